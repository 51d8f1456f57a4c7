"""The layout of ring ranks: whose rows lie where."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import ringcp
from ringcp.grouped import Grid, grouped


@st.composite
def layouts(draw):
    """A layout, and a degree that divides its ranks."""
    world_size = draw(st.integers(1, 12))
    degree = draw(st.sampled_from([d for d in range(1, world_size + 1) if world_size % d == 0]))
    seq_len = draw(st.integers(0, 90))
    make = draw(st.sampled_from([ringcp.Contiguous, ringcp.HeadTail, ringcp.Striped, ringcp.Balanced]))
    if make is ringcp.Balanced:
        return ringcp.Balanced(seq_len, world_size, ringcp.Window(draw(st.integers(0, 20)))), degree
    return make(seq_len, world_size), degree


def positions_of(layout, ring_rank):
    """Of a grouped layout, as `Layout.positions`."""
    runs = [torch.arange(*span) for span in layout.spans(ring_rank)]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_rows_of_an_exchange_lie_where_the_ring_rank_has_them(drawn):
    layout, degree = drawn
    grid, rows = Grid(layout.world_size, degree), grouped(layout, degree)
    assert (rows.seq_len, rows.world_size) == (layout.seq_len, layout.world_size // degree)
    for ring_rank in range(rows.world_size):
        positions = positions_of(rows, ring_rank)
        assert rows.local_len(ring_rank) == len(positions)
        taken = torch.zeros(len(positions), dtype=torch.int64)
        for place, placements in enumerate(rows.placements(ring_rank)):
            own = layout.positions(grid.exchange(ring_rank * degree)[place])
            local = torch.zeros(len(own), dtype=torch.int64)
            for placed in placements:
                assert torch.equal(positions[placed.block_rows], own[placed.local_rows])
                taken[placed.block_rows] += 1
                local[placed.local_rows] += 1
            assert (local == 1).all(), "each local row goes to one place"
        assert (taken == 1).all(), "each place gets one row"


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_rows_lie_in_the_order_of_positions(drawn):
    layout, degree = drawn
    rows = grouped(layout, degree)
    for ring_rank in range(rows.world_size):
        if layout.name != "striped" or degree in (1, layout.world_size):
            positions = positions_of(rows, ring_rank)
            assert torch.equal(positions, positions.sort().values)


@pytest.mark.parametrize("make", [ringcp.Contiguous, ringcp.HeadTail])
@pytest.mark.parametrize("seq_len", [1, 37, 64])
def test_the_usual_layouts_of_all_ranks_are_the_usual_ones_of_ring_ranks(make, seq_len):
    # So head-tail stays balanced over a ring of exchanges, and the same shards serve every mode.
    for world_size, degree in ((4, 2), (8, 2), (8, 4), (6, 3)):
        rows, usual = grouped(make(seq_len, world_size), degree), make(seq_len, world_size // degree)
        assert [rows.spans(r) for r in range(rows.world_size)] == [usual.spans(r) for r in range(rows.world_size)]


def test_neighbours_exchange_and_rings_go_across():
    grid = Grid(6, 2)
    assert [grid.exchange(rank) for rank in range(6)] == [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5)]
    assert [grid.ring(rank) for rank in range(6)] == [(0, 2, 4), (1, 3, 5)] * 3
    assert [(grid.ring_rank(rank), grid.place(rank)) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
