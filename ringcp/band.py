"""Rectangles of the score matrix with a diagonal band: the one shape that everything is cut into.

A `Band` is the set of pairs (i, j) with ``q[0] <= i < q[1]``, ``k[0] <= j < k[1]`` and
``lo <= i - j <= hi``. Full, causal and window attention are bands. `lo` and `hi` are always finite: an
edge that cuts nothing off lies on the corner of the rectangle. Functions of one or two bands are O(1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

Range = tuple[int, int]


class Band(NamedTuple):
    """The pairs of rows ``q`` and keys ``k`` with ``lo <= i - j <= hi``."""

    q: Range
    k: Range
    lo: int
    hi: int

    @property
    def num_q(self) -> int:
        return length_of(self.q)

    @property
    def num_k(self) -> int:
        return length_of(self.k)

    @property
    def cuts_low(self) -> bool:
        """Whether ``i - j >= lo`` cuts off a corner (the upper right one, as a causal mask does)."""
        return self.lo > self.q[0] - self.k[1] + 1

    @property
    def cuts_high(self) -> bool:
        """Whether ``i - j <= hi`` cuts off a corner (the lower left one, as a window does)."""
        return self.hi < self.q[1] - 1 - self.k[0]

    @property
    def is_full(self) -> bool:
        return not self.cuts_low and not self.cuts_high

    def shift(self, q: int = 0, k: int = 0) -> Band:
        """The same pairs, counted from other origins."""
        return Band((self.q[0] + q, self.q[1] + q), (self.k[0] + k, self.k[1] + k), self.lo + q - k, self.hi + q - k)

    def allows(self, i: int, j: int) -> bool:
        return self.q[0] <= i < self.q[1] and self.k[0] <= j < self.k[1] and self.lo <= i - j <= self.hi


def length_of(x: Range) -> int:
    """How many there are in a range."""
    return x[1] - x[0]


def full(q: Range, k: Range) -> Band | None:
    """All pairs of a rectangle, or None if there are none."""
    return trim(q, k, q[0] - k[1] + 1, q[1] - 1 - k[0])


def trim(q: Range, k: Range, lo: int, hi: int) -> Band | None:
    """The band in its smallest rectangle, or None if it holds no pair.

    In a trimmed band every row and every key takes part in at least one pair: kernels never see a dead row.
    """
    # Row i meets keys [i - hi, i - lo]; key j meets rows [j + lo, j + hi].
    if lo > hi:
        return None
    (q0, q1), (k0, k1) = q, k
    q0, q1 = (k0 + lo if k0 + lo > q0 else q0), (k1 + hi if k1 + hi < q1 else q1)
    k0, k1 = (q0 - hi if q0 - hi > k0 else k0), (q1 - lo if q1 - lo < k1 else k1)
    if q0 >= q1 or k0 >= k1:
        return None
    least, most = q0 - k1 + 1, q1 - 1 - k0
    return Band((q0, q1), (k0, k1), lo if lo > least else least, hi if hi < most else most)


def crop(band: Band, q: Range, k: Range) -> Band | None:
    """The part of `band` that lies in the rectangle ``q x k``."""
    q = (max(q[0], band.q[0]), min(q[1], band.q[1]))
    k = (max(k[0], band.k[0]), min(k[1], band.k[1]))
    return trim(q, k, band.lo, band.hi) if q[0] < q[1] and k[0] < k[1] else None


def intersect(a: Band, b: Band) -> Band | None:
    """The pairs of both, or None if there are none."""
    (aq, ak, alo, ahi), (bq, bk, blo, bhi) = a, b
    q = (aq[0] if aq[0] > bq[0] else bq[0]), (aq[1] if aq[1] < bq[1] else bq[1])
    k = (ak[0] if ak[0] > bk[0] else bk[0]), (ak[1] if ak[1] < bk[1] else bk[1])
    if q[0] >= q[1] or k[0] >= k[1]:
        return None
    return trim(q, k, alo if alo > blo else blo, ahi if ahi < bhi else bhi)


def subtract(a: Band, b: Band) -> Iterator[Band]:
    """Disjoint bands that hold exactly the pairs of `a` that are not in `b`."""
    both = intersect(a, b)
    if both is None:
        yield a
        return
    q, k = both.q, both.k
    # Outside the common rectangle all of `a` remains; inside it, what lies beside b's diagonal band.
    parts = (
        trim((a.q[0], q[0]), a.k, a.lo, a.hi),
        trim((q[1], a.q[1]), a.k, a.lo, a.hi),
        trim(q, (a.k[0], k[0]), a.lo, a.hi),
        trim(q, (k[1], a.k[1]), a.lo, a.hi),
        trim(q, k, a.lo, both.lo - 1),
        trim(q, k, both.hi + 1, a.hi),
    )
    yield from (part for part in parts if part is not None)


def count(band: Band) -> int:
    """Number of pairs."""
    if band.is_full:
        return band.num_q * band.num_k

    def pairs_up_to(d: int) -> int:
        # Pairs with i - j <= d: cut the corner triangle by inclusion and exclusion.
        m = d - band.q[0] + band.k[1] - 1
        return sum(
            sign * (n + 1) * (n + 2) // 2 for sign, n in ((1, m), (-1, m - a), (-1, m - b), (1, m - a - b)) if n >= 0
        )

    a, b = band.num_q, band.num_k
    return pairs_up_to(band.hi) - pairs_up_to(band.lo - 1)


def merge(a: Band, b: Band) -> Band | None:
    """One band with exactly the pairs of two disjoint ones, if there is one."""
    q = (min(a.q[0], b.q[0]), max(a.q[1], b.q[1]))
    k = (min(a.k[0], b.k[0]), max(a.k[1], b.k[1]))
    # The smallest band around both; a trimmed band attains its edges, so no other can have these pairs alone.
    whole = Band(q, k, min(a.lo, b.lo), max(a.hi, b.hi))
    return whole if count(whole) == count(a) + count(b) else None


def merge_all(bands: Iterable[Band]) -> list[Band]:
    """Fewer disjoint bands with the same pairs: neighbours in (q, k) order are joined until none can be."""
    result: list[Band] = []
    for band in sorted(bands):
        while result and (joined := merge(result[-1], band)) is not None:
            result.pop()
            band = joined
        result.append(band)
    return result


def union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sorted disjoint ranges that cover the same numbers; touching ones are joined."""
    result: list[Range] = []
    for start, stop in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return tuple(result)
