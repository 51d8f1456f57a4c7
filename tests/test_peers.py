"""What the comparison with other libraries stands on, without them: the stand-in for flash-attn, layouts, cases."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.peers.standin.flash_attn import flash_attn_func, flash_attn_varlen_func
from benchmarks.peers.standin.flash_attn import flash_attn_interface as interface
from ringcp.testing import assert_close, reference_attention

HEADS, KV_HEADS, DIM = 4, 2, 16
SCALE = 0.3


def tensors(rows, keys, batch=2):
    generator = torch.Generator().manual_seed(rows + keys)
    shapes = [(rows, HEADS), (keys, KV_HEADS), (keys, KV_HEADS), (rows, HEADS)]
    return [torch.randn(batch, *shape, DIM, generator=generator).bfloat16() for shape in shapes]


def attending(rows, keys, causal, left, right):
    """From the documentation of flash-attn: the mask is aligned to the bottom right corner."""
    ahead = torch.arange(keys) - torch.arange(rows).unsqueeze(1) - (keys - rows)
    right = 0 if causal else right
    return (ahead <= (right if right >= 0 else rows + keys)) & (ahead >= (-left if left >= 0 else -rows - keys))


def hold(q, k, v, dout, mask, out, lse, grads):
    """(B, S, H, D) results against fp64, and rows without a key against flash-attn's conventions."""
    heads_first = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = reference_attention(*heads_first, mask=mask, scale=SCALE)
    expected = [wanted, *torch.autograd.grad(wanted, heads_first, dout.transpose(1, 2).double())]
    alive = mask.any(-1)
    qa, ka, va = (x.detach().requires_grad_() for x in heads_first)
    one = F.scaled_dot_product_attention(qa[:, :, alive], ka, va, mask[alive], scale=SCALE, enable_gqa=True)
    baseline = [one, *torch.autograd.grad(one, (qa, ka, va), dout.transpose(1, 2)[:, :, alive])]
    for name, actual, exact, kernel in zip(("out", "dq", "dk", "dv"), (out, *grads), expected, baseline, strict=True):
        actual = actual.transpose(1, 2)
        if name == "out":
            assert not actual[:, :, ~alive].any()
            actual, exact = actual[:, :, alive], exact[:, :, alive]
        assert_close(actual, exact.detach(), baseline=kernel.detach(), name=name)
    assert lse.dtype == torch.float32
    assert lse[:, :, ~alive].eq(torch.inf).all()
    torch.testing.assert_close(lse[:, :, alive].double(), wanted_lse[:, :, alive].detach(), atol=2e-3, rtol=0)


FORMS = [(False, -1, -1), (True, -1, -1), (True, 20, -1), (False, 20, 5), (False, 3, -1)]


@pytest.mark.parametrize(("rows", "keys"), [(96, 96), (40, 96), (96, 40)])
@pytest.mark.parametrize("form", FORMS)
def test_the_stand_in_aligns_masks_to_the_bottom_right(rows, keys, form):
    causal, left, right = form
    q, k, v, dout = tensors(rows, keys)
    out, lse, _, _ = interface._flash_attn_forward(q, k, v, 0.0, SCALE, causal, left, right, 0.0, None, False)
    assert out.shape == q.shape
    assert lse.shape == (2, HEADS, rows)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    interface._flash_attn_backward(
        dout, q, k, v, out, lse, *grads, 0.0, SCALE, causal, left, right, 0.0, None, False
    )  # fmt: skip
    hold(q, k, v, dout, attending(rows, keys, causal, left, right), out, lse, grads)


@pytest.mark.parametrize("form", FORMS)
def test_packed_sequences_do_not_see_each_other(form):
    causal, left, right = form
    lengths = [(30, 30), (1, 50), (33, 16)]
    q, k, v, dout = tensors(64, 96, batch=1)
    offsets = [torch.tensor([0, *(pair[i] for pair in lengths)]).cumsum(0).int() for i in (0, 1)]
    longest = [max(pair[i] for pair in lengths) for i in (0, 1)]
    flat = [x.squeeze(0) for x in (q, k, v)]
    out, lse, _, _ = interface._flash_attn_varlen_forward(*flat, *offsets, *longest, 0.0, SCALE, causal, left, right)
    assert lse.shape == (HEADS, 64)
    grads = [torch.full_like(x, torch.nan) for x in flat]
    interface._flash_attn_varlen_backward(
        dout[0], *flat, out, lse, *grads, *offsets, *longest, 0.0, SCALE, causal, left, right, 0.0, None, False
    )
    mask = torch.block_diag(*(attending(*pair, causal, left, right) for pair in lengths)).bool()
    hold(q, k, v, dout, mask, out[None], lse[None], [x[None] for x in grads])


def test_backward_takes_the_lse_of_more_keys():
    # As in a ring: two blocks of keys, each with the out and lse of both.
    q, k, v, dout = tensors(48, 96)
    left_out = 0.0, None, False
    whole = interface._flash_attn_forward(q, k, v, 0.0, SCALE, False, -1, -1, *left_out)[:2]
    dq = torch.zeros(q.shape)
    grads_k, grads_v = [], []
    for keys in (slice(0, 48), slice(48, 96)):
        grads = [torch.empty_like(x) for x in (q, k[:, keys], v[:, keys])]
        interface._flash_attn_backward(
            dout, q, k[:, keys], v[:, keys], *whole, *grads, 0.0, SCALE, False, -1, -1, 0.0, None, False
        )
        dq += grads[0]
        grads_k.append(grads[1])
        grads_v.append(grads[2])
    grads = dq.bfloat16(), torch.cat(grads_k, 1), torch.cat(grads_v, 1)
    hold(q, k, v, dout, torch.ones(48, 96, dtype=torch.bool), *whole, grads)


@pytest.mark.parametrize("packed", [False, True])
def test_the_differentiable_functions_are_those(packed):
    q, k, v, dout = tensors(64, 64, batch=1)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = {"softmax_scale": SCALE, "causal": True, "return_attn_probs": True}
    if packed:
        cu = torch.tensor([0, 24, 64], dtype=torch.int32)
        out, lse, _ = flash_attn_varlen_func(*(x[0] for x in leaves), cu, cu, 40, 40, **options)
        out, lse = out[None], lse[None]
        mask = torch.block_diag(torch.ones(24, 24).tril(), torch.ones(40, 40).tril()).bool()
    else:
        out, lse, _ = flash_attn_func(*leaves, **options)
        mask = torch.ones(64, 64, dtype=torch.bool).tril()
    hold(q, k, v, dout, mask, out.detach(), lse, torch.autograd.grad(out, leaves, dout))


def test_the_stand_in_refuses_what_it_cannot_do():
    q, k, v, _ = tensors(8, 8)
    with pytest.raises(RuntimeError, match="only supports fp16 and bf16"):
        flash_attn_func(q.float(), k.float(), v.float())
    with pytest.raises(NotImplementedError, match="dropout_p: expected none"):
        flash_attn_func(q, k, v, dropout_p=0.1)
