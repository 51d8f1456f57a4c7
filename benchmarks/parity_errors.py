"""The errors of the parity table: every mask, dtype, mode and number of ranks against fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from benchmarks.parity_cells import (
    Cell,
    Results,
    both_on_rank,
    in_one_process,
    modes_of,
    of_ranks,
    one_kernel,
    reference,
)
from ringcp.testing.pool import World

ATTENTION = ("out", "dq", "dk", "dv")
STEP = ("loss", "gradient norm", "gradient")
QUANTITIES = ATTENTION + STEP
ONE_KERNEL = "one kernel"


@dataclass(frozen=True)
class Error:
    """One line of the CSV. `mode` is "one kernel" for torch's attention without ringcp; `ran` says on what."""

    dtype: str
    mask: str
    mode: str
    ranks: int
    ran: str
    quantity: str
    max_abs: float
    rel_l2: float


MOST_FP64 = 1e-10
MOST_GROWTH = 1.5


def above_bar(found: Sequence[Error]) -> list[str]:
    """What breaks the bars, in words: fp64 within 1e-10; elsewhere, relative L2 of out, dq, dk, dv at most 1.5 times
    that of one kernel.
    """
    one = {(e.dtype, e.mask, e.quantity): e.rel_l2 for e in found if e.mode == ONE_KERNEL}
    said = []
    for e in found:
        what = f"{e.quantity}, {e.dtype}, {e.mask}, {e.mode}, {e.ranks} ranks"
        if e.dtype == "fp64" and not e.max_abs <= MOST_FP64:
            said.append(f"{what}: off by {e.max_abs:.1e}, more than {MOST_FP64:.0e}")
        bar = MOST_GROWTH * one[e.dtype, e.mask, e.quantity]
        if e.dtype != "fp64" and e.quantity in ATTENTION and not e.rel_l2 <= bar:
            said.append(f"{what}: relative L2 {e.rel_l2:.1e}, more than {bar:.1e}")
    return said


def ways(pools: Mapping[int, World], sizes: Sequence[int]) -> list[tuple[str, int, str, Callable[[Cell], Results]]]:
    """All ways to compute a cell: (mode, ranks, what it runs on, the function). Sizes without a pool are in process."""
    found: list[tuple[str, int, str, Callable[[Cell], Results]]] = [(ONE_KERNEL, 1, "torch", one_kernel)]
    for size in sizes:
        for mode in modes_of(size):
            if size in pools:
                found.append((mode, size, "gloo", _on(pools[size], mode)))
            else:
                found.append((mode, size, "one process", _in_process(mode, size)))
    return found


def _on(pool: World, mode: str) -> Callable[[Cell], Results]:
    return lambda cell: of_ranks(cell, pool.run(both_on_rank, cell, mode))


def _in_process(mode: str, size: int) -> Callable[[Cell], Results]:
    return lambda cell: in_one_process(cell, mode, size)


def errors(
    cells: Sequence[Cell], pools: Mapping[int, World], sizes: Sequence[int], progress: Callable[[str], None]
) -> Iterator[Error]:
    """Every quantity of every cell, computed in every way. `progress` hears of each way before it runs."""
    for cell in cells:
        truth = reference(cell)
        for mode, size, ran, compute in ways(pools, sizes):
            progress(f"{cell.dtype_name} {cell.mask_name}, {mode}, {size} ranks")
            for quantity, max_abs, rel_l2 in compared(compute(cell), truth):
                yield Error(cell.dtype_name, cell.mask_name, mode, size, ran, quantity, max_abs, rel_l2)


def compared(got: Results, truth: Results) -> Iterator[tuple[str, float, float]]:
    """Every quantity: its name, largest absolute error, and relative L2 error."""
    for name, actual, wanted in zip(ATTENTION, got.attention, truth.attention, strict=True):
        yield name, *_errors(actual.double(), wanted)
    for name, a, b in (
        ("loss", got.step.loss, truth.step.loss),
        ("gradient norm", got.step.gradient.norm().item(), truth.step.gradient.norm().item()),
    ):
        yield name, abs(a - b), abs(a - b) / abs(b)
    yield "gradient", *_errors(got.step.gradient, truth.step.gradient)


def _errors(actual: Tensor, wanted: Tensor) -> tuple[float, float]:
    difference = actual - wanted
    return difference.abs().max().item(), (difference.norm() / wanted.norm()).item()
