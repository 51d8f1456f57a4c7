"""What a rank holds during one call of a gather plan: one block of all the rows it needs, and the sum over it.

What comes and goes is a part of a block, one a peer, and passes through a buffer each way. Shapes as in `buffers`; a
block has the KV heads of its step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ringcp.band import Range
from ringcp.buffers import Held, add_held, block_size, block_views, empty_rows, part, sum_views
from ringcp.layout import Span
from ringcp.lower import Call, PlanStep
from ringcp.merge import accumulator_dtype
from ringcp.schedule import Message

Views = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


class _Passage:
    """One buffer for the messages of a step in one direction, side by side."""

    def __init__(
        self, k: Tensor, v: Tensor, dtype: torch.dtype, messages: Sequence[list[Message]], views: Views = block_views
    ) -> None:
        self._k, self._v = k, v
        self._views = views
        self._places: list[dict[Hashable, int]] = []
        self._filled: set[tuple[int, Hashable]] = set()
        size = 0
        for of_step in messages:
            places: dict[Hashable, int] = {}
            end = 0
            for message in of_step:
                if _content(message) not in places:
                    places[_content(message)] = end
                    end += self._size(message)
            self._places.append(places)
            size = max(size, end)
        self._buffer = k.new_empty(size, dtype=dtype)

    def _size(self, message: Message) -> int:
        return block_size(*_of_heads(self._k, self._v, message.kv_heads), message.num_rows)

    def place(self, i: int, message: Message) -> Tensor:
        """The message's part of the buffer in step i."""
        start = self._places[i][_content(message)]
        return self._buffer[start : start + self._size(message)]

    def rows(self, i: int, message: Message) -> tuple[Tensor, Tensor]:
        """The same as keys and values, or as their gradients."""
        return self._views(self.place(i, message), *_of_heads(self._k, self._v, message.kv_heads), message.num_rows)

    def fill(self, i: int, message: Message, source: tuple[Tensor, Tensor], rows: Iterable[Range | Span]) -> Tensor:
        """Put these rows in; what has gone to another peer is there."""
        key = i, _content(message)
        if key not in self._filled:
            self._filled.add(key)
            _copy_rows(self.rows(i, message), _whole(message), source, rows)
        return self.place(i, message)


class GatheredBlocks:
    """The keys and values in hand: a block, rows that come for the next one, and rows that go."""

    def __init__(self, steps: Sequence[PlanStep], k: Tensor, v: Tensor) -> None:
        self._k, self._v = k, v
        self._steps = steps
        self._sent = _Passage(k, v, k.dtype, [_of("kv", step.sends) for step in steps])
        self._come = _Passage(k, v, k.dtype, [_of("kv", step.recvs) for step in steps])
        self._block = k.new_empty(_largest(steps, k, v))

    def in_hand(self, i: int) -> tuple[Tensor, Tensor]:
        """k and v of step i."""
        step = self._steps[i]
        return block_views(self._block, *_of_heads(self._k, self._v, step.kv_heads), step.num_rows)

    def outgoing(self, i: int, message: Message) -> Tensor:
        """What step i sends: rows of the own block."""
        assert message.own_rows is not None, "keys are sent by their owner"
        own = _of_heads(self._k, self._v, message.kv_heads)
        return self._sent.fill(i, message, own, message.own_rows)

    def incoming(self, i: int, message: Message) -> Tensor:
        """Where step i receives a part of the next block."""
        return self._come.place(i, message)

    def settle(self, i: int) -> None:
        """Put the next block together: nothing needs this one any more."""
        for message in _of("kv", self._steps[i].recvs):
            _copy_rows(self.in_hand(i + 1), _in_block(message), self._come.rows(i, message), _whole(message))
        for message in _of("kv", self._steps[i].kept):
            own = _of_heads(self._k, self._v, message.kv_heads)
            _copy_rows(self.in_hand(i + 1), _in_block(message), own, _in_own(message))


class GatheredSums:
    """dK and dV: of the own block, and of the gathered one until its parts have gone to their owners."""

    def __init__(self, steps: Sequence[PlanStep], k: Tensor, v: Tensor) -> None:
        self._k, self._v = k, v
        self._steps = steps
        dtype = accumulator_dtype(k.dtype)
        self._sent = _Passage(k, v, dtype, [_of("dkv", step.sends) for step in steps], sum_views)
        self._come = _Passage(k, v, dtype, [_of("dkv", step.recvs) for step in steps], sum_views)
        self._block = k.new_empty(_largest(steps, k, v), dtype=dtype)
        self._own = empty_rows(k, dtype).zero_(), empty_rows(v, dtype).zero_()
        self._held: list[Held] = []

    def result(self) -> tuple[Tensor, Tensor]:
        """dK and dV of the own block, after the last step."""
        return self._own

    def outgoing(self, i: int, message: Message) -> Tensor:
        """What step i sends: the owner's part of the sum over the block of the step before."""
        return self._sent.fill(i, message, self._sum(i - 1), _in_block(message))

    def incoming(self, i: int, message: Message) -> Tensor:
        """Where step i receives gradients of own rows."""
        return self._come.place(i, message)

    def hold(self, call: Call, dk: Tensor, dv: Tensor) -> None:
        """Keep a call's result until the sum before it has gone."""
        self._held.append(Held(call, dk, dv))

    def settle(self, i: int) -> None:
        """Add what has come, and the own part, in the order of ranks; then sum what the step computed."""
        step = self._steps[i]
        kept = _of("dkv", step.kept)
        for message in sorted(kept + _of("dkv", step.recvs), key=lambda m: m.peer):
            own = _of_heads(*self._own, message.kv_heads)
            if message in kept:
                _add_rows(own, _in_own(message), self._sum(i - 1), _in_block(message))
            else:
                _add_rows(own, _in_own(message), self._come.rows(i, message), _whole(message))
        if step.num_rows:
            add_held(self._held, *self._sum(i), start=True)

    def _sum(self, i: int) -> tuple[Tensor, Tensor]:
        step = self._steps[i]
        return sum_views(self._block, *_of_heads(self._k, self._v, step.kv_heads), step.num_rows)


def _of(what: str, messages: Iterable[Message]) -> list[Message]:
    return [message for message in messages if message.what == what]


def _content(message: Message) -> Hashable:
    """What tells messages of a step apart: several peers may take the same rows."""
    return message.own_rows if message.what == "kv" and message.own_rows is not None else message.peer


def _of_heads(k: Tensor, v: Tensor, heads: Range | None) -> tuple[Tensor, Tensor]:
    return part(k, None, heads, (0, k.shape[2])), part(v, None, heads, (0, v.shape[2]))


def _largest(steps: Sequence[PlanStep], k: Tensor, v: Tensor) -> int:
    return max(block_size(*_of_heads(k, v, step.kv_heads), step.num_rows) for step in steps)


def _whole(message: Message) -> tuple[Range, ...]:
    return ((0, message.num_rows),)


def _in_own(message: Message) -> tuple[Range, ...]:
    assert message.own_rows is not None, "the rank has no rows in this message"
    return message.own_rows


def _in_block(message: Message) -> tuple[Span, ...]:
    assert message.block_rows is not None, "the message is no part of a block"
    return message.block_rows


def _copy_rows(
    to: tuple[Tensor, Tensor],
    to_rows: Iterable[Range | Span],
    of: tuple[Tensor, Tensor],
    of_rows: Iterable[Range | Span],
) -> None:
    for target, source in _matched(to, to_rows, of, of_rows):
        target.copy_(source)


def _add_rows(
    to: tuple[Tensor, Tensor],
    to_rows: Iterable[Range | Span],
    of: tuple[Tensor, Tensor],
    of_rows: Iterable[Range | Span],
) -> None:
    for target, source in _matched(to, to_rows, of, of_rows):
        target.add_(source)


def _matched(
    to: tuple[Tensor, Tensor],
    to_rows: Iterable[Range | Span],
    of: tuple[Tensor, Tensor],
    of_rows: Iterable[Range | Span],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the first rows in `to_rows` and in `of_rows`, of the next ones, and so on: of keys, then of values."""
    runs = list(_runs(to_rows, of_rows))
    for target, source in zip(to, of, strict=True):
        for a, b in runs:
            yield target[:, :, a], source[:, :, b]


def _runs(a_rows: Iterable[Range | Span], b_rows: Iterable[Range | Span]) -> Iterator[tuple[slice, slice]]:
    """Two lists of as many rows as slices, cut where a run of either ends."""
    a_runs, b_runs = ([range(*run) for run in rows] for rows in (a_rows, b_rows))
    assert sum(map(len, a_runs)) == sum(map(len, b_runs)), "rows without a place"
    while a_runs and b_runs:
        num = min(len(a_runs[0]), len(b_runs[0]))
        yield _slice(a_runs[0][:num]), _slice(b_runs[0][:num])
        for runs in (a_runs, b_runs):
            runs[0] = runs[0][num:]
            if not runs[0]:
                del runs[0]


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop, rows.step)
