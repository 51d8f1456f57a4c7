"""What every schedule must do, checked against masks that are written out: see `verify`."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st

from ringcp import Causal, Chunked, Contiguous, Documents, Full, HeadTail, Padding, Prefix, Striped, Window
from ringcp.band import Band, subtract, trim
from ringcp.layout import Layout, Span
from ringcp.mask import Mask, Pieces
from ringcp.schedule import Heads, Message, Schedule, Step, Tile, build
from ringcp.topology import Topology


@dataclass(frozen=True)
class Bands:
    """A mask that is nothing but disjoint bands over the positions, for each batch row its own if `rows` says so."""

    of_row: tuple[tuple[Band, ...], ...]
    rows: int | None = None
    reach: int | None = None

    def pieces(self, q_span: Span, k_span: Span, row: int = 0) -> list[Band]:
        placed = (on_spans(band, q_span, k_span) for band in self.of_row[row])
        return [band for band in placed if band is not None]


def on_spans(band: Band, q_span: Span, k_span: Span) -> Band | None:
    """The part of a band over positions that lies on two spans of one step, in elements of the spans."""
    step = q_span.step
    assert step == k_span.step, "a schedule asks about spans of one step"
    ahead = q_span.start - k_span.start
    q = [np.clip(-((q_span.start - p) // step), 0, q_span.length) for p in band.q]
    k = [np.clip(-((k_span.start - p) // step), 0, k_span.length) for p in band.k]
    return trim(tuple(map(int, q)), tuple(map(int, k)), -((ahead - band.lo) // step), (band.hi - ahead) // step)


def pairs_of(band: Band) -> np.ndarray:
    """The rectangle of a band written out: bool (num_q, num_k)."""
    ahead = np.arange(*band.q)[:, None] - np.arange(*band.k)[None, :]
    return (band.lo <= ahead) & (ahead <= band.hi)


def allowed_pairs(mask: Pieces, seq_len: int) -> np.ndarray:
    """The mask written out: bool (batch rows with masks of their own or 1, S, S)."""
    if isinstance(mask, Mask):
        positions = torch.arange(seq_len)
        return mask.dense(positions, positions).reshape(mask.rows or 1, seq_len, seq_len).numpy()
    allowed = np.zeros((mask.rows or 1, seq_len, seq_len), dtype=bool)
    for row, bands in enumerate(mask.of_row):
        for band in bands:
            allowed[row, slice(*band.q), slice(*band.k)] |= pairs_of(band)
    return allowed


@dataclass
class Case:
    """The schedules of all ranks for one call."""

    layout: Layout
    mask: Pieces
    topology: Topology
    heads: Heads | None = None

    @cached_property
    def schedules(self) -> list[Schedule]:
        ranks = range(self.layout.world_size)
        return [build(self.layout, self.mask, self.topology, rank, self.heads) for rank in ranks]

    @property
    def num_heads(self) -> int:
        """Query heads; one stands for all where the schedule does not tell them apart."""
        return 1 if self.heads is None else self.heads.q

    @cached_property
    def positions(self) -> list[np.ndarray]:
        return [self.layout.positions(rank).numpy() for rank in range(self.layout.world_size)]

    @cached_property
    def allowed(self) -> np.ndarray:
        return allowed_pairs(self.mask, self.layout.seq_len)

    def rows_of(self, step: Step) -> np.ndarray:
        """Positions of the rows that a step says are in hand."""
        return take(self.positions[step.source], step.rows)

    def need(self, rank: int, owner: int) -> list[int]:
        """Positions of `owner` that some query of `rank` attends to, from the positions alone."""
        attended = self.allowed[:, self.positions[rank]].any((0, 1))
        return [p for p in self.positions[owner].tolist() if attended[p]]


def take(x: np.ndarray, ranges: tuple[tuple[int, int], ...]) -> np.ndarray:
    return np.concatenate([x[:0], *(x[slice(*r)] for r in ranges)])


def verify(layout: Layout, mask: Pieces, topology: Topology, heads: Heads | None = None) -> Case:
    """Check everything that holds for every schedule, on all ranks together."""
    case = Case(layout, mask, topology, heads)
    check_tiles(case)
    for direction in ("forward", "backward"):
        check_every_pair_once(case, direction)
        run(case, direction)
    check_traffic(case)
    return case


def check_tiles(case: Case) -> None:
    """No tile has a dead row or key; backward works through the tiles of forward in the same order."""
    for rank, schedule in enumerate(case.schedules):
        assert schedule.rank == schedule.forward[0].source == rank
        assert schedule.num_rows == len(case.positions[rank])
        for step in schedule.forward:
            for band in (tile.band for tile in step.tiles):
                assert trim(*band) == band, f"dead rows, keys or edges in {band}"
                assert 0 <= band.q[0] < band.q[1] <= schedule.num_rows
                assert 0 <= band.k[0] < band.k[1] <= step.num_rows
        ahead, back = schedule.forward, schedule.backward
        assert [(s.source, s.rows) for s in back[: len(ahead)]] == [(s.source, s.rows) for s in ahead]
        for i, step in enumerate(back[: len(ahead)]):
            assert [(t.band, t.batch) for t in step.tiles] == [(t.band, t.batch) for t in ahead[i].tiles]
        for step in back[len(ahead) :]:  # the last gradients on their way home, and maybe work of the own block
            assert step.source == rank
            assert [t.band for t in step.tiles] in ([], [t.band for t in ahead[0].tiles])


def heads_of(case: Case, tile: Tile) -> slice:
    """The query heads of a tile, which have to be those of its KV heads."""
    if case.heads is None:
        assert tile.q_heads is tile.kv_heads is None
        return slice(None)
    start, stop = tile.q_heads or (0, case.heads.q)
    assert 0 <= start < stop <= case.heads.q
    kv_start, kv_stop = tile.kv_heads or (0, case.heads.kv)
    if kv_stop - kv_start > 1 or case.heads.kv > 1:
        group = case.heads.q // case.heads.kv
        assert (kv_start * group, kv_stop * group) == (start, stop), f"query heads away from their KV heads: {tile}"
    return slice(start, stop)


def check_every_pair_once(case: Case, direction: str) -> None:
    """Every allowed pair is in exactly one tile over all ranks and steps, for each head, and no other pair is."""
    rows, seq_len = case.mask.rows or 1, case.layout.seq_len
    seen = np.zeros((rows, case.num_heads, seq_len, seq_len), dtype=np.int32)
    for rank, schedule in enumerate(case.schedules):
        q_pos = case.positions[rank]
        for step in getattr(schedule, direction):
            k_pos = case.rows_of(step)
            for tile in step.tiles:
                assert (tile.batch is None) == (case.mask.rows is None)
                batch = slice(None) if tile.batch is None else slice(*tile.batch)
                of_heads = seen[batch, heads_of(case, tile)]
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
    in_hand = list(case.positions)
    own = [np.zeros((len(p), world_size, case.num_heads), dtype=np.int64) for p in case.positions]
    sums: list[tuple[np.ndarray, np.ndarray] | None] = [None] * world_size

    for i, steps in enumerate(zip(*steps_of, strict=True)):
        wire: dict[tuple[int, int], deque] = defaultdict(deque)
        for rank, step in enumerate(steps):
            if step.source == rank and step.rows:
                in_hand[rank] = case.positions[rank]
            assert np.array_equal(in_hand[rank], case.rows_of(step)), f"rank {rank} step {i}"
            for message in step.sends:
                check_message(message, rank)
                if message.what == "dkv":
                    assert message.own_rows is None
                    data = sums[rank]
                elif message.own_rows is None:
                    data = in_hand[rank]
                else:
                    data = take(case.positions[rank], message.own_rows)
                wire[rank, message.peer].append((message.what, message.num_rows, data))
        received: list[dict[str, tuple]] = [{} for _ in steps]
        for rank, step in enumerate(steps):
            for message in step.recvs:
                check_message(message, rank)
                what, num_rows, data = wire[message.peer, rank].popleft()
                assert (what, num_rows) == (message.what, message.num_rows)
                assert what not in received[rank], "two buffers: one block comes in while one is in hand"
                received[rank][what] = (message, data)
        assert not any(wire.values()), "sent, but awaited by nobody"

        for rank, step in enumerate(steps):
            settle(case, rank, i, step, received[rank].get("dkv"), in_hand[rank], own, sums)
            in_hand[rank] = received[rank]["kv"][1] if "kv" in received[rank] else case.positions[rank][:0]
            if "kv" in received[rank]:
                assert received[rank]["kv"][0].num_rows == len(in_hand[rank])

    if direction == "backward":
        for rank, keys in enumerate(case.positions):
            expected = [case.allowed[:, q][:, :, keys].sum((0, 1)) for q in case.positions]
            assert (own[rank] == np.stack(expected, 1)[..., None]).all(), f"gradients of rank {rank}"


def settle(case: Case, rank: int, i: int, step: Step, received, block, own, sums) -> None:
    """Add what a step computed and received to where it belongs."""
    computed = np.zeros((step.num_rows, *own[rank].shape[1:]), dtype=np.int64)
    for tile in step.tiles:
        computed[slice(*tile.band.k), rank, heads_of(case, tile)] += pairs_of(tile.band).sum(0)[:, None]
    if received is not None:
        message, (positions, gradients) = received
        assert len(positions) == message.num_rows
        if message.own_rows is None:
            assert np.array_equal(positions, block), "a sum for another block than the one in hand"
            computed = computed + gradients
        else:
            assert np.array_equal(positions, take(case.positions[rank], message.own_rows))
            own[rank][take(np.arange(len(own[rank])), message.own_rows)] += gradients
    if step.source == rank and step.num_rows:
        own[rank] += computed
    elif step.num_rows:
        sums[rank] = (block, computed)


def check_message(message: Message, rank: int) -> None:
    assert message.peer != rank
    assert message.num_rows > 0
    if message.own_rows is not None:
        assert message.num_rows == sum(stop - start for start, stop in message.own_rows)
        assert all(start < stop for start, stop in message.own_rows)
        assert all(a[1] < b[0] for a, b in pairwise(message.own_rows)), "rows that touch are one range"


def check_traffic(case: Case) -> None:
    """Ring: the P - 1 blocks that pass, and as many sums. Direct: exactly the rows that are needed, and back."""
    layout, ranks = case.layout, range(case.layout.world_size)
    for rank, schedule in enumerate(case.schedules):
        kv, dkv = schedule.rows_sent("kv"), schedule.rows_sent("dkv", schedule.backward)
        assert schedule.rows_sent("kv", schedule.backward) == kv
        assert schedule.rows_sent("dkv") == 0
        if schedule.kind == "local":
            assert len(case.schedules) == 1
            assert not any(step.sends or step.recvs for step in (*schedule.forward, *schedule.backward))
        elif schedule.kind == "ring":
            after = case.topology.downstream(rank, 1)
            assert kv == layout.seq_len - layout.local_len(after)
            assert dkv == layout.seq_len - layout.local_len(rank)
            assert {m.peer for step in schedule.backward for m in step.sends} <= {after}
        else:
            sent = {r: [] for r in ranks}
            for message in (m for step in schedule.forward for m in step.sends):
                sent[message.peer] += take(case.positions[rank], message.own_rows).tolist()
            assert sent == {peer: case.need(peer, rank) if peer != rank else [] for peer in ranks}
            assert dkv == sum(len(case.need(rank, owner)) for owner in ranks if owner != rank)
    assert {schedule.kind for schedule in case.schedules} == {expected_kind(case)}


def expected_kind(case: Case) -> str:
    """Ring where one of three or more ranks attends to every key; wide masks on strided layouts count as full."""
    layout, ranks = case.layout, range(case.layout.world_size)
    if len(ranks) <= 2:
        return "direct" if len(ranks) == 2 else "local"
    wide = case.mask.reach is None or case.mask.reach >= len(ranks)
    if layout.name == "striped" and wide:
        return "ring" if layout.seq_len else "direct"
    for rank in ranks:
        others = [p for owner in ranks if owner != rank for p in case.positions[owner]]
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
def any_bands(draw, seq_len: int) -> Bands:
    """Arbitrary disjoint bands over a sequence; in each batch row others, or one set for all rows."""

    def one_row() -> tuple[Band, ...]:
        bands = []
        for _ in range(draw(st.integers(0, 4))):
            q, k = (tuple(sorted(draw(st.tuples(ends, ends)))) for _ in range(2))
            lo = draw(st.integers(-seq_len, seq_len))
            bands.append(trim(q, k, lo, lo + draw(st.integers(0, 2 * seq_len))))
        return disjoint([band for band in bands if band is not None])

    ends = st.integers(0, seq_len)
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
