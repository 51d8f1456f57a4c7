"""Ranks as a grid of rings and exchanges, and the layout that the ring ranks of a grid have. Pure.

Rank ``r = c * degree + s``: c is its ring rank, s its place in the exchange. The ranks of one ring rank exchange tokens
for heads, and then hold all rows of that ring rank for their share of the heads: in the order of positions, whichever
layout the rows came in. So one layout of all ranks serves every mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from ringcp.band import Range, length_of
from ringcp.layout import Layout, Span, joined


@dataclass(frozen=True)
class Grid:
    """`world_size` ranks in exchanges of `degree` neighbouring ranks."""

    world_size: int
    degree: int

    def ring_rank(self, rank: int) -> int:
        return rank // self.degree

    def place(self, rank: int) -> int:
        return rank % self.degree

    def exchange(self, rank: int) -> tuple[int, ...]:
        """The ranks that exchange with `rank`, itself among them, by place."""
        first = rank - rank % self.degree
        return tuple(range(first, first + self.degree))

    def ring(self, rank: int) -> tuple[int, ...]:
        """The ranks of the ring of `rank`, itself among them, by ring rank."""
        return tuple(range(rank % self.degree, self.world_size, self.degree))


class Placed(NamedTuple):
    """Local rows of one rank, and where they lie in the rows of its ring rank: every `step`-th from `start` on."""

    rows: Range
    start: int
    step: int

    @property
    def local_rows(self) -> slice:
        return slice(*self.rows)

    @property
    def block_rows(self) -> slice:
        return slice(self.start, self.start + (length_of(self.rows) - 1) * self.step + 1, self.step)


@dataclass(frozen=True)
class GroupedLayout:
    """What each ring rank owns: the rows of its ranks, in the order of positions (of a strided layout: rank by rank,
    but for one ring rank, which owns all).
    """

    layout: Layout
    degree: int

    @property
    def seq_len(self) -> int:
        return self.layout.seq_len

    @property
    def world_size(self) -> int:
        return self.layout.world_size // self.degree

    def spans(self, ring_rank: int) -> tuple[Span, ...]:
        return self._placed[ring_rank][0]

    def local_len(self, ring_rank: int) -> int:
        return sum(span.length for span in self.spans(ring_rank))

    def placements(self, ring_rank: int) -> tuple[tuple[Placed, ...], ...]:
        """Where the rows of each rank of this ring rank lie, by place."""
        return self._placed[ring_rank][1]

    @cached_property
    def _placed(self) -> tuple[tuple[tuple[Span, ...], tuple[tuple[Placed, ...], ...]], ...]:
        return tuple(self._place(ring_rank) for ring_rank in range(self.world_size))

    def _place(self, ring_rank: int) -> tuple[tuple[Span, ...], tuple[tuple[Placed, ...], ...]]:
        ranks = range(ring_rank * self.degree, (ring_rank + 1) * self.degree)
        of_rank = [self.layout.spans(rank) for rank in ranks]
        spans = sorted(span for spans in of_rank for span in spans)
        if self.world_size == 1:
            whole = (Span(0, self.seq_len),) if self.seq_len else ()
            starts = {span: span.start for span in spans}
            return whole, tuple(_placements(spans, starts, strided=True) for spans in of_rank)
        if any(span.step > 1 for span in spans):
            spans = [span for spans in of_rank for span in spans]
        starts = dict(zip(spans, accumulate((span.length for span in spans), initial=0), strict=False))
        return joined(spans), tuple(_placements(spans, starts, strided=False) for spans in of_rank)


def _placements(spans: tuple[Span, ...], starts: dict[Span, int], strided: bool) -> tuple[Placed, ...]:
    """Of one rank's spans, whose first rows lie at `starts`."""
    ends = list(accumulate((span.length for span in spans), initial=0))
    return tuple(
        Placed((at, end), starts[span], span.step if strided else 1)
        for (at, end), span in zip(pairwise(ends), spans, strict=True)
    )


@lru_cache(maxsize=256)
def grouped(layout: Layout, degree: int) -> GroupedLayout:
    """The layout of the ring ranks, remembered for the last layouts."""
    return GroupedLayout(layout, degree)
