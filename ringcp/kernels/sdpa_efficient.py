"""Kernel "sdpa_efficient": memory-efficient attention (cutlass).

The ops want rows, head dims and the rows of the bias at multiples of 16 bytes, as many KV heads as query heads, and in
backward an lse padded with +inf to a multiple of 32 rows. Causality counts from the first row and the first key.

Written from the schemas and headers of torch 2.13 and C++ sources of about that time, for torch 2.11 to 2.14; not
yet run on a GPU. Tests run it on a stand-in that wants the same, which takes the place of the ops through the fields.

Shapes: B batch, H query heads, M query rows, N keys, D head dim of q and k, Dv of v, W padded head dim,
R rows padded to a multiple of 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringcp.cutting import Caps
from ringcp.kernels import refusals
from ringcp.kernels.base import Form, Problem
from ringcp.kernels.operands import HALF, additive_mask, aligned, num_lse_columns, padded, round_up, with_lse_grad

_aten = torch.ops.aten


@dataclass(frozen=True)
class SdpaEfficient:
    """fp32, fp16 and bf16; head dims of any size; bands by a bias; KV heads are repeated for GQA."""

    forward_op: Callable[..., Any] = _aten._scaled_dot_product_efficient_attention.default
    backward_op: Callable[..., Any] = _aten._scaled_dot_product_efficient_attention_backward.default

    name = "sdpa_efficient"
    caps = Caps(causal="top_left", band="mask")
    switch = "efficient"

    def refusals(self, problem: Problem) -> list[str]:
        dtypes = (torch.float32, *HALF)
        reasons = refusals.shared(problem, self.caps, device="cuda", dtypes=dtypes, max_dim=None, multiple=8)
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
    ) -> tuple[Tensor, Tensor]:
        assert (softcap, allowed) == (None, None), "refused"
        q_BHMW, k_BHNW, v_BHNW = (_repeated(_row_aligned(x, x.shape[-1]), q.shape[1]) for x in (q, k, v))
        out_BHMW, lse_BHR, *_ = self.forward_op(
            q_BHMW, k_BHNW, v_BHNW, _bias(q, k, form), True, 0.0, _is_causal(form), scale=scale
        )
        return out_BHMW[..., : v.shape[-1]], lse_BHR[..., : q.shape[2]]

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert (softcap, allowed) == (None, None), "refused"
        m, dim, value_dim, kv_heads = q.shape[2], q.shape[-1], v.shape[-1], k.shape[1]
        value_width = round_up(value_dim + (0 if dlse is None else num_lse_columns(q.dtype)), _step(q))
        q_BHMW, k_BHNW = (_repeated(_row_aligned(x, dim), q.shape[1]) for x in (q, k))
        v_BHNW = _repeated(_row_aligned(v, value_width), q.shape[1])
        dout_BHMW, out_BHMW = (aligned(x) for x in with_lse_grad(dout, out, dlse, value_width, q.dtype))
        lse_BHR = lse.new_full((*lse.shape[:2], round_up(m, 32)), float("inf"))
        lse_BHR[..., :m] = lse
        seed, offset = torch.empty(2, dtype=torch.int64)
        dq, dk, dv, _ = self.backward_op(
            dout_BHMW, q_BHMW, k_BHNW, v_BHNW, _bias(q, k, form), out_BHMW, lse_BHR, seed, offset, 0.0,
            [True, True, True, False], _is_causal(form), scale=scale,
        )  # fmt: skip
        dk, dv = (x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
        return dq[..., :dim], dk[..., :dim], dv[..., :value_dim]


def _is_causal(form: Form) -> bool:
    return form == Form(lo=0)


def _step(x: Tensor) -> int:
    return 16 // x.element_size()


def _row_aligned(x_BHSD: Tensor, width: int) -> Tensor:
    return aligned(padded(x_BHSD, round_up(width, _step(x_BHSD))))


def _repeated(x_BHND: Tensor, heads: int) -> Tensor:
    return x_BHND if x_BHND.shape[1] == heads else x_BHND.repeat_interleave(heads // x_BHND.shape[1], dim=1)


def _bias(q: Tensor, k: Tensor, form: Form) -> Tensor | None:
    if form == Form() or _is_causal(form):
        return None
    b, h, m, n = *q.shape[:3], k.shape[2]
    return additive_mask(m, n, form, dtype=q.dtype, device=q.device, row_multiple=16).expand(b, h, m, n)
