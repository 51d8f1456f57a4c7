"""Kernel "sdpa_flash_cpu": torch's flash attention for CPUs.

The op reads a last dim of any stride as if it were 1, and returns wrong numbers without a word; it takes every other
stride, 0 included. It dies on 0 rows or keys. A row that attends to nothing gets lse 0.0; forms have none.

Shapes: B batch, H heads, M query rows, N keys, D head dim of q and k, Dv of v, W the wider of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringcp.band import Band, crop, trim
from ringcp.cutting import Caps, Strips
from ringcp.kernels import refusals
from ringcp.kernels.base import Form, Problem
from ringcp.kernels.operands import additive_mask, attending, padded, shared_width, unit_stride, with_lse_grad
from ringcp.kernels.pairwise import Alibi
from ringcp.kernels.windows import form_of

_aten = torch.ops.aten
# With rows of any width, the bits of a head's results depend on how many heads it is among: a product whose operands
# start at a multiple of 16 bytes is computed in another order than one whose operands do not.
_ALIGNED = 8
# A bias of more elements is made for some rows at a time: heads times rows times keys would soon fill the memory.
_BIAS_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class SdpaFlashCpu:
    """fp32, fp64, bf16, fp16 (whose backward is slow); GQA without repeats; bands and ALiBi by an additive mask."""

    forward_op: Callable[..., Any] = _aten._scaled_dot_product_flash_attention_for_cpu.default
    backward_op: Callable[..., Any] = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    name = "sdpa_flash_cpu"
    # A window of 1024 tokens on one thread, by rows of a strip: 64, 128, 192 and 256 reach 71, 68, 66 and 56 GFLOP/s in
    # fp32 forward, 82, 76, 69 and 65 in its backward; in bf16 70, 64, 65 and 62, and in its backward 69, 66, 83 and 81,
    # where triangles reach 98.
    _half = Caps("top_left", "mask", forward=Strips(64), backward=Strips(192, triangles=768))
    caps = Caps("top_left", "mask", forward=Strips(64), backward=Strips(64), half=_half)
    switch = "flash"

    def refusals(self, problem: Problem) -> list[str]:
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        takes = {"explicit": True, "alibi": True}
        return refusals.shared(problem, self.caps, device="cpu", dtypes=dtypes, max_dim=None, multiple=1, **takes)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        form: Form,
        scale: float,
        softcap: float | None = None,
        allowed: Tensor | None = None,
        alibi: Alibi | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert softcap is None, "refused"
        if allowed is None and alibi is None and _is_mirrored(q, k, form):
            q, k, v = _mirrored(q, k, v)
            return _mirrored(*self.forward(q, k, v, form=Form(lo=0), scale=scale))
        strips = [] if alibi is None else _strips(q.shape[2], k.shape[2], form, alibi)
        if alibi is not None and len(strips) > 1:
            each = [
                self.forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], form=part, scale=scale, **extras)
                for rows, keys, part, extras in _launches(strips, allowed, alibi)
            ]
            out_BHME, lse_BHM = (torch.cat(parts, 2) for parts in zip(*each, strict=True))
            return out_BHME, lse_BHM
        value_dim = v.shape[-1]
        width = max(q.shape[-1], value_dim)
        q_BHMW, k_BHNW, v_BHNW = (unit_stride(padded(x, width)) for x in (q, k, v))
        is_causal, mask = _mask(q, k, form, allowed, alibi)
        out_BHMW, lse_BHM = self.forward_op(q_BHMW, k_BHNW, v_BHNW, 0.0, is_causal, attn_mask=mask, scale=scale)
        if mask is not None and allowed is not None:
            lse_BHM = lse_BHM.masked_fill((mask == -torch.inf).all(-1), -torch.inf)
        return out_BHMW[..., :value_dim], lse_BHM

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
        *,
        form: Form,
        scale: float,
        softcap: float | None = None,
        allowed: Tensor | None = None,
        alibi: Alibi | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert softcap is None, "refused"
        if allowed is None and alibi is None and _is_mirrored(q, k, form):
            dout, q, k, v, out, lse = _mirrored(dout, q, k, v, out, lse)
            dlse = None if dlse is None else dlse.flip(2)
            return _mirrored(*self.backward(dout, q, k, v, out, lse, dlse, form=Form(lo=0), scale=scale))
        strips = [] if alibi is None else _strips(q.shape[2], k.shape[2], form, alibi)
        if alibi is not None and len(strips) > 1:
            wide = torch.promote_types(k.dtype, torch.float32)
            dk, dv = (torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (k, v))
            dqs = []
            for rows, keys, part, extras in _launches(strips, allowed, alibi):
                dq_part, dk_part, dv_part = self.backward(
                    dout[:, :, rows],
                    q[:, :, rows],
                    k[:, :, keys],
                    v[:, :, keys],
                    out[:, :, rows],
                    lse[:, :, rows],
                    None if dlse is None else dlse[:, :, rows],
                    form=part,
                    scale=scale,
                    **extras,
                )
                dqs.append(dq_part)
                dk[:, :, keys] += dk_part
                dv[:, :, keys] += dv_part
            return torch.cat(dqs, 2), dk.to(k.dtype), dv.to(v.dtype)
        dim, value_dim = q.shape[-1], v.shape[-1]
        width = shared_width(dim, value_dim, dlse, q.dtype, multiple=1 if dlse is None else _ALIGNED)
        q_BHMW, k_BHNW, v_BHNW = (unit_stride(padded(x, width)) for x in (q, k, v))
        dout_BHMW, out_BHMW = (unit_stride(x) for x in with_lse_grad(dout, out, dlse, width, q.dtype))
        is_causal, mask = _mask(q, k, form, allowed, alibi)
        dq, dk, dv = self.backward_op(
            dout_BHMW, q_BHMW, k_BHNW, v_BHNW, out_BHMW, lse, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return dq[..., :dim], dk[..., :dim], dv[..., :value_dim]


def _is_mirrored(q: Tensor, k: Tensor, form: Form) -> bool:
    """Whether the last row sees the last key only, the one before it the last two, and so on."""
    return form == Form(hi=q.shape[2] - k.shape[2])


def _mirrored(*of_rows: Tensor) -> tuple[Any, ...]:
    """With rows and keys counted from the end, which turns such a form into a causal one, and back."""
    return tuple(x.flip(2) for x in of_rows)


def _strips(m: int, n: int, form: Form, alibi: Alibi) -> list[Band]:
    """The form as bands of some rows each, whose bias is not too large."""
    whole = trim((0, m), (0, n), 1 - n if form.lo is None else form.lo, m - 1 if form.hi is None else form.hi)
    assert whole is not None, f"{m} x {n} {form} holds no pair"
    num_rows = max(1, _BIAS_ELEMENTS // (alibi.slopes.numel() * n))
    parts = (crop(whole, (start, min(start + num_rows, m)), whole.k) for start in range(0, m, num_rows))
    return [part for part in parts if part is not None]


def _launches(
    strips: Sequence[Band], allowed: Tensor | None, alibi: Alibi
) -> Iterator[tuple[slice, slice, Form, dict[str, Any]]]:
    """For each strip its rows, keys and form, and what of the rest is its."""
    for band in strips:
        rows, keys = slice(*band.q), slice(*band.k)
        extras: dict[str, Any] = {"alibi": alibi.part(rows, keys)}
        if allowed is not None:
            m, n = len(alibi.rows), len(alibi.keys)
            extras["allowed"] = allowed.expand(*allowed.shape[:2], m, n)[:, :, rows, keys]
        yield rows, keys, form_of(band), extras


def _mask(q: Tensor, k: Tensor, form: Form, allowed: Tensor | None, alibi: Alibi | None) -> tuple[bool, Tensor | None]:
    """Whether causal; else 0 or the bias where a pair attends and -inf elsewhere, (M, N) or (B | 1, H | 1, M, N); or
    None.
    """
    m, n = q.shape[2], k.shape[2]
    assert m * n > 0, f"an empty tile of {m} rows and {n} keys must not reach a kernel"
    if alibi is not None:
        # The op adds a mask of fp32 to half precision: in 8 bits the distance itself would be lost.
        bias_BHMN = alibi.bias(torch.promote_types(q.dtype, torch.float32))
        if allowed is not None:
            bias_BHMN = torch.where(attending(m, n, form, allowed), bias_BHMN, -torch.inf)
        elif form != Form():
            bias_BHMN += additive_mask(m, n, form, dtype=bias_BHMN.dtype, device=q.device)
        return False, bias_BHMN
    if allowed is not None:
        pairs_BHMN = attending(m, n, form, allowed)
        return False, q.new_zeros(pairs_BHMN.shape).masked_fill_(~pairs_BHMN, -torch.inf)
    if form == Form():
        return False, None
    if form == Form(lo=0):
        return True, None
    return False, additive_mask(m, n, form, dtype=q.dtype, device=q.device)
