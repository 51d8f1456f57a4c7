"""ALiBi and dropout are exact in every mode, with every mask and layout, at any number of ranks."""

import functools
import itertools

import pytest
import torch
from calls import ways
from cases import Case, assert_none, differences, layout_of, mask_of, rank_in, whole
from pairwise_cases import P, factors, oracle, results, seed_of, slopes_of

import ringcp
from ringcp.testing import in_process

MASKS = (
    "full", "causal", "window_3", "two_sided", "documents", "documents_window", "prefix", "left_padding", "chunked",
    "documents_or_window",
)  # fmt: skip
LAYOUTS = ("head_tail", "striped", "contiguous", "balanced")


def cases(seq_len):
    """Every mask, with layouts and heads in turn; kernels too, as far as they can."""
    turns = (itertools.cycle(each) for each in (LAYOUTS, ("gqa", "mqa", "narrow_v"), ("auto", "reference")))
    for mask, layout, heads, kernel in zip(MASKS, *turns, strict=False):
        yield Case(seq_len, mask, layout, heads, kernel=kernel)


def checked(what, case, tensors, cut, attend, seed):
    """What is off of ``attend(q, k, v, **options)``, with slopes and with dropout."""
    slopes = slopes_of(case, each_row=case.kernel == "auto")
    options = {"alibi_slopes": slopes, "kernel": case.kernel}, {"dropout_p": P, "kernel": "reference"}
    definitions = {"slopes": slopes}, {"kept": factors(tensors.q, tensors.k, seed)}
    found = []
    for feature, given, definition in zip(("ALiBi", "dropout"), options, definitions, strict=True):
        got = results([cut(x) for x in tensors], functools.partial(attend, **given))
        want = results(tensors, functools.partial(oracle, mask=mask_of(case), **definition))
        found += differences(f"{what} {case} {feature}", got, {name: cut(x) for name, x in want.items()})
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "mode, degree", [("ring", None), ("gather", None), ("gather", 2), ("ulysses", None), ("usp", 4)]
)
def test_exact_in_process(mode, degree):
    found = []
    for case in cases(29):
        layout = layout_of(case, 8)
        how = {"mode": mode, "ulysses_degree": degree, "layout": layout, "world_size": 8, "mask": mask_of(case)}
        seed = seed_of(11)

        def attend(q, k, v, how=how, **options):
            torch.manual_seed(11)
            return in_process(q, k, v, return_lse=True, **how, **options)

        found += checked(mode, case, whole(case, 8), lambda x: x, attend, seed)
    assert_none([found])


def check_over_ranks(mesh):
    found = []
    for (name, way), case in itertools.product(ways(mesh).items(), list(cases(23))[:: 1 if mesh.size() == 2 else 3]):
        layout, rank = layout_of(case, mesh.size()), rank_in(way["mesh"])
        seed = seed_of(5)

        def attend(q, k, v, case=case, layout=layout, way=way, rank=rank, **options):
            torch.manual_seed(5 + rank)  # each rank its own: the one of rank 0 counts
            return ringcp.attention(q, k, v, mask=mask_of(case), layout=layout, return_lse=True, **way, **options)

        cut = functools.partial(layout.shard, rank=rank, dim=2)
        found += checked(name, case, whole(case, mesh.size()), cut, attend, seed)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_exact_over_ranks(worlds, world_size):
    assert_none(worlds(world_size).run(check_over_ranks))
