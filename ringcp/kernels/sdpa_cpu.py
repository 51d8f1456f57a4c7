"""Kernel "sdpa_flash_cpu": torch's flash attention for CPUs.

The op reads a last dim of any stride as if it were 1, and returns wrong numbers without a word; it takes every other
stride, 0 included, and a mask beside causality. It dies on 0 rows or keys. A row that attends to nothing gets lse 0.0;
forms have none.

Shapes: B batch, H heads, M query rows, N keys, D head dim of q and k, Dv of v, W the wider of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringcp.cutting import Caps, Strips
from ringcp.kernels import biased, refusals
from ringcp.kernels.base import Form, Problem
from ringcp.kernels.biased import Extras
from ringcp.kernels.operands import additive_mask, attending, padded, shared_width, unit_stride, with_lse_grad
from ringcp.kernels.pairwise import Alibi, AttnMask

_aten = torch.ops.aten
# With rows of any width, the bits of a head's results depend on how many heads it is among: a product whose operands
# start at a multiple of 16 bytes is computed in another order than one whose operands do not.
_ALIGNED = 8
# Of a bias in one launch.
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
        extras = Extras(allowed, alibi, attn_mask)
        if extras.empty and _is_mirrored(q, k, form):
            q, k, v = _mirrored(q, k, v)
            return _mirrored(*self.forward(q, k, v, form=Form(lo=0), scale=scale))
        strips = biased.strips(q.shape[2], k.shape[2], form, extras, _BIAS_ELEMENTS)
        if strips:
            return biased.forward(partial(self.forward, scale=scale), strips, q, k, v)
        value_dim = v.shape[-1]
        width = max(q.shape[-1], value_dim)
        q_BHMW, k_BHNW, v_BHNW = (unit_stride(padded(x, width)) for x in (q, k, v))
        is_causal, mask = _mask(q, k, form, extras)
        out_BHMW, lse_BHM = self.forward_op(q_BHMW, k_BHNW, v_BHNW, 0.0, is_causal, attn_mask=mask, scale=scale)
        if mask is not None and not (allowed is None and attn_mask is None):
            lse_BHM = lse_BHM.masked_fill(biased.dead_rows(mask, is_causal, q.shape[2]), -torch.inf)
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
        extras = Extras(allowed, alibi, attn_mask)
        if extras.empty and _is_mirrored(q, k, form):
            dout, q, k, v, out, lse = _mirrored(dout, q, k, v, out, lse)
            dlse = None if dlse is None else dlse.flip(2)
            return _mirrored(*self.backward(dout, q, k, v, out, lse, dlse, form=Form(lo=0), scale=scale))
        strips = biased.strips(q.shape[2], k.shape[2], form, extras, _BIAS_ELEMENTS)
        if strips:
            return biased.backward(partial(self.backward, scale=scale), strips, dout, q, k, v, out, lse, dlse)
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


def _mask(q: Tensor, k: Tensor, form: Form, extras: Extras) -> tuple[bool, Tensor | None]:
    """Whether causal; 0 or the bias where a pair attends and -inf elsewhere, (M, N) or (B | 1, H | 1, M | 1, N), or
    None.
    """
    m, n = q.shape[2], k.shape[2]
    assert m * n > 0, f"an empty tile of {m} rows and {n} keys must not reach a kernel"
    if extras.biases:
        # The op adds a mask of fp32 to half precision: in 8 bits a distance itself would be lost.
        wide = torch.promote_types(q.dtype, torch.float32)
        is_causal = form != Form() and extras.has_one_row(form)
        return is_causal, biased.bias_of(m, n, form, extras, wide, q.device)
    if extras.allowed is not None:
        pairs_BHMN = attending(m, n, form, extras.allowed)
        return False, q.new_zeros(pairs_BHMN.shape).masked_fill_(~pairs_BHMN, -torch.inf)
    if form == Form():
        return False, None
    if form == Form(lo=0):
        return True, None
    return False, additive_mask(m, n, form, dtype=q.dtype, device=q.device)
