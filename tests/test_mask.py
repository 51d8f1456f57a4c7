"""Masks: their pieces on any two spans against the pairs that attend, written out."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcp import Causal, Chunked, Contiguous, Documents, Full, HeadTail, Padding, Prefix, Striped, Window
from ringcp.band import trim
from ringcp.layout import Span
from ringcp.mask import Mask, decode_mask

LAYOUTS = [Contiguous, HeadTail, Striped]
ROWS = 2
"""Batch rows of the masks that differ from row to row."""


class Case(NamedTuple):
    """A mask, and whether a query position attends to a key position in a batch row."""

    mask: Mask
    allows: Callable[[int, int, int], bool]


def per_row(make: Callable[[list], Mask], allows: Callable[[object, int, int], bool], entries) -> st.SearchStrategy:
    """Cases of a mask with one entry for all batch rows, or with one for each."""
    shared = entries.map(lambda e: Case(make([e]), lambda q, k, row: allows(e, q, k)))
    each = st.lists(entries, min_size=ROWS, max_size=ROWS).map(
        lambda es: Case(make(es), lambda q, k, row: allows(es[row], q, k))
    )
    return st.one_of(shared, each)


def document(lengths: list[int], position: int) -> int | None:
    """The document of a position; None in the padding."""
    for n, length in enumerate(lengths):
        if position < length:
            return n
        position -= length
    return None


PADDED_LEN = 45
windows = st.builds(
    lambda left, right: Case(Window(left, right), lambda q, k, row: -right <= q - k <= left),
    st.integers(0, 12),
    st.integers(0, 6),
)
documents = per_row(
    Documents,
    lambda lengths, q, k: document(lengths, q) is not None and document(lengths, q) == document(lengths, k),
    st.lists(st.one_of(st.integers(0, 2), st.integers(0, 25)), max_size=7),
)
prefixes = per_row(Prefix, lambda n, q, k: k < n or k <= q, st.integers(0, PADDED_LEN))
right_padding = per_row(Padding, lambda n, q, k: q < n and k < n, st.integers(0, PADDED_LEN))
left_padding = per_row(
    lambda valid: Padding(valid, side="left", seq_len=PADDED_LEN),
    lambda n, q, k: all(PADDED_LEN - n <= p < PADDED_LEN for p in (q, k)),
    st.integers(0, PADDED_LEN),
)
chunks = st.integers(1, 20).map(lambda n: Case(Chunked(n), lambda q, k, row: q // n == k // n))
full, causal = Case(Full(), lambda q, k, row: True), Case(Causal(), lambda q, k, row: q >= k)

bandless = st.one_of(st.sampled_from([full, causal]), documents, prefixes, right_padding, left_padding, chunks)
"""What a kernel without windows can take, and so what is cut out of it with &."""


def both(cases):
    return st.tuples(cases, cases).map(
        lambda ab: Case(ab[0].mask & ab[1].mask, lambda *pair: ab[0].allows(*pair) and ab[1].allows(*pair))
    )


def either(cases):
    return st.tuples(cases, cases).map(
        lambda ab: Case(ab[0].mask | ab[1].mask, lambda *pair: ab[0].allows(*pair) or ab[1].allows(*pair))
    )


def grown(cases):
    return st.one_of(both(cases), either(cases))


trees = st.recursive(st.one_of(bandless, windows, documents), grown, max_leaves=5)
endless = st.recursive(
    st.one_of(st.sampled_from([full, causal]), windows, documents, prefixes, left_padding), grown, max_leaves=5
)
"""Masks whose number of pieces is bounded: chunks go on for ever."""

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


def rows_of(mask: Mask) -> range:
    """Batch rows to look at: all of them, or two of those that share the mask."""
    assert mask.rows in (None, ROWS)
    return range(ROWS)


@given(trees, two_spans())
@settings(max_examples=500)
def test_pieces_are_the_allowed_pairs_once_each(case, qk):
    q_span, k_span = qk
    for row in rows_of(case.mask):
        attended = [
            (i, j) for i, q in enumerate(range(*q_span)) for j, k in enumerate(range(*k_span)) if case.allows(q, k, row)
        ]
        pieces = case.mask.pieces(q_span, k_span, row)
        found = [
            (i, j) for b in pieces for i in range(*b.q) for j in range(*b.k) if b.lo <= i - j <= b.hi
        ]  # with repetition: pieces are disjoint
        assert sorted(found) == attended
        assert all(trim(*b) == b for b in pieces)


@given(trees, two_spans())
@settings(max_examples=200)
def test_dense_is_the_mask_written_out(case, qk):
    q, k = (torch.arange(*span) for span in qk)
    dense = case.mask.dense(q, k)
    assert dense.dtype == torch.bool
    written = [[[case.allows(i, j, row) for j in k.tolist()] for i in q.tolist()] for row in range(case.mask.rows or 1)]
    assert dense.tolist() == ([[each] for each in written] if case.mask.rows else written[0])


@given(trees, trees, st.integers(0, 20))
def test_within_is_whether_a_mask_allows_no_more_than_another(a, b, seq_len):
    pairs = [(q, k, row) for q in range(seq_len) for k in range(seq_len) for row in range(ROWS)]
    assert a.mask.within(b.mask, seq_len) == all(b.allows(*pair) for pair in pairs if a.allows(*pair))
    assert (a.mask & b.mask).within(a.mask, seq_len)
    assert a.mask.within(b.mask | a.mask, seq_len)


@given(endless, st.integers(0, 40), st.integers(1, 4))
@settings(max_examples=100)
def test_the_number_of_pieces_does_not_grow_with_the_area(case, start, step):
    for row in rows_of(case.mask):
        counts = {
            len(case.mask.pieces(Span(start, start + n * step, step), Span(0, n * step, step), row))
            for n in (500, 10**5, 10**10)
        }
        assert len(counts) == 1


@pytest.mark.parametrize(
    "mask",
    [Full(), Causal(), Window(7), Window(2, 3), Causal() & Window(4, 4), Documents([10**9]), Padding([10**9])],
    ids=repr,
)
def test_simple_masks_are_one_piece(mask):
    for n in (1, 5, 10**9):
        assert len(mask.pieces(Span(0, n), Span(0, n))) == 1


def test_documents_are_looked_up_where_the_spans_are():
    """A thousand documents of 100 tokens: a look at one rectangle gives its own."""
    mask = Documents([100] * 1000) & Causal()
    assert len(mask.pieces(Span(0, 100_000), Span(0, 100_000))) == 1000
    assert mask.pieces(Span(50_010, 50_020), Span(50_000, 50_030)) == [((0, 10), (0, 20), -10, 9)]
    assert mask.pieces(Span(50_010, 50_020), Span(50_100, 50_200)) == []


@given(trees)
@settings(max_examples=150)
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
    masks += [Prefix(5), Prefix([5, 6]), Padding([9, 2]), Chunked(64) & Causal(), Documents([3, 4, 0, 9]) & Causal()]
    assert {mask.spec.shape for mask in masks} == {(32,)}
    assert len({tuple(mask.spec.tolist()) for mask in masks}) == len(masks)


@given(trees, trees)
@settings(max_examples=100)
def test_equality_is_that_of_the_expression(a, b):
    assert (a.mask == b.mask) == (repr(a.mask) == repr(b.mask))
    # A spec has more in it: for how many batch rows, and for how long a sequence, a mask was given.
    assert a.mask == b.mask or not torch.equal(a.mask.spec, b.mask.spec)
    assert a.mask != repr(a.mask)


def test_repr_can_be_read_back():
    assert repr(Causal() & Window(4, 2) | Full()) == "((Causal() & Window(4, 2)) | Full())"
    assert repr(Documents([3, 0, 4]) & Chunked(2)) == "(Documents([3, 4]) & Chunked(2))"
    assert repr(Documents([[3], [1, 2]])) == "Documents([[3], [1, 2]])"
    assert repr(Prefix(4) | Prefix([4, 5])) == "(Prefix(4) | Prefix([4, 5]))"
    assert repr(Padding([3, 4])) == "Padding([[0, 3], [0, 4]])"


def test_long_texts_are_cut_but_tell_masks_apart():
    """The text of a mask is compared between ranks, and shown where they differ."""
    lengths = [17] * 500
    texts = {repr(Documents([*lengths, last])) for last in (1, 2, 3)}
    assert len(texts) == 3
    assert all(len(text) < 120 and text.startswith("Documents([17, 17, 17") for text in texts)


@given(st.recursive(bandless, both, max_leaves=4), st.sampled_from(LAYOUTS), st.integers(0, 40), st.integers(1, 9))
@settings(max_examples=200)
def test_masks_without_bands_are_full_and_causal_pieces(case, make, seq_len, world_size):
    """Between any two spans of a layout: what a kernel without windows can take."""
    assert not case.mask.needs_band
    layout = make(seq_len, world_size)
    owned = [span for rank in range(world_size) for span in layout.spans(rank)]
    for row in rows_of(case.mask):
        assert not any(b.cuts_high for q in owned for k in owned for b in case.mask.pieces(q, k, row))


def test_windows_and_unions_need_bands():
    for mask in (
        *(Window(3), Window(3) & Causal(), Full() | Causal(), Causal() & (Full() | Causal())),
        *(Documents([3]) & Window(3), Documents([3]) | Prefix(2)),
    ):
        assert mask.needs_band


@given(trees)
@settings(max_examples=100)
def test_reach_bounds_every_pair(case):
    positions = torch.arange(150)  # of up to seven documents of 25 tokens
    apart = (positions[:, None] - positions).abs() * case.mask.dense(positions, positions)
    assert case.mask.reach is None or apart.max() <= case.mask.reach


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
        (Documents([3, 9, 0, 2]), 8),
        (Documents([[3, 9], [12]]) & Causal(), 11),
        (Documents([3, 9]) & Window(4), 4),
        (Documents([0, 0]), 0),
        (Chunked(8), 7),
        (Chunked(8) | Documents([3, 9]), 8),
        (Prefix(5), None),
        (Padding([5, 6]), None),
        (Padding([5, 6]) & Chunked(2), 1),
    ],
)
def test_reach(mask, reach):
    assert mask.reach == reach


@pytest.mark.parametrize("w", [1, 3, 8, 17])
def test_window_counts_the_token_itself(w):
    """``Window(w - 1)`` is the causal window of w tokens."""
    positions = torch.arange(40)
    assert Window(w - 1).dense(positions, positions).sum(1).tolist() == [min(w, i + 1) for i in range(40)]


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
