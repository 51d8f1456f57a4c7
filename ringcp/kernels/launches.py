"""FlashAttention's calls: (B, S, H, D) operands of one head dim, one launch for each part of a band, the parts joined;
or (T, H, D) operands of sequences side by side, in one launch.

Shapes: B batch, H heads, M query rows, N keys, D head dim of q and k, Dv of v, W padded head dim; T query rows and U
keys of all sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ringcp.band import Range
from ringcp.kernels.base import Form
from ringcp.kernels.operands import aligned, padded, shared_width, with_lse_grad
from ringcp.kernels.packed import Packed
from ringcp.kernels.windows import Window, form_of, split, window


class _Part(NamedTuple):
    """Some rows and some keys of a call, and the window over them."""

    q: Range
    k: Range
    window: Window


class Launching(ABC):
    """A kernel of such calls; an adapter says how one launch is made.

    quirks: whether it misreads some bands (see `windows`), which are then launched in several parts.
    """

    quirks: ClassVar[bool] = True

    @abstractmethod
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
        """out (B, M, H, W) and lse (B, H, M) of (B, S, H, W) operands; if `packed`, out (T, H, W) and lse (H, T)."""

    @abstractmethod
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
        """dq, dk and dv, from operands in the shapes of forward; lse is contiguous."""

    def _parts(self, m: int, n: int, form: Form) -> list[_Part]:
        if not self.quirks:
            return [_Part((0, m), (0, n), window(m, n, form))]
        return [_Part(band.q, band.k, window(band.num_q, band.num_k, form_of(band))) for band in split(m, n, form)]

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
        value_dim = v.shape[-1]
        width = shared_width(q.shape[-1], value_dim, None, q.dtype)
        q_BMHW, k_BNHW, v_BNHW = (_rows_first(x, width) for x in (q, k, v))
        outs, lses = [], []
        for part in self._parts(q.shape[2], k.shape[2], form):
            rows, keys = slice(*part.q), slice(*part.k)
            operands = q_BMHW[:, rows], k_BNHW[:, keys], v_BNHW[:, keys]
            out_BMHW, lse_BHM = self.launch_forward(*operands, part.window, scale, softcap)
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
        allowed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert allowed is None, "refused"
        parts = self._parts(q.shape[2], k.shape[2], form)
        dim, value_dim = q.shape[-1], v.shape[-1]
        width = shared_width(dim, value_dim, dlse, q.dtype)
        q_BMHW, k_BNHW, v_BNHW = (_rows_first(x, width) for x in (q, k, v))
        wider = with_lse_grad(dout, out, dlse, width, q.dtype)
        dout_BMHW, out_BMHW = (_rows_first(x, width) for x in wider)
        dqs, dkvs = [], []
        for part in parts:
            rows, keys = slice(*part.q), slice(*part.k)
            operands = dout_BMHW[:, rows], q_BMHW[:, rows], k_BNHW[:, keys], v_BNHW[:, keys], out_BMHW[:, rows]
            lse_BHM = lse[:, :, rows].contiguous()
            dq_BMHW, *dkv = self.launch_backward(*operands, lse_BHM, part.window, scale, softcap)
            dqs.append(dq_BMHW.transpose(1, 2)[..., :dim])
            dkvs.append([x.transpose(1, 2) for x in dkv])
        dk_BHNW, dv_BHNW = dkvs[0] if len(parts) == 1 else _summed(dkvs, [part.k for part in parts], k.shape[2])
        return _joined(dqs), dk_BHNW[..., :dim], dv_BHNW[..., :value_dim]

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, *, packed: Packed, scale: float, softcap: float | None = None
    ) -> tuple[Tensor, Tensor]:
        value_dim = v.shape[-1]
        width = shared_width(q.shape[-1], value_dim, None, q.dtype)
        q_THW, k_UHW, v_UHW = (aligned(padded(x, width)) for x in (q, k, v))
        out_THW, lse_HT = self.launch_forward(q_THW, k_UHW, v_UHW, packed.window, scale, softcap, packed)
        return out_THW[..., :value_dim], lse_HT

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
        dim, value_dim = q.shape[-1], v.shape[-1]
        width = shared_width(dim, value_dim, dlse, q.dtype)
        q_THW, k_UHW, v_UHW = (aligned(padded(x, width)) for x in (q, k, v))
        wider = with_lse_grad(dout, out, None if dlse is None else dlse.mT, width, q.dtype)
        dout_THW, out_THW = (aligned(x) for x in wider)
        operands = dout_THW, q_THW, k_UHW, v_UHW, out_THW, lse.contiguous()
        dq, dk, dv = self.launch_backward(*operands, packed.window, scale, softcap, packed)
        return dq[..., :dim], dk[..., :dim], dv[..., :value_dim]


def _rows_first(x_BHSD: Tensor, width: int) -> Tensor:
    """(B, S, H, W): a view, unless it has to be padded or aligned."""
    return aligned(padded(x_BHSD, width)).transpose(1, 2)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _summed(dkvs: list[list[Tensor]], ranges: list[Range], n: int) -> tuple[Tensor, ...]:
    """Sums of dk and of dv over calls that used some of the n keys each, in fp32."""
    sums = []
    for parts in zip(*dkvs, strict=True):
        b, h, _, w = parts[0].shape
        total_BHNW = parts[0].new_zeros(b, h, n, w, dtype=torch.promote_types(parts[0].dtype, torch.float32))
        for part_BHNW, keys in zip(parts, ranges, strict=True):
            total_BHNW[:, :, slice(*keys)] += part_BHNW
        sums.append(total_BHNW.to(parts[0].dtype))
    return tuple(sums)
