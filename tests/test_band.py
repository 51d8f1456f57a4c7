"""Bands against sets of pairs that are written out."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcp import band
from ringcp.band import Band, Range

Pairs = set[tuple[int, int]]


def pairs(q: Range, k: Range, lo: int, hi: int) -> Pairs:
    return {(i, j) for i in range(*q) for j in range(*k) if lo <= i - j <= hi}


def pairs_of(*bands: Band | None) -> Pairs:
    """The pairs of disjoint bands; None has none."""
    sets = [pairs(*b) for b in bands if b is not None]
    union = set().union(*sets)
    assert sum(map(len, sets)) == len(union), f"not disjoint: {bands}"
    return union


def assert_tight(b: Band | None) -> None:
    """No dead row, no dead key, and edges that lie on a corner where they cut nothing off."""
    if b is None:
        return
    inside = pairs(*b)
    assert {i for i, _ in inside} == set(range(*b.q))
    assert {j for _, j in inside} == set(range(*b.k))
    ahead = {i - j for i, j in inside}
    assert (b.lo, b.hi) == (min(ahead), max(ahead))


ranges = st.tuples(st.integers(-4, 5), st.integers(0, 7)).map(lambda x: (x[0], x[0] + x[1]))
edges = st.integers(-11, 11)
raw_bands = st.tuples(ranges, ranges, edges, edges)
bands = raw_bands.map(lambda raw: band.trim(*raw)).filter(lambda b: b is not None)


@given(raw_bands)
@settings(max_examples=400)
def test_trim_keeps_the_pairs_in_the_smallest_rectangle(raw):
    result = band.trim(*raw)
    assert pairs_of(result) == pairs(*raw)
    assert (result is None) == (not pairs(*raw))
    assert_tight(result)
    assert result is None or band.trim(*result) == result


@given(ranges, ranges)
@settings(max_examples=50)
def test_full_is_the_whole_rectangle(q, k):
    result = band.full(q, k)
    assert pairs_of(result) == {(i, j) for i in range(*q) for j in range(*k)}
    assert result is None or result.is_full


@given(bands, ranges, ranges)
@settings(max_examples=200)
def test_crop(b, q, k):
    result = band.crop(b, q, k)
    assert pairs_of(result) == {(i, j) for i, j in pairs_of(b) if q[0] <= i < q[1] and k[0] <= j < k[1]}
    assert_tight(result)


@given(bands, bands)
@settings(max_examples=300)
def test_intersect_and_subtract(a, b):
    both = band.intersect(a, b)
    rest = list(band.subtract(a, b))
    assert pairs_of(both) == pairs_of(a) & pairs_of(b)
    assert pairs_of(*rest) == pairs_of(a) - pairs_of(b)
    assert len(rest) <= 6
    for part in (both, *rest):
        assert_tight(part)


@given(bands)
@settings(max_examples=300)
def test_count(b):
    assert band.count(b) == len(pairs_of(b))


def test_count_is_exact_far_beyond_what_can_be_written_out():
    n = 10**12
    assert band.count(Band((0, n), (0, n), 0, n - 1)) == n * (n + 1) // 2
    assert band.count(Band((0, n), (0, n), 0, 4)) == 5 * n - (1 + 2 + 3 + 4)


@given(bands, st.integers(-9, 9), st.integers(-9, 9))
@settings(max_examples=100)
def test_shift_moves_the_origins(b, q, k):
    moved = b.shift(q, k)
    assert pairs_of(moved) == {(i + q, j + k) for i, j in pairs_of(b)}
    assert_tight(moved)
    assert b.shift(q=q) == b.shift(q) == b.shift(q, 0)


@given(bands)
@settings(max_examples=200)
def test_cuts_allows_and_lengths(b):
    corners = [(i, j) for i in range(*b.q) for j in range(*b.k) if (i, j) not in pairs_of(b)]
    assert b.cuts_low == any(i - j < b.lo for i, j in corners)
    assert b.cuts_high == any(i - j > b.hi for i, j in corners)
    assert b.is_full == (not corners)
    assert (b.num_q, b.num_k) == (len(range(*b.q)), len(range(*b.k)))
    around = [(i, j) for i in range(b.q[0] - 1, b.q[1] + 1) for j in range(b.k[0] - 1, b.k[1] + 1)]
    assert {(i, j) for i, j in around if b.allows(i, j)} == pairs_of(b)


def hull(union: Pairs) -> Band:
    """The smallest band around some pairs."""
    rows, keys = [i for i, _ in union], [j for _, j in union]
    ahead = [i - j for i, j in union]
    return Band((min(rows), max(rows) + 1), (min(keys), max(keys) + 1), min(ahead), max(ahead))


@st.composite
def two_disjoint(draw) -> tuple[Band, Band]:
    """Two bands that may be one: what is left and right of a cut, or any part of a difference."""
    whole = draw(bands)
    cut = draw(st.integers(-4, 12))
    q, k = whole.q, whole.k
    way = draw(st.sampled_from(["rows", "keys", "diagonal", "any"]))
    if way == "rows":
        parts = [band.crop(whole, (q[0], cut), k), band.crop(whole, (cut, q[1]), k)]
    elif way == "keys":
        parts = [band.crop(whole, q, (k[0], cut)), band.crop(whole, q, (cut, k[1]))]
    elif way == "diagonal":
        parts = [band.trim(q, k, whole.lo, cut - 1), band.trim(q, k, cut, whole.hi)]
    else:
        parts = [whole, next(band.subtract(draw(bands), whole), None)]
    if None in parts:
        parts = [Band((0, 1), (0, 1), 0, 0), Band((0, 1), (1, 2), -1, -1)]
    return tuple(draw(st.permutations(parts)))


@given(two_disjoint())
@settings(max_examples=500)
def test_merge_finds_the_one_band_if_there_is_one(parts):
    union = pairs_of(*parts)
    whole = hull(union)
    assert band.merge(*parts) == (whole if pairs_of(whole) == union else None)


def disjoint(drawn: list[Band]) -> list[Band]:
    result: list[Band] = []
    for b in drawn:
        rest = [b]
        for taken in result:
            rest = [part for x in rest for part in band.subtract(x, taken)]
        result += rest
    return result


@given(st.lists(bands, max_size=4).map(disjoint))
@settings(max_examples=200)
def test_merge_all_keeps_the_pairs(parts):
    merged = band.merge_all(parts)
    assert pairs_of(*merged) == pairs_of(*parts)
    assert len(merged) <= len(parts)
    assert all(band.merge(a, b) is None for a, b in pairwise(merged))
    for part in merged:
        assert_tight(part)


@pytest.mark.parametrize("a, b", [(3, 3), (3, 4), (4, 3), (1, 1), (1, 5)])
def test_the_own_block_of_a_causal_head_tail_ring_is_one_band(a, b):
    q = k = ((0, a), (a, a + b))
    tiles = [band.trim(q[0], k[0], 0, a), band.full(q[1], k[0]), band.trim(q[1], k[1], 0, b)]
    assert band.merge_all(tiles) == [Band((0, a + b), (0, a + b), 0, a + b - 1)]
