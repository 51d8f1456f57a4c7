"""flash-attn's functions on the CPU. (B, S, H, D) in fp16 or bf16; packed sequences are (T, H, D).

As there: causal and windows count from the bottom right; lse is fp32, (B, H, S) or (H, T), and +inf for a row that sees
nothing; gradients are written into dq, dk and dv. What the CPU cannot do raises: dropout, softcap, ALiBi, paging.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import cpu_flash
from benchmarks.peers.cpu_flash import Segments

_HALF = (torch.float16, torch.bfloat16)


def _check(q: Tensor, **unsupported: Any) -> None:
    if q.dtype not in _HALF:
        raise RuntimeError(f"FlashAttention only supports fp16 and bf16, got {q.dtype}")
    for name, value in unsupported.items():
        if value:
            raise NotImplementedError(f"{name}: expected none in the stand-in for flash-attn, got {value!r}")


def _whole(q: Tensor, k: Tensor) -> Segments:
    return (((0, q.shape[1]), (0, k.shape[1])),)


def _packed(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Segments:
    return cpu_flash.segments(cu_seqlens_q.tolist(), cu_seqlens_k.tolist())


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
    return_softmax,
):  # fmt: skip
    _check(q, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, return_softmax=return_softmax)
    window = window_size_left, window_size_right
    out, lse = cpu_flash.forward(q, k, v, _whole(q, k), causal, window, softmax_scale)
    return out, lse, None, None


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    _check(q, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, return_softmax=return_softmax)
    _check(q, block_table=block_table, leftpad_k=leftpad_k, seqused_k=seqused_k)
    batch = (x.unsqueeze(0) for x in (q, k, v))
    window = window_size_left, window_size_right
    out, lse = cpu_flash.forward(*batch, _packed(cu_seqlens_q, cu_seqlens_k), causal, window, softmax_scale)
    return out.squeeze(0), lse.squeeze(0), None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
    softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    _check(q, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    window = window_size_left, window_size_right
    cpu_flash.backward(
        dout, q, k, v, out, softmax_lse, (dq, dk, dv), _whole(q, k), causal, window, softmax_scale
    )  # fmt: skip


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    _check(q, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    dout, q, k, v, out, lse, dq, dk, dv = (x.unsqueeze(0) for x in (dout, q, k, v, out, softmax_lse, dq, dk, dv))
    window = window_size_left, window_size_right
    packed = _packed(cu_seqlens_q, cu_seqlens_k)
    cpu_flash.backward(dout, q, k, v, out, lse, (dq, dk, dv), packed, causal, window, softmax_scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, packed, causal, window, scale):
        out, lse = cpu_flash.forward(q, k, v, packed, causal, window, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = packed, causal, window, scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        q, k, v, out, lse = ctx.saved_tensors
        grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        cpu_flash.backward(dout, q, k, v, out, lse, grads, *ctx.options)
        return *grads, None, None, None, None


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    _check(q, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = _Attention.apply(q, k, v, _whole(q, k), causal, tuple(window_size), scale)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    _check(q, dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, block_table=block_table)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    packed = _packed(cu_seqlens_q, cu_seqlens_k)
    batch = (x.unsqueeze(0) for x in (q, k, v))
    out, lse = _Attention.apply(*batch, packed, causal, tuple(window_size), scale)
    return (out.squeeze(0), lse.squeeze(0), None) if return_attn_probs else out.squeeze(0)
