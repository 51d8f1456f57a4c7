"""Kernel "sdpa_flash_cpu": torch's flash attention for CPUs.

The op reads a last dim of any stride as if it were 1, and returns wrong numbers without a word; it takes every other
stride, 0 included, and a mask beside causality. It dies on 0 rows or keys. A row that attends to nothing gets lse 0.0;
forms have none.

Shapes: B batch, H heads, M query rows, N keys, D head dim of q and k, Dv of v, W the wider of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringcp.band import Band, crop
from ringcp.cutting import Caps, Strips
from ringcp.kernels import refusals
from ringcp.kernels.base import Form, Problem
from ringcp.kernels.operands import additive_mask, attending, padded, shared_width, unit_stride, with_lse_grad
from ringcp.kernels.pairwise import Alibi, AttnMask
from ringcp.kernels.windows import band_of, form_of

_aten = torch.ops.aten
# With rows of any width, the bits of a head's results depend on how many heads it is among: a product whose operands
# start at a multiple of 16 bytes is computed in another order than one whose operands do not.
_ALIGNED = 8
# A bias of more elements is made for some rows at a time: heads times rows times keys would soon fill the memory.
_BIAS_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class SdpaFlashCpu:
    """fp32, fp64, bf16, fp16 (whose backward is slow); GQA without repeats; bands, ALiBi, attn_mask by an added one."""

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
        takes = {"explicit": True, "alibi": True, "attn_mask": True}
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
        attn_mask: AttnMask | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert softcap is None, "refused"
        extras = _Extras(allowed, alibi, attn_mask)
        if extras.empty and _is_mirrored(q, k, form):
            q, k, v = _mirrored(q, k, v)
            return _mirrored(*self.forward(q, k, v, form=Form(lo=0), scale=scale))
        strips = _strips(q.shape[2], k.shape[2], form, extras)
        if len(strips) > 1:
            each = [
                self.forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], form=part, scale=scale, **of_strip)
                for rows, keys, part, of_strip in _launches(strips, extras, q.shape[2], k.shape[2])
            ]
            out_BHME, lse_BHM = (torch.cat(parts, 2) for parts in zip(*each, strict=True))
            return out_BHME, lse_BHM
        value_dim = v.shape[-1]
        width = max(q.shape[-1], value_dim)
        q_BHMW, k_BHNW, v_BHNW = (unit_stride(padded(x, width)) for x in (q, k, v))
        is_causal, mask = _mask(q, k, form, extras)
        out_BHMW, lse_BHM = self.forward_op(q_BHMW, k_BHNW, v_BHNW, 0.0, is_causal, attn_mask=mask, scale=scale)
        if mask is not None and not (allowed is None and attn_mask is None):
            lse_BHM = lse_BHM.masked_fill(_dead(mask, is_causal, q.shape[2]), -torch.inf)
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
        attn_mask: AttnMask | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert softcap is None, "refused"
        extras = _Extras(allowed, alibi, attn_mask)
        if extras.empty and _is_mirrored(q, k, form):
            dout, q, k, v, out, lse = _mirrored(dout, q, k, v, out, lse)
            dlse = None if dlse is None else dlse.flip(2)
            return _mirrored(*self.backward(dout, q, k, v, out, lse, dlse, form=Form(lo=0), scale=scale))
        strips = _strips(q.shape[2], k.shape[2], form, extras)
        if len(strips) > 1:
            wide = torch.promote_types(k.dtype, torch.float32)
            dk, dv = (torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (k, v))
            dqs = []
            for rows, keys, part, of_strip in _launches(strips, extras, q.shape[2], k.shape[2]):
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
                    **of_strip,
                )
                dqs.append(dq_part)
                dk[:, :, keys] += dk_part
                dv[:, :, keys] += dv_part
            return torch.cat(dqs, 2), dk.to(k.dtype), dv.to(v.dtype)
        dim, value_dim = q.shape[-1], v.shape[-1]
        width = shared_width(dim, value_dim, dlse, q.dtype, multiple=1 if dlse is None else _ALIGNED)
        q_BHMW, k_BHNW, v_BHNW = (unit_stride(padded(x, width)) for x in (q, k, v))
        dout_BHMW, out_BHMW = (unit_stride(x) for x in with_lse_grad(dout, out, dlse, width, q.dtype))
        is_causal, mask = _mask(q, k, form, extras)
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


class _Extras(NamedTuple):
    """What a call says of pairs beside its form."""

    allowed: Tensor | None
    alibi: Alibi | None
    attn_mask: AttnMask | None

    @property
    def empty(self) -> bool:
        return self.allowed is None and not self.biases

    @property
    def biases(self) -> tuple[Alibi | AttnMask, ...]:
        return tuple(bias for bias in (self.alibi, self.attn_mask) if bias is not None)

    def has_one_row(self, form: Form) -> bool:
        """Whether all rows of a full or causal call have one bias: then the op spreads it."""
        if self.attn_mask is None or self.alibi is not None or self.allowed is not None:
            return False
        return self.attn_mask.values.shape[2] == 1 and form in (Form(), Form(lo=0))

    def part(self, rows: slice, keys: slice, m: int, n: int) -> dict[str, Any]:
        """Those of some rows and keys of m and n, by keyword."""
        allowed = self.allowed
        return {
            "allowed": None if allowed is None else allowed.expand(*allowed.shape[:2], m, n)[:, :, rows, keys],
            "alibi": None if self.alibi is None else self.alibi.part(rows, keys),
            "attn_mask": None if self.attn_mask is None else self.attn_mask.part(rows, keys),
        }


def _strips(m: int, n: int, form: Form, extras: _Extras) -> list[Band]:
    """The form as bands of some rows each, whose bias is not too large; none if there is no bias of many rows."""
    if not extras.biases or extras.has_one_row(form):
        return []
    whole = band_of(m, n, form)
    num_rows = max(1, _BIAS_ELEMENTS // (max(bias.planes for bias in extras.biases) * n))
    parts = (crop(whole, (start, min(start + num_rows, m)), whole.k) for start in range(0, m, num_rows))
    return [part for part in parts if part is not None]


def _launches(
    strips: Sequence[Band], extras: _Extras, m: int, n: int
) -> Iterator[tuple[slice, slice, Form, dict[str, Any]]]:
    """For each strip its rows, keys and form, and what of the rest is its."""
    for band in strips:
        rows, keys = slice(*band.q), slice(*band.k)
        yield rows, keys, form_of(band), extras.part(rows, keys, m, n)


def _mask(q: Tensor, k: Tensor, form: Form, extras: _Extras) -> tuple[bool, Tensor | None]:
    """Whether causal; 0 or the bias where a pair attends and -inf elsewhere, (M, N) or (B | 1, H | 1, M | 1, N), or
    None.
    """
    m, n = q.shape[2], k.shape[2]
    assert m * n > 0, f"an empty tile of {m} rows and {n} keys must not reach a kernel"
    # The op adds a mask of fp32 to half precision: in 8 bits a distance itself would be lost.
    wide = torch.promote_types(q.dtype, torch.float32)
    biases = [bias.bias(wide) for bias in extras.biases]
    if extras.has_one_row(form):
        return form != Form(), biases[0]
    if biases:
        bias_BHMN = biases[0] if len(biases) == 1 else biases[0] + biases[1]
        if extras.allowed is not None:
            return False, torch.where(attending(m, n, form, extras.allowed), bias_BHMN, -torch.inf)
        if form != Form():
            bias_BHMN = bias_BHMN + additive_mask(m, n, form, dtype=wide, device=q.device)
        return False, bias_BHMN
    if extras.allowed is not None:
        pairs_BHMN = attending(m, n, form, extras.allowed)
        return False, q.new_zeros(pairs_BHMN.shape).masked_fill_(~pairs_BHMN, -torch.inf)
    if form == Form():
        return False, None
    if form == Form(lo=0):
        return True, None
    return False, additive_mask(m, n, form, dtype=q.dtype, device=q.device)


def _dead(mask: Tensor, is_causal: bool, m: int) -> Tensor:
    """(B | 1, H | 1, M | 1): which rows attend to nothing."""
    masked = mask == -torch.inf
    if not is_causal:
        return masked.all(-1)
    # Row i sees keys 0 to i of the one row there is; rows beyond the keys see all.
    masked_before = masked[..., 0, :].to(torch.uint8).cummin(-1).values.bool()
    return masked_before[..., torch.arange(m, device=mask.device).clamp_max(masked.shape[-1] - 1)]
