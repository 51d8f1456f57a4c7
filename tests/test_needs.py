"""What ranks need of each other, held against masks that are written out."""

import random

import pytest
from hypothesis import given, settings
from schedule_checks import Bands, allowed_pairs, any_call, any_cross_call

from ringcp import Causal, Contiguous, Documents, HeadTail, Padding, Striped, Window
from ringcp.band import trim
from ringcp.grouped import GroupedLayout
from ringcp.needs import Needs, Pairs, needs


def written_out(pairs: Pairs) -> Needs:
    """The same from the positions alone."""
    allowed = allowed_pairs(pairs.mask, pairs.q.seq_len, pairs.k.seq_len).any(0)
    ranks = range(pairs.k.world_size)
    asking, owned = (
        [[position for span in layout.spans(rank) for position in range(*span)] for rank in ranks]
        for layout in (pairs.q, pairs.k)
    )
    of = [[0 if r == s else int(allowed[asking[r]].any(0)[owned[s]].sum()) for s in ranks] for r in ranks]
    return Needs(tuple(map(sum, of)), tuple(frozenset(s for s in ranks if row[s]) for row in of))


@given(any_call(max_world=9, max_len=60))
@settings(max_examples=300)
def test_any_layout_and_mask(call):
    layout, mask, _ = call
    pairs = Pairs(layout, layout, mask)
    assert needs(pairs) == written_out(pairs)


@given(any_cross_call(max_world=6, max_len=40))
@settings(max_examples=300)
def test_queries_and_keys_in_different_layouts(call):
    q_layout, mask, _, kv_layout = call
    pairs = Pairs(q_layout, kv_layout, mask)
    assert needs(pairs) == written_out(pairs)


@pytest.mark.parametrize("make", [Contiguous, HeadTail, Striped])
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_documents_and_windows_around_the_number_of_ranks(make, degree):
    """Where documents and windows are about as long as the gaps between a rank's tokens."""
    generator = random.Random(degree)
    layout = GroupedLayout(make(131, 6), degree)
    for _ in range(20):
        lengths = [generator.randint(0, 9) for _ in range(25)]
        masks = [Documents(lengths), Documents(lengths) & Causal(), Documents([lengths, [100, 31]]) & Window(3)]
        masks += [Window(generator.randint(0, 9), generator.randint(0, 3)), Padding(generator.randint(0, 131))]
        for mask in masks:
            pairs = Pairs(layout, layout, mask)
            assert needs(pairs) == written_out(pairs), mask


@pytest.mark.parametrize("make", [Contiguous, HeadTail, Striped])
def test_a_few_diagonals_far_from_the_edge(make):
    """A narrow band with keys cut off at both ends, as no mask of ours has it."""
    layout = make(97, 7)
    for lo, hi in ((0, 0), (11, 13), (-20, -18), (5, 40)):
        band = trim((3, 90), (8, 77), lo, hi)
        pairs = Pairs(layout, layout, Bands(((band,),)))
        assert needs(pairs) == written_out(pairs)
