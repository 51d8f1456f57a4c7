"""Every mode against the definition of attention, in fp64: out, lse, dq, dk, dv, each on its own and on every rank."""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from cases import (
    INPUTS,
    KERNELS,
    LAYOUTS,
    MASKS,
    MASKS_OF,
    SHAPES,
    STRIDES,
    UPSTREAMS,
    Case,
    Tensors,
    assert_none,
    check_cases,
    differences,
    expected,
    in_process_case,
    lengths,
    restride,
    run_case,
    whole,
)

# (mode, degree) by the number of gloo ranks, and in one process.
OVER_GLOO = {
    2: [("gather", None), ("gather", 2), ("ulysses", None)],
    3: [("gather", None), ("ulysses", None)],
    4: [("gather", None), ("gather", 2), ("ulysses", None), ("usp", 2)],
}
HERE = {
    8: [("gather", None), ("gather", 2), ("ulysses", None), ("usp", 2), ("usp", 4)],
    16: [("ulysses", None), ("usp", 8)],
}
ALL_MASKS = (*MASKS, *MASKS_OF)
ALL_LAYOUTS = (*LAYOUTS, "balanced")


def deck(draw: random.Random, values: Sequence[Any]) -> Iterator[Any]:
    """The values in drawn order, each once before any comes again."""
    while True:
        yield from draw.sample(list(values), len(values))


def drawn(world_size: int, ways: Sequence[tuple[str, int | None]], num: int) -> Iterator[Case]:
    """`num` cases of each way: all values of everything, in drawn company."""
    draw = random.Random(world_size)
    for mode, degree in ways:
        memory = (None, 1, 4000) if mode == "gather" else (None,)
        save = ("exchanged", "local") if mode == "ulysses" or degree else ("auto",)
        columns = (lengths(world_size), ALL_MASKS, ALL_LAYOUTS, SHAPES, INPUTS, STRIDES, UPSTREAMS, KERNELS)
        decks = [deck(draw, tuple(values)) for values in (*columns, (mode,), (degree,), memory, save)]
        yield from itertools.islice(itertools.starmap(Case, zip(*decks, strict=True)), num)


def over_gloo(world_size: int) -> list[Case]:
    return list(drawn(world_size, OVER_GLOO[world_size], 24))


def here(world_size: int) -> list[Case]:
    return list(drawn(world_size, HERE[world_size], 24 if world_size == 8 else 10))


@pytest.mark.parametrize("world_size", OVER_GLOO)
@pytest.mark.report("1.56")
@pytest.mark.report("1.57")
@pytest.mark.report("1.58")
@pytest.mark.report("1.61")
@pytest.mark.report("5.DS #7384")
@pytest.mark.report("5.verl #1226")
@pytest.mark.report("7.31")
def test_exact_over_gloo(worlds, world_size):
    assert_none(worlds(world_size).run(check_cases, over_gloo(world_size), timeout=110))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("world_size", HERE)
@pytest.mark.report("1.59")
def test_exact_in_process(world_size):
    found = []
    for case in here(world_size):
        tensors = whole(case, world_size)
        given = Tensors(*(restride(x, case.strides) for x in tensors))
        found += differences(f"{case}", in_process_case(case, world_size, given), expected(case, tensors))
    assert_none([found])


def test_every_pair_occurs():
    """Each mode with each mask, layout, heads, inputs, strides and upstream gradient."""
    cases = [case for world_size in OVER_GLOO for case in over_gloo(world_size)] + here(8)
    everything = {
        "mask": ALL_MASKS, "layout": ALL_LAYOUTS, "heads": SHAPES, "inputs": INPUTS, "strides": STRIDES,
        "upstream": UPSTREAMS, "kernel": KERNELS,
    }  # fmt: skip
    for way, (name, values) in itertools.product(
        {way for ways in (*OVER_GLOO.values(), HERE[8]) for way in ways}, everything.items()
    ):
        found = {getattr(case, name) for case in cases if (case.mode, case.degree) == way}
        assert found == set(values), (way, name)
    assert {case.seq_len for case in cases} >= {1, 2, 3, 4, 5, 7, 8, 15, 24, 33, 37}


def check_poisoned(mesh, cases):
    """`check_cases` with every fresh buffer full of NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(64).isnan().all()
        return check_cases(mesh, cases)
    finally:
        torch.use_deterministic_algorithms(False)


def test_buffers_full_of_nan(worlds):
    cases = list(drawn(5, OVER_GLOO[4], 12))
    assert_none(worlds(4).run(check_poisoned, cases, timeout=110))


@pytest.mark.parametrize(("mode", "degree"), OVER_GLOO[4])
def test_a_case_can_fail(worlds, mode, degree):
    """The comparison sees an error of 1e-9 in each of the five results of each mode."""
    for found in worlds(4).run(spoiled, Case(24, heads="12_3", mode=mode, degree=degree)):
        assert [text.split(": ")[1] for text in found] == ["out", "dq", "dk", "dv", "lse"]


def spoiled(mesh, case):
    got, want = run_case(mesh, case)
    return differences("spoiled", {name: x + 1e-9 * x.abs().max().clamp(min=1) for name, x in got.items()}, want)
