"""Kernel "flash4": FlashAttention 4 for Blackwell and Hopper, from the package flash-attn-4 (flash_attn.cute).

Read in flash_attn/cute/interface.py, mask.py and flash_bwd_preprocess.py of 0251105a (4.0.0b27, August 2026), whose
arguments of these names are there from 4.0.0b9 on: operands (B, S, H, D), head dims that are multiples of 8, one of q
and k and one of v; causality and windows count from the last row and the last key, None is no edge; a row that sees
nothing has lse -inf; forward returns more than out and lse; backward takes the gradient of the lse, and a softcap, 0.0
being none. With cu_seqlens it takes (T, H, D), and has the lse and its gradient as (H, T).

Head dims: up to 256 on Hopper; on Blackwell up to 128, or 192 with 128 for v. (256 with 256, which later betas have
there, does without softcap, gradient of the lse and determinism, and is not asked for.)

Not yet run on a GPU. Tests run it on a stand-in of these signatures and conventions.

Shapes: B batch, H heads, M query rows, X padded head dim of v; T query rows of all sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ringcp.cutting import Caps
from ringcp.kernels import refusals
from ringcp.kernels.base import Form, Problem
from ringcp.kernels.operands import HALF, aligned, padded, round_up
from ringcp.kernels.package import Package
from ringcp.kernels.packed import Packed
from ringcp.kernels.windows import Window, window

_HOPPER = 9

PACKAGE = Package(
    "flash-attn-4",
    "flash_attn.cute.interface",
    takes=(
        # qv is not passed: it came with the version whose backward was the first to take a softcap.
        ("_flash_attn_fwd", ("softmax_scale", "softcap", "window_size_left", "return_lse", "qv", "cu_seqlens_q")),
        ("_flash_attn_bwd", ("softmax_scale", "softcap", "window_size_left", "deterministic", "dlse", "cu_seqlens_q")),
    ),
    wanted="flash-attn-4 4.0.0b9 or later",
)


@dataclass(frozen=True)
class Flash4:
    """fp16 and bf16; any band; GQA without repeats; softcap; deterministic if torch asks for it."""

    name = "flash4"
    caps = Caps(causal="bottom_right", band="any", varlen=True)
    switch = "flash"

    def refusals(self, problem: Problem) -> list[str]:
        reasons = refusals.shared(
            problem, self.caps, device="cuda", dtypes=HALF, max_dim=None, multiple=8, softcap=True
        )
        return PACKAGE.refusals(problem, (_HOPPER, 10, 11), [*reasons, *_head_dims(problem)])

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
        seen = window(q.shape[2], k.shape[2], form)
        out_BMHX, lse_BHM = _forward(map(_rows_first, (q, k, v)), seen, scale, softcap)
        return out_BMHX.transpose(1, 2)[..., : v.shape[-1]], lse_BHM

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
        seen = window(q.shape[2], k.shape[2], form)
        operands = map(_rows_first, (q, k, v, out.to(q.dtype), dout.to(q.dtype)))
        grads = _backward(operands, lse, dlse, seen, scale, softcap)
        dq, dk, dv = (grad.transpose(1, 2)[..., : x.shape[-1]] for grad, x in zip(grads, (q, k, v), strict=True))
        return dq, dk, dv

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, *, packed: Packed, scale: float, softcap: float | None = None
    ) -> tuple[Tensor, Tensor]:
        out_THX, lse_HT = _forward(map(_even, (q, k, v)), packed.window, scale, softcap, packed)
        return out_THX[..., : v.shape[-1]], lse_HT

    def backward_packed(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
        *,
        packed: Packed,
        scale: float,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        operands = map(_even, (q, k, v, out.to(q.dtype), dout.to(q.dtype)))
        grads = _backward(operands, lse, dlse, packed.window, scale, softcap, packed)
        dq, dk, dv = (grad[..., : x.shape[-1]] for grad, x in zip(grads, (q, k, v), strict=True))
        return dq, dk, dv


def _forward(
    qkv: Iterable[Tensor], seen: Window, scale: float, softcap: float | None, packed: Packed | None = None
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = PACKAGE.load()._flash_attn_fwd(
        *qkv,
        **({} if packed is None else packed.arguments),
        softmax_scale=scale,
        causal=seen.is_causal,
        softcap=softcap or 0.0,
        window_size_left=seen.left,
        window_size_right=seen.right,
        return_lse=True,
    )
    return out, lse


def _backward(
    operands: Iterable[Tensor],
    lse: Tensor,
    dlse: Tensor | None,
    seen: Window,
    scale: float,
    softcap: float | None,
    packed: Packed | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """From q, k, v, out and dout."""
    dq, dk, dv, *_ = PACKAGE.load()._flash_attn_bwd(
        *operands,
        lse.contiguous(),
        **({} if packed is None else packed.arguments),
        softmax_scale=scale,
        causal=seen.is_causal,
        softcap=softcap or 0.0,
        window_size_left=seen.left,
        window_size_right=seen.right,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        dlse=None if dlse is None else dlse.to(lse.dtype).contiguous(),
    )
    return dq, dk, dv


def _even(x: Tensor) -> Tensor:
    return aligned(padded(x, round_up(x.shape[-1], 8)))


def _rows_first(x_BHSD: Tensor) -> Tensor:
    return _even(x_BHSD).transpose(1, 2)


def _head_dims(problem: Problem) -> Iterator[str]:
    hopper = problem.device.type != "cuda" or torch.cuda.get_device_capability(problem.device)[0] == _HOPPER
    largest = 256 if hopper else 128
    if not hopper and (round_up(problem.head_dim, 8), round_up(problem.value_dim, 8)) == (192, 128):
        return
    for name, dim in (("head_dim", problem.head_dim), ("value_dim", problem.value_dim)):
        if dim > largest:
            yield f"{name} {dim} > {largest}"
