"""What every schedule must do, checked against masks that are written out: see `verify`."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st

from ringcp import Causal, Chunked, Contiguous, Documents, Full, HeadTail, Padding, Prefix, Striped, Window
from ringcp.band import Band, Range, subtract, trim
from ringcp.layout import Layout, Span
from ringcp.mask import Mask, Pieces
from ringcp.needs import Placing
from ringcp.schedule import Heads, Message, Schedule, Step, Tile, build
from ringcp.topology import Topology


@dataclass(frozen=True)
class Bands:
    """A mask that is nothing but disjoint bands over the positions, for each batch row its own if `rows` says so."""

    of_row: tuple[tuple[Band, ...], ...]
    rows: int | None = None
    reach: int | None = None

    def pieces(self, q_span: Span, k_span: Span, row: int = 0) -> list[Band]:
        if q_span.step != k_span.step and min(q_span.length, k_span.length) > 1:
            one_by_one = [(i, Span(p, p + 1)) for i, p in enumerate(range(*q_span))]
            return [band.shift(i) for i, q in one_by_one for band in self.pieces(q, k_span, row)]
        placed = (on_spans(band, q_span, k_span) for band in self.of_row[row])
        return [band for band in placed if band is not None]


def on_spans(band: Band, q_span: Span, k_span: Span) -> Band | None:
    """The part of a band over positions that lies on two spans of one step, in elements of the spans."""
    step = q_span.step if q_span.length > 1 else k_span.step
    ahead = q_span.start - k_span.start
    q = [np.clip(-((q_span.start - p) // step), 0, q_span.length) for p in band.q]
    k = [np.clip(-((k_span.start - p) // step), 0, k_span.length) for p in band.k]
    return trim(tuple(map(int, q)), tuple(map(int, k)), -((ahead - band.lo) // step), (band.hi - ahead) // step)


def pairs_of(band: Band) -> np.ndarray:
    """The rectangle of a band written out: bool (num_q, num_k)."""
    ahead = np.arange(*band.q)[:, None] - np.arange(*band.k)[None, :]
    return (band.lo <= ahead) & (ahead <= band.hi)


def allowed_pairs(mask: Pieces, seq_len: int, num_keys: int | None = None) -> np.ndarray:
    """The mask written out: bool (batch rows with masks of their own or 1, S, keys); None for S keys."""
    shape = mask.rows or 1, seq_len, seq_len if num_keys is None else num_keys
    if isinstance(mask, Mask):
        return mask.dense(*map(torch.arange, shape[1:])).reshape(shape).numpy()
    allowed = np.zeros(shape, dtype=bool)
    for row, bands in enumerate(mask.of_row):
        for band in bands:
            allowed[row, slice(*band.q), slice(*band.k)] |= pairs_of(band)
    return allowed


@dataclass
class Case:
    """The schedules of all ranks for one call."""

    layout: Placing
    mask: Pieces
    topology: Topology
    heads: Heads | None = None
    gather: int | None = None
    kv_layout: Placing | None = None

    @property
    def keys(self) -> Placing:
        return self.layout if self.kv_layout is None else self.kv_layout

    @cached_property
    def schedules(self) -> list[Schedule]:
        more = {"gather": self.gather, "kv_layout": self.kv_layout}
        ranks = range(self.layout.world_size)
        return [build(self.layout, self.mask, self.topology, rank, self.heads, **more) for rank in ranks]

    @property
    def num_heads(self) -> int:
        """Query heads; one stands for all where the schedule does not tell them apart."""
        return 1 if self.heads is None else self.heads.q

    def serves(self, kv: Range | None) -> np.ndarray:
        """Which query heads some key heads serve: bool (Hq,)."""
        if self.heads is None or kv is None:
            return np.ones(self.num_heads, dtype=bool)
        group = self.heads.group or self.heads.q // self.heads.kv
        return np.isin((self.heads.first + np.arange(self.heads.q)) // group, np.arange(*kv))

    @cached_property
    def positions(self) -> list[np.ndarray]:
        return [self.layout.positions(rank).numpy() for rank in range(self.layout.world_size)]

    @cached_property
    def key_positions(self) -> list[np.ndarray]:
        return [self.keys.positions(rank).numpy() for rank in range(self.layout.world_size)]

    @cached_property
    def allowed(self) -> np.ndarray:
        return allowed_pairs(self.mask, self.layout.seq_len, self.keys.seq_len)

    def rows_of(self, step: Step) -> np.ndarray:
        """Positions of the keys that a step says are in hand."""
        if step.source is None:
            assert not step.rows
            return np.array([p for span in step.positions for p in range(*span)], dtype=np.int64)
        assert not step.positions
        return take(self.key_positions[step.source], step.rows)

    def need(self, rank: int, owner: int) -> list[int]:
        """Positions of `owner` that some query of `rank` attends to, from the positions alone."""
        attended = self.allowed[:, self.positions[rank]].any((0, 1))
        return [p for p in self.key_positions[owner].tolist() if attended[p]]

    @property
    def groups(self) -> list[Range]:
        """The KV heads of each step of a gather plan."""
        return [(i, min(i + self.gather, self.heads.kv)) for i in range(0, self.heads.kv, self.gather)]


def take(x: np.ndarray, ranges: Iterable[Range | Span]) -> np.ndarray:
    return np.concatenate([x[:0], *(x[slice(*r)] for r in ranges)])


def verify(layout, mask, topology, heads=None, gather=None, kv_layout=None) -> Case:
    """Check everything that holds for every schedule, on all ranks together."""
    case = Case(layout, mask, topology, heads, gather, kv_layout)
    check_tiles(case)
    for direction in ("forward", "backward"):
        check_every_pair_once(case, direction)
        run(case, direction)
    check_traffic(case)
    return case


def check_tiles(case: Case) -> None:
    """No tile has a dead row or key; backward works through the tiles of forward in the same order."""
    for rank, schedule in enumerate(case.schedules):
        own = None if schedule.kind == "gather" else rank
        assert schedule.rank == rank
        assert schedule.forward[0].source == own
        assert schedule.num_rows == len(case.positions[rank])
        for step in schedule.forward:
            for band in (tile.band for tile in step.tiles):
                assert trim(*band) == band, f"dead rows, keys or edges in {band}"
                assert 0 <= band.q[0] < band.q[1] <= schedule.num_rows
                assert 0 <= band.k[0] < band.k[1] <= step.num_rows
        ahead, back = schedule.forward, schedule.backward
        in_hand = [[(s.source, s.rows, s.positions, s.kv_heads) for s in steps] for steps in (ahead, back)]
        assert in_hand[1][: len(ahead)] == in_hand[0]
        for i, step in enumerate(back[: len(ahead)]):
            assert bands_of(step) == bands_of(ahead[i])
        for step in back[len(ahead) :]:  # the last gradients on their way home, and maybe work of the own block
            assert step.source == own
            assert bands_of(step) in ([], bands_of(ahead[0]))


def bands_of(step: Step) -> list[tuple]:
    """The work of a step, whatever the heads."""
    return list(dict.fromkeys((tile.band, tile.batch) for tile in step.tiles))


def heads_of(case: Case, step: Step, tile: Tile) -> slice:
    """The query heads of a tile; a kernel that gets them beside its KV heads must give each the KV head it uses."""
    if case.heads is None:
        assert tile.q_heads is tile.kv_heads is None
        return slice(None)
    start, stop = tile.q_heads or (0, case.heads.q)
    assert 0 <= start < stop <= case.heads.q
    first_held, last_held = step.kv_heads or (0, case.heads.kv)
    kv_start, kv_stop = tile.kv_heads or (0, last_held - first_held)
    assert 0 <= kv_start < kv_stop <= last_held - first_held
    served, rest = divmod(stop - start, kv_stop - kv_start)
    assert rest == 0, f"query heads that are no multiple of the KV heads: {tile}"
    group = case.heads.group or case.heads.q // case.heads.kv
    for head in range(start, stop):
        used = first_held + kv_start + (head - start) // served
        assert used == (case.heads.first + head) // group, f"query head {head} away from its KV head: {tile}"
    return slice(start, stop)


def check_every_pair_once(case: Case, direction: str) -> None:
    """Every allowed pair is in exactly one tile over all ranks and steps, for each head, and no other pair is."""
    seen = np.zeros((case.mask.rows or 1, case.num_heads, *case.allowed.shape[1:]), dtype=np.int32)
    for rank, schedule in enumerate(case.schedules):
        q_pos = case.positions[rank]
        for step in getattr(schedule, direction):
            k_pos = case.rows_of(step)
            for tile in step.tiles:
                assert (tile.batch is None) == (case.mask.rows is None)
                batch = slice(None) if tile.batch is None else slice(*tile.batch)
                of_heads = seen[batch, heads_of(case, step, tile)]
                of_heads[:, :, q_pos[slice(*tile.band.q), None], k_pos[None, slice(*tile.band.k)]] += pairs_of(
                    tile.band
                )
    assert (seen == case.allowed[:, None]).all()


def run(case: Case, direction: str) -> None:
    """Run all ranks step by step with symbols for data, as the executor does with tensors.

    A row of keys is its position; its gradient is, for each rank and head, the number of pairs with that rank's
    queries. So what is in hand in a step is what the step says, messages match in pairs, and every contribution to a
    gradient comes to the owner of its row exactly once.
    """
    world_size = case.layout.world_size
    steps_of = [getattr(schedule, direction) for schedule in case.schedules]
    assert len({len(steps) for steps in steps_of}) == 1, "ranks differ in the number of steps"
    in_hand = [case.rows_of(steps[0]) for steps in steps_of]
    own = [np.zeros((len(p), world_size, case.num_heads), dtype=np.int64) for p in case.key_positions]
    sums: list[tuple[np.ndarray, np.ndarray] | None] = [None] * world_size

    for i, steps in enumerate(zip(*steps_of, strict=True)):
        wire: dict[tuple[int, int], deque] = defaultdict(deque)
        for rank, step in enumerate(steps):
            if step.source == rank and step.rows:
                in_hand[rank] = case.key_positions[rank]
            assert np.array_equal(in_hand[rank], case.rows_of(step)), f"rank {rank} step {i}"
            for message in (*step.sends, *step.kept):
                check_message(message, rank, kept=message in step.kept)
                data = sent(case, rank, message, in_hand[rank], sums[rank])
                wire[rank, message.peer].append((message.what, message.num_rows, message.kv_heads, data))
        received: list[list[tuple]] = [[] for _ in steps]
        for rank, step in enumerate(steps):
            for message in (*step.recvs, *step.kept):
                check_message(message, rank, kept=message in step.kept)
                what, num_rows, kv_heads, data = wire[message.peer, rank].popleft()
                assert (what, num_rows, kv_heads) == (message.what, message.num_rows, message.kv_heads)
                received[rank].append((message, data))
            whats = [m.what for m, _ in received[rank] if m.block_rows is None and m.kv_heads is None]
            assert len(whats) == len(set(whats)), "two buffers: one block comes in while one is in hand"
        assert not any(wire.values()), "sent, but awaited by nobody"

        for rank, step in enumerate(steps):
            settle(case, rank, step, received[rank], in_hand[rank], own, sums)
            following = steps_of[rank][i + 1] if i + 1 < len(steps_of[rank]) else None
            in_hand[rank] = next_block(following, [of for of in received[rank] if of[0].what == "kv"])

    if direction == "backward":
        for rank, keys in enumerate(case.key_positions):
            expected = [case.allowed[:, q][:, :, keys].sum((0, 1)) for q in case.positions]
            assert (own[rank] == np.stack(expected, 1)[..., None]).all(), f"gradients of rank {rank}"


def sent(case: Case, rank: int, message: Message, block: np.ndarray, sums):
    """What a message carries: positions, or positions and gradients of its heads alone."""
    if message.what == "kv":
        return block if message.own_rows is None else take(case.key_positions[rank], message.own_rows)
    if message.block_rows is None:
        assert message.own_rows is None
        return sums
    positions, gradients = (take(x, message.block_rows) for x in sums)
    return positions, gradients * case.serves(message.kv_heads)


def next_block(following: Step | None, came: list[tuple[Message, np.ndarray]]) -> np.ndarray:
    """The rows in hand in the next step, from what has come."""
    if following is None or following.source is not None:
        assert all(message.num_rows == len(data) for message, data in came)
        return np.concatenate([np.empty(0, dtype=np.int64), *(data for _, data in came)])
    block = np.full(following.num_rows, -1)
    for message, data in came:
        assert message.kv_heads == following.kv_heads
        for at, position in zip(take(np.arange(len(block)), message.block_rows), data, strict=True):
            assert block[at] == -1, "two rows in one place"
            block[at] = position
    return block


def settle(case: Case, rank: int, step: Step, received, block, own, sums) -> None:
    """Add what a step computed and received to where it belongs."""
    computed = np.zeros((step.num_rows, *own[rank].shape[1:]), dtype=np.int64)
    for tile in step.tiles:
        computed[slice(*tile.band.k), rank, heads_of(case, step, tile)] += pairs_of(tile.band).sum(0)[:, None]
    assert not computed[:, :, ~case.serves(step.kv_heads)].any(), "heads that are not in hand"
    for message, (positions, gradients) in (of for of in received if of[0].what == "dkv"):
        assert len(positions) == message.num_rows
        if message.own_rows is None:
            assert np.array_equal(positions, block), "a sum for another block than the one in hand"
            computed = computed + gradients
        else:
            assert np.array_equal(positions, take(case.key_positions[rank], message.own_rows))
            own[rank][take(np.arange(len(own[rank])), message.own_rows)] += gradients
    if step.source == rank and step.num_rows:
        own[rank] += computed
    elif step.num_rows:
        sums[rank] = (block, computed)


def check_message(message: Message, rank: int, *, kept: bool) -> None:
    assert (message.peer == rank) == kept
    assert message.num_rows > 0
    if message.block_rows is not None:
        assert message.num_rows == sum(span.length for span in message.block_rows)
    if message.own_rows is not None:
        assert message.num_rows == sum(stop - start for start, stop in message.own_rows)
        assert all(start < stop for start, stop in message.own_rows)
        assert all(a[1] < b[0] for a, b in pairwise(message.own_rows)), "rows that touch are one range"


def check_traffic(case: Case) -> None:
    """Ring: the P - 1 blocks that pass, and as many sums. Direct: exactly the rows that are needed, and back.

    Gather: the same rows for each group of heads.
    """
    keys, ranks = case.keys, range(case.layout.world_size)
    for rank, schedule in enumerate(case.schedules):
        kv, dkv = schedule.rows_sent("kv"), schedule.rows_sent("dkv", schedule.backward)
        assert schedule.rows_sent("kv", schedule.backward) == kv
        assert schedule.rows_sent("dkv") == 0
        if schedule.kind == "local":
            assert len(case.schedules) == 1
            assert not any(step.sends or step.recvs for step in (*schedule.forward, *schedule.backward))
        elif schedule.kind == "ring":
            after = case.topology.downstream(rank, 1)
            assert kv == keys.seq_len - keys.local_len(after)
            assert dkv == keys.seq_len - keys.local_len(rank)
            assert {m.peer for step in schedule.backward for m in step.sends} <= {after}
        else:
            groups = case.groups if schedule.kind == "gather" else [None]
            sent = {(r, group): [] for r in ranks for group in groups}
            for message in (m for step in schedule.forward for m in step.sends):
                rows = take(case.key_positions[rank], message.own_rows).tolist()
                sent[message.peer, message.kv_heads] += rows
            assert sent == {(r, group): case.need(r, rank) if r != rank else [] for r, group in sent}
            assert dkv == len(groups) * sum(len(case.need(rank, owner)) for owner in ranks if owner != rank)
    assert {schedule.kind for schedule in case.schedules} == {expected_kind(case)}


def expected_kind(case: Case) -> str:
    """Ring where one of three or more ranks attends to every key."""
    ranks = range(case.layout.world_size)
    if len(ranks) == 1 or case.gather is not None:
        return "gather" if len(ranks) > 1 else "local"
    if len(ranks) == 2:
        return "direct"
    for rank in ranks:
        others = [p for owner in ranks if owner != rank for p in case.key_positions[owner]]
        if others and case.allowed[:, case.positions[rank]].any((0, 1))[others].all():
            return "ring"
    return "direct"


def disjoint(bands: list[Band]) -> tuple[Band, ...]:
    """Of each band what no earlier one has."""
    result: list[Band] = []
    for band in bands:
        rest = [band]
        for taken in result:
            rest = [part for x in rest for part in subtract(x, taken)]
        result += rest
    return tuple(result)


@st.composite
def any_bands(draw, seq_len: int, num_keys: int | None = None) -> Bands:
    """Arbitrary disjoint bands over a sequence; in each batch row others, or one set for all rows."""
    num_keys = seq_len if num_keys is None else num_keys

    def one_row() -> tuple[Band, ...]:
        bands = []
        for _ in range(draw(st.integers(0, 4))):
            q, k = (tuple(sorted(draw(st.tuples(ends, ends)))) for ends in (q_ends, k_ends))
            lo = draw(st.integers(-num_keys, seq_len))
            bands.append(trim(q, k, lo, lo + draw(st.integers(0, seq_len + num_keys))))
        return disjoint([band for band in bands if band is not None])

    q_ends, k_ends = st.integers(0, seq_len), st.integers(0, num_keys)
    rows = draw(st.sampled_from([None, None, 2, 3]))
    of_row = tuple(one_row() for _ in range(rows or 1))
    farthest = max((abs(d) for bands in of_row for b in bands for d in (b.lo, b.hi)), default=0)
    return Bands(of_row, rows, draw(st.sampled_from([None, farthest])))


def of_each_row(make, entries):
    """A mask with one entry for all batch rows, or one for each of two."""
    return st.one_of(st.lists(entries, min_size=1, max_size=1), st.lists(entries, min_size=2, max_size=2)).map(make)


leaves = st.one_of(
    st.sampled_from([Full(), Causal()]),
    st.builds(Window, st.integers(0, 20), st.sampled_from([0, 0, 1, 6])),
    of_each_row(Documents, st.lists(st.one_of(st.integers(0, 2), st.integers(0, 30)), max_size=8)),
    of_each_row(Prefix, st.integers(0, 40)),
    of_each_row(Padding, st.integers(0, 40)),
    of_each_row(lambda valid: Padding(valid, side="left", seq_len=40), st.integers(0, 40)),
    st.builds(Chunked, st.integers(1, 20)),
)
expressions = st.recursive(
    leaves, lambda m: st.builds(lambda a, b, c: a & b if c else a | b, m, m, st.booleans()), max_leaves=3
)


@st.composite
def any_call(draw, max_world: int, max_len: int, min_world: int = 1) -> tuple[Layout, Pieces, Topology]:
    """A layout, a mask and a topology that fit each other."""
    world_size, seq_len = draw(st.integers(min_world, max_world)), draw(st.integers(0, max_len))
    layout = draw(st.sampled_from([Contiguous, HeadTail, Striped]))(seq_len, world_size)
    mask = draw(st.one_of(leaves, expressions, any_bands(seq_len)))
    order = draw(st.one_of(st.just(list(range(world_size))), st.permutations(range(world_size))))
    return layout, mask, Topology(tuple(order))


@dataclass(frozen=True)
class Shuffled:
    """Chunks dealt out in any way, each rank's in any order: no more than a schedule has to know of a layout."""

    seq_len: int
    of_rank: tuple[tuple[Span, ...], ...]

    @property
    def world_size(self) -> int:
        return len(self.of_rank)

    def spans(self, rank: int) -> tuple[Span, ...]:
        return self.of_rank[rank]

    def local_len(self, rank: int) -> int:
        return len(self.positions(rank))

    def positions(self, rank: int) -> torch.Tensor:
        return torch.tensor([p for span in self.of_rank[rank] for p in range(*span)], dtype=torch.int64)


@st.composite
def shuffled(draw, seq_len: int, world_size: int) -> Shuffled:
    """A layout of any chunks; some ranks may own none."""
    edges = sorted({0, seq_len, *draw(st.lists(st.integers(0, seq_len), max_size=2 * world_size))})
    chunks = [Span(*ends) for ends in draw(st.permutations(list(pairwise(edges))))]
    owners = draw(st.lists(st.integers(0, world_size - 1), min_size=len(chunks), max_size=len(chunks)))
    dealt = [tuple(c for c, owner in zip(chunks, owners, strict=True) if owner == r) for r in range(world_size)]
    return Shuffled(seq_len, tuple(dealt))


def placings(seq_len: int, world_size: int):
    """Any layout: of a name, or shuffled."""
    named = st.sampled_from([Contiguous, HeadTail, Striped]).map(lambda make: make(seq_len, world_size))
    return st.one_of(named, named, shuffled(seq_len, world_size))


@st.composite
def any_cross_call(draw, max_world: int, max_len: int) -> tuple[Placing, Pieces, Topology, Placing]:
    """Layouts of queries and of keys, of any lengths, with a mask and a topology."""
    world_size = draw(st.integers(1, max_world))
    num_q, num_k = (draw(st.integers(0, max_len)) for _ in range(2))
    mask = draw(st.one_of(leaves, expressions, any_bands(num_q, num_k)))
    topology = Topology(tuple(draw(st.permutations(range(world_size)))))
    return draw(placings(num_q, world_size)), mask, topology, draw(placings(num_k, world_size))


@st.composite
def some_heads(draw) -> Heads:
    """Any contiguous part of the query heads, with the KV heads that it needs."""
    group, first_q, q = (draw(st.integers(*ends)) for ends in ((1, 5), (0, 12), (1, 12)))
    first_kv, last_kv = first_q // group, (first_q + q - 1) // group
    return Heads(q, last_kv + 1 - first_kv, first_q - first_kv * group, group)
