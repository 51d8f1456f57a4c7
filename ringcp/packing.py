"""Calls of one launch as sequences side by side, and the results back at their places.

Shapes: q (B, Hq, S, D), k (B, Hkv, N, D), v (B, Hkv, N, E) of the rank and of the block in hand; T query rows and U
keys of all calls together, which the kernel gets as q (T, Hq, D), k (U, Hkv, D) and v (U, Hkv, E). The calls of a cell
follow each other batch row by batch row.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from ringcp.band import Range, length_of
from ringcp.buffers import part
from ringcp.kernels.base import Kernel
from ringcp.kernels.packed import Packed, Packing
from ringcp.kernels.windows import window
from ringcp.lower import Call, Launch

_Places = list[list[tuple[Range | None, Range | None, Range]]]
"""For each cell some batch rows, heads and sequence rows; None means all."""


def forward(
    kernel: Kernel, launch: Launch, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None
) -> list[tuple[Call, Tensor, Tensor]]:
    """out (b, h, rows, E) and lse (b, h, rows) for the query rows of some calls: together those of the launch."""
    rows, keys = _rows(launch), _keys(launch)
    out_THE, lse_HT = cast(Packing, kernel).forward_packed(
        _packed(q, rows),
        _packed(k, keys),
        _packed(v, keys),
        packed=_sequences(launch, q),
        scale=scale,
        softcap=softcap,
    )
    calls = [call for cell in launch.cells for call in cell.rows]
    return list(zip(calls, _unpacked(out_THE, rows, q), _unpacked(lse_HT.mT, rows, q), strict=True))


def backward(
    kernel: Kernel,
    launch: Launch,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[list[tuple[Call, Tensor]], list[tuple[Call, Tensor, Tensor]]]:
    """dq for the query rows of some calls, dk and dv for the keys of some: together those of the launch."""
    rows, keys = _rows(launch), _keys(launch)
    dq_THD, dk_UHD, dv_UHE = cast(Packing, kernel).backward_packed(
        _packed(dout, rows),
        _packed(q, rows),
        _packed(k, keys),
        _packed(v, keys),
        _packed(out, rows),
        _packed(lse, rows).mT,
        None if dlse is None else _packed(dlse, rows).mT,
        packed=_sequences(launch, q),
        scale=scale,
        softcap=softcap,
    )
    by_rows = [call for cell in launch.cells for call in cell.rows]
    by_keys = [call for cell in launch.cells for call in cell.keys]
    dqs = zip(by_rows, _unpacked(dq_THD, rows, q), strict=True)
    dkvs = zip(by_keys, _unpacked(dk_UHD, keys, q), _unpacked(dv_UHE, keys, q), strict=True)
    return list(dqs), list(dkvs)


def _rows(launch: Launch) -> _Places:
    return [[(call.batch, call.q_heads, call.q) for call in cell.rows] for cell in launch.cells]


def _keys(launch: Launch) -> _Places:
    return [[(call.batch, call.kv_heads, call.k) for call in cell.keys] for cell in launch.cells]


def _packed(x: Tensor, places: _Places) -> Tensor:
    """(T, H, ...) from (B, H, S, ...): a view, where the places are all of it."""
    cells = [_cat([part(x, *place).transpose(1, 2) for place in of_cell], 1) for of_cell in places]
    return _cat([cell.flatten(0, 1) for cell in cells], 0)


def _cat(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _unpacked(x: Tensor, places: _Places, q: Tensor) -> Iterator[Tensor]:
    """(b, h, rows, ...) for each place, from (T, h, ...)."""
    start = 0
    for of_cell in places:
        num_batch = _num_batch(of_cell[0][0], q)
        lengths = [length_of(rows) for _, _, rows in of_cell]
        stop = start + num_batch * sum(lengths)
        yield from x[start:stop].unflatten(0, (num_batch, -1)).transpose(1, 2).split(lengths, dim=2)
        start = stop


def _sequences(launch: Launch, q: Tensor) -> Packed:
    sizes = [
        (length_of(call.q), length_of(call.k))
        for cell in launch.cells
        for call in cell.calls * _num_batch(cell.calls[0].batch, q)
    ]
    rows, keys = zip(*sizes, strict=True)
    ends = [list(accumulate(lengths, initial=0)) for lengths in (rows, keys)]
    # From pinned memory, so that the host need not wait.
    cu = torch.tensor(ends, dtype=torch.int32, pin_memory=q.is_cuda).to(q.device, non_blocking=True)
    return Packed(cu[0], cu[1], max(rows), max(keys), window(*sizes[0], launch.calls[0].form))


def _num_batch(batch: Range | None, q: Tensor) -> int:
    return q.shape[0] if batch is None else length_of(batch)
