"""From tiles to kernel calls, by what the kernel can do in one launch. Pure.

Lowering first joins tiles that are one band together (the own block of a causal head-tail ring is *one* causal
call, an earlier block is all rows of q against its first half), then cuts what the kernel cannot take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Literal, NamedTuple

from ringcp.band import Band, Range, crop, merge_all
from ringcp.errors import UnsupportedError
from ringcp.schedule import Message, Schedule, Step, Tile

# Rows of one strip of a banded tile under a dense mask: long enough for kernel speed, short enough that the two
# corners of a strip that the mask wastes stay small beside a window.
_STRIP_ROWS = 256
# A wider rectangle under a mask is cut into a masked edge, a full middle and a masked edge.
_MASKED_KEYS = 8 * _STRIP_ROWS


@dataclass(frozen=True)
class Caps:
    """What one launch of a kernel can do.

    causal: the bands ``i - j >= lo`` it takes: "square" (as many rows as keys, aligned to the diagonal),
        "top_left" (row 0 sees key 0 only), "bottom_right" (the last row sees every key), or "none".
    band: how it takes other bands: "any" at the price of the pairs, "mask" through a dense mask at the price
        of the whole rectangle, or "none".
    """

    causal: Literal["square", "top_left", "bottom_right", "none"]
    band: Literal["any", "mask", "none"]


class Form(NamedTuple):
    """Which pairs of one launch attend: row i (of m) and key j (of n) with ``lo <= i - j <= hi``.

    None is an edge that cuts nothing off: ``Form()`` is full, ``Form(lo=0)`` causal with row 0 seeing key 0,
    ``Form(lo=m - n)`` causal with the last row seeing every key. Every row and every key takes part in at
    least one pair. Lowering only asks for what the kernel's caps allow.
    """

    lo: int | None = None
    hi: int | None = None


class Call(NamedTuple):
    """One kernel launch on local query rows and on key rows of the block in hand. None means all.

    fresh: no earlier call of this rank has written any of its query rows.
    """

    q: Range
    k: Range
    form: Form
    batch: Range | None
    q_heads: Range | None
    kv_heads: Range | None
    fresh: bool


@dataclass(frozen=True)
class PlanStep:
    """A `Step` whose tiles have become calls."""

    source: int
    num_rows: int
    calls: tuple[Call, ...]
    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]


@dataclass(frozen=True)
class Plan:
    """A schedule lowered for one kernel: what the executor runs.

    unstarted: query rows that must start as out 0 and lse -inf: no call is the first to write all of them.
    """

    schedule: Schedule
    forward: tuple[PlanStep, ...]
    backward: tuple[PlanStep, ...]
    unstarted: tuple[Range, ...]


@lru_cache(maxsize=1024)
def lower(schedule: Schedule, caps: Caps) -> Plan:
    """The calls of a schedule for a kernel with these caps.

    Raises:
        UnsupportedError: if a tile needs a band and the kernel takes none.
    """
    # Freshness is tracked by rows alone; tiles of single batch rows or heads merge into zeros instead.
    by_rows = all(tile[1:] == _EVERYWHERE for step in schedule.forward for tile in step.tiles)
    written = _Rows(schedule.num_rows)
    lowered = [
        tuple(
            _call(part, where, by_rows and written.add(part.q))
            for band, where in _joined(step.tiles)
            for part in _cut(band, caps)
        )
        for step in schedule.forward
    ]

    def with_calls(steps: tuple[Step, ...]) -> tuple[PlanStep, ...]:
        # Backward works on the same tiles in the same order, and has one more step that only moves gradients.
        calls = [*lowered, *[()] * (len(steps) - len(lowered))]
        return tuple(PlanStep(s.source, s.num_rows, c, s.sends, s.recvs) for s, c in zip(steps, calls, strict=True))

    return Plan(schedule, with_calls(schedule.forward), with_calls(schedule.backward), written.need_start())


_Where = tuple[Range | None, Range | None, Range | None]
_EVERYWHERE: _Where = (None, None, None)


def _joined(tiles: tuple[Tile, ...]) -> Iterator[tuple[Band, _Where]]:
    """Tiles of the same batch rows and heads, joined where together they are one band."""

    def where(tile: Tile) -> _Where:
        return tile[1:]

    for place, group in groupby(tiles, key=where):
        for band in merge_all(tile.band for tile in group):
            yield band, place


def _call(band: Band, where: _Where, fresh: bool) -> Call:
    ahead = band.q[0] - band.k[0]  # (i - j) counted from the corner of the call is (i - j) - ahead
    form = Form(band.lo - ahead if band.cuts_low else None, band.hi - ahead if band.cuts_high else None)
    return Call(band.q, band.k, form, *where, fresh)


def _cut(band: Band, caps: Caps) -> Iterator[Band]:
    """Disjoint parts of a band, each of which is one launch."""
    if band.is_full or caps.band == "any":
        yield band
    elif band.cuts_high or caps.causal == "none":
        if caps.band == "none":
            raise UnsupportedError(f"kernel: expected one that takes windows, got caps {caps} for {band}")
        yield from _masked_strips(band)
    else:
        yield from _causal(band, caps)


def _causal(band: Band, caps: Caps) -> Iterator[Band]:
    """A band with a lower edge only, as full rectangles and one aligned causal call."""
    (q0, q1), (k0, k1), lo, _ = band
    # The band is trimmed, so row q0 sees keys up to q0 - lo >= k0, and row k1 - 1 + lo is the first to see all.
    see_all = k1 - 1 + lo
    if caps.causal == "bottom_right":
        parts = [((q0, see_all + 1), (k0, k1)), ((see_all + 1, q1), (k0, k1))]
    else:
        seen_by_all = q0 - lo
        parts = [((q0, q1), (k0, seen_by_all)), ((q0, q1), (seen_by_all, k1))]
        if caps.causal == "square":
            parts[1:] = [((q0, see_all + 1), (seen_by_all, k1)), ((see_all + 1, q1), (seen_by_all, k1))]
    cropped = (crop(band, q, k) for q, k in parts)
    yield from (part for part in cropped if part is not None)


def _masked_strips(band: Band) -> Iterator[Band]:
    """Any band as strips of rows, each a rectangle under a mask, or an edge, a full middle and an edge."""
    for start in range(band.q[0], band.q[1], _STRIP_ROWS):
        strip = crop(band, (start, min(start + _STRIP_ROWS, band.q[1])), band.k)
        assert strip is not None, "a trimmed band has no dead rows"
        if strip.num_k <= _MASKED_KEYS or strip.is_full:
            yield strip
            continue
        # Every row of the strip sees the keys from (last row - hi) to (first row - lo).
        middle = (max(strip.k[0], strip.q[1] - 1 - strip.hi), min(strip.k[1], strip.q[0] - strip.lo + 1))
        for k in (middle, (strip.k[0], middle[0]), (middle[1], strip.k[1])):
            part = crop(strip, strip.q, k)
            if part is not None:
                yield part


class _Rows:
    """Which query rows have been written, so that first writes need no merge."""

    def __init__(self, num_rows: int) -> None:
        self._free: list[Range] = [(0, num_rows)] if num_rows else []
        self._merged_first: list[Range] = []

    def add(self, rows: Range) -> bool:
        """Mark rows as written; whether none of them was."""
        start, stop = rows
        hit = [(max(a, start), min(b, stop)) for a, b in self._free if max(a, start) < min(b, stop)]
        cut = [part for a, b in self._free for part in ((a, min(b, start)), (max(a, stop), b))]
        self._free = [(a, b) for a, b in cut if a < b]
        if sum(b - a for a, b in hit) == stop - start:
            return True
        self._merged_first += hit
        return False

    def need_start(self) -> tuple[Range, ...]:
        """Rows that no call writes, or whose first call has to merge."""
        return tuple(sorted(self._free + self._merged_first))
