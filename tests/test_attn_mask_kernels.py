"""`attn_mask` in the kernels that take it, beside forms, and why others refuse it. That for GPUs runs on stand-ins."""

import contextlib
import itertools

import kernel_standins as standins
import pytest
import torch
import torch.nn.functional as F

import ringcp
from ringcp.kernels.base import Form, Problem
from ringcp.kernels.pairwise import Alibi, AttnMask
from ringcp.kernels.reference import Reference
from ringcp.kernels.registry import KERNELS, choose
from ringcp.kernels.sdpa_cpu import SdpaFlashCpu
from ringcp.kernels.sdpa_efficient import SdpaEfficient
from ringcp.testing import assert_close, in_process, reference_attention

sdpa = F.scaled_dot_product_attention
EFFICIENT = SdpaEfficient(standins.efficient_forward, standins.efficient_backward)
SCALE = 0.4


def operands(m, n, dtype=torch.float64):
    """q, k, v, dout and dlse."""
    generator = torch.Generator().manual_seed(1)
    shapes = (2, 4, m, 5), (2, 2, n, 5), (2, 2, n, 3), (2, 4, m, 3), (2, 4, m)
    *rest, dlse = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [*(x.to(dtype) for x in rest), dlse.to(torch.promote_types(dtype, torch.float32))]


def run(kernel, tensors, **how):
    """out, lse, dq, dk, dv; backward with +inf for rows that attend to nothing, as the executor has it."""
    q, k, v, dout, dlse = tensors
    out, lse = kernel.forward(q, k, v, **how)
    safe = lse.masked_fill(lse == -torch.inf, torch.inf)
    return [out, lse, *kernel.backward(dout, q, k, v, out, safe, dlse, **how)]


@pytest.mark.parametrize("form", [Form(), Form(lo=0), Form(lo=-4), Form(lo=-2, hi=3), Form(hi=6)])
@pytest.mark.parametrize("limit", [1, 200, 1 << 20])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1), (1, 4, 11), (2, 1, 11)])
def test_kernels_agree(monkeypatch, form, limit, shape):
    """With rows that see nothing; a bias of many rows is made for some at a time."""
    for kernel in ("sdpa_cpu", "sdpa_efficient"):
        monkeypatch.setattr(f"ringcp.kernels.{kernel}._BIAS_ELEMENTS", limit)
    generator = torch.Generator().manual_seed(1)
    m, n = 11, 9
    tensors = q, k, v, *_ = operands(m, n)
    values = torch.randn(*shape, 20, generator=generator, dtype=torch.float64)
    values[..., 1:4] = -torch.inf
    keys = torch.arange(n) * 2 + 1
    allowed = torch.rand(2, 1, m, n, generator=generator) > 0.3
    alibi = Alibi(torch.rand(2, 4, generator=generator), torch.arange(m), keys)
    for mask, slopes, pairs in itertools.product((values, values > -0.4), (None, alibi), (None, allowed)):
        how = {"form": form, "scale": SCALE, "attn_mask": AttnMask(mask, keys)}
        more = {"alibi": slopes, "allowed": pairs}
        want = run(Reference(), tensors, **how, **more)
        bias = mask.index_select(3, keys)
        bias = bias if mask is values else torch.zeros(bias.shape).double().masked_fill(~bias, -torch.inf)
        bias = bias + (0.0 if slopes is None else slopes.bias(torch.float64))
        behind = torch.arange(m)[:, None] - torch.arange(n)
        within = (behind >= (form.lo if form.lo is not None else -n)) & (behind <= (m if form.hi is None else form.hi))
        dense = torch.where(within & (allowed if pairs is not None else True), bias, -torch.inf).expand(2, 4, m, n)
        assert_close(want[0], sdpa(q, k, v, dense, scale=SCALE, enable_gqa=True))
        assert torch.equal(want[1] == -torch.inf, (dense == -torch.inf).all(-1))
        takes_it = [(SdpaFlashCpu(), more)] + [(EFFICIENT, {})] * (slopes is None and pairs is None)
        for kernel, others in takes_it:
            got = run(kernel, tensors, **how, **others)
            for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
                assert_close(x, y, name=f"{name} of {kernel.name}")


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 11)])
def test_a_part_of_the_keys_with_the_final_lse(shape):
    """As in a ring: rows that see nothing in one part, or in both, and the parts' gradients sum up."""
    m, n = 11, 9
    tensors = q, k, v, dout, dlse = operands(m, n)
    values = torch.randn(*shape, n, generator=torch.Generator().manual_seed(2), dtype=torch.float64) > 0.0
    values[..., :5] = False
    if shape[2] > 1:
        values[0, :, -1] = False
    mask, how = AttnMask(values, torch.arange(n)), {"form": Form(), "scale": SCALE}
    want = run(Reference(), tensors, attn_mask=mask, **how)
    out, lse = torch.zeros_like(dout), torch.full_like(dlse, -torch.inf)
    parts = [slice(0, 5), slice(5, n)]
    for keys in parts:
        of_part = mask.part(slice(0, m), keys)
        part, part_lse = EFFICIENT.forward(q, k[:, :, keys], v[:, :, keys], attn_mask=of_part, **how)
        assert (part[part_lse == -torch.inf] == 0).all()
        total = torch.logaddexp(lse, part_lse)
        out.lerp_(part, torch.exp(part_lse - total).nan_to_num(0.0).unsqueeze(-1))
        lse = total
    safe = lse.masked_fill(lse == -torch.inf, torch.inf)
    grads = [
        EFFICIENT.backward(
            dout, q, k[:, :, keys], v[:, :, keys], out, safe, dlse, attn_mask=mask.part(slice(0, m), keys), **how
        )
        for keys in parts
    ]
    dk, dv = (torch.cat([grad[i] for grad in grads], 2) for i in (1, 2))
    for x, y in zip((out, lse, grads[0][0] + grads[1][0], dk, dv), want, strict=True):
        assert_close(x, y)


def test_low_numbers_of_half_precision():
    """A row of -600 everywhere is as one of 0, one of float32's least number sees nothing."""
    tensors = operands(3, 4, torch.bfloat16)
    values = torch.zeros(1, 1, 3, 4, dtype=torch.bfloat16)
    values[:, :, 1], values[:, :, 2] = -600.0, torch.finfo(torch.float32).min
    how = {"form": Form(), "scale": SCALE}
    out, lse, dq, *_ = run(EFFICIENT, tensors, attn_mask=AttnMask(values, torch.arange(4)), **how)
    plain, plain_lse, *_ = run(EFFICIENT, tensors, **how)
    assert (out - plain)[:, :, :2].abs().max() < 2.0**-6
    assert (lse[:, :, 1] - plain_lse[:, :, 1] + 600).abs().max() < 1e-3
    assert (lse[:, :, 2] == -torch.inf).all()
    assert not out[:, :, 2].any()
    assert not dq[:, :, 2].any()


@pytest.mark.parametrize("form", [Form(), Form(lo=0), Form(lo=-2)])
@pytest.mark.parametrize("rows", [1, 24])
def test_the_ops_of_this_torch_take_the_bias(form, rows):
    """On meta tensors torch checks the arguments and gives shapes; nothing is computed."""
    tensors = [x.to("meta") for x in operands(24, 13, torch.bfloat16)]
    mask = AttnMask(torch.ones(2, 1, rows, 13, dtype=torch.bool, device="meta"), torch.arange(13, device="meta"))
    got = run(SdpaEfficient(), tensors, form=form, scale=SCALE, attn_mask=mask)
    assert [x.shape for x in got] == [tensors[3].shape, tensors[4].shape, *(x.shape for x in tensors[:3])]


# --- refusals


def problem(device="cuda", dtype=torch.bfloat16, **fields):
    shape = {"head_dim": 8, "value_dim": 8, "q_heads": 4, "kv_heads": 2, "scale": 0.3}
    needs = {"needs_band": False, "needs_grad": True, "needs_lse_grad": False}
    return Problem(torch.device(device), dtype, **shape, **needs, **fields)


def test_a_gpu_takes_it_where_no_digit_is_lost(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for dtype in (torch.bool, torch.bfloat16):
        assert choose("auto", problem(attn_mask=dtype)).name == "sdpa_efficient"
    assert choose("auto", problem(dtype=torch.float32, attn_mask=torch.float32)).name == "sdpa_efficient"
    assert choose("auto", problem(attn_mask=torch.float32)).name == "reference"
    with pytest.raises(
        ringcp.UnsupportedError, match=r"sdpa_efficient: attn_mask of float32, which it would round to bfloat16\."
    ):
        choose("sdpa_efficient", problem(attn_mask=torch.float32))
    others = set(KERNELS) - {"sdpa_efficient", "sdpa_flash_cpu", "reference"}
    for name in others:
        assert "no attn_mask" in KERNELS[name].refusals(problem(attn_mask=torch.bool)), name
        assert "no attn_mask" not in KERNELS[name].refusals(problem()), name


def unmasked_kernels(mesh):
    q = torch.zeros(1, 2, 4, 8)
    with ringcp.context_parallel(mesh, layout="contiguous", kernel="sdpa_cudnn"):
        with pytest.raises(ringcp.UnsupportedError, match=r"an attn_mask.*sdpa_cudnn: device cpu is not cuda"):
            sdpa(q, q, q, torch.ones(1, 4, dtype=torch.bool))
        with contextlib.suppress(ringcp.UnsupportedError):
            sdpa(q, q, q)


def test_kernels_that_take_none_are_refused(worlds):
    worlds(1).run(unmasked_kernels)


# --- in one process


def whole_masks():
    """By name, for two sequences of 13 and 9 tokens, two batch rows and four heads."""
    numbers = torch.randn(2, 4, 13, 9, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return {
        "(S, S)": numbers[0, 0] > 0,
        "(1, S)": numbers[0, 0, :1] > -0.5,
        "(S, 1)": numbers[0, 0, :, :1] > -0.5,
        "(B, 1, S, S)": numbers[:, :1],
        "(B, H, 1, S)": numbers[:, :, :1].masked_fill(numbers[:, :, :1] > 1, -torch.inf),
    }


@pytest.mark.parametrize("name", whole_masks())
def test_in_process_takes_the_whole_one(name):
    attn_mask = whole_masks()[name]
    q, k, v, dout, dlse = operands(13, 9)
    found = []
    for attend, ways in ((reference_attention, [{}]), (in_process, list(ways_in_process()))):
        for way in ways:
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            results = attend(*leaves, attn_mask=attn_mask, **way)
            found.append([*(x.detach() for x in results), *torch.autograd.grad(results, leaves, (dout, dlse))])
    want, *got = found
    for results in got:
        for x, y in zip(results, want, strict=True):
            assert_close(x, y)


def ways_in_process():
    for layout, (mode, degree) in itertools.product(
        ("head_tail", "striped"), (("ring", None), ("gather", None), ("ulysses", None), ("usp", 2))
    ):
        how = {"layout": layout, "kv_layout": "contiguous", "mode": mode, "ulysses_degree": degree}
        yield {"world_size": 4, "return_lse": True, **how}


@pytest.mark.parametrize(
    "attn_mask, error, said",
    [
        (torch.ones(5, 9, dtype=torch.bool), ringcp.LayoutError, r"^attn_mask: expected 13 rows or 1, and 9 keys or 1"),
        (torch.ones(13, 9, dtype=torch.int32), ringcp.ArgumentError, r"^attn_mask: expected bool, .* got torch.int32"),
        (torch.ones(3, 1, 13, 9), ringcp.ArgumentError, r"^attn_mask: expected 2 to 4 dims"),
        ([[True]], ringcp.UnsupportedError, r"^attn_mask: expected a tensor or None, got list"),
    ],
)
def test_in_process_refuses_others(attn_mask, error, said):
    q, k, v, *_ = operands(13, 9)
    with pytest.raises(error, match=said):
        in_process(q, k, v, world_size=2, kv_layout="contiguous", attn_mask=attn_mask)
