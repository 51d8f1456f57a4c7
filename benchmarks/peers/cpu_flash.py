"""What flash-attn computes, by the calls of CPU flash attention that ringcp makes for the same mask.

So a library on top of the stand-in package has the kernel that ringcp has: a window is cut into the same strips, a
bottom-right causal block into the same parts. Two things come on top: keys and values are copied, and the CPU op
returns gradients in memory of its own, which are copied into the caller's buffers, where the CUDA kernel writes them at
once. Where memory is counted, neither is: see `corner_only`.

Shapes: B batch, M query rows, N keys, Hq and Hkv heads, D head dim; packed sequences lie one after another in M and N.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from unittest import mock

import torch
from torch import Tensor

from ringcp.band import Range, trim
from ringcp.kernels.sdpa_cpu import SdpaFlashCpu
from ringcp.lower import Call, Form, Plan, lower
from ringcp.merge import merge_
from ringcp.schedule import Schedule, Step, Tile

_KERNEL = SdpaFlashCpu()
_CORNER = 768  # rows from which on the kernel's blocks, and so its workspace, are as large as they get

Segments = tuple[tuple[Range, Range], ...]
"""Rows and keys of each packed sequence."""


def segments(cu_seqlens_q: Sequence[int], cu_seqlens_k: Sequence[int]) -> Segments:
    """From the offsets of sequences in rows and in keys."""
    return tuple(zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True))


@lru_cache(maxsize=256)
def plan_of(packed: Segments, causal: bool, window: tuple[int, int], itemsize: int) -> Plan:
    """The kernel calls of a mask as flash-attn has it: the last row of a sequence is level with its last key.

    Args:
        window: how many keys a row sees to the left and to the right of the one it is level with; -1 for all.
        itemsize: bytes of an element.
    """
    left, right = window[0], 0 if causal else window[1]
    tiles = []
    for q, k in packed:
        level = q[1] - k[1]  # i - j of a row and the key that it is level with
        lo = q[0] - k[1] + 1 if right < 0 else level - right
        hi = q[1] - 1 - k[0] if left < 0 else level + left
        band = trim(q, k, lo, hi)
        if band is not None:
            tiles.append(Tile(band))
    num_rows, num_keys = packed[-1][0][1], packed[-1][1][1]
    steps = (Step(source=0, rows=((0, num_keys),), tiles=tuple(tiles)),)
    return lower(Schedule("local", 0, 1, num_rows, steps, steps), _KERNEL.caps.of(itemsize))


def _heads_first(x: Tensor) -> Tensor:
    """(B, H, N, D), also in memory: the CPU kernel is up to 6 % slower on keys and values that lie otherwise, which
    flash-attn's are not.
    """
    return x.transpose(1, 2).contiguous()


@contextmanager
def corner_only() -> Iterator[None]:
    """In the body the kernel computes the first rows of a head, and what else it should is zero: to count memory.

    That is what flash-attn takes then, which reads keys and values as they lie and writes gradients to where they
    belong; and the CPU kernel's workspace, which those have in their count who call that kernel themselves.
    """
    with mock.patch.multiple(__name__, forward=_forward_of_corner, backward=_backward_of_corner):
        yield


def forward(
    q: Tensor, k: Tensor, v: Tensor, packed: Segments, causal: bool, window: tuple[int, int], scale: float
) -> tuple[Tensor, Tensor]:
    """out (B, M, Hq, D) and lse (B, Hq, M) in fp32, +inf for a row without a key, from q (B, M, Hq, D), k and v."""
    q, k, v = q.transpose(1, 2), _heads_first(k), _heads_first(v)
    lowered = plan_of(packed, causal, window, q.itemsize).forward
    calls, m = lowered.steps[0].calls, q.shape[2]
    if len(calls) == 1 and calls[0].q == (0, m):
        out, lse = _KERNEL.forward(q, *_keys(k, v, call=calls[0]), form=calls[0].form, scale=scale)
        return out.transpose(1, 2), lse.contiguous()
    merged = not all(call.fresh for call in calls)
    out = torch.empty_like(q, dtype=torch.float32 if merged else q.dtype)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    for region in lowered.unstarted:
        out[:, :, slice(*region.rows)], lse[:, :, slice(*region.rows)] = 0.0, -torch.inf
    for call in calls:
        rows = slice(*call.q)
        part = _KERNEL.forward(q[:, :, rows], *_keys(k, v, call=call), form=call.form, scale=scale)
        if call.fresh:
            out[:, :, rows], lse[:, :, rows] = part
        else:
            merge_(out[:, :, rows], lse[:, :, rows], *part)
    return out.to(q.dtype).transpose(1, 2), lse.masked_fill_(lse == -torch.inf, torch.inf)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grads: Sequence[Tensor],
    packed: Segments,
    causal: bool,
    window: tuple[int, int],
    scale: float,
) -> None:
    """Writes dq, dk and dv into `grads`. out and lse may be those of more keys than these, as in a ring."""
    dout, q, out = (x.transpose(1, 2) for x in (dout, q, out))
    k, v = _heads_first(k), _heads_first(v)
    calls = plan_of(packed, causal, window, q.itemsize).backward.steps[0].calls
    places = [[call.q for call in calls]] + 2 * [[call.k for call in calls]]
    totals = [_Total(grad.transpose(1, 2), ranges) for grad, ranges in zip(grads, places, strict=True)]
    for call in calls:
        rows = slice(*call.q)
        keys = _keys(k, v, call=call)
        on_rows = dout[:, :, rows], q[:, :, rows], *keys, out[:, :, rows], lse[:, :, rows]
        parts = _KERNEL.backward(*on_rows, None, form=call.form, scale=scale)
        for total, place, part in zip(totals, (call.q, call.k, call.k), parts, strict=True):
            total.add(place, part)
    for total in totals:
        total.finish()


def _forward_of_corner(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    _KERNEL.forward(*_corner(q, k, v), form=Form(), scale=1.0)
    batch, rows, heads, _ = q.shape
    return q.new_zeros(batch, rows, heads, v.shape[3]), q.new_zeros(batch, heads, rows, dtype=torch.float32)


def _backward_of_corner(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grads: Sequence[Tensor], *_: object
) -> None:
    of_lse = lse[:1, :1, :_CORNER].contiguous()
    _KERNEL.backward(*_corner(dout, q, k, v, out), of_lse, None, form=Form(), scale=1.0)
    for grad in grads:
        grad.zero_()


def _corner(*of_rows: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2)[:1, :1, :_CORNER] for x in of_rows]


def _keys(k: Tensor, v: Tensor, *, call: Call) -> tuple[Tensor, Tensor]:
    return k[:, :, slice(*call.k)], v[:, :, slice(*call.k)]


class _Total:
    """A sum over parts of the rows of `target`: in place if no two parts overlap, else in fp32."""

    def __init__(self, target: Tensor, ranges: Sequence[Range]) -> None:
        ordered = sorted(ranges)
        self._target = target
        self._in_place = all(a[1] <= b[0] for a, b in pairwise(ordered))
        self._sum = target if self._in_place else torch.zeros_like(target, dtype=torch.float32)
        if self._in_place and sum(stop - start for start, stop in ordered) < target.shape[2]:
            target.zero_()

    def add(self, rows: Range, part: Tensor) -> None:
        of_rows = self._sum[:, :, slice(*rows)]
        if self._in_place:
            of_rows.copy_(part)
        else:
            of_rows.add_(part)

    def finish(self) -> None:
        if not self._in_place:
            self._target.copy_(self._sum)
