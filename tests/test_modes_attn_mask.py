"""`attn_mask` in a context is exact in every mode, with every mask beside it, on every layout and number of ranks."""

import itertools

import pytest
from attn_masks import OF_KEYS, OF_ROWS, check_case
from cases import ALLOWED, ALLOWED_OF, LAYOUTS, UNEVEN, Case, assert_none

HEADS = ("gqa", "mqa", "narrow_v", *UNEVEN)


def check_all(mesh, mode, degree):
    turns = (itertools.cycle(each) for each in ((*LAYOUTS, "balanced"), HEADS, ("auto", "auto", "reference")))
    every = itertools.product((*OF_KEYS, *OF_ROWS), (*ALLOWED, *ALLOWED_OF))
    found = []
    for (name, mask), layout, heads, kernel in zip(every, *turns, strict=False):
        found += check_case(mesh, Case(26, mask, layout, heads, kernel=kernel, mode=mode, degree=degree), name)
    for seq_len, name in itertools.product((1, mesh.size() - 1, 2 * mesh.size() + 1), (*OF_KEYS, *OF_ROWS)):
        found += check_case(mesh, Case(seq_len, "causal", "striped", "mqa", mode=mode, degree=degree), name)
    return found


@pytest.mark.parametrize(
    "size, mode, degree",
    [
        *[(size, mode, None) for size in (2, 3, 4) for mode in ("ring", "gather", "ulysses")],
        (4, "usp", 2),
        (4, "gather", 2),
    ],
)
def test_exact(worlds, size, mode, degree):
    assert_none(worlds(size).run(check_all, mode, degree, timeout=150))
