"""Making masks: what their functions take, alike in every form, and what they refuse in one sentence."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringcp
from ringcp import Causal, Chunked, Documents, Full, Padding, Prefix, Window

FORMS = {"list": list, "tuple": tuple, "int64": torch.tensor, "int32": lambda x: torch.tensor(x, dtype=torch.int32)}
lengths_of_documents = st.lists(st.integers(0, 9), max_size=8)


def sums(lengths: list[int]) -> list[int]:
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def position_ids(lengths: list[int]) -> list[int]:
    return [position for length in lengths for position in range(length)]


@given(lengths_of_documents, st.sampled_from(list(FORMS.values())))
def test_documents_are_the_same_however_they_are_given(lengths, form):
    mask = Documents(lengths)
    assert mask == Documents(form(lengths) if lengths else []) == Documents(lengths=lengths)
    assert mask == Documents(cu_seqlens=form(sums(lengths)))
    assert mask == Documents(position_ids=form(position_ids(lengths)) if any(lengths) else [])
    assert mask == Documents([length for length in lengths if length])
    assert mask.rows is None


@given(st.lists(lengths_of_documents, min_size=1, max_size=4))
def test_batch_rows_may_be_packed_differently(rows):
    mask = Documents(rows)
    assert mask == Documents(cu_seqlens=[sums(lengths) for lengths in rows])
    assert mask == Documents(position_ids=[position_ids(lengths) for lengths in rows])
    alone = [Documents(lengths) for lengths in rows]
    assert mask.rows == (None if all(other == alone[0] for other in alone) else len(rows))
    positions = torch.arange(40)
    dense = mask.dense(positions, positions).expand(len(rows), 1, 40, 40)
    assert all(torch.equal(dense[row, 0], each.dense(positions, positions)) for row, each in enumerate(alone))


def test_a_batch_as_a_tensor():
    rows = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])
    assert Documents(position_ids=rows) == Documents([[3, 2], [2, 3]])
    assert Documents(cu_seqlens=torch.tensor([[0, 3, 5], [0, 2, 5]])) == Documents([[3, 2], [2, 3]])
    assert Documents(torch.tensor([[3, 2], [2, 3]])) == Documents([[3, 2], [2, 3]])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_prefixes_and_padding_of_each_row_in_any_form(form):
    assert Prefix(form([3, 4])) == Prefix([3, 4]) != Prefix([4, 3])
    assert Prefix(form([3, 3])) == Prefix(3) == Prefix([3]) == Prefix(torch.tensor(3))
    assert Padding(form([3, 4])) == Padding([3, 4]) != Padding([4, 3])
    assert Padding(form([3, 5]), side="left", seq_len=5) == Padding([3, 5], side="left", seq_len=5) != Padding([3, 5])


def test_extreme_masks_are_simple_ones():
    positions = torch.arange(12)

    def dense(mask):
        return mask.dense(positions, positions)

    same = [
        (Prefix(0), Causal()),
        (Prefix(12), Full()),
        (Padding([12]), Full()),
        (Padding([12], side="left", seq_len=12), Full()),
        (Documents([12]), Full()),
        (Chunked(12), Full()),
        (Chunked(1), Window(0)),
        (Documents([1] * 12), Window(0)),
        (Documents([5, 5]), Chunked(5) & Padding([10])),
        (Chunked(4) & Causal(), Documents([4, 4, 4]) & Causal()),
    ]
    for mask, simple in same:
        assert torch.equal(dense(mask), dense(simple)), (mask, simple)
    assert not dense(Documents([])).any()
    assert not dense(Padding([0, 0])).any()


COUNT = "expected integers of at least 0, got {!r}; pass numbers of tokens"
ITEMS = "expected integers, got {}; pass a list or a tensor of them"
ONE = "Documents: expected one of lengths, cu_seqlens, position_ids, got {}; give one"
SUMS = "cu_seqlens: expected sums that start at 0 and never fall, got {}; pass lengths instead"
# By case: what makes the mask, and the whole message.
REFUSED = {
    **{
        f"{name} {value!r}": (
            lambda name=name, value=value: Window(**{"left": 1, "right": 1, name: value}),
            f"{name}: expected a number of tokens of at least 0, got {value!r}; "
            "for an unbounded side use Causal() or Full()",
        )
        for name in ("left", "right")
        for value in (-1, True, 2.0, None, "3")
    },
    **{
        f"chunk {value!r}": (
            lambda value=value: Chunked(value),
            f"size: expected a number of tokens of at least 1, got {value!r}; give the chunk's length",
        )
        for value in (0, -3, True, 2.0, None)
    },
    "negative prefix": (lambda: Prefix(-1), "n: " + COUNT.format(-1)),
    "flag prefix": (lambda: Prefix([3, True]), "n: " + COUNT.format(True)),
    "fractional prefix": (lambda: Prefix(3.0), "n: " + ITEMS.format("float")),
    "fractional prefixes": (lambda: Prefix(torch.tensor([3.0])), "n: " + COUNT.format(3.0)),
    "text prefix": (lambda: Prefix("3"), "n: " + ITEMS.format("str")),
    "no prefixes": (
        lambda: Prefix([]),
        "mask: expected an entry, for all batch rows or for each, got none; give the lengths",
    ),
    "negative padding": (lambda: Padding([4, -1]), "lengths: " + COUNT.format(-1)),
    "padding of nothing": (lambda: Padding(None), "lengths: " + ITEMS.format("NoneType")),
    "padding matrix": (
        lambda: Padding([[4], [5]]),
        "lengths: expected one number of tokens for each batch row, got lists; of an attention mask, pass "
        'mask.sum(-1), and where the padding is on the left side="left", seq_len=mask.shape[-1]',
    ),
    "side": (
        lambda: Padding([4], side="top"),
        'side: expected "right" or "left", got \'top\'; say where the padding is',
    ),
    "left padding": (
        lambda: Padding([4], side="left"),
        "seq_len: expected the length of the padded sequence for side='left', got None; give it",
    ),
    "padding too long": (
        lambda: Padding([4, 9], seq_len=8),
        "lengths: expected at most seq_len = 8, got 9; check both",
    ),
    "no documents": (lambda: Documents(), ONE.format("none")),
    "two documents": (lambda: Documents([3], cu_seqlens=[0, 3]), ONE.format("lengths, cu_seqlens")),
    "negative document": (lambda: Documents([3, -1]), "lengths: " + COUNT.format(-1)),
    "fractional documents": (lambda: Documents([3.0]), "lengths: " + ITEMS.format("float")),
    "fractional tensor": (lambda: Documents(torch.tensor([3.0])), "lengths: " + ITEMS.format("float")),
    "mixed documents": (lambda: Documents([3, [4]]), "lengths: " + COUNT.format([4])),
    "cube": (lambda: Documents(torch.ones(2, 2, 2, dtype=torch.int64)), "lengths: " + COUNT.format([1, 1])),
    "sums from 1": (lambda: Documents(cu_seqlens=[1, 3]), SUMS.format([1, 3])),
    "sums that fall": (lambda: Documents(cu_seqlens=[0, 5, 3]), SUMS.format([0, 5, 3])),
    "no sums": (lambda: Documents(cu_seqlens=[]), SUMS.format([])),
    "positions that jump": (
        lambda: Documents(position_ids=[0, 1, 3]),
        "position_ids: expected 0, 1, 2, ... anew in each document, got 3 after 1 at 2; "
        "pass lengths or cu_seqlens instead",
    ),
    "positions that fall": (
        lambda: Documents(position_ids=[[0, 1, 2], [0, 1, 1]]),
        "position_ids: expected 0, 1, 2, ... anew in each document, got 1 after 1 at 2; "
        "pass lengths or cu_seqlens instead",
    ),
    "positions of a shard": (
        lambda: Documents(position_ids=torch.arange(4, 9)),
        "position_ids: expected the whole sequence, from 0 on, got 4 first; unshard them",
    ),
    "rows": (
        lambda: Documents([[3], [4]]) & Prefix([1, 2, 3]),
        "mask: expected masks for equal numbers of batch rows, got Documents([[3], [4]]) for 2 and Prefix([1, 2, 3]) "
        "for 3; give both one entry a batch row",
    ),
    "rows of either": (
        lambda: Padding([1, 2]) | (Causal() & Padding([1, 2, 3])),
        "mask: expected masks for equal numbers of batch rows, got Padding([[0, 1], [0, 2]]) for 2 and "
        "(Causal() & Padding([[0, 1], [0, 2], [0, 3]])) for 3; give both one entry a batch row",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_mask_is_named(case):
    make, message = REFUSED[case]
    with pytest.raises(ringcp.ArgumentError) as caught:
        make()
    assert str(caught.value) == message
    assert re.match(r"\w+: expected .+, got .+; .+", message)


@pytest.mark.parametrize(
    ("mask", "wrong"),
    [
        (Documents([4, 7]), "documents of at most 10 tokens in all, got 11 in Documents([4, 7])"),
        (Causal() & Documents([[4], [11]]), "documents of at most 10 tokens in all, got 11 in (Causal() & Documents("),
        (Prefix(11), "a prefix of at most 10 tokens, got 11 in Prefix(11)"),
        (Window(3) | Prefix([2, 30]), "a prefix of at most 10 tokens, got 30 in (Window(3, 0) | Prefix([2, 30]))"),
        (Padding([10, 12]), "at most 10 valid tokens, got 12 in Padding("),
        (
            Padding([3], side="left", seq_len=12),
            "seq_len=10, the length of the whole sequence, got 12 in Padding([9, 12])",
        ),
        (
            Padding([3], side="left", seq_len=8),
            "seq_len=10, the length of the whole sequence, got 8 in Padding([5, 8])",
        ),
        (Padding([3], seq_len=12), "seq_len=10, the length of the whole sequence, got 12 in Padding([0, 3])"),
        (
            Documents(position_ids=[0, 1, 0, 1, 2]) & Causal(),
            "the position ids of all 10 tokens of the whole sequence, got those of 5 in (Documents([2, 3]) & Causal())",
        ),
        (
            Documents(position_ids=[[*range(10)], [*range(9)]]),
            "the position ids of all 10 tokens of the whole sequence",
        ),
        (Padding([5, 5, 5]), "one entry for each of 2 batch rows, or one for all, got 3 in Padding([0, 5])"),
        (Documents([[4], [4], [4]]), "one entry for each of 2 batch rows, or one for all, got 3 in Documents([4])"),
        (
            Causal() | Prefix([3, 3, 3]),
            "one entry for each of 2 batch rows, or one for all, got 3 in (Causal() | Prefix",
        ),
        (Prefix([1, 2, 3]), "one entry for each of 2 batch rows, or one for all, got 3 in Prefix([1, 2, 3])"),
    ],
    ids=lambda value: "" if isinstance(value, str) else repr(value),
)
def test_masks_of_another_batch_or_sequence(mask, wrong):
    found = mask.problem(batch=2, seq_len=10)
    assert found.startswith(f"mask: expected {wrong}")
    assert re.match(r"mask: expected .+, got .+; give .+", found)


@pytest.mark.parametrize(
    "mask",
    [
        *(Full(), Causal(), Window(50), Chunked(64), Documents([]), Documents([4, 6]), Documents([[4], [3, 7]])),
        *(Prefix(10), Prefix([0, 10]), Padding([10, 0]), Padding([3, 4], side="left", seq_len=10)),
    ],
    ids=repr,
)
def test_masks_that_fit(mask):
    for any_of_it in (mask, mask & Causal() | Window(3)):
        assert any_of_it.problem(batch=2, seq_len=10) == ""
