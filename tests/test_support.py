"""The support table is true: each cell is exact in process, or raises before anything runs; and it is the README's."""

import functools
import itertools
import sys

import pytest
import torch
from pairwise_cases import P, factors, seed_of
from support_table import (
    FEATURES,
    HOMES,
    LAYOUTS,
    MASKS,
    MODES,
    SEQ_LEN,
    WORLD_SIZE,
    committed,
    everything_there,
    supported,
    table,
)

import ringcp
from ringcp.kernels.registry import KERNELS
from ringcp.mask import Mask
from ringcp.sinks import fold_sinks
from ringcp.testing import in_process, reference_attention

SOFTCAP = 1.5
SLOPES = torch.tensor([0.5, 0.05, -0.1, 0.8])
SEED = 6
NUMBERS = torch.randn(1, 4, SEQ_LEN, SEQ_LEN, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
NUMBERS[NUMBERS > 1] = -torch.inf
NUMBERS[:, :, 3] = -torch.inf  # a row that attends to nothing
EXTRAS = {
    "softcap": {"softcap": SOFTCAP},
    "alibi": {"alibi_slopes": SLOPES},
    "dropout": {"dropout_p": P},
    "key_mask": {"attn_mask": torch.arange(SEQ_LEN)[None] % 5 > 0},
    "bias": {"attn_mask": NUMBERS},
}
module = sys.modules["ringcp.testing.in_process"]


@functools.lru_cache(maxsize=1)
def operands() -> list[torch.Tensor]:
    """q, k, v, sinks and the upstream gradients of out and lse."""
    generator = torch.Generator().manual_seed(4)
    shapes = (1, 4, SEQ_LEN, 6), (1, 2, SEQ_LEN, 6), (1, 2, SEQ_LEN, 5), (4,), (1, 4, SEQ_LEN, 5), (1, 4, SEQ_LEN)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def results(feature: str, attend) -> list[torch.Tensor]:
    *given, dout, dlse = operands()
    leaves = [x.clone().requires_grad_() for x in given]
    with_lse = feature in ("lse", "sinks")
    out, lse = attend(*leaves)
    upstream = ((out, lse), (dout, dlse)) if with_lse else ((out,), (dout,))
    grads = torch.autograd.grad(upstream[0], leaves, upstream[1], allow_unused=feature != "sinks")
    kept = grads if feature == "sinks" else grads[:3]
    return [out.detach(), *([lse.detach()] if with_lse else []), *kept]


@functools.cache
def wanted(mask: Mask, feature: str) -> list[torch.Tensor]:
    def attend(q, k, v, sinks):
        if feature == "dropout":
            weights, lse = reference_attention(q, k, torch.eye(SEQ_LEN).expand(*k.shape[:3], SEQ_LEN), mask=mask)
            kept = factors(q, k, seed_of(SEED))
            return (weights * kept) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1), lse
        out, lse = reference_attention(q, k, v, mask=mask, **EXTRAS.get(feature, {}))
        return fold_sinks(out, lse, sinks) if feature == "sinks" else (out, lse)

    return results(feature, attend)


def cell(chosen_kernel: str, mask: Mask, mode: str, layout: str, feature: str) -> str:
    """What comes of asking: "exact", "raises", or what is wrong."""
    placed = ringcp.Balanced(SEQ_LEN, WORLD_SIZE, mask) if layout == "balanced" else layout
    how = {"mask": mask, "mode": mode, "ulysses_degree": MODES[mode], "layout": placed, "kernel": chosen_kernel}

    def attend(q, k, v, sinks):
        with_lse = feature in ("lse", "sinks")
        extra = {"sinks": sinks} if feature == "sinks" else EXTRAS.get(feature, {})
        torch.manual_seed(SEED)
        got = in_process(q, k, v, world_size=WORLD_SIZE, return_lse=with_lse, **how, **extra)
        return got if with_lse else (got, None)

    ran = []
    with everything_there(chosen_kernel) as chosen, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "choose", chosen)
        patch.setattr(module, "drive_all", lambda runs, real=module.drive_all: (ran.append(1), real(runs))[1])
        try:
            got = results(feature, attend)
        except ringcp.UnsupportedError as error:
            return f"{len(ran)} passes ran, then: {error}" if ran else "raises"
    pairs = zip(got, wanted(mask, feature), strict=True)
    errors = [torch.where(x == y, 0.0, (x - y).abs()).nan_to_num(torch.inf).max().item() for x, y in pairs]
    return "exact" if max(errors) <= 1e-10 else f"errors {errors}"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kernel", HOMES)
def test_each_cell_is_exact_or_raises_before_anything_runs(kernel, feature):
    found = []
    for (name, mask), mode, layout in itertools.product(MASKS.items(), MODES, LAYOUTS):
        want = "exact" if supported(kernel, mask, feature) else "raises"
        got = cell(kernel, mask, mode, layout, feature)
        if got != want:
            found.append(f"{kernel} {name} {mode} {layout} {feature}: {got}, not {want}")
    assert not found, "\n".join(found[:10])


def test_every_kernel_mode_and_layout_is_in_the_walk():
    assert set(HOMES) == set(KERNELS)
    assert set(MODES) == set(ringcp.modes.MODES)
    assert set(LAYOUTS) == {*ringcp.layout.LAYOUT_NAMES, "balanced"} - {"auto"}


def test_the_table_of_the_readme_is_this_one():
    assert committed() == table(), "python tests/support_table.py --write"
