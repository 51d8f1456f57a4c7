"""Masks: their pieces on any two spans against the pairs that attend, written out."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringcp
from ringcp import Causal, Contiguous, Full, HeadTail, Striped, Window
from ringcp.band import trim
from ringcp.layout import Span
from ringcp.mask import Mask, decode_mask

LAYOUTS = [Contiguous, HeadTail, Striped]


class Case(NamedTuple):
    """A mask, and whether a query attends, by how far the key is behind it."""

    mask: Mask
    allows: object


windows = st.builds(
    lambda left, right: Case(Window(left, right), lambda ahead: -right <= ahead <= left),
    st.integers(0, 12),
    st.integers(0, 6),
)
leaves = st.one_of(
    st.just(Case(Full(), lambda ahead: True)),
    st.just(Case(Causal(), lambda ahead: ahead >= 0)),
    windows,
)
plain = st.sampled_from([Full(), Causal(), Full() & Causal(), Causal() & Causal() & Full()])


def grown(cases):
    both = st.tuples(cases, cases)
    return st.one_of(
        both.map(lambda ab: Case(ab[0].mask & ab[1].mask, lambda ahead: ab[0].allows(ahead) and ab[1].allows(ahead))),
        both.map(lambda ab: Case(ab[0].mask | ab[1].mask, lambda ahead: ab[0].allows(ahead) or ab[1].allows(ahead))),
    )


trees = st.recursive(leaves, grown, max_leaves=5)
spans = st.builds(
    lambda start, length, step: Span(start, start + length * step, step),
    st.integers(0, 30),
    st.one_of(st.integers(0, 1), st.integers(0, 14)),
    st.integers(1, 5),
)


@st.composite
def two_spans(draw):
    """Of one step, as in a layout, or of any two."""
    q, k = draw(spans), draw(spans)
    if draw(st.booleans()):
        k = Span(k.start, k.start + k.length * q.step, q.step)
    return q, k


@given(trees, two_spans())
@settings(max_examples=400)
def test_pieces_are_the_allowed_pairs_once_each(case, qk):
    q_span, k_span = qk
    attended = [
        (i, j) for i, p in enumerate(range(*q_span)) for j, s in enumerate(range(*k_span)) if case.allows(p - s)
    ]
    pieces = case.mask.pieces(q_span, k_span)
    found = [
        (i, j) for b in pieces for i in range(*b.q) for j in range(*b.k) if b.lo <= i - j <= b.hi
    ]  # with repetition: pieces are disjoint
    assert sorted(found) == attended
    assert all(trim(*b) == b for b in pieces)


@given(trees, two_spans())
@settings(max_examples=100)
def test_dense_is_the_mask_written_out(case, qk):
    q, k = (torch.arange(*span) for span in qk)
    dense = case.mask.dense(q, k)
    assert dense.dtype == torch.bool
    assert dense.tolist() == [[case.allows(p - s) for s in k.tolist()] for p in q.tolist()]


@given(trees, st.integers(0, 40), st.integers(1, 4))
@settings(max_examples=100)
def test_the_number_of_pieces_does_not_grow_with_the_area(case, start, step):
    counts = {
        len(case.mask.pieces(Span(start, start + n * step, step), Span(0, n * step, step)))
        for n in (500, 10**5, 10**10)
    }
    assert len(counts) == 1


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(7), Window(2, 3), Causal() & Window(4, 4)])
def test_simple_masks_are_one_piece(mask):
    for n in (1, 5, 10**9):
        assert len(mask.pieces(Span(0, n), Span(0, n))) == 1


@given(trees)
@settings(max_examples=100)
def test_specs_round_trip(case):
    again = decode_mask(tuple(case.mask.spec.tolist()))
    assert again == case.mask
    assert hash(again) == hash(case.mask)
    assert repr(again) == repr(case.mask)
    assert torch.equal(again.spec, case.mask.spec)
    assert case.mask.spec.dtype == torch.int64
    assert len(case.mask.spec) % 16 == 0


def test_simple_masks_have_specs_of_one_shape():
    """So that different masks do not recompile."""
    masks = [Full(), Causal(), Window(3), Window(10**6, 5), Causal() & Window(7), Window(1) | Window(4, 4)]
    assert {mask.spec.shape for mask in masks} == {(16,)}
    assert len({tuple(mask.spec.tolist()) for mask in masks}) == len(masks)


@given(trees, trees)
@settings(max_examples=100)
def test_equality_is_that_of_the_expression(a, b):
    assert (a.mask == b.mask) == (repr(a.mask) == repr(b.mask))
    assert a.mask != repr(a.mask)


def test_repr_can_be_read_back():
    assert repr(Causal() & Window(4, 2) | Full()) == "((Causal() & Window(4, 2)) | Full())"


@pytest.mark.parametrize("make", LAYOUTS)
@given(plain, st.integers(0, 40), st.integers(1, 9))
@settings(max_examples=40)
def test_masks_without_bands_are_full_and_causal_pieces(make, mask, seq_len, world_size):
    """Between any two spans of a layout: what a kernel without windows can take."""
    assert not mask.needs_band
    layout = make(seq_len, world_size)
    owned = [span for rank in range(world_size) for span in layout.spans(rank)]
    assert not any(b.cuts_high for q in owned for k in owned for b in mask.pieces(q, k))


def test_windows_and_unions_need_bands():
    for mask in (Window(3), Window(3) & Causal(), Full() | Causal(), Causal() & (Full() | Causal())):
        assert mask.needs_band


@given(trees)
@settings(max_examples=200)
def test_reach_bounds_every_pair(case):
    far = [ahead for ahead in range(-60, 61) if case.allows(ahead)]
    if case.mask.reach is None:
        assert not far or 60 in far
    else:
        assert all(abs(ahead) <= case.mask.reach for ahead in far)


@pytest.mark.parametrize(
    "mask, reach",
    [
        (Full(), None),
        (Causal(), None),
        (Window(3), 3),
        (Window(2, 5), 5),
        (Causal() & Window(4), 4),
        (Window(9) & Window(4), 4),
        (Window(9) | Window(4), 9),
        (Window(9) | Full(), None),
    ],
)
def test_reach(mask, reach):
    assert mask.reach == reach


@pytest.mark.parametrize("w", [1, 3, 8, 17])
def test_window_counts_the_token_itself(w):
    """``Window(w - 1)`` is the causal window of w tokens."""
    positions = torch.arange(40)
    assert Window(w - 1).dense(positions, positions).sum(1).tolist() == [min(w, i + 1) for i in range(40)]


@pytest.mark.parametrize("value", [-1, True, 2.0, None, "3"])
@pytest.mark.parametrize("name", ["left", "right"])
def test_bad_windows_are_named(name, value):
    with pytest.raises(ValueError) as caught:
        Window(**{"left": 1, "right": 1, name: value})
    assert isinstance(caught.value, ringcp.RingcpError)
    assert str(caught.value) == (
        f"{name}: expected a number of tokens of at least 0, got {value!r}; "
        "for an unbounded side use Causal() or Full()"
    )


@pytest.mark.parametrize("other", [None, True, 3])
def test_masks_combine_with_masks_only(other):
    with pytest.raises(TypeError):
        Causal() & other
    with pytest.raises(TypeError):
        Causal() | other


@pytest.mark.parametrize(
    "combine",
    [lambda a, b: a and b, lambda a, b: a or b, lambda a, b: not a, lambda a, b: b if a else None],
    ids=["and", "or", "not", "if"],
)
def test_masks_have_no_truth_value(combine):
    """`a and b` would be b alone."""
    with pytest.raises(TypeError, match=r"expected & or \| between masks, got and, or, not or if; write a & b"):
        combine(Causal(), Window(3))
