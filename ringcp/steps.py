"""What a schedule is made of: tiles of work, messages and steps, as data. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal, NamedTuple

from ringcp.band import Band, Range, length_of
from ringcp.layout import Span

Kind = Literal["local", "ring", "direct", "gather"]


class Tile(NamedTuple):
    """One piece of work: a band over local query rows and key rows of the block in hand. None means all.

    kv_heads: counted within the heads in hand.
    """

    band: Band
    batch: Range | None = None
    q_heads: Range | None = None
    kv_heads: Range | None = None


class Message(NamedTuple):
    """One send or receive, as this rank sees it.

    what: "kv", keys and values; or "dkv", their gradients.
    own_rows: the rows of the rank's own block that are sent, or that the received gradients belong to. None for the
        block in hand: a received block is passed on as it is, its gradients are summed on the way.
    block_rows: the rows of a gathered block, of which a message is a part: where the received rows go in the block of
        the next step, or whose gradients, over the block of the step before, are sent. None if it is not gathered.
    kv_heads: the KV heads that are sent; None for all.
    """

    what: Literal["kv", "dkv"]
    peer: int
    num_rows: int
    own_rows: tuple[Range, ...] | None = None
    block_rows: tuple[Span, ...] | None = None
    kv_heads: Range | None = None

    def words(self, towards: str) -> str:
        heads = "" if self.kv_heads is None else f" of KV heads [{self.kv_heads[0]}, {self.kv_heads[1]})"
        return f"{self.what} {self.num_rows} rows{heads} {towards} rank {self.peer}"


@dataclass(frozen=True)
class Step:
    """The tiles that need one block, and the transfers posted before they are computed.

    source: the owner of the block in hand; None if it is gathered from all ranks.
    rows: the rows of that owner that are in hand, in this order.
    sends, recvs: in the order in which every rank posts them. A received "kv" is in hand in the next step. A sent
        "dkv" is the sum over the block of the step before.
    positions: of the keys of a gathered block, in this order.
    kv_heads: the KV heads in hand; None for all.
    kept: what a rank would send itself: its own part of a gathered block, and of the sum over one.
    """

    source: int | None
    rows: tuple[Range, ...] = ()
    tiles: tuple[Tile, ...] = ()
    sends: tuple[Message, ...] = ()
    recvs: tuple[Message, ...] = ()
    positions: tuple[Span, ...] = ()
    kv_heads: Range | None = None
    kept: tuple[Message, ...] = ()

    @property
    def num_rows(self) -> int:
        return length(self.rows) + sum(span.length for span in self.positions)


@dataclass(frozen=True)
class Schedule:
    """What one rank does in one attention call.

    The first step works on the rank's own block, but for a gather plan: there it waits for the first gathered one.
    num_rows: local query rows.
    """

    kind: Kind
    rank: int
    world_size: int
    num_rows: int
    forward: tuple[Step, ...]
    backward: tuple[Step, ...] = field(repr=False)

    def rows_sent(self, what: Literal["kv", "dkv"], steps: Iterable[Step] | None = None) -> int:
        """Rows of keys (and as many of values) that this rank sends in its forward steps, or in others.

        A row that goes in several groups of heads counts once for each.
        """
        sends = (m for step in (self.forward if steps is None else steps) for m in step.sends)
        return sum(m.num_rows for m in sends if m.what == what)

    def __str__(self) -> str:
        lines = [f"{self.kind} schedule of rank {self.rank} of {self.world_size}, {self.num_rows} rows"]
        for name, steps in (("forward", self.forward), ("backward", self.backward)):
            for i, step in enumerate(steps):
                sent = ", ".join(m.words("->") for m in step.sends)
                received = ", ".join(m.words("<-") for m in step.recvs)
                work = f"{len(step.tiles)} tiles on {step.num_rows} rows of {owner_words(step.source)}"
                lines.append("  " + "; ".join(part for part in (f"{name} {i}: {work}", sent, received) if part))
        return "\n".join(lines)


def owner_words(source: int | None) -> str:
    """Whose keys a step works on."""
    return "all ranks" if source is None else f"rank {source}"


class Heads(NamedTuple):
    """Query heads, and key and value heads, of one rank.

    Query head h uses key head ``(first + h) // group``: where a rank has a part of the heads, its first key head may
    serve fewer query heads than the others, and so may its last. group: None for ``q // kv``.
    """

    q: int
    kv: int
    first: int = 0
    group: int | None = None

    def runs_of(self, kv: Range) -> tuple[tuple[Range, Range], ...]:
        """Query heads and key heads, where each key head serves as many query heads; as few runs as there can be.

        A kernel takes each: its query heads are a multiple of its key heads.
        """
        group = self.q // self.kv if self.group is None else self.group
        assert 0 <= self.first < group, f"the first key head serves none of {self}"
        assert (self.first + self.q - 1) // group == self.kv - 1, f"the last query head needs another key head: {self}"
        edges = [min(max(head * group - self.first, 0), self.q) for head in range(self.kv + 1)]
        runs = [list(run) for _, run in groupby(range(*kv), key=lambda head: edges[head + 1] - edges[head])]
        return tuple(((edges[run[0]], edges[run[-1] + 1]), (run[0], run[-1] + 1)) for run in runs)

    @property
    def runs(self) -> tuple[tuple[Range, Range], ...]:
        """All heads; see `runs_of`."""
        return self.runs_of((0, self.kv))


def for_heads(tiles: Iterable[Tile], heads: Heads, kv: Range, first_held: int = 0) -> tuple[Tile, ...]:
    """Work of all heads, for these KV heads alone, on a block that has them from head `first_held` on."""
    tiles, runs = tuple(tiles), heads.runs_of(kv)
    if runs == (((0, heads.q), (0, heads.kv)),):
        return tiles
    return tuple(
        tile._replace(q_heads=q, kv_heads=(start - first_held, stop - first_held))
        for q, (start, stop) in runs
        for tile in tiles
    )


def message(
    what: Literal["kv", "dkv"],
    peer: int,
    num_rows: int,
    own_rows: tuple[Range, ...] | None = None,
    block_rows: tuple[Span, ...] | None = None,
    kv_heads: Range | None = None,
) -> tuple[Message, ...]:
    """The message, or none if it has no rows."""
    return (Message(what, peer, num_rows, own_rows, block_rows, kv_heads),) if num_rows else ()


def length(rows: Iterable[Range]) -> int:
    """The number of rows in ranges of rows."""
    return sum(map(length_of, rows))
