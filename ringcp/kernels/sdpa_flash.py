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

from ringcp.kernels import refusals
from ringcp.kernels.base import Form, Problem
from ringcp.kernels.operands import HALF, aligned, padded, shared_width, with_lse_grad
from ringcp.kernels.windows import form_of, split, window
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
        self, q: Tensor, k: Tensor, v: Tensor, *, form: Form, scale: float, softcap: float | None = None
    ) -> tuple[Tensor, Tensor]:
        assert softcap is None, "refused"
        value_dim = v.shape[-1]
        width = shared_width(q.shape[-1], value_dim, None, q.dtype)
        q_BMHW, k_BNHW, v_BNHW = (_rows_first(x, width) for x in (q, k, v))
        outs, lses = [], []
        for band in split(q.shape[2], k.shape[2], form):
            rows, keys = slice(*band.q), slice(*band.k)
            is_causal, left, right = window(band.num_q, band.num_k, form_of(band))
            out_BMHW, lse_BHM, *_ = self.forward_op(
                q_BMHW[:, rows], k_BNHW[:, keys], v_BNHW[:, keys], None, None, band.num_q, band.num_k, 0.0, is_causal,
                False, scale=scale, window_size_left=left, window_size_right=right,
            )  # fmt: skip
            outs.append(out_BMHW.transpose(1, 2)[..., :value_dim])
            lses.append(lse_BHM)
        return _joined(outs), _joined(lses)

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert softcap is None, "refused"
        dim, value_dim = q.shape[-1], v.shape[-1]
        width = shared_width(dim, value_dim, dlse, q.dtype)
        q_BMHW, k_BNHW, v_BNHW = (_rows_first(x, width) for x in (q, k, v))
        dout_BMHW, out_BMHW = (_rows_first(x, width) for x in with_lse_grad(dout, out, dlse, width, q.dtype))
        # The op wants the state of a random generator that it reads only for dropout.
        rng_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty((), dtype=torch.uint64, device=q.device)
        dqs, dkvs = [], []
        bands = split(q.shape[2], k.shape[2], form)
        for band in bands:
            rows, keys = slice(*band.q), slice(*band.k)
            is_causal, left, right = window(band.num_q, band.num_k, form_of(band))
            dq_BMHW, *dkv_BNHW = self.backward_op(
                dout_BMHW[:, rows], q_BMHW[:, rows], k_BNHW[:, keys], v_BNHW[:, keys], out_BMHW[:, rows],
                lse[:, :, rows].contiguous(), None, None, band.num_q, band.num_k, 0.0, is_causal, rng_state, unused,
                scale=scale, window_size_left=left, window_size_right=right,
            )  # fmt: skip
            dqs.append(dq_BMHW.transpose(1, 2)[..., :dim])
            dkvs.append([x.transpose(1, 2) for x in dkv_BNHW])
        dk_BHNW, dv_BHNW = dkvs[0] if len(bands) == 1 else _summed(dkvs, [band.k for band in bands], k.shape[2])
        return _joined(dqs), dk_BHNW[..., :dim], dv_BHNW[..., :value_dim]


def _rows_first(x_BHSD: Tensor, width: int) -> Tensor:
    return aligned(padded(x_BHSD, width)).transpose(1, 2)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _summed(dkvs: list[list[Tensor]], ranges: list[tuple[int, int]], n: int) -> tuple[Tensor, ...]:
    """Sums of dk and of dv over calls that used some of the n keys each, in fp32."""
    sums = []
    for parts in zip(*dkvs, strict=True):
        b, h, _, w = parts[0].shape
        total_BHNW = parts[0].new_zeros(b, h, n, w, dtype=torch.promote_types(parts[0].dtype, torch.float32))
        for part_BHNW, keys in zip(parts, ranges, strict=True):
            total_BHNW[:, :, slice(*keys)] += part_BHNW
        sums.append(total_BHNW.to(parts[0].dtype))
    return tuple(sums)
