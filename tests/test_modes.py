"""Shares of heads, the bytes of each mode against messages that are written out, and the rule of "auto"."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringcp
from ringcp import Causal, Chunked, Documents, Full, Padding, Prefix, Window
from ringcp.modes import (
    Rows,
    Traffic,
    Weight,
    _choose,
    choose_mode,
    divisors,
    exchange_bytes,
    gathered,
    head_shares,
    in_parts,
    most,
    ranks_per_node,
    replicates,
    ring_lengths,
    rows_bytes,
    usp_bytes,
    whole_blocks,
)
from ringcp.schedule import build
from ringcp.topology import ring

heads = st.tuples(st.integers(1, 12), st.integers(1, 9)).map(lambda drawn: (drawn[0] * drawn[1], drawn[0]))


@given(heads, st.integers(1, 17))
def test_shares_hold_each_query_head_once_and_the_key_heads_that_it_needs(counts, degree):
    q_heads, kv_heads = counts
    shares = head_shares(q_heads, kv_heads, degree)
    assert [h for s in shares for h in range(*s.q)] == list(range(q_heads))
    assert len(shares) == degree
    widths = {s.q[1] - s.q[0] for s in shares}
    assert max(widths) - min(widths) <= 1
    for s in shares:
        assert set(range(*s.kv)) == {h // (q_heads // kv_heads) for h in range(*s.q)}
        assert 0 <= s.kv[0] <= s.kv[1] <= kv_heads
    assert replicates(shares) == (sum(s.kv[1] - s.kv[0] for s in shares) > kv_heads)


def test_shares_of_models():
    assert [s.kv for s in head_shares(12, 3, 2)] == [(0, 2), (1, 3)]
    assert [s.q for s in head_shares(28, 4, 8)] == [
        (0, 3),
        (3, 7),
        (7, 10),
        (10, 14),
        (14, 17),
        (17, 21),
        (21, 24),
        (24, 28),
    ]
    assert [s.kv for s in head_shares(28, 4, 8)] == [(i // 2, i // 2 + 1) for i in range(8)]
    assert [s.q for s in head_shares(2, 2, 4)] == [(0, 0), (0, 1), (1, 1), (1, 2)]
    assert [s.kv for s in head_shares(7, 1, 4)] == [(0, 1)] * 4
    assert not replicates(head_shares(32, 8, 8))
    assert replicates(head_shares(32, 8, 16))


# Bytes, against lists of messages ------------------------------------------------------------------------------------


@given(heads, st.integers(1, 17), st.integers(1, 4))
def test_parts_of_an_exchange(counts, degree, parts):
    """Each has a KV head or more of every rank, and the query heads of these; together they are the shares."""
    shares, group = head_shares(*counts, degree), counts[0] // counts[1]
    found = in_parts(shares, group, parts)
    assert len(found) == max(1, min(parts, *(kv[1] - kv[0] for _, kv in shares), counts[1]))
    for share, *of_rank in zip(shares, *found, strict=True):
        for whole, cuts in zip(share, zip(*of_rank, strict=True), strict=True):
            assert [i for cut in cuts for i in range(*cut)] == list(range(*whole))
        for q, kv in of_rank:
            assert sorted({i // group for i in range(*q)}) == list(range(*kv))


def exchange_messages(lengths, degree, weight, save):
    """(direction, sender, receiver, bytes) of every tensor that is sent."""
    shares = head_shares(weight.q_heads, weight.kv_heads, degree)
    element, wide = weight.itemsize, 8 if weight.itemsize == 8 else 4
    holders = [sum(h in range(*s.kv) for s in shares) for h in range(weight.kv_heads)]
    grad = wide if max(holders) > 1 else element
    d, v = weight.head_dim, weight.v_head_dim or weight.head_dim
    for a in range(len(lengths)):
        for b in range(len(lengths)):
            if a == b or a // degree != b // degree:
                continue
            # a's tokens to b, for b's heads; and back from a to b, for a's heads and b's tokens.
            theirs, mine = shares[b % degree], shares[a % degree]
            there, back = lengths[a] * weight.batch, lengths[b] * weight.batch
            for _ in range(*theirs.q):
                yield "forward", a, b, there * d * element  # q
                again = (d * element, v * element, wide) if save == "local" else ()  # q, out, lse
                for size in (v * element, *again):  # dout
                    yield "backward", a, b, there * size
            for _ in range(*theirs.kv):
                for direction in ("forward", "backward") if save == "local" else ("forward",):
                    yield direction, a, b, there * (d + v) * element  # k and v
            for _ in range(*mine.q):
                yield "forward", a, b, back * (v * element + wide)  # out and lse
                yield "backward", a, b, back * d * element  # dq
            for _ in range(*mine.kv):
                yield "backward", a, b, back * (d + v) * grad  # dk and dv


def summed(messages, world_size):
    sent = [{"forward": 0, "backward": 0} for _ in range(world_size)]
    for direction, sender, _, size in messages:
        sent[sender][direction] += size
    return tuple(Traffic(**of) for of in sent)


weights = st.builds(
    lambda counts, d, v, e, batch: Weight(*counts, d, e, batch, v),
    heads, st.integers(1, 5), st.none() | st.integers(1, 5), st.sampled_from([2, 4, 8]), st.integers(1, 3),
)  # fmt: skip


@st.composite
def split_ranks(draw):
    """Lengths of ranks, and a degree that divides their number."""
    degree, across = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    return draw(st.lists(st.integers(0, 9), min_size=degree * across, max_size=degree * across)), degree


saves = st.sampled_from(("exchanged", "local"))


@given(split_ranks(), weights, saves)
def test_bytes_of_exchanges(ranks, weight, save):
    lengths, degree = ranks
    messages = exchange_messages(lengths, degree, weight, save)
    assert exchange_bytes(lengths, degree, weight, save) == summed(messages, len(lengths))


def ring_messages(lengths, weight):
    """Hop by hop, as blocks and sums travel."""
    size, element, wide = len(lengths), weight.itemsize, 8 if weight.itemsize == 8 else 4
    row = weight.batch * weight.kv_heads * (weight.head_dim + (weight.v_head_dim or weight.head_dim))
    for rank in range(size):
        for owner in range(size):
            hops = (rank - owner) % size  # the owner's block has come so far when it is here
            for direction in ("forward", "backward"):
                if hops < size - 1:
                    yield direction, rank, (rank + 1) % size, lengths[owner] * row * element
            if hops:  # its sum, with what this rank adds
                yield "backward", rank, (rank + 1) % size, lengths[owner] * row * wide


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), weights)
def test_bytes_of_whole_blocks_in_a_ring(lengths, weight):
    assert rows_bytes(whole_blocks(lengths), weight) == summed(ring_messages(lengths, weight), len(lengths))


@given(split_ranks(), weights, saves)
def test_bytes_of_usp_are_those_of_its_exchanges_and_its_rings(ranks, weight, save):
    lengths, degree = ranks
    shares = head_shares(weight.q_heads, weight.kv_heads, degree)
    messages = list(exchange_messages(lengths, degree, weight, save))
    blocks = [sum(lengths[at : at + degree]) for at in range(0, len(lengths), degree)]
    for s, share in enumerate(shares):
        part = Weight(
            1, share.kv[1] - share.kv[0], *(weight.head_dim, weight.itemsize, weight.batch, weight.v_head_dim)
        )
        messages += ((way, a * degree + s, b * degree + s, size) for way, a, b, size in ring_messages(blocks, part))
    got = usp_bytes(lengths, degree, whole_blocks(ring_lengths(lengths, degree)), weight, save)
    assert got == summed(messages, len(lengths))
    if degree == 1:
        assert got == rows_bytes(whole_blocks(lengths), weight)
    if degree == len(lengths):
        assert got == exchange_bytes(lengths, degree, weight, save)


@pytest.mark.parametrize("mask", [Full(), Causal()])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("tokens", [0, 3, 40, 61])
def test_whole_blocks_are_those_of_the_schedule(mask, size, tokens):
    """But for what a plan between two ranks leaves out of a causal mask."""
    layout = ringcp.HeadTail(tokens, size)
    schedules = [build(layout, mask, ring(size), rank) for rank in range(size)]
    planned = tuple(Rows(s.rows_sent("kv"), s.rows_sent("dkv", s.backward)) for s in schedules)
    assert [s.rows_sent("kv", s.backward) for s in schedules] == [rows.kv for rows in planned]
    whole = whole_blocks([layout.local_len(rank) for rank in range(size)])
    if schedules[0].kind == "direct" and mask == Causal():
        assert all(a.kv <= b.kv and a.dkv <= b.dkv for a, b in zip(planned, whole, strict=True))
    else:
        assert planned == whole


def test_rows_of_a_gather():
    needed = [[0, 2, 0], [5, 0, 1], [3, 4, 9]]  # rank 2's own 9 rows do not move
    assert gathered(needed) == (Rows(5 + 3, 2), Rows(2 + 4, 5 + 1), Rows(1, 3 + 4))
    lengths = [4, 5, 6]
    assert gathered([[0, 5, 6], [4, 0, 6], [4, 5, 0]]) == tuple(Rows(2 * n, 15 - n) for n in lengths)


def test_the_formulas_of_even_ranks():
    """As books have them: 32 query and 8 key heads of 128, bf16, 1,024 tokens a rank on 8 ranks."""
    weight, lengths, row = Weight(32, 8, 128, 2), [1024] * 8, 1024 * 128 * 2
    (passed, *rest) = rows_bytes(whole_blocks(lengths), weight)
    assert set(rest) == {passed}
    assert passed == Traffic(7 * 2 * 8 * row, 7 * 2 * 8 * row * 3)  # dK and dV in fp32 are twice K and V
    lse = 1024 * 4 * 32
    there = (2 * 32 + 2 * 8) * row * 7 // 8  # q, out, k and v; or dout, dq, dk and dv
    assert most(exchange_bytes(lengths, 8, weight)) == Traffic(there + lse * 7 // 8, there)
    of_local = Traffic(there + lse * 7 // 8, 2 * there + lse * 7 // 8)
    assert most(exchange_bytes(lengths, 8, weight, "local")) == of_local


def test_most_takes_either_direction_by_itself():
    assert most([Traffic(1, 9), Traffic(5, 2)]) == Traffic(5, 9)
    assert Traffic(5, 9).total == 14


# The rule ------------------------------------------------------------------------------------------------------------


def choose(q_heads, kv_heads, world_size, ranks_per_node=None, *, mask=None, seq_len=4096, device="cpu", degree=None):
    return choose_mode(
        q_heads=q_heads,
        kv_heads=kv_heads,
        seq_len=seq_len,
        world_size=world_size,
        ranks_per_node=world_size if ranks_per_node is None else ranks_per_node,
        mask=mask,
        device_type=device,
        ulysses_degree=degree,
    )


# (query heads, key heads, ranks, ranks a node) -> mode and exchange on CPU, mode on CUDA
HEADS = {
    "one rank": ((8, 8, 1, 1), ("ring", 1), "ring"),
    "heads divide": ((32, 8, 8, 8), ("ulysses", 8), "ulysses"),
    "heads divide, 2 ranks": ((32, 8, 2, 2), ("ulysses", 2), "ulysses"),
    "more ranks a node than ranks": ((32, 8, 4, 8), ("ulysses", 4), "ulysses"),
    "28/4 on 8: a seventh more than the mean": ((28, 4, 8, 8), ("ring", 1), "gather"),
    "28/4 on 7: query heads divide, key heads go to two ranks": ((28, 4, 7, 7), ("ring", 1), "gather"),
    "40/8 on 16: 3 heads of 2.5": ((40, 8, 16, 16), ("ring", 1), "gather"),
    "32/8 on 16: key heads go to two ranks, and still a fifth of the bytes": (
        (32, 8, 16, 16),
        ("ulysses", 16),
        "ulysses",
    ),
    "12/6 on 4: with the lse just above half of the bytes": ((12, 6, 4, 4), ("ring", 1), "gather"),
    "64/8 on 16: key heads go to two ranks, a third of the bytes": ((64, 8, 16, 16), ("ulysses", 16), "ulysses"),
    "32/4 on 8: two thirds of the bytes": ((32, 4, 8, 8), ("ring", 1), "gather"),
    "12/3 on 2: half as many bytes again as a ring": ((12, 3, 2, 2), ("ring", 1), "gather"),
    "3/3 on 2: 2 heads of 1.5": ((3, 3, 2, 2), ("ring", 1), "gather"),
    "7/1 on 4: one key head": ((7, 1, 4, 4), ("ring", 1), "ring"),
    "30/30 on 8: 4 heads of 3.75, an eighth of the bytes": ((30, 30, 8, 8), ("ulysses", 8), "ulysses"),
    "9/9 on 8": ((9, 9, 8, 8), ("ring", 1), "gather"),
    "63/63 on 8: 8 heads of 7.875": ((63, 63, 8, 8), ("ulysses", 8), "ulysses"),
    "fewer heads than ranks": ((2, 2, 8, 8), ("ring", 1), "gather"),
    "2 nodes of 8": ((32, 8, 16, 8), ("usp", 8), "usp"),
    "2 nodes of 8, 4 key heads, 0.455 of the bytes": ((32, 4, 16, 8), ("usp", 8), "usp"),
    "2 nodes of 8, 28/4": ((28, 4, 16, 8), ("usp", 4), "usp"),
    "2 nodes of 8, 40/8": ((40, 8, 16, 8), ("usp", 8), "usp"),
    "2 nodes of 8, nearly": ((30, 30, 16, 8), ("usp", 8), "usp"),
    "2 nodes of 6, 4 key heads": ((32, 4, 12, 6), ("usp", 2), "usp"),
    "2 nodes of 6, 6 heads of 5.33, 0.381 of the bytes": ((32, 8, 12, 6), ("usp", 6), "usp"),
    "4 nodes, odd heads": ((3, 3, 8, 2), ("ring", 1), "ring"),
    "4 nodes, one key head": ((7, 1, 8, 2), ("ring", 1), "ring"),
    "a rank a node": ((32, 8, 8, 1), ("ring", 1), "ring"),
}


@pytest.mark.parametrize("case", HEADS)
def test_the_rule(case):
    (q_heads, kv_heads, world_size, per_node), expected, on_cuda = HEADS[case]
    choice = choose(q_heads, kv_heads, world_size, per_node)
    assert (choice.mode, choice.ulysses_degree) == expected
    assert choose(q_heads, kv_heads, world_size, per_node, device="cuda").mode == on_cuda
    assert choice.why
    assert {mode for mode, _ in choice.not_taken} | {choice.mode} == {"ring", "gather", "ulysses", "usp"}
    assert all(why for _, why in choice.not_taken)
    assert len(choice.not_taken) == 3


MASKS = [
    (Window(1024), "ulysses"),  # as many as a rank has
    (Window(1023), "ring"),
    (Window(0, 1023), "ring"),
    (Window(0, 1024), "ulysses"),
    (Documents([1000, 1000, 24]), "ring"),
    (Documents([1000, 1000, 24]) & Causal(), "ring"),
    (Documents([[100] * 5, [1000, 1000]]), "ring"),
    (Documents([[100] * 5, [3000]]), "ulysses"),
    (Chunked(1000), "ring"),
    (Chunked(2048), "ulysses"),
    (Window(10) | Chunked(2048), "ulysses"),
    (Window(10) | Prefix(4), "ulysses"),
    (Prefix(4), "ulysses"),
    (Padding([900, 4096]), "ulysses"),
    (Causal(), "ulysses"),
    (Full(), "ulysses"),
    (None, "ulysses"),
]


@pytest.mark.parametrize(("mask", "mode"), MASKS, ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_masks_of_which_only_a_part_moves(mask, mode, device):
    """On 4 ranks with 1024 tokens each, or, the last of them, one less."""
    assert choose(32, 8, 4, mask=mask, seq_len=4096, device=device).mode == mode
    if mode == "ring":
        less = choose(32, 8, 4, mask=mask, seq_len=4095, device=device)
        assert less.mode == ("ulysses" if mask.reach == 1023 else "ring")
        assert f"reaches {mask.reach} tokens, less than a rank's 1024" in choose(32, 8, 4, mask=mask).why
        # Across nodes too; and shorter sequences are reached across.
        assert choose(32, 8, 4, 2, mask=mask).mode == "ring"
        assert choose(32, 8, 4, 2, mask=mask, seq_len=400).mode == ("usp" if mask.reach >= 100 else "ring")


@pytest.mark.parametrize(("degree", "mode"), [(1, "ring"), (2, "usp"), (4, "usp"), (8, "ulysses")])
@pytest.mark.parametrize("mask", [None, Window(1)])
def test_an_exchange_that_is_asked_for(degree, mode, mask):
    for per_node in (1, 4, 8):
        choice = choose(3, 1, 8, per_node, mask=mask, degree=degree)
        assert (choice.mode, choice.ulysses_degree) == (mode, degree)
    assert choose(3, 1, 1, degree=1).mode == "ring"


@pytest.mark.parametrize("degree", [0, 3, 16, -2])
def test_an_exchange_that_does_not_divide_the_ranks(degree):
    with pytest.raises(
        ringcp.ArgumentError, match=rf"^ulysses_degree: expected a divisor of the 8 ranks, got {degree}; .*1, 2, 4, 8$"
    ):
        choose(8, 8, 8, degree=degree)


@given(heads, st.integers(1, 24), st.integers(1, 24), st.sampled_from(["cpu", "cuda"]))
def test_a_choice_is_always_possible(counts, world_size, per_node, device):
    choice = choose(*counts, world_size, per_node, device=device)
    degree = choice.ulysses_degree
    assert world_size % degree == 0
    assert degree == {"ring": 1, "gather": 1, "ulysses": world_size}.get(choice.mode, degree)
    if choice.mode == "usp":
        assert 1 < degree < world_size
        assert per_node % degree == 0
    if degree > 1:
        widths = [s.q[1] - s.q[0] for s in head_shares(*counts, degree)]
        assert max(widths) * degree <= counts[0] * 9 / 8


def test_lengths_do_not_fill_the_memory():
    choose(32, 8, 8)
    before = _choose.cache_info().misses
    for seq_len in range(10_000, 10_500):
        choose(32, 8, 8, seq_len=seq_len, mask=Causal())
    assert _choose.cache_info().misses == before


@pytest.mark.parametrize(
    ("ranks", "local", "expected"),
    [
        (range(8), 8, 8),
        (range(16), 8, 8),
        (range(8, 16), 8, 8),
        (range(4, 12), 8, 4),  # half of either node
        (range(2, 10), 4, 2),
        (range(0, 16, 2), 8, 4),
        (range(0, 16, 8), 8, 1),
        ([0, 8, 1, 9], 8, 1),
        ([0, 1, 8, 9], 8, 2),
        ([0, 1, 2, 8, 9, 10], 8, 3),
        ([0, 1, 2, 3, 8, 9], 8, 2),
        ([0, 1, 2, 8, 9], 8, 1),
        ([5], 8, 1),
        (range(6), 1, 1),
        (range(6), 100, 6),
    ],
)  # fmt: skip
def test_neighbours_that_share_a_node(ranks, local, expected):
    assert ranks_per_node(ranks, local) == expected


def test_divisors():
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert all(a < b for a, b in pairwise(divisors(360)))
