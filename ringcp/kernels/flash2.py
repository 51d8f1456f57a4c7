"""Kernel "flash2": FlashAttention 2, from the package flash-attn.

Read in flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp of v2.7.0 to v2.8.3 (and main, 2.8.4):
operands (B, S, H, D) of one head dim, a multiple of 8 up to 256, dense in it; causality and windows count from the last
row and the last key, -1 is no edge; a row that sees nothing has lse +inf; softcap 0.0 is none, both directions have it.
There is no gradient through the lse: it is appended to dout as a column. Its varlen functions take (T, H, D), and have
the lse as (H, T). Version 2.6 has other signatures.

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

PACKAGE = Package(
    "flash-attn",
    "flash_attn.flash_attn_interface",
    takes=(
        ("_flash_attn_forward", ("window_size_left", "window_size_right", "softcap", "alibi_slopes", "return_softmax")),
        ("_flash_attn_backward", ("window_size_left", "window_size_right", "softcap", "alibi_slopes", "deterministic")),
        ("_flash_attn_varlen_forward", ("cu_seqlens_q", "window_size_left", "softcap", "return_softmax")),
        ("_flash_attn_varlen_backward", ("cu_seqlens_q", "window_size_left", "softcap", "deterministic")),
    ),
    wanted="flash-attn 2.7 or 2.8",
)


@dataclass(frozen=True)
class Flash2(Launching):
    """fp16 and bf16; any band; GQA without repeats; softcap; deterministic if torch asks for it."""

    name = "flash2"
    caps = Caps(causal="bottom_right", band="any", varlen=True)
    switch = "flash"

    def refusals(self, problem: Problem) -> list[str]:
        reasons = refusals.shared(problem, self.caps, device="cuda", dtypes=HALF, max_dim=256, multiple=8, softcap=True)
        return PACKAGE.refusals(problem, range(8, 13), reasons)

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
        function = flash._flash_attn_forward if packed is None else flash._flash_attn_varlen_forward
        out, lse, *_ = function(
            q,
            k,
            v,
            **({} if packed is None else packed.arguments),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=seen.is_causal,
            window_size_left=-1 if seen.left is None else seen.left,
            window_size_right=-1 if seen.right is None else seen.right,
            softcap=softcap or 0.0,
            alibi_slopes=None,
            return_softmax=False,
        )
        return out, lse.masked_fill(lse == torch.inf, -torch.inf)

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
        function = flash._flash_attn_backward if packed is None else flash._flash_attn_varlen_backward
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        function(
            dout,
            q,
            k,
            v,
            out,
            lse,
            dq,
            dk,
            dv,
            **({} if packed is None else packed.arguments),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=seen.is_causal,
            window_size_left=-1 if seen.left is None else seen.left,
            window_size_right=-1 if seen.right is None else seen.right,
            softcap=softcap or 0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            rng_state=None,
        )
        return dq, dk, dv
