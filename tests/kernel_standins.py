"""Torch's CUDA attention ops on the CPU: the same signatures, conventions and demands, in plain torch, for any dtype.

They assert what the ops of torch about 2.13 check, or would read wrongly (attention.cu, attention_backward.cu,
flash_api.cpp, mask.h, kernel_backward.h, MHA.cpp). A stand-in shows that an adapter calls the op as its source says;
it shows nothing about a GPU. fp64 is taken so that errors are not hidden by rounding.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

INF = float("inf")


def _dense(q, k, v, mask, scale, bias=0.0):
    """(B, H, M, N) probabilities, out and lse with -inf for dead rows."""
    scores = (q @ k.mT * scale + bias).masked_fill(~mask, -INF)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.masked_fill(lse == -INF, 0.0).unsqueeze(-1)) @ v, lse


def _dense_backward(dout, q, k, v, out, lse, mask, scale, bias=0.0):
    probs = torch.exp((q @ k.mT * scale + bias).masked_fill(~mask, -INF) - lse.unsqueeze(-1))
    dscores = probs * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * scale
    return dscores @ k, dscores.mT @ q, probs.mT @ dout


def _wide(*tensors):
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def _repeat(x, heads):
    return x.repeat_interleave(heads // x.shape[-3], -3)


def _group_sum(x, kv_heads):
    return x.unflatten(-3, (kv_heads, -1)).sum(-3)


def _check_aligned(*tensors, dims=(-4, -3, -2)):
    for x in tensors:
        assert x.stride(-1) == 1, "last dim must be contiguous"
        assert x.data_ptr() % 16 == 0, "misaligned address"
        for dim in dims:
            assert x.stride(dim) * x.element_size() % 16 == 0, f"stride({dim}) is not correctly aligned"


def _check_plain_lse(lse, shape, dtype):
    assert lse.is_contiguous(), "lse is read as contiguous"
    assert lse.shape == shape
    assert lse.dtype == torch.promote_types(dtype, torch.float32)


def _window_mask(m, n, is_causal, left, right, longest=None):
    """As flash_api.cpp and mask.h have it, quirks included. longest: of the keys of all sequences of a launch."""
    longest = n if longest is None else longest
    left, right = -1 if left is None else left, -1 if right is None else right
    if left >= longest:
        left = -1
    if right >= longest:
        right = -1
    if is_causal:
        right = 0
    if left < 0 and right < 0:
        return torch.ones(m, n, dtype=torch.bool)
    if left < 0 and right == 0:  # Causal: the left edge is not looked at.
        left = m + n
    left = longest if left < 0 else left
    right = longest if right < 0 else right
    row, col = torch.arange(m).unsqueeze(1), torch.arange(n)
    return (col >= row + n - m - left) & (col < row + 1 + n - m + right)


def _sequences_mask(cu_q, cu_k, max_q, max_k, q, k, mask_of):
    """(T, U): the mask of each sequence of a launch, side by side."""
    for cu, longest, x in ((cu_q, max_q, q), (cu_k, max_k, k)):
        assert x.ndim == 3, "(total, heads, head_dim)"
        assert cu.dtype == torch.int32, "cu_seqlens must have dtype int32"
        assert cu.device == x.device
        assert cu.is_contiguous()
        assert cu.shape == cu_q.shape
        assert type(longest) is int
        assert (cu[0], cu[-1], cu.diff().max()) == (0, len(x), longest)
        assert cu.diff().min() > 0, "a sequence without rows or keys"
    mask = torch.zeros(len(q), len(k), dtype=torch.bool)
    for (a, b), (c, d) in zip(*(zip(cu.tolist(), cu.tolist()[1:], strict=False) for cu in (cu_q, cu_k)), strict=True):
        mask[a:b, c:d] = mask_of(b - a, d - c)
    return mask


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
    seqused_k: Tensor | None = None, alibi_slopes: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
):  # fmt: skip
    _check_flash(query, key, value, dropout_p, scale)
    _check_aligned(query, key, value, dims=range(-query.ndim, -1))
    is_causal = is_causal and max_q > 1
    mask = _flash_mask(query, key, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window_size_left, window_size_right)
    q, k, v = (x.transpose(-3, -2) for x in _wide(query, key, value))
    out, lse = _dense(q, _repeat(k, query.shape[-2]), _repeat(v, query.shape[-2]), mask, scale)
    lse = lse.masked_fill(lse == -INF, INF)
    state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), query.new_empty(0)
    return out.transpose(-3, -2).contiguous().to(query.dtype), lse.contiguous(), *state


def flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor, cum_seq_k: Tensor, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    rng_state: Tensor, unused: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
):  # fmt: skip
    heads, kv_heads = query.shape[-2], key.shape[-2]
    _check_flash(query, key, value, dropout_p, scale)
    grad_out, out = grad_out.contiguous(), out.contiguous()
    _check_aligned(query, key, value, grad_out, out, dims=range(-query.ndim, -1))
    assert out.shape == grad_out.shape == query.shape
    assert out.dtype == grad_out.dtype == query.dtype
    assert rng_state.shape == (2,)
    assert rng_state.dtype == unused.dtype == torch.uint64
    _check_plain_lse(logsumexp, query.transpose(-3, -2).shape[:-1], query.dtype)
    mask = _flash_mask(query, key, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, window_size_left, window_size_right)
    dout, q, k, v, o = (x.transpose(-3, -2) for x in _wide(grad_out, query, key, value, out))
    dq, dk, dv = _dense_backward(dout, q, _repeat(k, heads), _repeat(v, heads), o, logsumexp, mask, scale)
    grads = dq, _group_sum(dk, kv_heads), _group_sum(dv, kv_heads)
    return tuple(x.transpose(-3, -2).contiguous().to(query.dtype) for x in grads)


def _flash_mask(q, k, cu_q, cu_k, max_q, max_k, is_causal, left, right):
    if cu_q is not None:
        of_one = partial(_window_mask, is_causal=is_causal, left=left, right=right, longest=max_k)
        return _sequences_mask(cu_q, cu_k, max_q, max_k, q, k, of_one)
    assert cu_k is None
    assert q.ndim == 4
    assert (max_q, max_k) == (q.shape[1], k.shape[1])
    return _window_mask(max_q, max_k, is_causal, left, right)


def _check_flash(q, k, v, dropout_p, scale):
    assert dropout_p == 0.0
    assert scale is not None
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], "one head dim"
    assert q.shape[-1] % 8 == 0, "head_size must be a multiple of 8"
    assert q.shape[-1] <= 256, "only supports head dimension at most 256"
    assert q.shape[-2] % k.shape[-2] == 0
    assert k.shape == v.shape


def efficient_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
):  # fmt: skip
    b, heads, m, _ = query.shape
    _check_efficient(query, key, value, attn_bias, dropout_p, scale)
    out, lse = _dense(*_wide(query, key, value), _efficient_mask(query, key, is_causal), scale, _added(attn_bias))
    rows = -(-m // 32) * 32 if compute_log_sumexp else 0
    padded = lse.new_full((b, heads, rows), INF)
    padded[..., :m] = lse.masked_fill(lse == -INF, 0.0)
    out = out.transpose(1, 2).contiguous().transpose(1, 2).to(query.dtype)
    return out, padded, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def efficient_backward(
    grad_out_: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor, out: Tensor,
    logsumexp: Tensor, philox_seed: Tensor, philox_offset: Tensor, dropout_p: float,
    grad_input_mask: list[bool], is_causal: bool = False, *, scale: float | None = None,
):  # fmt: skip
    b, heads, m, _ = query.shape
    _check_efficient(query, key, value, attn_bias, dropout_p, scale)
    grad_out_ = grad_out_.transpose(1, 2).contiguous().transpose(1, 2)
    _check_aligned(grad_out_, out)
    assert grad_out_.shape == out.shape == (b, heads, m, value.shape[-1])
    assert logsumexp.shape == (b, heads, -(-m // 32) * 32), "the kernel reads lse in blocks of 32 rows"
    assert (logsumexp[..., m:] == INF).all(), "rows past the end must have a probability of 0"
    assert logsumexp.stride(0) % 8 == logsumexp.stride(1) % 8 == 0
    assert logsumexp.stride(2) == 1
    assert philox_seed.dtype == philox_offset.dtype == torch.int64
    assert grad_input_mask == [True, True, True, False]
    mask = _efficient_mask(query, key, is_causal)
    operands = _wide(grad_out_, query, key, value, out)
    grads = _dense_backward(*operands, logsumexp[..., :m], mask, scale, _added(attn_bias))
    return *(x.to(query.dtype) for x in grads), None


def _check_efficient(q, k, v, bias, dropout_p, scale):
    _check_aligned(q, k, v)
    step = 16 // q.element_size()
    assert q.shape[:2] == k.shape[:2] == v.shape[:2], "as many KV heads as query heads"
    assert q.shape[-1] == k.shape[-1]
    assert q.shape[-1] % step == v.shape[-1] % step == 0, "last dimension of inputs to be divisible"
    assert dropout_p == 0.0
    assert scale is not None
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2]), "attn_bias: wrong shape"
        assert bias.dtype == q.dtype, "invalid dtype for bias"
        assert bias.stride(-1) == 1
        assert bias.data_ptr() % 16 == 0
        assert all(bias.stride(dim) % 16 == 0 for dim in range(3)), "attn_bias is not correctly aligned"
        last = sum((size - 1) * stride for size, stride in zip(bias.shape[:3], bias.stride()[:3], strict=True))
        end = bias.storage_offset() + last + -(-bias.shape[3] // step) * step
        assert end * bias.element_size() <= bias.untyped_storage().nbytes(), "rows are read in steps of 16 bytes"


def _efficient_mask(q, k, is_causal):
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    return mask.tril() if is_causal else mask


def _added(bias):
    return 0.0 if bias is None else _wide(bias)[0]


def cudnn_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
    scale: float | None = None,
):  # fmt: skip
    _check_cudnn(query, key, value, attn_bias, dropout_p, is_causal, scale)
    assert compute_log_sumexp
    m, n, heads = query.shape[2], key.shape[2], query.shape[1]
    mask = torch.ones(m, n, dtype=torch.bool)
    q, k, v = _wide(query, key, value)
    out, lse = _dense(q, _repeat(k, heads), _repeat(v, heads), mask.tril() if is_causal else mask, scale)
    seed = torch.zeros((), dtype=torch.int64)
    return out.to(query.dtype), lse.unsqueeze(-1), None, None, m, n, seed, seed, None


def cudnn_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    philox_seed: Tensor, philox_offset: Tensor, attn_bias: Tensor, cum_seq_q: Tensor, cum_seq_k: Tensor,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, *, scale: float | None = None,
):  # fmt: skip
    _check_cudnn(query, key, value, attn_bias, dropout_p, is_causal, scale)
    m, n, heads, kv_heads = query.shape[2], key.shape[2], query.shape[1], key.shape[1]
    assert cum_seq_q is None
    assert cum_seq_k is None
    assert (max_q, max_k) == (m, n)
    assert grad_out.is_contiguous(), "the cached plan has the strides of the first out"
    assert out.is_contiguous(), "the cached plan has the strides of the first out"
    _check_plain_lse(logsumexp, (*query.shape[:3], 1), query.dtype)
    mask = torch.ones(m, n, dtype=torch.bool)
    dout, q, k, v, o = _wide(grad_out, query, key, value, out)
    mask = mask.tril() if is_causal else mask
    dq, dk, dv = _dense_backward(dout, q, _repeat(k, heads), _repeat(v, heads), o, logsumexp[..., 0], mask, scale)
    return tuple(x.to(query.dtype) for x in (dq, _group_sum(dk, kv_heads), _group_sum(dv, kv_heads)))


def _check_cudnn(q, k, v, bias, dropout_p, is_causal, scale):
    assert bias is None
    assert dropout_p == 0.0
    assert scale is not None
    assert all(x.is_contiguous() for x in (q, k, v))
    _check_aligned(q, k, v)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0, "head_dim should be a multiple of 8"
    assert q.shape[-1] <= 128, "head_dim should be no more than 128"
    assert k.shape[2] != 1, "cudnn SDPA does not support key/value sequence length 1."
    assert not is_causal or q.shape[2] == k.shape[2]
