"""Layouts: every token has one owner, whatever the length and the number of ranks."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringcp
from ringcp import Contiguous, HeadTail, Striped
from ringcp.layout import LAYOUT_NAMES, UNSIZED, decode_layout, layout_named, unsized_spec

LAYOUTS = [Contiguous, HeadTail, Striped]
lengths = st.one_of(st.integers(0, 200), st.sampled_from([1, 7, 13, 32769]))
worlds = st.one_of(st.integers(1, 8), st.integers(1, 64))
any_layout = st.builds(lambda make, s, w: make(s, w), st.sampled_from(LAYOUTS), lengths, worlds)
small_layout = st.builds(
    lambda make, s, w: make(s, w), st.sampled_from(LAYOUTS), st.integers(0, 30), st.integers(1, 20)
)


def all_positions(layout):
    return [layout.positions(rank) for rank in range(layout.world_size)]


@pytest.mark.report("1.71")
@pytest.mark.report("7.14")
@given(any_layout)
@settings(max_examples=150)
def test_every_token_has_one_owner(layout):
    """Any length on any number of ranks, rows in the order of the sequence."""
    owned = all_positions(layout)
    assert torch.equal(torch.cat(owned).sort().values, torch.arange(layout.seq_len))
    for rank, positions in enumerate(owned):
        assert positions.dtype == torch.int64
        assert len(positions) == layout.local_len(rank)
        assert (positions.diff() > 0).all()
        assert all(span.length > 0 for span in layout.spans(rank))


@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize("seq_len", [1, 7, 13, 32769])
@pytest.mark.parametrize("world_size", [1, 2, 5, 64])
def test_local_lengths_differ_by_a_token_or_two(make, seq_len, world_size):
    layout = make(seq_len, world_size)
    lens = [layout.local_len(rank) for rank in range(world_size)]
    assert sum(lens) == seq_len
    assert max(lens) - min(lens) <= (2 if make is HeadTail else 1)


@given(lengths, worlds)
@settings(max_examples=100)
def test_contiguous_boundaries(seq_len, world_size):
    bounds = [i * seq_len // world_size for i in range(world_size + 1)]
    for positions, (start, stop) in zip(all_positions(Contiguous(seq_len, world_size)), pairwise(bounds), strict=True):
        assert torch.equal(positions, torch.arange(start, stop))


@pytest.mark.report("7.12")
@given(lengths, worlds)
@settings(max_examples=100)
def test_head_tail_boundaries(seq_len, world_size):
    """Chunks r and 2P - 1 - r, also where 2P does not divide S."""
    n = 2 * world_size
    bounds = list(pairwise(i * seq_len // n for i in range(n + 1)))
    for rank, positions in enumerate(all_positions(HeadTail(seq_len, world_size))):
        head, tail = bounds[rank], bounds[n - 1 - rank]
        assert positions.tolist() == [*range(*head), *range(*tail)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("chunk", [1, 5])
def test_head_tail_shards_as_torch_does_where_it_divides(world_size, chunk):
    balancers = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._load_balancer")
    seq_len = 2 * world_size * chunk
    balancer = balancers._HeadTailLoadBalancer(seq_len, world_size, "cpu")
    theirs = balancer._generate_indices(restore=False).flatten().chunk(world_size)
    for ours, expected in zip(all_positions(HeadTail(seq_len, world_size)), theirs, strict=True):
        assert torch.equal(ours, expected.to(torch.int64))


@pytest.mark.report("1.69")
@given(lengths, worlds)
@settings(max_examples=50)
def test_striped_gives_token_i_to_rank_i_mod_p(seq_len, world_size):
    for rank, positions in enumerate(all_positions(Striped(seq_len, world_size))):
        assert positions.tolist() == [i for i in range(seq_len) if i % world_size == rank]


def test_a_local_length_does_not_determine_the_length():
    """FACTS: head-tail on two ranks. So the length is agreed on, not guessed."""
    lens = [[HeadTail(s, 2).local_len(rank) for rank in range(2)] for s in range(8, 12)]
    assert lens == [[4, 4], [5, 4], [5, 5], [5, 6]]


@pytest.mark.report("7.18")
@pytest.mark.report("7.34")
@given(small_layout, st.integers(0, 2), st.booleans())
@settings(max_examples=100)
def test_round_trip_along_any_dim_with_gradients(layout, dim, negative):
    shape = [2, 3, 4]
    shape[dim] = layout.seq_len
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    dim = dim - 3 if negative else dim
    parts = [layout.shard(x, rank, dim) for rank in range(layout.world_size)]
    for rank, part in enumerate(parts):
        assert torch.equal(part, x.index_select(dim, layout.positions(rank)))
        assert part.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or not part.numel()
    whole = layout.unshard(parts, dim)
    assert torch.equal(whole, x)
    upstream = torch.randn_like(x)
    (grad,) = torch.autograd.grad(whole, x, upstream)
    assert torch.equal(grad, upstream)


@given(small_layout, st.data())
@settings(max_examples=50)
def test_the_gradient_of_a_shard_is_zero_elsewhere(layout, data):
    rank = data.draw(st.integers(0, layout.world_size - 1))
    x = torch.randn(2, layout.seq_len, requires_grad=True)
    part = layout.shard(x, rank, 1)
    upstream = torch.randn_like(part)
    (grad,) = torch.autograd.grad(part, x, upstream)
    assert torch.equal(grad, torch.zeros_like(x).index_copy(1, layout.positions(rank), upstream))


@pytest.mark.report("1.34")
@pytest.mark.report("5.verl #4250")
def test_labels_are_shifted_first_and_sharded_after():
    layout = HeadTail(8, 2)
    assert layout.shard(torch.arange(8), 0, 0).tolist() == [0, 1, 6, 7]
    shifted = torch.tensor([1, 2, 3, 4, 5, 6, 7, -100])
    assert [layout.shard(shifted, rank, 0).tolist() for rank in range(2)] == [[1, 2, 7, -100], [3, 4, 5, 6]]


@given(any_layout, any_layout)
@settings(max_examples=100)
def test_specs_equality_and_hash(a, b):
    assert a.spec.dtype == torch.int64
    assert a.spec.shape == (3,)
    again = decode_layout(*a.spec.tolist())
    assert again == a
    assert hash(again) == hash(a)
    assert (again.name, repr(again), again.key) == (a.name, repr(a), tuple(a.spec.tolist()))
    assert layout_named(a.name, a.seq_len, a.world_size) == a
    assert (a == b) == (repr(a) == repr(b))
    assert a != a.key


@pytest.mark.parametrize("name", LAYOUT_NAMES)
def test_unsized_specs_are_filled_in_later(name):
    code, *sizes = unsized_spec(name).tolist()
    assert sizes == [UNSIZED, UNSIZED]
    assert decode_layout(code, 12, 3) == layout_named(name, 12, 3)


def test_auto_is_head_tail():
    assert layout_named("auto", 12, 3) == HeadTail(12, 3)
    assert [layout_named(name, 1, 1).name for name in LAYOUT_NAMES if name != "auto"] == [
        "contiguous",
        "head_tail",
        "striped",
    ]


def test_printing_shows_who_owns_what():
    assert repr(HeadTail(13, 3)) == "HeadTail(13, 3)"
    assert str(HeadTail(13, 3)) == (
        "HeadTail(13, 3)\n"
        "  rank 0: 5 tokens  [0, 2) [10, 13)             ##........###\n"
        "  rank 1: 4 tokens  [2, 4) [8, 10)              ..##....##...\n"
        "  rank 2: 4 tokens  [4, 8)                      ....####....."
    )
    assert str(Striped(3, 4)) == (
        "Striped(3, 4)\n"
        "  rank 0: 1 token  [0, 3) step 4                #..\n"
        "  rank 1: 1 token  [1, 3) step 4                .#.\n"
        "  rank 2: 1 token  [2, 3) step 4                ..#\n"
        "  rank 3: 0 tokens  none                        ..."
    )


def test_printing_a_large_layout_stays_short():
    lines = str(Contiguous(100_000, 40)).splitlines()
    assert lines[1] == "  rank 0: 2500 tokens  [0, 2500)"
    assert len(lines) == 1 + 16 + 1
    assert lines[-1] == "  ... 24 more ranks"


@pytest.mark.parametrize("make", LAYOUTS)
@pytest.mark.parametrize(
    "args, message",
    [
        ((-1, 2), "seq_len: expected an integer of at least 0, got -1; give an int"),
        ((True, 2), "seq_len: expected an integer of at least 0, got True; give an int"),
        ((8.0, 2), "seq_len: expected an integer of at least 0, got 8.0; give an int"),
        ((8, 0), "world_size: expected an integer of at least 1, got 0; give an int"),
        ((8, "2"), "world_size: expected an integer of at least 1, got '2'; give an int"),
    ],
)
def test_bad_sizes_are_named(make, args, message):
    with pytest.raises(ringcp.LayoutError) as caught:
        make(*args)
    assert str(caught.value) == message


@pytest.mark.report("7.13", raises=True)
@pytest.mark.report("1.68", raises=True)
@pytest.mark.parametrize(
    "use, message",
    [
        (lambda a: a.spans(2), "rank: expected 0 <= rank < world_size = 2, got 2; pass mesh.get_local_rank()"),
        (lambda a: a.local_len(-1), "rank: expected 0 <= rank < world_size = 2, got -1; pass mesh.get_local_rank()"),
        (lambda a: a.spans(1.0), "rank: expected 0 <= rank < world_size = 2, got 1.0; pass mesh.get_local_rank()"),
        (lambda a: a.positions(7), "rank: expected 0 <= rank < world_size = 2, got 7; pass mesh.get_local_rank()"),
        (
            lambda a: a.shard(torch.ones(2, 9), 0, 1),
            "x: expected 7 tokens in dim 1 for HeadTail(7, 2), got 9; check dim and layout",
        ),
        (
            lambda a: a.shard(torch.ones(2, 7), 0, -2),
            "x: expected 7 tokens in dim 0 for HeadTail(7, 2), got 2; check dim and layout",
        ),
        (
            lambda a: a.shard(torch.ones(2, 7), 0, 2),
            "dim: expected a dim of x with 2 dims, got 2; give the sequence dim",
        ),
        (lambda a: a.unshard([torch.ones(7)], 0), "parts: expected one per rank, 2, got 1; pass every rank's shard"),
        (
            lambda a: a.unshard([torch.ones(3), torch.ones(3)], 0),
            "parts[1]: expected 4 tokens in dim 0 for HeadTail(7, 2), got 3; check dim and layout",
        ),
    ],
)
def test_what_does_not_fit_is_refused(use, message):
    """Also a table that is longer than the sequence: cutting it as if it were S long would misalign its rows."""
    with pytest.raises(ValueError) as caught:
        use(HeadTail(7, 2))
    assert isinstance(caught.value, ringcp.LayoutError)
    assert str(caught.value) == message
