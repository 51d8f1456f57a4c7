"""From tiles to kernel calls, by what the kernel can do in one launch. Pure.

Lowering first joins tiles that are one band together (the own block of a causal head-tail ring is *one* causal
call, an earlier block is all rows of q against its first half), then cuts what the kernel cannot take, and then puts
calls that are alike (the documents of a step) into one launch, if the kernel takes sequences of any lengths.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise, product
from operator import itemgetter
from typing import NamedTuple

from ringcp.band import Band, Range, length_of, merge_all
from ringcp.cutting import Caps, Strips, cut, takes
from ringcp.mask import Pieces
from ringcp.needs import Placing
from ringcp.schedule import Heads, Message, Schedule, Step, Tile, build
from ringcp.topology import Topology


class Form(NamedTuple):
    """Which pairs of one launch attend: row i (of m) and key j (of n) with ``lo <= i - j <= hi``.

    None is an edge that cuts nothing off: ``Form()`` is full, ``Form(lo=0)`` causal with row 0 seeing key 0,
    ``Form(lo=m - n)`` causal with the last row seeing every key. Every row and every key takes part in at
    least one pair. Lowering only asks for what the kernel's caps allow.
    """

    lo: int | None = None
    hi: int | None = None

    def from_the_end(self, m: int, n: int) -> tuple[int | None, int | None]:
        """The edges counted from the last row and the last key: how many keys a row sees before and after its own."""
        return None if self.hi is None else self.hi + n - m, None if self.lo is None else m - n - self.lo


class Call(NamedTuple):
    """What a kernel computes on local query rows and on key rows of the block in hand. None means all.

    fresh: no earlier call of this rank has written any of its query rows.
    """

    q: Range
    k: Range
    form: Form
    batch: Range | None
    q_heads: Range | None
    kv_heads: Range | None
    fresh: bool


class Cell(NamedTuple):
    """Calls of one launch on the same batch rows, in the order of their query rows.

    rows: the same query rows, where neighbours that touch and are equally fresh are one. keys: the same key rows, where
    neighbours that touch are one. What the other fields of these calls say of one dim does not count.
    """

    calls: tuple[Call, ...]
    rows: tuple[Call, ...]
    keys: tuple[Call, ...]


class Launch(NamedTuple):
    """What a kernel is given at once: one call; or, in cells of different batch rows, several that have the same heads
    and the same edges counted from the end, and of which no two share a query row or a key.
    """

    cells: tuple[Cell, ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(call for cell in self.cells for call in cell.calls)


class Region(NamedTuple):
    """Batch rows, query heads and query rows; a stop of None is the end."""

    batch: tuple[int, int | None]
    q_heads: tuple[int, int | None]
    rows: Range


@dataclass(frozen=True)
class PlanStep:
    """A `Step` whose tiles have become launches.

    own: whether the block in hand is the rank's own.
    """

    source: int | None
    own: bool
    num_rows: int
    launches: tuple[Launch, ...]
    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]
    kept: tuple[Message, ...] = ()
    kv_heads: Range | None = None

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(call for launch in self.launches for call in launch.calls)


@dataclass(frozen=True)
class Pass:
    """One direction of a plan.

    unstarted: what must start as zero (in the lse as -inf), since no call is the first to write all of it: rows that
        attend to nothing, and rows whose first call also covers others that have been written.
    """

    steps: tuple[PlanStep, ...]
    unstarted: tuple[Region, ...]


@dataclass(frozen=True)
class Plan:
    """A schedule lowered for one kernel: what the executor runs."""

    schedule: Schedule
    forward: Pass
    backward: Pass


@lru_cache(maxsize=64)  # packed documents are others in each batch, and long
def plan(
    layout: Placing,
    mask: Pieces,
    topology: Topology,
    rank: int,
    heads: Heads,
    caps: Caps,
    *,
    gather: int | None = None,
    kv_layout: Placing | None = None,
) -> Plan:
    """The plan of one rank: its schedule, lowered. Memoised, since it is made once a batch and used once a layer."""
    return lower(build(layout, mask, topology, rank, heads, gather=gather, kv_layout=kv_layout), caps)


def lower(schedule: Schedule, caps: Caps) -> Plan:
    """The calls of a schedule for a kernel with these caps.

    Raises:
        UnsupportedError: if a tile needs a band and the kernel takes none.
    """
    forward = _lowered(schedule, schedule.forward, caps, caps.forward)
    return Plan(schedule, forward, _lowered(schedule, schedule.backward, caps, caps.backward))


def _lowered(schedule: Schedule, steps: tuple[Step, ...], caps: Caps, strips: Strips) -> Pass:
    started = _Started(schedule.num_rows, [tile for step in steps for tile in step.tiles])
    lowered = []
    for step in steps:
        calls = [_call(part, where) for band, where in _joined(step.tiles, caps) for part in cut(band, caps, strips)]
        launches = tuple(_launch(cells, started) for cells in _alike(calls, caps))
        own = step.source == schedule.rank
        moves = step.sends, step.recvs, step.kept
        lowered.append(PlanStep(step.source, own, step.num_rows, launches, *moves, step.kv_heads))
    return Pass(tuple(lowered), started.unstarted())


_Where = tuple[Range | None, Range | None, Range | None]


def _joined(tiles: tuple[Tile, ...], caps: Caps) -> Iterator[tuple[Band, _Where]]:
    """Tiles of the same batch rows and heads, joined where together they are one band."""

    def where(tile: Tile) -> _Where:
        return tile[1:]

    for place, group in groupby(tiles, key=where):
        bands = [tile.band for tile in group]
        joined = merge_all(bands)
        # Full tiles along a diagonal (documents of one token) join into a window: not for a kernel that takes none.
        for band in joined if all(takes(band, caps) for band in joined) else bands:
            yield band, place


def _call(band: Band, where: _Where) -> Call:
    ahead = band.q[0] - band.k[0]  # (i - j) counted from the corner of the call is (i - j) - ahead
    form = Form(band.lo - ahead if band.cuts_low else None, band.hi - ahead if band.cuts_high else None)
    return Call(band.q, band.k, form, *where, fresh=False)


_Cells = dict[Range | None, list[Call]]
"""Calls of one launch, by batch rows."""


def _alike(calls: list[Call], caps: Caps) -> list[_Cells]:
    """The calls of a step, those together that one launch can do; in the order of the first of each."""
    found: list[_Cells] = []
    like: dict[tuple[object, ...], list[_Open]] = {}
    for call in calls:
        m, n = length_of(call.q), length_of(call.k)
        # A window with more rows than keys stays alone: FlashAttention 2 misreads some (see `ringcp.kernels.windows`).
        if not caps.varlen or (call.form != Form() and m > n):
            found.append({call.batch: [call]})
            continue
        kind = like.setdefault((call.form.from_the_end(m, n), call.q_heads, call.kv_heads), [])
        if not any(launch.add(call) for launch in kind):
            kind.append(_Open({}, {}))
            kind[-1].add(call)
            found.append(kind[-1].cells)
    return found


class _Open(NamedTuple):
    """A launch that takes further calls; the query rows and the keys that it has, sorted, by batch rows."""

    cells: _Cells
    taken: dict[Range | None, tuple[list[Range], list[Range]]]

    def add(self, call: Call) -> bool:
        """Take a call that shares nothing with the others; whether it does. So what is packed is never more than q and
        the block.
        """
        batch = call.batch
        if batch not in self.cells:
            if any(_overlap(batch, other) for other in self.cells):
                return False
            self.cells[batch], self.taken[batch] = [], ([], [])
        rows, keys = self.taken[batch]
        if not (_is_free(rows, call.q) and _is_free(keys, call.k)):
            return False
        insort(rows, call.q)
        insort(keys, call.k)
        self.cells[batch].append(call)
        return True


def _overlap(a: Range | None, b: Range | None) -> bool:
    return a is None or b is None or (a[0] < b[1] and b[0] < a[1])


def _is_free(taken: list[Range], wanted: Range) -> bool:
    """Whether it meets none of these ranges, which are sorted and disjoint."""
    at = bisect_left(taken, wanted)
    return (at == 0 or taken[at - 1][1] <= wanted[0]) and (at == len(taken) or wanted[1] <= taken[at][0])


def _launch(cells: _Cells, started: _Started) -> Launch:
    """With what is fresh marked: to be made in the order in which the launches run."""
    made = []
    for of_batch in cells.values():
        calls = [call._replace(fresh=started.add(call[3:6], call.q)) for call in sorted(of_batch, key=_first_row)]
        rows, keys = calls[:1], calls[:1]
        for call in calls[1:]:
            if rows[-1].q[1] == call.q[0] and rows[-1].fresh == call.fresh:
                rows[-1] = rows[-1]._replace(q=(rows[-1].q[0], call.q[1]))
            else:
                rows.append(call)
            if keys[-1].k[1] == call.k[0]:
                keys[-1] = keys[-1]._replace(k=(keys[-1].k[0], call.k[1]))
            else:
                keys.append(call)
        made.append(Cell(tuple(calls), tuple(rows), tuple(keys)))
    return Launch(tuple(made))


def _first_row(call: Call) -> int:
    return call.q[0]


class _Started:
    """Which query rows have been written, apart for all batch rows and heads that some tile tells apart."""

    def __init__(self, num_rows: int, tiles: list[Tile]) -> None:
        places = product(_stretches([t.batch for t in tiles]), _stretches([t.q_heads for t in tiles]))
        self._free: dict[tuple[_Stretch, _Stretch], list[Range]] = {
            place: [(0, num_rows)] if num_rows else [] for place in places
        }
        self._merged_first: list[Region] = []

    def add(self, where: _Where, rows: Range) -> bool:
        """Mark rows as written; whether none of them was, of any batch row or head."""
        start, stop = rows
        missing = 0
        hits = []
        for (batch, heads), free in self._free.items():
            if not (_inside(batch, where[0]) and _inside(heads, where[1])):
                continue
            # The free ranges are sorted: those that overlap lie together.
            first, last = bisect_right(free, start, key=_stop), bisect_left(free, stop, key=_start)
            overlapping = free[first:last]
            hit = [(max(a, start), min(b, stop)) for a, b in overlapping]
            missing += stop - start - sum(b - a for a, b in hit)
            hits += [Region(batch, heads, part) for part in hit]
            cut = [part for a, b in overlapping for part in ((a, min(b, start)), (max(a, stop), b))]
            free[first:last] = [(a, b) for a, b in cut if a < b]
        if missing:
            self._merged_first += hits
        return not missing

    def unstarted(self) -> tuple[Region, ...]:
        never = [Region(*place, rows) for place, free in self._free.items() for rows in free]
        return tuple(never + self._merged_first)


_start, _stop = itemgetter(0), itemgetter(1)

_Stretch = tuple[int, int | None]
"""Of batch rows or of heads; a stop of None is the end."""


def _stretches(ranges: list[Range | None]) -> list[_Stretch]:
    """All of them, cut at every edge of the ranges; the last stretch is open."""
    edges = sorted({0}.union(*(r for r in ranges if r is not None)))
    return [*pairwise(edges), (edges[-1], None)]


def _inside(stretch: _Stretch, where: Range | None) -> bool:
    start, stop = stretch
    return where is None or (where[0] <= start and stop is not None and stop <= where[1])
