"""Kernel "sdpa_cudnn": cuDNN attention.

The ops want one head dim, a multiple of 8 up to 128; lse is (B, H, M, 1). They cannot take a single key: that call
goes to the reference. torch caches the backward plan by the strides of q, k and v alone, although it holds those of
out, dout and lse too: all are made contiguous here, as they are when torch's own call has contiguous q, k, v.

Written from the schemas and headers of torch 2.13 and C++ sources of about that time, for torch 2.11 to 2.14; not
yet run on a GPU. Tests run it on a stand-in that wants the same, which takes the place of the ops through the fields.

Shapes: B batch, H query heads, M query rows, N keys, D head dim of q and k, Dv of v, W padded head dim.
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
from ringcp.kernels.operands import HALF, aligned, padded, shared_width, with_lse_grad
from ringcp.kernels.reference import Reference

_aten = torch.ops.aten


@dataclass(frozen=True)
class SdpaCudnn:
    """fp16 and bf16; full or square causal; GQA without repeats."""

    forward_op: Callable[..., Any] = _aten._scaled_dot_product_cudnn_attention.default
    backward_op: Callable[..., Any] = _aten._scaled_dot_product_cudnn_attention_backward.default

    name = "sdpa_cudnn"
    caps = Caps(causal="square", band="none")
    switch = "cudnn"

    def refusals(self, problem: Problem) -> list[str]:
        reasons = refusals.shared(problem, self.caps, device="cuda", dtypes=HALF, max_dim=128, multiple=8)
        if problem.deterministic:
            reasons.append("its backward is not deterministic")
        return reasons + refusals.cuda_build(problem, back_end="cudnn")

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
        if k.shape[2] == 1:
            return Reference().forward(q, k, v, form=form, scale=scale)
        value_dim = v.shape[-1]
        width = shared_width(q.shape[-1], value_dim, None, q.dtype)
        q_BHMW, k_BHNW, v_BHNW = (_contiguous(padded(x, width)) for x in (q, k, v))
        out_BHMW, lse_BHM1, *_ = self.forward_op(
            q_BHMW, k_BHNW, v_BHNW, None, True, 0.0, _is_causal(form), False, scale=scale
        )
        return out_BHMW[..., :value_dim], lse_BHM1.reshape(q.shape[:3])

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
        m, n, dim, value_dim = q.shape[2], k.shape[2], q.shape[-1], v.shape[-1]
        if n == 1:
            return Reference().backward(dout, q, k, v, out, lse, dlse, form=form, scale=scale)
        width = shared_width(dim, value_dim, dlse, q.dtype)
        q_BHMW, k_BHNW, v_BHNW = (_contiguous(padded(x, width)) for x in (q, k, v))
        dout_BHMW, out_BHMW = (_contiguous(x) for x in with_lse_grad(dout, out, dlse, width, q.dtype))
        seed, offset = torch.empty(2, dtype=torch.int64, device=q.device)
        dq, dk, dv = self.backward_op(
            dout_BHMW, q_BHMW, k_BHNW, v_BHNW, out_BHMW, _contiguous(lse.unsqueeze(-1)), seed, offset, None, None,
            None, m, n, 0.0, _is_causal(form), scale=scale,
        )  # fmt: skip
        return dq[..., :dim], dk[..., :dim], dv[..., :value_dim]


def _contiguous(x: Tensor) -> Tensor:
    return aligned(x).contiguous()


def _is_causal(form: Form) -> bool:
    assert form in (Form(), Form(lo=0)), f"cuDNN cannot take {form}"
    return form == Form(lo=0)
