"""Kernel "sdpa_flash": FlashAttention 2 inside torch, by the ops under SDPA that take windows.

The ops want (B, S, H, D) operands with one head dim, a multiple of 8 up to 256, rows at multiples of 16 bytes, and a
contiguous lse (B, H, M). Causality and windows count from the last row and the last key.

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

from ringcp.kernels import launches, refusals
from ringcp.kernels.base import Form, Problem
from ringcp.kernels.operands import HALF
from ringcp.kernels.windows import Window
from ringcp.lower import Caps

_aten = torch.ops.aten


@dataclass(frozen=True)
class SdpaFlash:
    """fp16 and bf16; any band; GQA without repeats."""

    forward_op: Callable[..., Any] = _aten._flash_attention_forward.default
    backward_op: Callable[..., Any] = _aten._flash_attention_backward.default

    name = "sdpa_flash"
    caps = Caps(causal="bottom_right", band="any")
    switch = "flash"

    def refusals(self, problem: Problem) -> list[str]:
        reasons = refusals.shared(problem, self.caps, device="cuda", dtypes=HALF, max_dim=256, multiple=8)
        # activate_flash_attention_impl("FA3") puts another kernel, with other limits, behind the op.
        active = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
        if active not in (None, "FA2"):
            reasons.append(f"{active} is active in place of FA2: restore_flash_attention_impl() brings that back")
        return reasons + refusals.cuda_build(problem, back_end="flash")

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

        def launch(q_BMHW: Tensor, k_BNHW: Tensor, v_BNHW: Tensor, seen: Window) -> tuple[Tensor, Tensor]:
            out_BMHW, lse_BHM, *_ = self.forward_op(
                q_BMHW, k_BNHW, v_BNHW, None, None, q_BMHW.shape[1], k_BNHW.shape[1], 0.0, seen.is_causal, False,
                scale=scale, window_size_left=seen.left, window_size_right=seen.right,
            )  # fmt: skip
            return out_BMHW, lse_BHM

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
        assert (softcap, allowed) == (None, None), "refused"
        # The op wants the state of a random generator that it reads only for dropout.
        rng_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty((), dtype=torch.uint64, device=q.device)

        def launch(
            dout_BMHW: Tensor,
            q_BMHW: Tensor,
            k_BNHW: Tensor,
            v_BNHW: Tensor,
            out_BMHW: Tensor,
            lse: Tensor,
            seen: Window,
        ) -> tuple[Tensor, Tensor, Tensor]:
            dq_BMHW, dk_BNHW, dv_BNHW = self.backward_op(
                dout_BMHW, q_BMHW, k_BNHW, v_BNHW, out_BMHW, lse, None, None, q_BMHW.shape[1], k_BNHW.shape[1], 0.0,
                seen.is_causal, rng_state, unused,
                scale=scale, window_size_left=seen.left, window_size_right=seen.right,
            )  # fmt: skip
            return dq_BMHW, dk_BNHW, dv_BNHW

        parts = launches.in_parts(q.shape[2], k.shape[2], form)
        return launches.backward(launch, parts, dout, q, k, v, out, lse, dlse)
