"""Schedules: who computes what in which step, and what is sent to whom. Pure: integers in, dataclasses out.

Two kinds of plan move keys and values:

- **ring**: whole blocks pass from neighbour to neighbour, P - 1 hops. In backward the sum of a block's dK/dV travels
  one step behind the block, in the same batch of transfers as the next block, and ends at the owner.
- **direct**: each rank fetches from each owner exactly the rows that its queries attend to; each partial dK/dV
  returns to the owner in one hop, and the owner adds them in the order of the hops.

The rule: where some rank attends to every key, all blocks have to reach it and the links of a ring carry them anyway:
ring. Otherwise (windows, documents) direct moves less: direct. Between two ranks both are wired alike, and direct still
leaves out what the other rank does not need: direct. A plan knows masks by their pieces only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

from ringcp.band import Band, Range, union
from ringcp.errors import LayoutError
from ringcp.layout import Layout, Span
from ringcp.mask import Pieces
from ringcp.topology import Topology


class Tile(NamedTuple):
    """One piece of work: a band over local query rows and key rows of the block in hand. None means all."""

    band: Band
    batch: Range | None = None
    q_heads: Range | None = None
    kv_heads: Range | None = None


class Message(NamedTuple):
    """One send or receive, as this rank sees it.

    what: "kv", keys and values; or "dkv", their gradients.
    own_rows: the rows of the rank's own block that are sent, or that the received gradients belong to. None for the
        block in hand: a received block is passed on as it is, its gradients are summed on the way.
    """

    what: Literal["kv", "dkv"]
    peer: int
    num_rows: int
    own_rows: tuple[Range, ...] | None = None


@dataclass(frozen=True)
class Step:
    """The tiles that need one block, and the transfers posted before they are computed.

    source: the owner of the block in hand.
    rows: the rows of that owner that are in hand, in this order.
    sends, recvs: in the order in which every rank posts them. A received "kv" is in hand in the next step. A sent
        "dkv" is the sum over the block of the step before.
    """

    source: int
    rows: tuple[Range, ...]
    tiles: tuple[Tile, ...] = ()
    sends: tuple[Message, ...] = ()
    recvs: tuple[Message, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(stop - start for start, stop in self.rows)


@dataclass(frozen=True)
class Schedule:
    """What one rank does in one attention call. The first step works on the rank's own block."""

    kind: Literal["local", "ring", "direct"]
    rank: int
    world_size: int
    num_rows: int
    forward: tuple[Step, ...]
    backward: tuple[Step, ...] = field(repr=False)

    def rows_sent(self, what: Literal["kv", "dkv"], steps: Iterable[Step] | None = None) -> int:
        """Rows of keys (and as many of values) that this rank sends in its forward steps, or in others."""
        sends = (m for step in (self.forward if steps is None else steps) for m in step.sends)
        return sum(m.num_rows for m in sends if m.what == what)

    def __str__(self) -> str:
        lines = [f"{self.kind} schedule of rank {self.rank} of {self.world_size}, {self.num_rows} rows"]
        for name, steps in (("forward", self.forward), ("backward", self.backward)):
            for i, step in enumerate(steps):
                sent = ", ".join(f"{m.what} {m.num_rows} rows -> rank {m.peer}" for m in step.sends)
                received = ", ".join(f"{m.what} {m.num_rows} rows <- rank {m.peer}" for m in step.recvs)
                work = f"{len(step.tiles)} tiles on {step.num_rows} rows of rank {step.source}"
                lines.append("  " + "; ".join(part for part in (f"{name} {i}: {work}", sent, received) if part))
        return "\n".join(lines)


class Heads(NamedTuple):
    """Query heads, and key and value heads."""

    q: int
    kv: int


@lru_cache(maxsize=1024)
def build(layout: Layout, mask: Pieces, topology: Topology, rank: int, heads: Heads | None = None) -> Schedule:
    """The schedule of `rank` for one call of attention in which queries and keys lie in `layout`.

    heads: if given, backward keeps half the heads of the own block for the last step, so that the way home of the last
        dK/dV is hidden too.

    Raises:
        LayoutError: if layout and topology differ in the number of ranks.
    """
    if layout.world_size != topology.world_size:
        raise LayoutError(f"layout: expected one for {topology.world_size} ranks, got {layout!r}")
    needs = _needs(layout, mask)
    own = Step(rank, _whole(layout, rank), _tiles(layout, mask, rank, rank))
    kind: Literal["local", "ring", "direct"]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    if topology.world_size == 1:
        kind, forward, backward = "local", (own,), (own,)
    elif topology.world_size > 2 and any(
        0 < need == layout.seq_len - layout.local_len(r) for r, need in enumerate(needs.num_rows)
    ):
        kind = "ring"
        forward, backward = _ring(layout, mask, topology, own)
    else:
        kind = "direct"
        forward, backward = _direct(layout, mask, topology, own, needs.hops(topology))
    if heads is not None and len(backward) > len(forward):
        backward = _split_own_work(backward, heads)
    return Schedule(kind, rank, topology.world_size, layout.local_len(rank), forward, backward)


_Steps = tuple[tuple[Step, ...], tuple[Step, ...]]


def _ring(layout: Layout, mask: Pieces, topology: Topology, own: Step) -> _Steps:
    rank, world_size = own.source, topology.world_size
    before, after = topology.upstream(rank, 1), topology.downstream(rank, 1)
    rows = [layout.local_len(topology.upstream(rank, hop)) for hop in range(world_size)]
    forward, backward = [], []
    for hop in range(world_size):
        source = topology.upstream(rank, hop)
        tiles = own.tiles if hop == 0 else _tiles(layout, mask, rank, source)
        more = hop + 1 < world_size
        sends = _message("kv", after, rows[hop]) if more else ()
        recvs = _message("kv", before, rows[hop + 1]) if more else ()
        forward.append(Step(source, _whole(layout, source), tiles, sends, recvs))
        if hop >= 2:  # the sum over a block starts at hop 1 and is passed on from hop 2
            sends += _message("dkv", after, rows[hop - 1])
            recvs += _message("dkv", before, rows[hop])
        backward.append(Step(source, _whole(layout, source), tiles, sends, recvs))
    # The last sum goes to its owner, who is the neighbour; the own one comes home.
    home = Step(rank, (), (), _message("dkv", after, rows[-1]), _message("dkv", before, rows[0], own.rows))
    return tuple(forward), (*backward, home)


def _direct(layout: Layout, mask: Pieces, topology: Topology, own: Step, hops: tuple[int, ...]) -> _Steps:
    rank = own.source
    fetched = [_fetch(layout, mask, rank, topology.upstream(rank, hop)) for hop in hops]
    lent = [_needed_rows(layout, mask, topology.downstream(rank, hop), rank) for hop in hops]
    blocks = [own, *fetched]
    forward, backward = [], []
    for i, block in enumerate(blocks):
        sends: tuple[Message, ...] = ()
        recvs: tuple[Message, ...] = ()
        if i < len(hops):
            sends = _message("kv", topology.downstream(rank, hops[i]), _length(lent[i]), lent[i])
            recvs = _message("kv", fetched[i].source, fetched[i].num_rows)
        forward.append(Step(block.source, block.rows, block.tiles, sends, recvs))
        if i >= 2:
            sends += _message("dkv", fetched[i - 2].source, fetched[i - 2].num_rows)
            recvs += _message("dkv", topology.downstream(rank, hops[i - 2]), _length(lent[i - 2]), lent[i - 2])
        backward.append(Step(block.source, block.rows, block.tiles, sends, recvs))
    if hops:
        home_sends = _message("dkv", fetched[-1].source, fetched[-1].num_rows)
        home_recvs = _message("dkv", topology.downstream(rank, hops[-1]), _length(lent[-1]), lent[-1])
        backward.append(Step(rank, (), (), home_sends, home_recvs))
    return tuple(forward), tuple(backward)


def _split_own_work(steps: tuple[Step, ...], heads: Heads) -> tuple[Step, ...]:
    """The own block's tiles, half of the heads in the first step and the others in the last one."""
    assert all(tile[2:] == (None, None) for tile in steps[0].tiles), "tiles of some heads would lose them"
    # At a multiple of the group where there are several key heads: then each half has key heads of its own.
    kv_cut = heads.kv // 2
    q_cut = kv_cut * (heads.q // heads.kv) if kv_cut else heads.q // 2
    if not q_cut:
        return steps

    def some(q: Range, kv: Range) -> tuple[Tile, ...]:
        return tuple(tile._replace(q_heads=q, kv_heads=kv if kv_cut else None) for tile in steps[0].tiles)

    early, late = some((0, q_cut), (0, kv_cut)), some((q_cut, heads.q), (kv_cut, heads.kv))
    return replace(steps[0], tiles=early), *steps[1:-1], replace(steps[-1], tiles=late, rows=steps[0].rows)


def _message(
    what: Literal["kv", "dkv"], peer: int, num_rows: int, own_rows: tuple[Range, ...] | None = None
) -> tuple[Message, ...]:
    return (Message(what, peer, num_rows, own_rows),) if num_rows else ()


def _whole(layout: Layout, rank: int) -> tuple[Range, ...]:
    length = layout.local_len(rank)
    return ((0, length),) if length else ()


def _length(rows: tuple[Range, ...]) -> int:
    return sum(stop - start for start, stop in rows)


def _tiles(layout: Layout, mask: Pieces, rank: int, source: int) -> tuple[Tile, ...]:
    """The work of `rank`'s queries on `source`'s block, in local rows of both."""
    q_spans, k_spans = _placed(layout, rank), _placed(layout, source)
    return tuple(
        Tile(band.shift(q_at, k_at), None if row is None else (row, row + 1))
        for row in ((None,) if mask.rows is None else range(mask.rows))
        for q_at, q_span in q_spans
        for k_at, k_span in k_spans
        for band in mask.pieces(q_span, k_span, row or 0)
    )


def _placed(layout: Layout, rank: int) -> list[tuple[int, Span]]:
    """Each span of a rank with the local row at which it starts."""
    spans = layout.spans(rank)
    return list(zip(accumulate((s.length for s in spans), initial=0), spans, strict=False))


def _needed_rows(layout: Layout, mask: Pieces, rank: int, source: int) -> tuple[Range, ...]:
    """The rows of `source` that some query of `rank` attends to."""
    return union(tile.band.k for tile in _tiles(layout, mask, rank, source))


def _fetch(layout: Layout, mask: Pieces, rank: int, source: int) -> Step:
    """A step on exactly the needed rows of `source`: key rows are counted within the rows in hand."""
    tiles = _tiles(layout, mask, rank, source)
    rows = union(tile.band.k for tile in tiles)
    starts = [start for start, _ in rows]
    # Row start of range n lies at (rows before it) in the block in hand.
    moved = [at - start for at, (start, _) in zip(accumulate((b - a for a, b in rows), initial=0), rows, strict=False)]
    placed = (t._replace(band=t.band.shift(k=moved[bisect_right(starts, t.band.k[0]) - 1])) for t in tiles)
    return Step(source, rows, tuple(placed))


@dataclass(frozen=True)
class _Needs:
    """What every rank needs of the others.

    num_rows: for each rank, how many rows of other ranks its queries attend to.
    sources: for each rank, the ranks that own them.
    """

    num_rows: tuple[int, ...]
    sources: tuple[frozenset[int], ...]

    def hops(self, topology: Topology) -> tuple[int, ...]:
        """The distances over which anything moves: the same on every rank, so that steps stay aligned."""
        place = {rank: at for at, rank in enumerate(topology.order)}
        pairs = ((rank, source) for rank, sources in enumerate(self.sources) for source in sources)
        return tuple(sorted({(place[rank] - place[source]) % topology.world_size for rank, source in pairs}))


@lru_cache(maxsize=256)
def _needs(layout: Layout, mask: Pieces) -> _Needs:
    """The needs of all ranks, from one look at each rank's queries against the whole sequence."""
    ranks = range(layout.world_size)
    strided = any(span.step > 1 for rank in ranks for span in layout.spans(rank))
    if not strided:
        owners = sorted((span.start, rank) for rank in ranks for span in layout.spans(rank))
        needed = [_needed_positions(layout, mask, rank) for rank in ranks]
        sources = [_owners(owners, ranges) for ranges in needed]
        num_rows = [
            _length(ranges) - _overlap(ranges, layout.spans(rank)) for rank, ranges in zip(ranks, needed, strict=True)
        ]
    elif mask.reach is not None and mask.reach < layout.world_size:
        rows = [[_length(_needed_rows(layout, mask, r, s)) if s != r else 0 for s in ranks] for r in ranks]
        sources = [frozenset(s for s in ranks if of[s]) for of in rows]
        num_rows = [sum(of) for of in rows]
    else:
        # A wider mask touches about every row of a strided layout: take it as full.
        sources = [frozenset(ranks)] * layout.world_size
        num_rows = [layout.seq_len - layout.local_len(rank) for rank in ranks]
    return _Needs(tuple(num_rows), tuple(s - {rank} for rank, s in zip(ranks, sources, strict=True)))


def _needed_positions(layout: Layout, mask: Pieces, rank: int) -> tuple[Range, ...]:
    sequence = Span(0, layout.seq_len)
    return union(
        band.k
        for row in range(mask.rows or 1)
        for span in layout.spans(rank)
        for band in mask.pieces(span, sequence, row)
    )


def _overlap(ranges: Iterable[Range], spans: Iterable[Span]) -> int:
    return sum(max(0, min(b, s.stop) - max(a, s.start)) for a, b in ranges for s in spans)


def _owners(owners: list[tuple[int, int]], ranges: Iterable[Range]) -> frozenset[int]:
    """The ranks that own the positions of `ranges`; `owners` lists (start of a span, rank)."""
    starts = [start for start, _ in owners]
    return frozenset(
        rank for a, b in ranges for _, rank in owners[bisect_right(starts, a) - 1 : bisect_right(starts, b - 1)]
    )
