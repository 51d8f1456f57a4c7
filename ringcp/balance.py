"""`Balanced`: chunks dealt to ranks so that all have equally much to compute, and few keys move. Pure.

The sequence is cut into n chunks, equally many for each rank. The work of a chunk is the number of allowed pairs of its
queries, summed over the batch rows; a rank's keys that move are the positions that its queries attend to and that it
does not own. Balance comes first: a rank that has 10 % more to do delays every other one by that, while keys travel
under the compute.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import combinations, pairwise
from typing import NamedTuple, Self

from ringcp.band import Range, count, merge_all, union
from ringcp.errors import ArgumentError, LayoutError
from ringcp.integers import is_int
from ringcp.layout import DEALT, Contiguous, HeadTail, Layout, Span, chunks
from ringcp.mask import Full, Mask

# Chunks a rank. Measured on packed documents, windows and prefixes: with 4, ranks are up to 19 % off the mean, with 8
# within 2 % nearly everywhere, and with 16 no better, while the runs that kernels work on are a third shorter. So more
# only where 8 do not do, as for one long document that others do not fill up to a multiple of the ranks.
_CHUNKS, _MOST_CHUNKS = 8, 32

# Up to here the best dealing is found by looking at all: 12 chunks on 3 ranks are dealt in 5,775 ways.
_FEW_CHUNKS = 12

# What bounds the search; all times the number of ranks.
_ROUNDS = 8  # swaps that even out
_TRIES = 128  # swaps looked at to move fewer keys

# How many ranks are looked at as partners of a swap, chunks for each chunk, and swaps of those for the keys they move.
_PARTNERS, _NEAR, _FINALISTS = 4, 4, 16


def Balanced(seq_len: int, world_size: int, mask: Mask, *, chunk: int | None = None) -> Layout:
    """Chunks dealt by work: every rank has equally many, and about as many pairs of `mask` to compute as the others.

    Each rank's pairs are within max(2 %, the work of the heaviest chunk) of the mean, and as near as this search gets
    without going below 2 %. Of the dealings that are that even, it takes the one that moves the fewest keys that it
    finds: the best there is, up to 12 chunks. Head-tail and contiguous are among those it looks at, so no more keys
    move than in either that is as even. (One that is not can move fewer: with documents of 4 and 12 tokens on 2
    ranks, head-tail moves 8 keys where no even dealing moves fewer than 9; its ranks compute 52 and 36 pairs.)

    Pure and deterministic: every rank makes the same from the same mask. In time O(n log n) for n chunks, and
    remembered for the last masks. One layout for all batch rows, balanced on their sum. Local lengths differ by up to
    one token a chunk.

    Args:
        seq_len: number of tokens of the whole sequence.
        world_size: number of ranks.
        mask: the mask of the calls, with all that it leaves out: ``Documents(...) & Causal()`` where they are causal.
            A `Predicate` counts as all the pairs that it could allow.
        chunk: the most tokens that a chunk may have. None: 8 chunks a rank, or 16 or 32 where ranks would otherwise be
            more than 2 % off the mean: few, so that the runs that kernels work on stay long (neighbouring chunks of a
            rank are one run). Each rank has 2, 4, 8, ... chunks in any case: then the edges of head-tail are among
            theirs.

    Raises:
        ArgumentError: a `mask` or `chunk` that is none.
        LayoutError: sizes that are none, or a mask of a longer sequence.
    """
    plain = HeadTail(seq_len, world_size)  # checks the sizes
    if not isinstance(mask, Mask):
        raise ArgumentError(
            f"mask: expected the ringcp mask by which work is balanced, got {type(mask).__name__}; "
            "pass that of the calls, such as ringcp.Documents(lengths) & ringcp.Causal()"
        )
    mask = mask.superset
    _check_length(mask, seq_len)
    if chunk is None:
        share = max(2, seq_len // world_size)  # a chunk has at least one token, if there are that many
        most = min(_MOST_CHUNKS, 1 << share.bit_length() - 1)
        per_rank = min(_CHUNKS, most)
    elif not is_int(chunk, 1):
        raise ArgumentError(f"chunk: expected a number of tokens of at least 1, or None, got {chunk!r}; give an int")
    else:
        per_rank = most = max(2, 1 << (-(-seq_len // (world_size * chunk)) - 1).bit_length())
    dealt = _deal(mask, seq_len, world_size, per_rank)
    while dealt.uneven and per_rank < most:
        per_rank *= 2
        dealt = min(dealt, _deal(mask, seq_len, world_size, per_rank), key=lambda dealt: dealt.uneven)
    return Layout(DEALT, plain.seq_len, world_size, dealt.owners)


def choose_layout(mask: Mask | None, seq_len: int, world_size: int) -> Layout:
    """The layout that suits a mask; None is full attention.

    - Every query attends alike, to a window that reaches less far than a rank's share (``seq_len // world_size``):
      contiguous. Only what lies at the edges of a rank moves, and each rank has about the same to do.
    - Every query attends to all before it, or to all: head-tail.
    - Anything else, such as documents, prefixes, padding and wide windows: balanced; if that comes out as one of the
      other two, that one, whose spec is shorter.

    A `Predicate` counts as all the pairs that it could allow. Remembered for the last masks.
    """
    return _chosen(Full() if mask is None else mask.superset, seq_len, world_size)


@lru_cache(maxsize=64)
def _chosen(mask: Mask, seq_len: int, world_size: int) -> Layout:
    head_tail, contiguous = HeadTail(seq_len, world_size), Contiguous(seq_len, world_size)
    _check_length(mask, seq_len)
    sequence = Span(0, seq_len)
    rows = [merge_all(mask.pieces(sequence, sequence, row)) for row in range(mask.rows or 1)]
    if all(len(bands) == 1 and bands[0].q == (0, seq_len) for bands in rows):
        if mask.reach is not None and mask.reach < seq_len // world_size:
            return contiguous
        if not any(bands[0].cuts_high for bands in rows):
            return head_tail
    balanced = Balanced(seq_len, world_size, mask)
    ranks = range(world_size)
    same = (plain for plain in (head_tail, contiguous) if all(plain.spans(r) == balanced.spans(r) for r in ranks))
    return next(same, balanced)


def _check_length(mask: Mask, seq_len: int) -> None:
    wrong = mask.problem(None, seq_len)
    if wrong:
        raise LayoutError(wrong)


class _Dealt(NamedTuple):
    """A dealing: how much farther than 2 % a rank is off the mean (times ranks), and for each chunk its rank."""

    uneven: int
    owners: tuple[int, ...]


@lru_cache(maxsize=64)
def _deal(mask: Mask, seq_len: int, world_size: int, per_rank: int) -> _Dealt:
    """The dealing; ranks are numbered by their first chunks, as in contiguous and head-tail."""
    work = _Work(mask, seq_len, world_size, per_rank)
    if work.num_chunks <= _FEW_CHUNKS:
        parts = _best_of_all(work)
    else:
        # Many chunks start from the dealing of half as many, and not from nothing, so that runs stay long.
        coarse = _deal(mask, seq_len, world_size, per_rank // 2).owners if per_rank > _CHUNKS else ()
        parts = _found(work, coarse)
    owners = [0] * work.num_chunks
    for rank, part in enumerate(sorted(map(sorted, parts))):
        for i in part:
            owners[i] = rank
    worst = max(abs(work.off(part)) for part in parts)
    return _Dealt(max(0, worst - work.slack), tuple(owners))


_Part = Sequence[int]


class _Work:
    """What there is to deal.

    pairs: of each chunk, the number of allowed pairs of its queries.
    covers: of each chunk, its positions and those that its queries attend to.
    related: the chunks whose cover reaches into that of the next one.
    slack: how far `off` may be from 0 where ranks are within 2 % of the mean.
    """

    def __init__(self, mask: Mask, seq_len: int, world_size: int, per_rank: int) -> None:
        self.world_size, self.num_chunks, self.per_rank = world_size, per_rank * world_size, per_rank
        self.pairs, self.covers = [], []
        sequence = Span(0, seq_len)
        for chunk in chunks(seq_len, self.num_chunks):
            bands = (
                [band for row in range(mask.rows or 1) for band in mask.pieces(chunk, sequence, row)]
                if chunk.length
                else []
            )
            self.pairs.append(sum(map(count, bands)))
            own = [(chunk.start, chunk.stop)] if chunk.length else []
            self.covers.append(union([*own, *(band.k for band in bands)]))
        self.related = [i for i, (a, b) in enumerate(pairwise(self.covers)) if a and b and a[-1][1] > b[0][0]]
        self.total = sum(self.pairs)
        self.slack = self.total // 50

    def off(self, part: Iterable[int]) -> int:
        """The pairs of a rank less the mean, times the number of ranks (so that it is an integer)."""
        return self.world_size * sum(self.pairs[i] for i in part) - self.total

    def covered(self, part: Iterable[int]) -> int:
        """How many positions a rank owns or attends to: over all ranks S, and the keys that move."""
        ranges: list[Range] = sorted([r for i in part for r in self.covers[i]])
        total = end = 0
        for start, stop in ranges:
            if stop > end:
                total += stop - (start if start > end else end)
                end = stop
        return total


def _runs(part: Iterable[int]) -> int:
    """How many runs of neighbouring chunks there are."""
    return 1 + sum(b > a + 1 for a, b in pairwise(sorted(part)))


def _best_of_all(work: _Work) -> Sequence[_Part]:
    """Of the most even dealings, or of all within the slack: the fewest keys that move, then the fewest runs."""
    parts = {
        part: (abs(work.off(part)), work.covered(part)) for part in combinations(range(work.num_chunks), work.per_rank)
    }

    def first_parts(free: tuple[int, ...]) -> Iterable[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Each part that holds the first free chunk, and what it leaves."""
        for others in combinations(free[1:], work.per_rank - 1):
            yield (free[0], *others), tuple(i for i in free[1:] if i not in others)

    @cache
    def most_even(free: tuple[int, ...]) -> int:
        if not free:
            return 0
        return min(max(parts[part][0], most_even(rest)) for part, rest in first_parts(free))

    everything = tuple(range(work.num_chunks))
    allowed = max(work.slack, most_even(everything))

    @cache
    def fewest_keys(free: tuple[int, ...]) -> tuple[float, int, tuple[tuple[int, ...], ...]]:
        if not free:
            return 0, 0, ()
        best: tuple[float, int, tuple[tuple[int, ...], ...]] = (float("inf"), 0, ())
        for part, rest in first_parts(free):
            if parts[part][0] <= allowed:
                keys, runs, dealt = fewest_keys(rest)
                best = min(best, (keys + parts[part][1], runs + _runs(part), (part, *dealt)))
        return best

    return fewest_keys(everything)[2]


def _found(work: _Work, coarse: tuple[int, ...]) -> Sequence[_Part]:
    """A dealing that a bounded search finds, from some that are easily made; see `_Dealing`.

    coarse: the owners of half as many chunks, to start from; or none.
    """
    n, half, world_size = work.num_chunks, work.per_rank // 2, work.world_size
    halves = [tuple(range(i, i + half)) for i in range(0, n, half)]
    contiguous = [halves[2 * r] + halves[2 * r + 1] for r in range(world_size)]
    head_tail = [halves[r] + halves[-1 - r] for r in range(world_size)]
    dealings = [_Dealing(work, parts) for parts in (contiguous, head_tail)]
    starts = [dealing.parts for dealing in dealings if dealing.worst > work.slack]
    if coarse:
        starts = [[[i for i in range(n) if coarse[i // 2] == rank] for rank in range(world_size)]]
    dealings += [_Dealing(work, start).even_out() for start in starts]
    if min(dealing.worst for dealing in dealings) > work.slack:
        # In the order of work, one of the next `world_size` chunks to each rank, forth and back. Two ranks then differ
        # by at most the heaviest chunk less the lightest one, which is what `Balanced` promises, whatever the mask.
        order = sorted(range(n), key=lambda i: (work.pairs[i], i))
        rounds = [order[i : i + world_size] for i in range(0, n, world_size)]
        snake = zip(*(r if i % 2 else r[::-1] for i, r in enumerate(rounds)), strict=True)
        dealings.append(_Dealing(work, snake).even_out())
    allowed = max(work.slack, min(dealing.worst for dealing in dealings))
    even = [dealing for dealing in dealings if dealing.worst <= allowed]
    for dealing in even:
        dealing.move_fewer_keys(allowed)
    return min(even, key=lambda dealing: (sum(dealing.covered), dealing.num_runs)).parts


class _Dealing:
    """Which chunks each rank has, and swaps of two chunks that make it better.

    by_pairs: of each rank, its chunks as (pairs, chunk), sorted.
    off, covered: of each rank, see `_Work`.
    """

    def __init__(self, work: _Work, parts: Iterable[_Part]) -> None:
        self.work = work
        self.by_pairs = [sorted((work.pairs[i], i) for i in part) for part in parts]
        self.off = [work.off(part) for part in self.parts]
        self.covered = [work.covered(part) for part in self.parts]

    @property
    def parts(self) -> list[list[int]]:
        return [[i for _, i in part] for part in self.by_pairs]

    @property
    def worst(self) -> int:
        return max(map(abs, self.off))

    @property
    def num_runs(self) -> int:
        return sum(map(_runs, self.parts))

    def covered_after(self, rank: int, gone: int, new: int) -> int:
        """The rank's `covered` with another chunk in place of one."""
        return self.work.covered([new, *(i for _, i in self.by_pairs[rank] if i != gone)])

    def swap(self, r: int, a: int, s: int, b: int) -> None:
        """Give chunk a of rank r to rank s, for chunk b."""
        pairs = self.work.pairs
        covered = self.covered_after(r, a, b), self.covered_after(s, b, a)
        for rank, gone, new in ((r, a, b), (s, b, a)):
            self.by_pairs[rank].remove((pairs[gone], gone))
            insort(self.by_pairs[rank], (pairs[new], new))
            self.off[rank] += self.work.world_size * (pairs[new] - pairs[gone])
        self.covered[r], self.covered[s] = covered

    def even_out(self) -> Self:
        """Swap chunks of the rank that is farthest off with ranks that are off the other way, until all are even.

        Of the swaps that even out most, or enough, it takes the one that adds the fewest keys. None makes the worst
        rank worse.
        """
        order = sorted((off, rank) for rank, off in enumerate(self.off))
        for _ in range(_ROUNDS * self.work.world_size):
            light, heavy = order[0], order[-1]
            off, r = heavy if heavy[0] >= -light[0] else light
            if abs(off) <= self.work.slack:
                break
            others = order[:_PARTNERS] if off > 0 else order[: -_PARTNERS - 1 : -1]
            swaps = sorted(swap for _, s in others if s != r for swap in self._evening(r, s))
            if not swaps:
                break
            left = swaps[0][0]
            finalists = [swap[2:] for swap in swaps[:_FINALISTS] if swap[0] == left]
            a, s, b = min(finalists, key=lambda x: self._more_covered(r, *x))
            for rank in (r, s):
                order.pop(bisect_left(order, (self.off[rank], rank)))
            self.swap(r, a, s, b)
            for rank in (r, s):
                insort(order, (self.off[rank], rank))
        return self

    def _evening(self, r: int, s: int) -> Iterable[tuple[int, int, int, int, int]]:
        """Swaps that bring the farther of two ranks nearer: what is left, how far apart, a, s, b."""
        world_size, slack = self.work.world_size, self.work.slack
        now = max(abs(self.off[r]), abs(self.off[s]))
        wanted = (self.off[r] - self.off[s]) // (2 * world_size)
        for pairs, a in self.by_pairs[r]:
            for other, b in _nearest(self.by_pairs[s], pairs - wanted):
                moved = world_size * (pairs - other)
                left = max(abs(self.off[r] - moved), abs(self.off[s] + moved))
                if left < now:
                    yield max(left, slack), abs(a - b), a, s, b

    def _more_covered(self, r: int, a: int, s: int, b: int) -> int:
        after = self.covered_after(r, a, b) + self.covered_after(s, b, a)
        return after - self.covered[r] - self.covered[s]

    def move_fewer_keys(self, allowed: int) -> None:
        """Where neighbouring chunks have different owners, bring one to the other's if that moves fewer keys.

        Or as many, in fewer runs. Another chunk of about as much work goes back, so that no rank is farther off than
        `allowed`.
        """
        owner = {i: rank for rank, part in enumerate(self.parts) for i in part}
        tries = _TRIES * self.work.world_size
        improved = True
        while improved:
            improved = False
            for left in self.work.related:
                for a, kept in ((left + 1, left), (left, left + 1)):
                    r, s = owner[a], owner[kept]
                    if r == s:
                        break
                    if tries <= 0:
                        return
                    backs = self._backs(r, a, s, kept, allowed)
                    tries -= 1 + len(backs)
                    found = min(
                        ((self._more_covered(r, a, s, b), _more_runs(owner, a, b), b) for b in backs), default=(0, 0, a)
                    )
                    if found < (0, 0):
                        b = found[2]
                        self.swap(r, a, s, b)
                        owner[a], owner[b] = s, r
                        improved = True

    def _backs(self, r: int, a: int, s: int, kept: int, allowed: int) -> list[int]:
        """Chunks of s that may go to r for chunk a."""
        world_size, pairs = self.work.world_size, self.work.pairs[a]
        # off[r] - world_size * (pairs - other) and off[s] + world_size * (pairs - other) are to be within `allowed`.
        least = max(self.off[r] - allowed, -allowed - self.off[s])
        most = min(self.off[r] + allowed, allowed - self.off[s])
        near = _nearest(self.by_pairs[s], pairs - (least + most) // (2 * world_size))
        return [b for other, b in near if b != kept and least <= world_size * (pairs - other) <= most]


def _more_runs(owner: dict[int, int], a: int, b: int) -> int:
    """How many more runs there are once chunks a and b have changed owners."""

    def joins(i: int, rank: int, but: int) -> int:
        return sum(j != but and owner.get(j) == rank for j in (i - 1, i + 1))

    r, s = owner[a], owner[b]
    return joins(a, r, b) + joins(b, s, a) - joins(a, s, b) - joins(b, r, a)


def _nearest(part: Sequence[tuple[int, int]], pairs: int) -> Sequence[tuple[int, int]]:
    """Some chunks of a rank whose work is near to `pairs`."""
    at = bisect_right(part, (pairs, -1))
    return part[max(0, at - _NEAR) : at + _NEAR]
