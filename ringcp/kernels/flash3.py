"""Kernel "flash3": FlashAttention 3 for Hopper, from the package flash_attn_3 (its module is flash_attn_interface).

Read in hopper/flash_attn_interface.py, flash_api.cpp, mask.h and flash_bwd_preprocess_kernel.h of 0251105a (3.0.0,
August 2026), whose two signatures are those from 5e114d53 (August 2025) on: operands (B, S, H, D), head dims that are
multiples of 8 up to 256, dense in it; causality and windows count from the last row and the last key, -1 is no edge,
and no edge is misread; a row that sees nothing has lse -inf; softcap 0.0 is none, both directions have it. There is no
gradient through the lse: it is appended to dout as a column. Deterministic up to head dim 192. With cu_seqlens it takes
(T, H, D), and has the lse as (H, T).

Another head dim of v is taken in few pairs only (192 with 128, up to 64 with any): v is padded to that of q instead.

Not yet run on a GPU. Tests run it on a stand-in of these signatures and conventions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringcp.cutting import Caps
from ringcp.kernels import refusals
from ringcp.kernels.base import Problem
from ringcp.kernels.launches import Launching
from ringcp.kernels.operands import HALF
from ringcp.kernels.package import Package
from ringcp.kernels.packed import Packed
from ringcp.kernels.windows import Window

_DETERMINISTIC_DIM = 192

PACKAGE = Package(
    "flash_attn_3",
    "flash_attn_interface",
    takes=(
        ("_flash_attn_forward", ("softmax_scale", "causal", "window_size_left", "softcap", "cu_seqlens_q")),
        ("_flash_attn_backward", ("softmax_scale", "is_causal", "window_size_left", "deterministic", "cu_seqlens_q")),
    ),
    wanted="flash_attn_3 of August 2025 or later",
)


@dataclass(frozen=True)
class Flash3(Launching):
    """fp16 and bf16; any band; GQA without repeats; softcap; deterministic if torch asks for it."""

    name = "flash3"
    caps = Caps(causal="bottom_right", band="any", varlen=True)
    switch = "flash"
    quirks = False

    def refusals(self, problem: Problem) -> list[str]:
        reasons = refusals.shared(problem, self.caps, device="cuda", dtypes=HALF, max_dim=256, multiple=8, softcap=True)
        if problem.deterministic and problem.needs_grad and refusals.padded_dim(problem, 8) > _DETERMINISTIC_DIM:
            reasons.append(f"its backward is not deterministic for head dims above {_DETERMINISTIC_DIM}")
        return PACKAGE.refusals(problem, (9,), reasons)

    def launch_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seen: Window,
        scale: float,
        softcap: float | None,
        packed: Packed | None = None,
    ) -> tuple[Tensor, Tensor]:
        flash = PACKAGE.load()
        out, lse, *_ = flash._flash_attn_forward(
            q,
            k,
            v,
            **({} if packed is None else packed.arguments),
            softmax_scale=scale,
            causal=seen.is_causal,
            window_size_left=-1 if seen.left is None else seen.left,
            window_size_right=-1 if seen.right is None else seen.right,
            softcap=softcap or 0.0,
        )
        return out, lse

    def launch_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        seen: Window,
        scale: float,
        softcap: float | None,
        packed: Packed | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        flash = PACKAGE.load()
        can = q.shape[-1] <= _DETERMINISTIC_DIM
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        flash._flash_attn_backward(
            dout,
            q,
            k,
            v,
            out,
            lse,
            **({} if packed is None else packed.arguments),
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=scale,
            is_causal=seen.is_causal,
            window_size_left=-1 if seen.left is None else seen.left,
            window_size_right=-1 if seen.right is None else seen.right,
            softcap=softcap or 0.0,
            deterministic=can and torch.are_deterministic_algorithms_enabled(),
        )
        return dq, dk, dv
