"""Documents by kernels that take sequences, in every mode: exact, and a few launches for many documents."""

import sys

import package_standins as packages
import pytest
import torch
from test_packing import TAKE_SEQUENCES

import ringcp
from ringcp.testing import assert_close, in_process, reference_attention

LENGTHS = [12, 9, 8, 7, 6, 5, 4, 4, 3, 3, 2, 2, 1, 2, 1, 1]
MASKS = {
    "causal": ringcp.Documents(LENGTHS) & ringcp.Causal(),
    "full": ringcp.Documents(LENGTHS),
    "by row": ringcp.Documents([LENGTHS, LENGTHS[::-1]]) & ringcp.Causal(),
}
MODES = {"ring": None, "gather": None, "ulysses": None, "usp": 2}


def results(attend, qkv, upstream, **options):
    leaves = [x.clone().requires_grad_() for x in qkv]
    out, lse = attend(*leaves, **options)
    return out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, upstream)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", TAKE_SEQUENCES)
@pytest.mark.parametrize("kind", MASKS)
def test_sixteen_documents_are_a_few_launches(monkeypatch, name, kind):
    packages.install(monkeypatch)
    kernel = TAKE_SEQUENCES[name]
    launches = []
    for way in ("forward", "backward", "forward_packed", "backward_packed"):
        real = getattr(type(kernel), way)

        def counted(self, *args, _way=way, _real=real, **how):
            launches.append(_way)
            return _real(self, *args, **how)

        monkeypatch.setattr(type(kernel), way, counted)
    monkeypatch.setattr(sys.modules["ringcp.testing.in_process"], "choose", lambda asked, problem: kernel)
    generator = torch.Generator().manual_seed(3)
    shapes = (2, 4, 70, 6), (2, 2, 70, 6), (2, 2, 70, 5), (2, 4, 70, 5), (2, 4, 70)
    *qkv, dout, dlse = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    mask = MASKS[kind]
    want = results(reference_attention, qkv, (dout, dlse), mask=mask)
    for mode, degree in MODES.items():
        world_size = 4 if degree else 2
        for layout in ("contiguous", "head_tail") if kind == "causal" else ("head_tail",):
            launches.clear()
            how = {"world_size": world_size, "mode": mode, "ulysses_degree": degree, "layout": layout}
            got = results(in_process, qkv, (dout, dlse), mask=mask, return_lse=True, **how)
            for what, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
                assert_close(a, b, name=f"{mode} {layout} {what}")
            ahead, back = (sum(way.startswith(of) for way in launches) for of in ("forward", "backward"))
            packed = sum(way.endswith("packed") for way in launches)
            # 16 documents (32 of two rows) on each rank's heads, or cut at its edges: one or two kinds in each step.
            assert packed >= 2 * world_size, (mode, layout, launches)
            assert ahead <= 6 * world_size, (mode, layout, ahead)
            assert back <= 8 * world_size, (mode, layout, back)
