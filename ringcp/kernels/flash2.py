"""Kernel "flash2": FlashAttention 2, from the package flash-attn.

Read in flash_attn/flash_attn_interface.py and csrc/flash_attn/flash_api.cpp of v2.7.0 to v2.8.3 (and main, 2.8.4):
operands (B, S, H, D) of one head dim, a multiple of 8 up to 256, dense in it; causality and windows count from the last
row and the last key, -1 is no edge; a row that sees nothing has lse +inf; softcap 0.0 is none, both directions have it.
There is no gradient through the lse: it is appended to dout as a column. Version 2.6 has other signatures.

Not yet run on a GPU. Tests run it on a stand-in of these signatures and conventions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringcp.kernels import launches, refusals
from ringcp.kernels.base import Form, Problem
from ringcp.kernels.operands import HALF
from ringcp.kernels.package import Package
from ringcp.kernels.windows import Window
from ringcp.lower import Caps

PACKAGE = Package(
    "flash-attn",
    "flash_attn.flash_attn_interface",
    takes=(
        ("_flash_attn_forward", ("window_size_left", "window_size_right", "softcap", "alibi_slopes", "return_softmax")),
        ("_flash_attn_backward", ("window_size_left", "window_size_right", "softcap", "alibi_slopes", "deterministic")),
    ),
    wanted="flash-attn 2.7 or 2.8",
)


@dataclass(frozen=True)
class Flash2:
    """fp16 and bf16; any band; GQA without repeats; softcap; deterministic if torch asks for it."""

    name = "flash2"
    caps = Caps(causal="bottom_right", band="any")
    switch = "flash"

    def refusals(self, problem: Problem) -> list[str]:
        reasons = refusals.shared(problem, self.caps, device="cuda", dtypes=HALF, max_dim=256, multiple=8, softcap=True)
        return PACKAGE.refusals(problem, range(8, 13), reasons)

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
        assert allowed is None, "refused"
        flash = PACKAGE.load()

        def launch(q_BMHW: Tensor, k_BNHW: Tensor, v_BNHW: Tensor, seen: Window) -> tuple[Tensor, Tensor]:
            out_BMHW, lse_BHM, *_ = flash._flash_attn_forward(
                q_BMHW,
                k_BNHW,
                v_BNHW,
                dropout_p=0.0,
                softmax_scale=scale,
                causal=seen.is_causal,
                window_size_left=-1 if seen.left is None else seen.left,
                window_size_right=-1 if seen.right is None else seen.right,
                softcap=softcap or 0.0,
                alibi_slopes=None,
                return_softmax=False,
            )
            return out_BMHW, lse_BHM.masked_fill(lse_BHM == torch.inf, -torch.inf)

        return launches.forward(launch, launches.in_parts(q.shape[2], k.shape[2], form), q, k, v)

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
        assert allowed is None, "refused"
        flash = PACKAGE.load()

        def launch(
            dout_BMHW: Tensor,
            q_BMHW: Tensor,
            k_BNHW: Tensor,
            v_BNHW: Tensor,
            out_BMHW: Tensor,
            lse: Tensor,
            seen: Window,
        ) -> tuple[Tensor, Tensor, Tensor]:
            dq, dk, dv = (torch.empty_like(x) for x in (q_BMHW, k_BNHW, v_BNHW))
            flash._flash_attn_backward(
                dout_BMHW,
                q_BMHW,
                k_BNHW,
                v_BNHW,
                out_BMHW,
                lse,
                dq,
                dk,
                dv,
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

        parts = launches.in_parts(q.shape[2], k.shape[2], form)
        return launches.backward(launch, parts, dout, q, k, v, out, lse, dlse)
