"""What a rank holds during one call: blocks of keys and values that pass through, and sums.

Shapes: q (B, Hq, S, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv) with the local S. A block is one contiguous run of
elements: K as (B, Hkv, rows, D), then V as (B, Hkv, rows, Dv), since the CPU kernel is 2 % (fp32) to 6 % (bf16) slower
where heads lie side by side. Sums over a block are (B, rows, Hkv, D) and (B, rows, Hkv, Dv), as kernels give them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from ringcp.band import Range
from ringcp.lower import Call, PlanStep, Region
from ringcp.merge import accumulator_dtype
from ringcp.schedule import Message
from ringcp.steps import length


def part(x: Tensor, batch: Range | None, heads: Range | None, rows: Range) -> Tensor:
    """The batch rows, heads and sequence rows of a tensor (B, H, S, ...), as a view."""
    for dim, taken in ((0, batch), (1, heads), (2, rows)):
        if taken is not None and taken != (0, x.shape[dim]):
            x = x.narrow(dim, taken[0], taken[1] - taken[0])
    return x


class Rows:
    """A sum over calls for each local query row: (B, Hq, S, last), or (B, Hq, S) for last None.

    It becomes a tensor with the first call, and is that call's own result where that covers everything: in the
    kernel's dtype until something is added, then in the accumulator's.
    """

    def __init__(self, q: Tensor, last: int | None) -> None:
        self._q = q
        self._last = last
        self._total: Tensor | None = None

    @property
    def total(self) -> Tensor:
        dtype = accumulator_dtype(self._q.dtype)
        if self._total is None:
            batch, heads, rows, _ = self._q.shape
            if self._last is None:
                self._total = self._q.new_empty((batch, heads, rows), dtype=dtype)
            else:  # (B, S, H, D) in memory, as a projection wants it next
                self._total = self._q.new_empty((batch, rows, heads, self._last), dtype=dtype).transpose(1, 2)
        self._total = self._total.to(dtype)
        return self._total

    def result(self) -> Tensor:
        """All of it, after the last call; in the kernel's dtype if one call was all."""
        return self.total if self._total is None else self._total

    def start_with(self, value: float, regions: Sequence[Region]) -> None:
        """Fill what no call is the first to write."""
        for (b0, b1), (h0, h1), (start, stop) in regions:
            self.total[b0:b1, h0:h1, start:stop].fill_(value)

    def part(self, call: Call) -> Tensor:
        return part(self.total, call.batch, call.q_heads, call.q)

    def write(self, call: Call, value: Tensor) -> None:
        if self._total is None and value.shape[:3] == self._q.shape[:3]:
            self._total = value
        else:
            self.part(call).copy_(value)


class Blocks:
    """The keys and values in hand: two buffers that take turns, and one to pack rows of the own block in."""

    def __init__(self, steps: Sequence[PlanStep], k: Tensor, v: Tensor) -> None:
        self._k, self._v = k, v
        self._steps = steps
        sends = [m for step in steps for m in step.sends if m.what == "kv"]
        recvs = [(i % 2, m) for i, step in enumerate(steps) for m in step.recvs if m.what == "kv"]
        relayed = [m.num_rows for m in sends if m.own_rows is None]
        # In a ring the own block starts in the second buffer, which is free again when it has been sent.
        used = {slot for slot, _ in recvs} | ({1} if relayed else set())
        in_turn = max([*relayed, *(m.num_rows for _, m in recvs)], default=0)
        self._slots = [self._new(in_turn if slot in used else 0) for slot in range(2)]
        self._packed = self._new(max([m.num_rows for m in sends if m.own_rows is not None], default=0))
        if relayed and steps[0].num_rows:
            self._pack(self._slots[1], ((0, steps[0].num_rows),))

    def _new(self, num_rows: int) -> Tensor:
        return self._k.new_empty(block_size(self._k, self._v, num_rows))

    def _pack(self, buffer: Tensor, rows: tuple[Range, ...]) -> Tensor:
        num_rows = length(rows)
        k, v = block_views(buffer, self._k, self._v, num_rows)
        at = 0
        for start, stop in rows:
            k[:, :, at : at + stop - start].copy_(self._k[:, :, start:stop])
            v[:, :, at : at + stop - start].copy_(self._v[:, :, start:stop])
            at += stop - start
        return buffer[: block_size(self._k, self._v, num_rows)]

    def in_hand(self, i: int) -> tuple[Tensor, Tensor]:
        """k and v of step i."""
        if self._steps[i].own:
            return self._k, self._v
        return block_views(self._slots[(i - 1) % 2], self._k, self._v, self._steps[i].num_rows)

    def outgoing(self, i: int, message: Message) -> Tensor:
        """What step i sends: rows of the own block, or the block in hand."""
        if message.own_rows is not None:
            return self._pack(self._packed, message.own_rows)
        return self._first(self._slots[(i - 1) % 2], message.num_rows)

    def incoming(self, i: int, message: Message) -> Tensor:
        """Where step i receives the block of the next step."""
        return self._first(self._slots[i % 2], message.num_rows)

    def settle(self, i: int) -> None:
        """What step i has received is where the next one reads it."""

    def _first(self, buffer: Tensor, num_rows: int) -> Tensor:
        return buffer[: block_size(self._k, self._v, num_rows)]


class Held(NamedTuple):
    """The gradients that one call has computed."""

    call: Call
    dk: Tensor
    dv: Tensor


class Sums:
    """dK and dV: of the own block, of the block in hand, and of the one before, which is on its way."""

    def __init__(self, steps: Sequence[PlanStep], k: Tensor, v: Tensor) -> None:
        self._k, self._v = k, v
        self._steps = steps
        self._dtype = accumulator_dtype(k.dtype)
        messages = [m for step in steps for m in (*step.sends, *step.recvs) if m.what == "dkv"]
        size = block_size(k, v, max([m.num_rows for m in messages], default=0))
        self._sum, self._spare = k.new_empty(size, dtype=self._dtype), k.new_empty(size, dtype=self._dtype)
        self._held: list[Held] = []
        self._held_own: list[Held] = []
        self._own: tuple[Tensor, Tensor] | None = None

    def result(self) -> tuple[Tensor, Tensor]:
        """dK and dV of the own block, after the last step; in the kernel's dtype if one call was all."""
        if self._own is None and self._is_all(self._held_own):
            return self._held_own[0].dk, self._held_own[0].dv
        return self._own_sum()

    def _is_all(self, results: Sequence[Held]) -> bool:
        return len(results) == 1 and results[0].dk.shape == self._k.shape

    def _own_sum(self) -> tuple[Tensor, Tensor]:
        """With all results held so far put in."""
        if self._own is None:
            if self._is_all(self._held_own):
                _, dk, dv = self._held_own.pop()
                self._own = dk.to(self._dtype), dv.to(self._dtype)
            else:
                self._own = empty_rows(self._k, self._dtype), empty_rows(self._v, self._dtype)
                add_held(self._held_own, *self._own, start=True)
        add_held(self._held_own, *self._own, start=False)
        return self._own

    def outgoing(self, i: int, message: Message) -> Tensor:
        """What step i sends: the sum over the block of the step before."""
        return self._sum[: block_size(self._k, self._v, message.num_rows)]

    def incoming(self, i: int, message: Message) -> Tensor:
        """Where step i receives a sum: over the block in hand, or over rows of the own one."""
        return self._spare[: block_size(self._k, self._v, message.num_rows)]

    def hold(self, call: Call, dk: Tensor, dv: Tensor) -> None:
        """Keep a call's result until the transfers of the step are done and the buffers are free."""
        self._held.append(Held(call, dk, dv))

    def settle(self, i: int) -> None:
        """Add what step i computed and received to where it belongs."""
        step = self._steps[i]
        if step.own:  # results of the first and the last step are put together in one go, if nothing comes between
            self._held_own += self._held
            self._held.clear()
        received = [m for m in step.recvs if m.what == "dkv"]
        for message in received:
            if message.own_rows is not None:
                self._add_to_own(message.own_rows, message.num_rows)
        if step.num_rows and not step.own:
            passing = any(message.own_rows is None for message in received)
            if passing:
                self._sum, self._spare = self._spare, self._sum
            dk, dv = sum_views(self._sum, self._k, self._v, step.num_rows)
            add_held(self._held, dk, dv, start=not passing)

    def _add_to_own(self, rows: tuple[Range, ...], num_rows: int) -> None:
        received = sum_views(self._spare, self._k, self._v, num_rows)
        for total, value in zip(self._own_sum(), received, strict=True):
            at = 0
            for start, stop in rows:
                total[:, :, start:stop].add_(value[:, :, at : at + stop - start])
                at += stop - start


def add_held(results: list[Held], dk: Tensor, dv: Tensor, start: bool) -> None:
    """Add results to sums, which they `start`; and forget them."""
    gaps = _gaps(results, dk) if start else None
    if start and gaps is None:
        dk.zero_()
        dv.zero_()
    for total in (dk, dv):
        for batch, heads, rows in gaps or ():
            part(total, batch, heads, rows).zero_()
    for call, dk_c, dv_c in results:
        for total, value in ((dk, dk_c), (dv, dv_c)):
            target = part(total, call.batch, call.kv_heads, call.k)
            if gaps is None:
                target.add_(value)
            else:
                target.copy_(value)
    results.clear()


def _gaps(results: list[Held], dk: Tensor) -> list[tuple[Range, Range, Range]] | None:
    """The batch rows, heads and key rows where no result is; None if some results overlap."""
    ranges: dict[tuple[Range, Range], list[Range]] = {}
    for held in results:
        cell = held.call.batch or (0, dk.shape[0]), held.call.kv_heads or (0, dk.shape[1])
        ranges.setdefault(cell, []).append(held.call.k)
    # Disjoint cells whose areas add up to that of all of dk are all of it.
    area = sum((b1 - b0) * (h1 - h0) for (b0, b1), (h0, h1) in ranges)
    if area != dk.shape[0] * dk.shape[1] or any(_meet(x, y) for x, y in combinations(ranges, 2)):
        return None
    gaps = []
    for (batch, heads), rows in ranges.items():
        at = 0
        for start, stop in [*sorted(rows), (dk.shape[2], dk.shape[2])]:
            if start < at:
                return None
            if start > at:
                gaps.append((batch, heads, (at, start)))
            at = stop
    return gaps


def _meet(x: tuple[Range, Range], y: tuple[Range, Range]) -> bool:
    return all(a[0] < b[1] and b[0] < a[1] for a, b in zip(x, y, strict=True))


def empty_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Like `x` (B, H, S, D), stored as (B, S, H, D)."""
    batch, heads, rows, last = x.shape
    return x.new_empty((batch, rows, heads, last), dtype=dtype).transpose(1, 2)


def block_size(k: Tensor, v: Tensor, num_rows: int) -> int:
    """Elements of a block with so many rows of the heads of `k` and `v`."""
    batch, heads, _, head_dim = k.shape
    return batch * heads * num_rows * (head_dim + v.shape[-1])


def block_views(buffer: Tensor, k: Tensor, v: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The keys (B, Hkv, rows, D) and values (B, Hkv, rows, Dv) of a block."""
    k_part, v_part = _halves(buffer, k, v, num_rows)
    return k_part.view(*k.shape[:2], num_rows, k.shape[3]), v_part.view(*v.shape[:2], num_rows, v.shape[3])


def sum_views(buffer: Tensor, k: Tensor, v: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """dK and dV over a block, in the same shapes."""
    k_part, v_part = _halves(buffer, k, v, num_rows)
    (batch, heads), last = k.shape[:2], (k.shape[3], v.shape[3])
    dk, dv = (x.view(batch, num_rows, heads, d) for x, d in zip((k_part, v_part), last, strict=True))
    return dk.transpose(1, 2), dv.transpose(1, 2)


def _halves(buffer: Tensor, k: Tensor, v: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    split = k.shape[0] * k.shape[1] * num_rows * k.shape[3]
    return buffer[:split], buffer[split : block_size(k, v, num_rows)]
