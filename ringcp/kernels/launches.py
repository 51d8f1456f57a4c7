"""FlashAttention's calls: (B, S, H, D) operands of one head dim, one launch for each part of a band, the parts joined;
or (T, H, D) operands of sequences side by side, in one launch.

Shapes: B batch, H heads, M query rows, N keys, D head dim of q and k, Dv of v, W padded head dim; T query rows and U
keys of all sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringcp.band import Range
from ringcp.kernels.base import Form
from ringcp.kernels.operands import aligned, padded, shared_width, with_lse_grad
from ringcp.kernels.windows import Window, form_of, split, window

ForwardLaunch = Callable[[Tensor, Tensor, Tensor, Window], tuple[Tensor, Tensor]]
"""out (B, M, H, W) and lse (B, H, M) from q, k, v; or out (T, H, W) and lse (H, T)."""

BackwardLaunch = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Window], tuple[Tensor, Tensor, Tensor]]
"""dq, dk, dv from dout, q, k, v, out, all (B, S, H, W) or all (S, H, W), and a contiguous lse."""


class Part(NamedTuple):
    """Some rows and some keys of a call, and the window over them."""

    q: Range
    k: Range
    window: Window


def in_parts(m: int, n: int, form: Form) -> list[Part]:
    """`form` as FlashAttention 2 takes it, in several launches where one would meet its quirks (see `windows`)."""
    return [Part(band.q, band.k, window(band.num_q, band.num_k, form_of(band))) for band in split(m, n, form)]


def in_one(m: int, n: int, form: Form) -> list[Part]:
    """`form` in one launch, for versions without those quirks."""
    return [Part((0, m), (0, n), window(m, n, form))]


def rows_first(x_BHSD: Tensor, width: int) -> Tensor:
    """(B, S, H, W): a view, unless it has to be padded or aligned."""
    return aligned(padded(x_BHSD, width)).transpose(1, 2)


def forward(
    launch: ForwardLaunch, parts: Sequence[Part], q_BHMD: Tensor, k_BHND: Tensor, v_BHNE: Tensor
) -> tuple[Tensor, Tensor]:
    """out (B, H, M, Dv) and lse (B, H, M) of all parts."""
    value_dim = v_BHNE.shape[-1]
    width = shared_width(q_BHMD.shape[-1], value_dim, None, q_BHMD.dtype)
    q_BMHW, k_BNHW, v_BNHW = (rows_first(x, width) for x in (q_BHMD, k_BHND, v_BHNE))
    outs, lses = [], []
    for part in parts:
        rows, keys = slice(*part.q), slice(*part.k)
        out_BMHW, lse_BHM = launch(q_BMHW[:, rows], k_BNHW[:, keys], v_BNHW[:, keys], part.window)
        outs.append(out_BMHW.transpose(1, 2)[..., :value_dim])
        lses.append(lse_BHM)
    return _joined(outs), _joined(lses)


def backward(
    launch: BackwardLaunch,
    parts: Sequence[Part],
    dout_BHME: Tensor,
    q_BHMD: Tensor,
    k_BHND: Tensor,
    v_BHNE: Tensor,
    out_BHME: Tensor,
    lse_BHM: Tensor,
    dlse_BHM: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of all parts, in the shapes of q, k and v; the gradient through the lse in appended columns."""
    dim, value_dim, dtype = q_BHMD.shape[-1], v_BHNE.shape[-1], q_BHMD.dtype
    width = shared_width(dim, value_dim, dlse_BHM, dtype)
    q_BMHW, k_BNHW, v_BNHW = (rows_first(x, width) for x in (q_BHMD, k_BHND, v_BHNE))
    wider = with_lse_grad(dout_BHME, out_BHME, dlse_BHM, width, dtype)
    dout_BMHW, out_BMHW = (rows_first(x, width) for x in wider)
    dqs, dkvs = [], []
    for part in parts:
        rows, keys = slice(*part.q), slice(*part.k)
        on_k, lse = (k_BNHW[:, keys], v_BNHW[:, keys]), lse_BHM[:, :, rows].contiguous()
        dq_BMHW, *dkv = launch(dout_BMHW[:, rows], q_BMHW[:, rows], *on_k, out_BMHW[:, rows], lse, part.window)
        dqs.append(dq_BMHW.transpose(1, 2)[..., :dim])
        dkvs.append([x.transpose(1, 2) for x in dkv])
    dk_BHNW, dv_BHNW = dkvs[0] if len(parts) == 1 else _summed(dkvs, [part.k for part in parts], k_BHND.shape[2])
    return _joined(dqs), dk_BHNW[..., :dim], dv_BHNW[..., :value_dim]


def forward_packed(
    launch: ForwardLaunch, seen: Window, q_THD: Tensor, k_UHD: Tensor, v_UHE: Tensor
) -> tuple[Tensor, Tensor]:
    """out (T, H, Dv) and lse (H, T)."""
    value_dim = v_UHE.shape[-1]
    width = shared_width(q_THD.shape[-1], value_dim, None, q_THD.dtype)
    q_THW, k_UHW, v_UHW = (aligned(padded(x, width)) for x in (q_THD, k_UHD, v_UHE))
    out_THW, lse_HT = launch(q_THW, k_UHW, v_UHW, seen)
    return out_THW[..., :value_dim], lse_HT


def backward_packed(
    launch: BackwardLaunch,
    seen: Window,
    dout_THE: Tensor,
    q_THD: Tensor,
    k_UHD: Tensor,
    v_UHE: Tensor,
    out_THE: Tensor,
    lse_HT: Tensor,
    dlse_HT: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, in the shapes of q, k and v."""
    dim, value_dim, dtype = q_THD.shape[-1], v_UHE.shape[-1], q_THD.dtype
    width = shared_width(dim, value_dim, dlse_HT, dtype)
    q_THW, k_UHW, v_UHW = (aligned(padded(x, width)) for x in (q_THD, k_UHD, v_UHE))
    wider = with_lse_grad(dout_THE, out_THE, None if dlse_HT is None else dlse_HT.mT, width, dtype)
    dout_THW, out_THW = (aligned(x) for x in wider)
    dq, dk, dv = launch(dout_THW, q_THW, k_UHW, v_UHW, out_THW, lse_HT.contiguous(), seen)
    return dq[..., :dim], dk[..., :dim], dv[..., :value_dim]


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
