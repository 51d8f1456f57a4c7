"""Which rows of which rank are needed where: a mask looked at through the layouts of queries and keys. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, Protocol

from ringcp.band import Range, union
from ringcp.layout import Span
from ringcp.marks import marked, marks_on
from ringcp.mask import Pieces
from ringcp.steps import Tile, length
from ringcp.topology import Topology


class Placing(Hashable, Protocol):
    """What a schedule needs to know of a layout. Implementations are hashable: schedules are memoised by them."""

    @property
    def seq_len(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The runs of positions that `rank` owns, in local order; none of them is empty."""
        ...

    def local_len(self, rank: int) -> int:
        """Number of tokens that `rank` owns."""
        ...


def placed(layout: Placing, rank: int) -> list[tuple[int, Span]]:
    """Each span of a rank with the local row at which it starts."""
    return from_zero(layout.spans(rank))


def from_zero(spans: Sequence[Span]) -> list[tuple[int, Span]]:
    """Each span with the place at which it starts among the positions of all of them."""
    return list(zip(accumulate((s.length for s in spans), initial=0), spans, strict=False))


def positions_of(layout: Placing, rank: int, rows: Iterable[Range]) -> list[Span]:
    """The positions of some local rows, in their order."""
    return [
        Span(span.start + (a - at) * span.step, span.start + (b - 1 - at) * span.step + 1, span.step)
        for start, stop in rows
        for at, span in placed(layout, rank)
        for a, b in ((max(start, at), min(stop, at + span.length)),)
        if a < b
    ]


def whole(layout: Placing, rank: int) -> tuple[Range, ...]:
    """All rows of a rank."""
    num_rows = layout.local_len(rank)
    return ((0, num_rows),) if num_rows else ()


class Pairs(NamedTuple):
    """Which queries attend to which keys: where the ranks have them, and the mask over their positions.

    q, k: two layouts for cross-attention, with positions of each counted in its own sequence; else the same.
    """

    q: Placing
    k: Placing
    mask: Pieces

    @property
    def batch_rows(self) -> list[tuple[int, Range | None]]:
        """The rows of the mask, with the batch rows that these stand for; None is all."""
        return [(0, None)] if self.mask.rows is None else [(row, (row, row + 1)) for row in range(self.mask.rows)]

    def tiles(self, rank: int, source: int) -> tuple[Tile, ...]:
        """The work of `rank`'s queries on `source`'s block, in local rows of both."""
        q_spans, k_spans = placed(self.q, rank), placed(self.k, source)
        return tuple(
            Tile(band.shift(q_at, k_at), batch)
            for row, batch in self.batch_rows
            for q_at, q_span in q_spans
            for k_at, k_span in k_spans
            for band in self.mask.pieces(q_span, k_span, row)
        )

    def needed_rows(self, rank: int, source: int) -> tuple[Range, ...]:
        """The rows of `source` that some query of `rank` attends to."""
        return union(tile.band.k for tile in self.tiles(rank, source))

    def fetched(self, rank: int, source: int) -> tuple[tuple[Range, ...], tuple[Tile, ...]]:
        """Exactly the needed rows of `source`, and the work on them: key rows are counted within these rows."""
        tiles = self.tiles(rank, source)
        rows = union(tile.band.k for tile in tiles)
        return rows, within(tiles, rows)


def within(tiles: Iterable[Tile], rows: tuple[Range, ...]) -> tuple[Tile, ...]:
    """The tiles with their keys counted within `rows`, sorted ranges; each tile has its keys in one of them."""
    starts = [start for start, _ in rows]
    # Row start of range n lies at (rows before it) in the block in hand.
    moved = [at - start for at, (start, _) in zip(accumulate((b - a for a, b in rows), initial=0), rows, strict=False)]
    return tuple(t._replace(band=t.band.shift(k=moved[bisect_right(starts, t.band.k[0]) - 1])) for t in tiles)


@dataclass(frozen=True)
class Needs:
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
def needs(pairs: Pairs) -> Needs:
    """The needs of all ranks, from one look at each rank's queries against the whole sequence."""
    ranks, queries, keys = range(pairs.k.world_size), Span(0, pairs.q.seq_len), Span(0, pairs.k.seq_len)
    asking, owned = ([layout.spans(rank) for rank in ranks] for layout in (pairs.q, pairs.k))
    rows = range(pairs.mask.rows or 1)
    num_rows, sources = [], []
    if any(span.step > 1 for spans in (*asking, *owned) for span in spans):
        bands = (band for row in rows for band in pairs.mask.pieces(queries, keys, row))
        for rank, marks in zip(ranks, marked(bands, asking, keys.length), strict=True):
            needed_of = [0 if source == rank else marks_on(marks, owned[source]) for source in ranks]
            num_rows.append(sum(needed_of))
            sources.append(frozenset(source for source in ranks if needed_of[source]))
    else:
        runs = sorted((span.start, rank) for rank in ranks for span in owned[rank])
        for rank in ranks:
            bands = (band for row in rows for span in asking[rank] for band in pairs.mask.pieces(span, keys, row))
            needed = union(band.k for band in bands)
            num_rows.append(length(needed) - _overlap(needed, owned[rank]))
            sources.append(_owners(runs, needed) - {rank})
    return Needs(tuple(num_rows), tuple(sources))


def _overlap(ranges: Iterable[Range], spans: Iterable[Span]) -> int:
    return sum(max(0, min(b, s.stop) - max(a, s.start)) for a, b in ranges for s in spans)


def _owners(owners: list[tuple[int, int]], ranges: Iterable[Range]) -> frozenset[int]:
    """The ranks that own the positions of `ranges`; `owners` lists (start of a span, rank)."""
    starts = [start for start, _ in owners]
    return frozenset(
        rank for a, b in ranges for _, rank in owners[bisect_right(starts, a) - 1 : bisect_right(starts, b - 1)]
    )
