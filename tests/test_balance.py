"""Balanced layouts: equal work and few keys that move, held against masks that are written out and every dealing."""

import random
import time
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_checks import verify

import ringcp
from ringcp import Balanced, Causal, Contiguous, Documents, Full, HeadTail, Padding, Prefix, Window
from ringcp.balance import _best_of_all, _deal, _Dealing, _found, _Work, choose_layout
from ringcp.band import count
from ringcp.layout import LAYOUT_NAMES, Layout, Span, decode_layout
from ringcp.mask import Mask
from ringcp.testing import in_process
from ringcp.topology import ring


def dense(mask: Mask, seq_len: int) -> torch.Tensor:
    """(batch rows, S, S), from the definition and not from the pieces."""
    return mask.dense(torch.arange(seq_len), torch.arange(seq_len)).reshape(mask.rows or 1, seq_len, seq_len)


def loads(layout: Layout, allowed: torch.Tensor) -> list[int]:
    """The allowed pairs of each rank."""
    return [int(allowed[:, layout.positions(rank)].sum()) for rank in range(layout.world_size)]


def moved(layout: Layout, allowed: torch.Tensor) -> int:
    """The keys that some rank attends to and does not own, over all ranks."""
    wanted = 0
    for rank in range(layout.world_size):
        positions = layout.positions(rank)
        needed = allowed[:, positions].any(0).any(0)
        needed[positions] = False
        wanted += int(needed.sum())
    return wanted


def farthest(of_rank: list[int]) -> int:
    """How far a rank is off the mean, times the number of ranks."""
    return max(abs(len(of_rank) * load - sum(of_rank)) for load in of_rank)


def parts_of(layout: Layout) -> list[list[int]]:
    return [[i for i, owner in enumerate(layout.owners) if owner == rank] for rank in range(layout.world_size)]


def edges(seq_len: int, num_chunks: int) -> list[int]:
    return [i * seq_len // num_chunks for i in range(num_chunks + 1)]


@st.composite
def lengths_of(draw, seq_len: int) -> list[int]:
    """Documents that fill the sequence or not, one of them perhaps giant."""
    lengths = draw(st.lists(st.integers(1, max(1, seq_len // draw(st.sampled_from([1, 2, 8])))), max_size=12))
    while sum(lengths) > seq_len:
        lengths.pop()
    return [*lengths, seq_len - sum(lengths)] if draw(st.booleans()) else lengths


@st.composite
def any_mask(draw, seq_len: int, rows: bool = True) -> Mask:
    def documents() -> Mask:
        if rows and draw(st.integers(0, 3)) == 0:
            return Documents([draw(lengths_of(seq_len)) for _ in range(2)])
        return Documents(draw(lengths_of(seq_len)))

    kind = draw(st.sampled_from(["documents", "documents", "documents & causal", "window", "prefix", "padding", "or"]))
    if kind == "documents":
        return documents()
    if kind == "documents & causal":
        return documents() & Causal()
    if kind == "window":
        return Window(draw(st.integers(0, seq_len)), draw(st.integers(0, 3)))
    if kind == "prefix":
        return Prefix(draw(st.integers(0, seq_len)))
    if kind == "padding":
        return Padding(draw(st.integers(0, seq_len))) & draw(st.sampled_from([Causal(), Full()]))
    return (documents() & Causal()) | Window(draw(st.integers(0, 4)))


@st.composite
def any_balanced(draw, max_len: int = 90, max_world: int = 7, rows: bool = True) -> tuple[Layout, Mask]:
    seq_len, world_size = draw(st.integers(0, max_len)), draw(st.integers(1, max_world))
    mask = draw(any_mask(seq_len, rows))
    return Balanced(seq_len, world_size, mask, chunk=draw(st.sampled_from([None, None, 1, 3, 10]))), mask


def packed(generator: random.Random, seq_len: int, kind: str) -> list[int]:
    """Lengths of packed documents as training sees them."""
    if kind == "giant":
        giant = generator.randint(seq_len // 3, seq_len * 4 // 5)
        return [*packed(generator, seq_len // 6, "middling"), giant]
    mean = max(1, seq_len // generator.choice({"long": [2, 4, 8], "middling": [16, 32], "short": [128, 256]}[kind]))
    lengths: list[int] = []
    while (left := seq_len - sum(lengths)) > 0:
        lengths.append(min(left, generator.randint(1, 2 * mean)))
    return lengths


@given(any_balanced())
@settings(max_examples=300)
def test_equal_counts_even_work_and_no_more_keys_than_head_tail(case):
    layout, mask = case
    seq_len, world_size = layout.seq_len, layout.world_size
    num_chunks = len(layout.owners)
    assert num_chunks % (2 * world_size) == 0
    assert {len(part) for part in parts_of(layout)} == {num_chunks // world_size}

    allowed = dense(mask, seq_len)
    at = edges(seq_len, num_chunks)
    heaviest = max(int(allowed[:, a:b].sum()) for a, b in pairwise(at))
    ours = loads(layout, allowed)
    assert 50 * farthest(ours) <= max(sum(ours), 50 * world_size * heaviest)

    for other in (HeadTail(seq_len, world_size), Contiguous(seq_len, world_size)):
        if 50 * farthest(loads(other, allowed)) <= max(sum(ours), 50 * farthest(ours)):
            assert moved(layout, allowed) <= moved(other, allowed)


@given(any_balanced(max_len=200, max_world=20))
@settings(max_examples=150)
def test_every_token_has_one_owner_and_the_spec_says_which(case):
    layout, _ = case
    at = edges(layout.seq_len, len(layout.owners))
    for rank, part in enumerate(parts_of(layout)):
        positions = layout.positions(rank)
        assert positions.tolist() == [p for i in part for p in range(at[i], at[i + 1])]
        assert layout.local_len(rank) == len(positions)
        spans = layout.spans(rank)
        assert all(span.length > 0 for span in spans)
        assert all(a.stop < b.start for a, b in pairwise(spans)), "neighbours are one run"
    assert layout.spec.dtype == torch.int64
    again = decode_layout(*layout.spec.tolist())
    assert again == layout
    assert (hash(again), repr(again), again.key) == (hash(layout), repr(layout), tuple(layout.spec.tolist()))
    x = torch.randn(2, layout.seq_len)
    parts = [layout.shard(x, rank, 1) for rank in range(layout.world_size)]
    assert torch.equal(layout.unshard(parts, 1), x)


def all_dealings(num_chunks: int, per_rank: int):
    """Every way to deal chunks in equal numbers; ranks are not told apart."""

    def rest(free: tuple[int, ...]):
        if not free:
            yield ()
            return
        for others in combinations(free[1:], per_rank - 1):
            left = tuple(i for i in free[1:] if i not in others)
            yield from (((free[0], *others), *more) for more in rest(left))

    yield from rest(tuple(range(num_chunks)))


def best_by_brute_force(mask: Mask, seq_len: int, world_size: int, num_chunks: int) -> tuple[int, int]:
    """How far off the best balanced dealing is, and the fewest keys of all that are as even, or within 2 %."""
    allowed, at = dense(mask, seq_len), edges(seq_len, num_chunks)
    pairs = [int(allowed[:, a:b].sum()) for a, b in pairwise(at)]
    needed = [allowed[:, a:b].any(0).any(0) for a, b in pairwise(at)]
    of_part = {}
    for part in combinations(range(num_chunks), num_chunks // world_size):
        needs = torch.stack([needed[i] for i in part]).any(0)
        for i in part:
            needs[at[i] : at[i + 1]] = False
        of_part[part] = abs(world_size * sum(pairs[i] for i in part) - sum(pairs)), int(needs.sum())
    dealt = [
        (max(of_part[part][0] for part in parts), sum(of_part[part][1] for part in parts))
        for parts in all_dealings(num_chunks, num_chunks // world_size)
    ]
    even = min(off for off, _ in dealt)
    return even, min(keys for off, keys in dealt if 50 * off <= max(sum(pairs), 50 * even))


@given(st.data())
@settings(max_examples=60)
def test_up_to_12_chunks_it_is_the_best_of_all_dealings(data):
    world_size, num_chunks = data.draw(st.sampled_from([(2, 4), (2, 8), (3, 6), (3, 12), (4, 8)]))
    seq_len = data.draw(st.integers(num_chunks, 60))
    mask = data.draw(any_mask(seq_len))
    layout = Balanced(seq_len, world_size, mask, chunk=-(-seq_len // num_chunks))
    assert len(layout.owners) == num_chunks
    even, keys = best_by_brute_force(mask, seq_len, world_size, num_chunks)
    allowed = dense(mask, seq_len)
    total = int(allowed.sum())
    assert 50 * farthest(loads(layout, allowed)) <= max(total, 50 * even)
    assert moved(layout, allowed) <= 1.2 * keys


def test_the_search_for_many_chunks_is_near_the_best_where_all_can_be_looked_at():
    """Beyond 12 chunks nothing is exhaustive; so the search itself is held against the best on 12."""
    generator, ratios = random.Random(0), []
    for _ in range(60):
        seq_len, world_size = generator.choice([120, 500]), generator.choice([2, 3, 6])
        mask = Documents(packed(generator, seq_len, generator.choice(["long", "middling", "giant"])))
        work = _Work(generator.choice([mask, mask & Causal()]), seq_len, world_size, 12 // world_size)
        found, best = _found(work, ()), _best_of_all(work)
        off, least = (max(abs(work.off(part)) for part in parts) for parts in (found, best))
        assert off <= max(work.slack, least + work.world_size * max(work.pairs))
        keys, fewest = (sum(map(work.covered, parts)) - seq_len for parts in (found, best))
        if off <= max(work.slack, least):
            ratios.append((keys + 1) / (fewest + 1))
    ratios.sort()
    assert len(ratios) > 50, "as even as can be"
    assert ratios[len(ratios) // 2] <= 1.05
    assert ratios[len(ratios) * 9 // 10] <= 1.2


def test_the_search_moves_fewer_keys_than_evening_alone():
    """And many chunks lie in runs that are not shorter than those of few: they start from the dealing of few."""
    seq_len, evened, found = 65536, 0, 0
    for seed in range(6):
        mask = Documents(packed(random.Random(seed), seq_len, "middling")) & Causal()
        work = _Work(mask, seq_len, 4, 8)
        contiguous = _Dealing(work, [range(r * 8, r * 8 + 8) for r in range(4)])
        evened += sum(contiguous.even_out().covered) - seq_len
        found += sum(map(work.covered, _found(work, ()))) - seq_len
        runs = [len(Balanced(seq_len, 4, mask, chunk=chunk).spans(0)) for chunk in (2048, 32)]
        assert runs[1] <= runs[0] + 4
    assert found <= 0.9 * evened


def test_documents_of_4_and_12_tokens_on_two_ranks_are_even():
    """Torch's balancer gives 26 and 62. Even costs 9 keys, and no even dealing costs fewer; head-tail is 52 and 36."""
    mask = Documents([4, 12]) & Causal()
    layout, allowed = Balanced(16, 2, mask), dense(mask, 16)
    assert loads(layout, allowed) == [44, 44]
    assert best_by_brute_force(mask, 16, 2, 16) == (0, moved(layout, allowed)) == (0, 9)
    assert (loads(HeadTail(16, 2), allowed), moved(HeadTail(16, 2), allowed)) == ([52, 36], 8)
    assert loads(Balanced(16, 2, Documents([4, 12])), dense(Documents([4, 12]), 16)) == [80, 80]


def spread(layout: Layout, mask: Mask) -> float:
    """The rank that is farthest off the mean, as a part of it; by pieces, for long sequences."""
    sequence = Span(0, layout.seq_len)
    of_rank = [
        sum(
            count(band)
            for row in range(mask.rows or 1)
            for span in layout.spans(rank)
            for band in mask.pieces(span, sequence, row)
        )
        for rank in range(layout.world_size)
    ]
    return farthest(of_rank) / sum(of_rank)


@pytest.mark.parametrize("kind", ["long", "middling", "short", "giant"])
@pytest.mark.parametrize("world_size", [2, 8, 64])
def test_packed_documents_of_training_are_within_2_percent(kind, world_size):
    """Head-tail and contiguous are up to 200 % off on these. A giant bidirectional one needs more chunks than 32."""
    generator = random.Random(len(kind) + world_size)
    seq_len = 16384 * world_size + 7
    rows = [packed(generator, seq_len, kind) for _ in range(3)]
    for mask in (Documents(rows[0]) & Causal(), Documents(rows[1]), Documents(rows) & Causal()):
        layout = Balanced(seq_len, world_size, mask)
        assert spread(layout, mask) <= (0.04 if mask == Documents(rows[1]) else 0.02)
        assert (
            len(layout.owners) == 8 * world_size or spread(Balanced(seq_len, world_size, mask, chunk=2048), mask) > 0.02
        )


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "mask", [Causal(), Full(), Prefix(100), Window(50), Window(5), Padding(700) & Causal()], ids=repr
)
def test_masks_that_are_not_documents(mask, world_size):
    layout, allowed = Balanced(1000, world_size, mask), dense(mask, 1000)
    head_tail = HeadTail(1000, world_size)
    if 50 * farthest(loads(head_tail, allowed)) <= max(int(allowed.sum()), 50 * farthest(loads(layout, allowed))):
        assert moved(layout, allowed) <= moved(head_tail, allowed)
    assert farthest(loads(layout, allowed)) <= 0.07 * allowed.sum()


@pytest.mark.parametrize("seq_len, world_size", [(0, 1), (0, 5), (1, 4), (3, 8), (13, 13), (9, 64)])
def test_more_ranks_than_tokens(seq_len, world_size):
    layout = Balanced(seq_len, world_size, Causal())
    owned = torch.cat([layout.positions(rank) for rank in range(world_size)])
    assert torch.equal(owned.sort().values, torch.arange(seq_len))
    assert len(layout.owners) == 2 * world_size


def test_the_same_on_every_call():
    masks = [Documents(packed(random.Random(seed), 5000, "middling")) & Causal() for seed in range(3)]
    first = [Balanced(5000, 8, mask) for mask in masks]
    _deal.cache_clear()
    again = [Balanced(5000, 8, Documents(lengths=mask_lengths(mask)) & Causal()) for mask in masks]
    assert first == again
    assert len({layout.key for layout in first}) == 3


def mask_lengths(mask: Mask) -> list[int]:
    at = mask._node.a.edges[0]
    return [b - a for a, b in pairwise(at)]


def test_the_work_grows_with_the_number_of_ranks_and_not_faster(monkeypatch):
    """What costs is `covered`, each call O(chunks of a rank); the time is printed."""
    calls = 0
    counted = _Work.covered

    def covered(self, part):
        nonlocal calls
        calls += 1
        return counted(self, part)

    monkeypatch.setattr(_Work, "covered", covered)
    for world_size in (8, 16, 32, 64):
        generator = random.Random(world_size)
        seq_len = 16384 * world_size
        lengths = [seq_len // (16 * world_size) + generator.randint(-900, 900) for _ in range(15 * world_size)]
        mask, calls, start = Documents(lengths) & Causal(), 0, time.perf_counter()
        Balanced(seq_len, world_size, mask)
        taken = time.perf_counter() - start
        print(f"{len(lengths)} documents, {world_size} ranks: {taken * 1e3:.0f} ms, {calls} times covered")
        # Up to four dealings: twice the tries of each, the finalists of each round, and once for each rank.
        assert calls <= world_size * 4 * (2 * 256 + 2 * 8 * 16 + 2 * 8 + 1)


def test_chunk_sets_how_long_chunks_are_at_most():
    mask = Documents([30, 70]) & Causal()
    for chunk in (1, 7, 12, 13, 25, 26, 99, 1000):
        layout = Balanced(100, 2, mask, chunk=chunk)
        at = edges(100, len(layout.owners))
        assert max(b - a for a, b in pairwise(at)) <= max(chunk, 25)
    assert [len(Balanced(100, 2, mask, chunk=chunk).owners) for chunk in (1, 24, 25, 1000)] == [128, 8, 4, 4]
    assert [len(Balanced(s, 2, Causal()).owners) for s in (1, 5, 8, 15, 16, 10**6)] == [4, 4, 8, 8, 16, 16]
    assert [len(Balanced(s, 8, Documents([s * 13 // 32])).owners) for s in (8, 256, 2**20)] == [16, 256, 256], (
        "more where 8 a rank are not even"
    )


def test_it_prints_itself_shortly():
    layout = Balanced(1 << 20, 64, Documents([1 << 19, 1 << 18]) & Causal())
    assert repr(layout).startswith("Balanced(1048576, 64, 512 chunks #")
    assert len(repr(layout)) < 60
    small = Balanced(8, 2, Documents([2, 6]) & Causal())
    assert "rank 0: 4 tokens" in str(small)
    assert small.name == "balanced"
    other = Layout(small.spec[0].item(), 8, 2, tuple(1 - owner for owner in small.owners))
    assert repr(other) != repr(small)
    assert other != small


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: Balanced(-1, 2, Causal()), ringcp.LayoutError, "seq_len: expected an integer of at least 0, got -1"),
        (lambda: Balanced(8, 0, Causal()), ringcp.LayoutError, "world_size: expected an integer of at least 1, got 0"),
        (
            lambda: Balanced(8, 2, None),
            ringcp.ArgumentError,
            "mask: expected the ringcp mask by which work is balanced, got NoneType; pass that of the calls",
        ),
        (lambda: Balanced(8, 2, Causal), ringcp.ArgumentError, "got function; pass that of the calls"),
        (lambda: Balanced(8, 2, Documents([4, 5])), ringcp.LayoutError, "documents of at most 8 tokens in all, got 9"),
        (lambda: Balanced(8, 2, Causal(), chunk=0), ringcp.ArgumentError, "chunk: expected a number of tokens of at"),
        (lambda: Balanced(8, 2, Causal(), chunk=2.0), ringcp.ArgumentError, "at least 1, or None, got 2.0"),
        (
            lambda: in_process(*torch.zeros(3, 1, 1, 8, 4), world_size=2, layout="balanced"),
            ringcp.LayoutError,
            r"got 'balanced', which needs the mask to balance by; pass layout=ringcp.Balanced\(seq_len, mesh.size\(\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_balanced_is_no_word():
    assert "balanced" not in LAYOUT_NAMES


@pytest.mark.parametrize(
    "mask, expected",
    [
        (None, HeadTail(64, 4)),
        (Full(), HeadTail(64, 4)),
        (Causal(), HeadTail(64, 4)),
        (Documents([64]) & Causal(), HeadTail(64, 4)),
        (Prefix(0), HeadTail(64, 4)),
        (Window(15), Contiguous(64, 4)),
        (Window(15) & Causal(), Contiguous(64, 4)),
        (Window(3, 2), Contiguous(64, 4)),
        (Window(16), "balanced"),  # reaches as far as a rank's share
        (Documents([10, 54]) & Causal(), "balanced"),
        (Documents([8] * 8), Contiguous(64, 4)),  # balanced, which is contiguous
        (Documents([[10, 54], [64]]), "balanced"),
        (Prefix(30), "balanced"),
    ],
    ids=repr,
)
def test_the_layout_that_suits_a_mask(mask, expected):
    got = choose_layout(mask, 64, 4)
    assert got == (Balanced(64, 4, mask) if expected == "balanced" else expected)


@given(any_balanced(max_len=40, max_world=6, rows=False))
@settings(max_examples=40)
def test_schedules_are_exact(case):
    layout, mask = case
    verify(layout, mask, ring(layout.world_size))
