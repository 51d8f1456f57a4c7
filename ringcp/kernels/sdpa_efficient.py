"""Kernel "sdpa_efficient": memory-efficient attention (cutlass).

The ops want rows, head dims and the rows of the bias at multiples of 16 bytes, as many KV heads as query heads, and in
backward an lse padded with +inf to a multiple of 32 rows. Causality counts from the first row and the first key.

The bias is in q's dtype, of the whole shape, and may have strides of 0; beside it causality holds as well. A row that
attends to nothing has out 0 and lse 0.0. Before torch 2.13, 2**32 elements of one head's bias or more are read at
wrong rows, without a word (pytorch/pytorch#187225): strips stay far below.

Written from the schemas and headers of torch 2.13 and C++ sources of about that time, for torch 2.11 to 2.14; not
yet run on a GPU. Tests run it on a stand-in that wants the same, which takes the place of the ops through the fields.

Shapes: B batch, H query heads, M query rows, N keys, D head dim of q and k, Dv of v, W padded head dim,
R rows padded to a multiple of 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringcp.cutting import Caps
from ringcp.kernels import biased, refusals
from ringcp.kernels.base import Form, Problem
from ringcp.kernels.biased import Extras
from ringcp.kernels.operands import HALF, additive_mask, aligned, num_lse_columns, padded, round_up, with_lse_grad
from ringcp.kernels.pairwise import AttnMask

_aten = torch.ops.aten
# Of the bias of an attn_mask in one launch: 1 GiB in fp32.
_BIAS_ELEMENTS = 1 << 28
# So many elements apart lie the rows of a bias, and what is between them is read.
_ROW_MULTIPLE = 16


@dataclass(frozen=True)
class SdpaEfficient:
    """fp32, fp16 and bf16; head dims of any size; bands and attn_mask by a bias; KV heads are repeated for GQA."""

    forward_op: Callable[..., Any] = _aten._scaled_dot_product_efficient_attention.default
    backward_op: Callable[..., Any] = _aten._scaled_dot_product_efficient_attention_backward.default

    name = "sdpa_efficient"
    caps = Caps(causal="top_left", band="mask")
    switch = "efficient"

    def refusals(self, problem: Problem) -> list[str]:
        dtypes = (torch.float32, *HALF)
        reasons = refusals.shared(
            problem, self.caps, device="cuda", dtypes=dtypes, max_dim=None, multiple=8, attn_mask=True
        )
        of_mask = problem.attn_mask
        if of_mask is not None and of_mask not in (torch.bool, problem.dtype):
            reasons.append(
                f"attn_mask of {refusals.word(of_mask)}, which it would round to {refusals.word(problem.dtype)}"
            )
        return reasons + refusals.cuda_build(problem, back_end="efficient")

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
        attn_mask: AttnMask | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert (softcap, allowed) == (None, None), "refused"
        extras = Extras(attn_mask=attn_mask)
        strips = biased.strips(q.shape[2], k.shape[2], form, extras, _BIAS_ELEMENTS)
        if strips:
            return biased.forward(partial(self.forward, scale=scale), strips, q, k, v)
        q_BHMW, k_BHNW, v_BHNW = (_repeated(_row_aligned(x, x.shape[-1]), q.shape[1]) for x in (q, k, v))
        is_causal, bias_BHMN = _bias(q, k, form, extras)
        out_BHMW, lse_BHR, *_ = self.forward_op(
            q_BHMW, k_BHNW, v_BHNW, _spread(bias_BHMN, q), True, 0.0, is_causal, scale=scale
        )
        lse_BHM = lse_BHR[..., : q.shape[2]]
        if bias_BHMN is not None and attn_mask is not None:
            lse_BHM = lse_BHM.masked_fill(biased.dead_rows(bias_BHMN, is_causal, q.shape[2]), -torch.inf)
        return out_BHMW[..., : v.shape[-1]], lse_BHM

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
        attn_mask: AttnMask | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert (softcap, allowed) == (None, None), "refused"
        extras = Extras(attn_mask=attn_mask)
        strips = biased.strips(q.shape[2], k.shape[2], form, extras, _BIAS_ELEMENTS)
        if strips:
            return biased.backward(partial(self.backward, scale=scale), strips, dout, q, k, v, out, lse, dlse)
        m, dim, value_dim, kv_heads = q.shape[2], q.shape[-1], v.shape[-1], k.shape[1]
        value_width = round_up(value_dim + (0 if dlse is None else num_lse_columns(q.dtype)), _step(q))
        q_BHMW, k_BHNW = (_repeated(_row_aligned(x, dim), q.shape[1]) for x in (q, k))
        v_BHNW = _repeated(_row_aligned(v, value_width), q.shape[1])
        dout_BHMW, out_BHMW = (aligned(x) for x in with_lse_grad(dout, out, dlse, value_width, q.dtype))
        lse_BHR = lse.new_full((*lse.shape[:2], round_up(m, 32)), float("inf"))
        lse_BHR[..., :m] = lse
        seed, offset = torch.empty(2, dtype=torch.int64)
        is_causal, bias_BHMN = _bias(q, k, form, extras)
        dq, dk, dv, _ = self.backward_op(
            dout_BHMW, q_BHMW, k_BHNW, v_BHNW, _spread(bias_BHMN, q), out_BHMW, lse_BHR, seed, offset, 0.0,
            [True, True, True, False], is_causal, scale=scale,
        )  # fmt: skip
        dk, dv = (x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
        return dq[..., :dim], dk[..., :dim], dv[..., :value_dim]


def _step(x: Tensor) -> int:
    return 16 // x.element_size()


def _row_aligned(x_BHSD: Tensor, width: int) -> Tensor:
    return aligned(padded(x_BHSD, round_up(width, _step(x_BHSD))))


def _repeated(x_BHND: Tensor, heads: int) -> Tensor:
    return x_BHND if x_BHND.shape[1] == heads else x_BHND.repeat_interleave(heads // x_BHND.shape[1], dim=1)


def _bias(q: Tensor, k: Tensor, form: Form, extras: Extras) -> tuple[bool, Tensor | None]:
    """Whether causal; 0 or the bias where a pair attends and -inf elsewhere, (M, N) or (B | 1, H | 1, M | 1, N), in q's
    dtype, or None.
    """
    m, n = q.shape[2], k.shape[2]
    if extras.attn_mask is not None:
        # In fp32, since it says there which numbers are too low for any score to show beside.
        bias_BHMN = biased.bias_of(m, n, form, extras, torch.promote_types(q.dtype, torch.float32), q.device)
        rows = q.new_zeros(*bias_BHMN.shape[:3], round_up(n, _ROW_MULTIPLE))[..., :n]
        return form != Form() and extras.has_one_row(form), rows.copy_(bias_BHMN)
    if form == Form() or form == Form(lo=0):
        return form != Form(), None
    return False, additive_mask(m, n, form, dtype=q.dtype, device=q.device, row_multiple=_ROW_MULTIPLE)


def _spread(bias_BHMN: Tensor | None, q: Tensor) -> Tensor | None:
    return None if bias_BHMN is None else bias_BHMN.expand(*q.shape[:3], bias_BHMN.shape[-1])
