"""Schedules of all ranks together: exact, matched and no more traffic than needed, for any layout, mask and ring."""

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_checks import Bands, any_call, any_cross_call, some_heads, verify

import ringcp
from ringcp import Causal, Contiguous, Full, HeadTail, Striped, Window
from ringcp.band import Band, trim
from ringcp.errors import ArgumentError
from ringcp.layout import Span
from ringcp.schedule import Heads, build
from ringcp.topology import Topology, ring

LAYOUTS = [Contiguous, HeadTail, Striped]


@given(any_call(max_world=9, max_len=40))
@settings(max_examples=300)
def test_any_layout_mask_and_ring(call):
    verify(*call)


@given(
    any_call(max_world=5, max_len=24),
    st.sampled_from([Heads(1, 1), Heads(6, 3), Heads(6, 2), Heads(4, 1), Heads(2, 2)]),
)
@settings(max_examples=150)
def test_heads_of_the_own_block_in_two_steps(call, heads):
    """Backward may keep some heads of the own block for the end: each pair is still computed once for each head."""
    case = verify(*call, heads)
    for schedule in case.schedules:
        early, late = (Counter(t.band for t in schedule.backward[i].tiles) for i in (0, -1))
        assert len(schedule.backward) == 1 or late == (early if heads.q > 1 else {})


groups = st.one_of(st.none(), st.integers(1, 4))


@given(any_call(max_world=7, max_len=32), st.integers(1, 4), some_heads())
@settings(max_examples=200)
def test_groups_of_heads_gathered(call, size, heads):
    verify(*call, heads, size)


@given(any_call(max_world=5, max_len=24), groups, some_heads())
@settings(max_examples=150)
def test_some_heads(call, size, heads):
    """A part of the heads, whose first and last KV heads serve fewer query heads."""
    verify(*call, heads, size)


@given(any_cross_call(max_world=5, max_len=24), groups, some_heads())
@settings(max_examples=300)
def test_queries_and_keys_in_different_layouts(call, size, heads):
    layout, mask, topology, kv_layout = call
    verify(layout, mask, topology, heads, size, kv_layout)


@given(any_call(max_world=64, max_len=130, min_world=10))
@settings(max_examples=12)
def test_any_layout_mask_and_ring_of_up_to_64(call):
    verify(*call)


@pytest.mark.report("7.10")
@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(5)], ids=repr)
@pytest.mark.parametrize("seq_len, world_size", [(130, 64), (1, 5), (7, 13), (96, 8), (33, 4)])
def test_every_layout_and_mask(make, mask, seq_len, world_size):
    verify(make(seq_len, world_size), mask, ring(world_size))


@pytest.mark.report("1.71")
@pytest.mark.report("7.14")
@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_lengths_that_do_not_divide_match_on_both_ends_of_every_message(make, world_size):
    """A length that does not divide ends elsewhere in mismatched messages; here both ends are the same number."""
    for seq_len in range(6 * world_size):
        verify(make(seq_len, world_size), Causal(), ring(world_size))


@pytest.mark.report("1.73")
@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize("mask", [Full(), Causal(), Window(3)], ids=repr)
def test_a_world_of_one_moves_nothing(make, mask):
    schedule = build(make(13, 1), mask, ring(1), 0)
    assert schedule.kind == "local"
    assert len(schedule.forward) == len(schedule.backward) == 1
    assert [tile.band.q for tile in schedule.forward[0].tiles] == [(0, 13)]
    assert not schedule.backward[0].sends
    assert not schedule.backward[0].recvs


@pytest.mark.parametrize("world_size, mask", [(2, Full()), (3, Causal()), (4, Causal()), (8, Full()), (64, Causal())])
def test_bytes_are_those_of_the_formula(world_size, mask):
    """FACTS: (P - 1) S / P rows of keys and values each way, and as many of their gradients."""
    seq_len = 4 * world_size
    for rank in range(world_size):
        schedule = build(HeadTail(seq_len, world_size), mask, ring(world_size), rank)
        assert schedule.kind == ("ring" if world_size > 2 else "direct")
        rows = (world_size - 1) * seq_len // world_size
        assert schedule.rows_sent("kv") == rows
        assert schedule.rows_sent("kv", schedule.backward) == rows
        assert schedule.rows_sent("dkv", schedule.backward) == rows


@pytest.mark.report("5.TE PR #2829")
@pytest.mark.parametrize("left", [0, 2, 7, 8, 9, 16, 17, 40])
def test_a_window_needs_only_the_hops_that_it_spans(left):
    """Contiguous chunks of 8: ceil(left / 8) hops, and `left` rows in all, not whole blocks."""
    world_size, chunk = 8, 8
    for rank in range(world_size):
        schedule = build(Contiguous(world_size * chunk, world_size), Window(left), ring(world_size), rank)
        assert schedule.kind == "direct"
        assert len(schedule.forward) == 1 + -(-left // chunk)
        fetched = [m.num_rows for step in schedule.forward for m in step.recvs]
        assert sum(fetched) == min(left, rank * chunk)
        assert len(fetched) == min(-(-left // chunk), rank)


@pytest.mark.parametrize(
    "layout, left, peers",
    [
        (Contiguous(64, 8), 3, {2}),  # its one left neighbour
        (HeadTail(64, 8), 3, {2, 4}),  # chunks 3 and 12 of 16 border on chunks 2 and 11
        (Striped(64, 8), 3, {0, 1, 2}),  # the three tokens before each of its own
        (Striped(64, 8), 0, set()),
    ],
)
def test_far_blocks_of_a_window_are_never_sent(layout, left, peers):
    verify(layout, Window(left), ring(8))
    schedule = build(layout, Window(left), ring(8), 3)
    for steps in (schedule.forward, schedule.backward):
        assert {m.peer for step in steps for m in step.recvs if m.what == "kv"} == peers
        assert {m.peer for step in steps for m in step.sends if m.what == "dkv"} <= peers


def test_a_wide_window_is_still_direct_while_no_rank_attends_to_all():
    case = verify(Contiguous(64, 4), Window(40), ring(4))
    assert case.schedules[3].kind == "direct"
    assert verify(Contiguous(64, 4), Window(63), ring(4)).schedules[0].kind == "ring"


def test_steps_follow_the_order_of_the_ring():
    order = (2, 0, 3, 1)
    case = verify(HeadTail(16, 4), Full(), Topology(order))
    assert [step.source for step in case.schedules[0].forward] == [0, 2, 1, 3]
    assert {m.peer for step in case.schedules[0].forward for m in step.sends} == {3}


@pytest.mark.report("1.72")
def test_messages_of_a_step_are_in_one_order_on_every_rank():
    """Keys and values before gradients, one neighbour to send to, one to receive from."""
    for rank in range(5):
        schedule = build(HeadTail(40, 5), Full(), ring(5), rank)
        for step in schedule.backward:
            whats = [m.what for m in step.sends]
            assert whats == [m.what for m in step.recvs]
            assert whats == sorted(whats, reverse=True)


def test_single_pairs_of_a_mask_are_enough():
    """One token of the last rank attends to one of the first: one message of one row, and its gradient back."""
    mask = Bands(((Band((30, 31), (2, 3), 28, 28),),))
    case = verify(Contiguous(32, 4), mask, ring(4))
    traffic = Counter((rank, m.what, m.peer, m.num_rows)
        for rank, s in enumerate(case.schedules) for step in s.backward for m in step.sends)  # fmt: skip
    assert traffic == {(0, "kv", 3, 1): 1, (3, "dkv", 0, 1): 1}


def test_a_mask_of_nothing_moves_nothing():
    case = verify(HeadTail(32, 4), Bands(((),)), ring(4))
    assert all(s.kind == "direct" and len(s.forward) == len(s.backward) == 1 for s in case.schedules)


def test_ranks_of_a_batch_row_have_its_tiles_only():
    causal, own = Band((0, 8), (0, 8), 0, 7), Band((0, 8), (0, 8), 0, 0)
    case = verify(Contiguous(8, 2), Bands(((causal,), (own,)), rows=2), ring(2))
    tiles = [tile for step in case.schedules[1].forward for tile in step.tiles]
    assert Counter(tile.batch for tile in tiles) == {(0, 1): 2, (1, 2): 1}


@dataclass(frozen=True, eq=False)
class CountedDocuments:
    """Causal documents of given lengths; counts the questions it was asked and the pieces it returned."""

    ends: list[int]
    rows: None = None
    reach: None = None
    counts: Counter = field(default_factory=Counter)

    def pieces(self, q_span: Span, k_span: Span, row: int = 0) -> list[Band]:
        self.counts["calls"] += 1
        first = bisect_right(self.ends, max(q_span.start, k_span.start))
        last = bisect_left(self.ends, min(q_span.stop, k_span.stop))
        found = []
        for n in range(first, min(last + 1, len(self.ends))):
            start, stop = (self.ends[n - 1] if n else 0), self.ends[n]
            q = (max(start, q_span.start) - q_span.start, min(stop, q_span.stop) - q_span.start)
            k = (max(start, k_span.start) - k_span.start, min(stop, k_span.stop) - k_span.start)
            band = trim(q, k, k_span.start - q_span.start, q[1])
            found += [] if band is None else [band]
        self.counts["pieces"] += len(found)
        return found


def documents(num: int, seq_len: int) -> CountedDocuments:
    """Documents of uneven lengths."""
    cuts = sorted({1 + (i * i * 7919 + i * 104729) % (seq_len - 1) for i in range(1, num)})
    return CountedDocuments([*cuts, seq_len])


@pytest.mark.report("1.36")
@pytest.mark.parametrize("make", [Contiguous, HeadTail])
def test_documents_move_only_what_straddles_ranks(make):
    mask = documents(12, 90)
    bands = [Band((a, b), (a, b), 0, b - a - 1) for a, b in pairwise([0, *mask.ends])]
    case = verify(make(90, 5), Bands((tuple(bands),)), ring(5))
    assert case.schedules[2] == build(make(90, 5), mask, ring(5), 2)
    assert all(schedule.kind == "direct" for schedule in case.schedules)
    moved = sum(schedule.rows_sent("kv") for schedule in case.schedules)
    assert 0 < moved < 90 < 4 * 90  # what a ring would move


@pytest.mark.parametrize("make, spans_of_a_rank", [(Contiguous, 1), (HeadTail, 2)])
def test_the_work_of_planning_does_not_grow_with_the_area(make, spans_of_a_rank):
    """1,000 documents on 64 ranks: a look at all documents once, then at those of the rank."""
    world_size, seq_len = 64, 131072
    mask = documents(1000, seq_len)
    build(make(seq_len, world_size), mask, ring(world_size), 31)
    asked_of_all = world_size * spans_of_a_rank
    asked_of_pairs = 2 * world_size * spans_of_a_rank**2
    assert mask.counts["calls"] <= asked_of_all + asked_of_pairs
    borders = 2 * world_size * spans_of_a_rank
    assert mask.counts["pieces"] <= len(mask.ends) + borders + 4 * 2 * (len(mask.ends) // world_size + 2)
    before = Counter(mask.counts)
    build(make(seq_len, world_size), mask, ring(world_size), 31)
    assert mask.counts == before  # once a batch, not once a layer


def test_a_ring_of_few_pieces_asks_once_a_pair():
    """A custom mask that says nothing about itself is planned from its pieces alone."""
    mask = CountedDocuments([4096])
    schedule = build(HeadTail(4096, 64), mask, ring(64), 5)
    assert schedule.kind == "ring"
    assert mask.counts["calls"] <= 64 * 2 + 64 * 4
    assert schedule.forward == build(HeadTail(4096, 64), Causal(), ring(64), 5).forward


def test_printing_tells_the_story_of_a_rank():
    assert str(build(HeadTail(13, 2), Causal(), ring(2), 0)) == (
        "direct schedule of rank 0 of 2, 7 rows\n"
        "  forward 0: 3 tiles on 7 rows of rank 0; kv 3 rows -> rank 1; kv 6 rows <- rank 1\n"
        "  forward 1: 1 tiles on 6 rows of rank 1\n"
        "  backward 0: 3 tiles on 7 rows of rank 0; kv 3 rows -> rank 1; kv 6 rows <- rank 1\n"
        "  backward 1: 1 tiles on 6 rows of rank 1\n"
        "  backward 2: 0 tiles on 0 rows of rank 0; dkv 6 rows -> rank 1; dkv 3 rows <- rank 1"
    )


def test_layout_and_topology_must_be_of_one_world():
    with pytest.raises(ringcp.LayoutError) as caught:
        build(HeadTail(16, 4), Causal(), ring(3), 0)
    assert str(caught.value) == "layout: expected one for 3 ranks, got HeadTail(16, 4)"


def test_both_layouts_must_be_of_one_world():
    with pytest.raises(ringcp.LayoutError) as caught:
        build(HeadTail(16, 4), Causal(), ring(4), 0, kv_layout=HeadTail(16, 3))
    assert str(caught.value) == "kv_layout: expected one for 4 ranks, got HeadTail(16, 3)"


def test_a_group_has_a_head():
    with pytest.raises(ArgumentError) as caught:
        build(HeadTail(16, 4), Causal(), ring(4), 0, Heads(4, 2), gather=0)
    assert str(caught.value) == "gather: expected at least one KV head in a group, got 0; give 1 or more"


@pytest.mark.parametrize(
    "heads", [Heads(3, 2), Heads(6, 2, 3, 4), Heads(6, 3, 0, 4), Heads(4, 2, 4, 4), Heads(2, 1, 0, 1)]
)
def test_heads_fit_each_other(heads):
    with pytest.raises(AssertionError, match="key head"):
        build(HeadTail(16, 4), Causal(), ring(4), 0, heads)


def test_printing_names_the_heads_of_a_message():
    schedule = build(Contiguous(8, 2), Causal(), ring(2), 1, Heads(6, 3), gather=2)
    assert str(schedule).splitlines()[:4] == [
        "gather schedule of rank 1 of 2, 4 rows",
        "  forward 0: 0 tiles on 0 rows of all ranks; kv 4 rows of KV heads [0, 2) <- rank 0",
        "  forward 1: 1 tiles on 8 rows of all ranks; kv 4 rows of KV heads [2, 3) <- rank 0",
        "  forward 2: 1 tiles on 8 rows of all ranks",
    ]
    assert str(schedule).splitlines()[-1] == (
        "  backward 3: 0 tiles on 0 rows of all ranks; dkv 4 rows of KV heads [2, 3) -> rank 0"
    )


@pytest.mark.parametrize("make", LAYOUTS)
def test_a_gathered_window_moves_its_halo_alone(make):
    """Each of three groups of heads brings the rows that a direct plan does."""
    for rank in range(8):
        layout, mask, topology = make(64, 8), Window(3), ring(8)
        direct, gather = (build(layout, mask, topology, rank, Heads(3, 3), gather=size) for size in (None, 1))
        assert gather.rows_sent("kv") == 3 * direct.rows_sent("kv")
        assert gather.rows_sent("dkv", gather.backward) == 3 * direct.rows_sent("dkv", direct.backward)


@pytest.mark.parametrize("order", [(0, 2), (0, 0), (1, 2, 3)])
def test_a_topology_is_a_permutation(order):
    with pytest.raises(ArgumentError) as caught:
        Topology(order)
    assert str(caught.value) == f"order: expected a permutation of {len(order)} ranks, got {order}"


def test_upstream_and_downstream():
    topology = Topology((3, 1, 0, 2))
    assert [topology.downstream(3, hops) for hops in range(5)] == [3, 1, 0, 2, 3]
    assert all(topology.upstream(topology.downstream(r, h), h) == r for r in range(4) for h in range(6))
