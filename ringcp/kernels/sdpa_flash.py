"""Kernel "sdpa_flash": FlashAttention 2 inside torch, by the ops under SDPA that take windows.

The ops want (B, S, H, D) operands with one head dim, a multiple of 8 up to 256, rows at multiples of 16 bytes, and a
contiguous lse (B, H, M); of sequences side by side (T, H, D) operands and an lse (H, T). Causality and windows count
from the last row and the last key.

Written from the schemas and headers of torch 2.13 and C++ sources of about that time, for torch 2.11 to 2.14; not
yet run on a GPU. Tests run it on a stand-in that wants the same, which takes the place of the ops through the fields.

Shapes: B batch, H query heads, M query rows, D head dim, T query rows of all sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringcp.cutting import Caps
from ringcp.kernels import refusals
from ringcp.kernels.base import Problem
from ringcp.kernels.launches import Launching
from ringcp.kernels.operands import HALF
from ringcp.kernels.packed import Packed
from ringcp.kernels.windows import Window

_aten = torch.ops.aten


@dataclass(frozen=True)
class SdpaFlash(Launching):
    """fp16 and bf16; any band; GQA without repeats."""

    forward_op: Callable[..., Any] = _aten._flash_attention_forward.default
    backward_op: Callable[..., Any] = _aten._flash_attention_backward.default

    name = "sdpa_flash"
    caps = Caps(causal="bottom_right", band="any", varlen=True)
    switch = "flash"

    def refusals(self, problem: Problem) -> list[str]:
        reasons = refusals.shared(problem, self.caps, device="cuda", dtypes=HALF, max_dim=256, multiple=8)
        # activate_flash_attention_impl("FA3") puts another kernel, with other limits, behind the op.
        active = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
        if active not in (None, "FA2"):
            reasons.append(f"{active} is active in place of FA2: restore_flash_attention_impl() brings that back")
        return reasons + refusals.cuda_build(problem, back_end="flash")

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
        assert softcap is None, "refused"
        out, lse, *_ = self.forward_op(
            q, k, v, *_sequences(q, k, packed), 0.0, seen.is_causal, False,
            scale=scale, window_size_left=seen.left, window_size_right=seen.right,
        )  # fmt: skip
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
        assert softcap is None, "refused"
        # The op wants the state of a random generator that it reads only for dropout.
        rng_state, unused = (torch.empty(size, dtype=torch.uint64, device=q.device) for size in ((2,), ()))
        dq, dk, dv = self.backward_op(
            dout, q, k, v, out, lse, *_sequences(q, k, packed), 0.0, seen.is_causal, rng_state, unused,
            scale=scale, window_size_left=seen.left, window_size_right=seen.right,
        )  # fmt: skip
        return dq, dk, dv


def _sequences(q: Tensor, k: Tensor, packed: Packed | None) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Where they start and how long they are; those of (B, S, H, D) operands are as long as S."""
    return (None, None, q.shape[1], k.shape[1]) if packed is None else packed[:4]
