"""The errors of the parity table: every mask, dtype, mode and number of ranks against fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from benchmarks.parity.cells import (
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
MOST_FP64 = 1e-10
MOST_GROWTH = 1.5


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


class Way(NamedTuple):
    """A way to compute a cell; the first three as in `Error`."""

    mode: str
    ranks: int
    ran: str
    compute: Callable[[Cell], Results]


def ways(pools: Mapping[int, World], sizes: Sequence[int]) -> list[Way]:
    """All that there are; a size without a pool is computed in one process."""
    found = [Way(ONE_KERNEL, 1, "torch", one_kernel)]
    for size, mode in [(n, mode) for n in sizes for mode in modes_of(n)]:
        if size in pools:
            found.append(Way(mode, size, "gloo", partial(_on_ranks, pools[size], mode)))
        else:
            found.append(Way(mode, size, "one process", partial(in_one_process, mode=mode, world_size=size)))
    return found


def _on_ranks(pool: World, mode: str, cell: Cell) -> Results:
    return of_ranks(cell, pool.run(both_on_rank, cell, mode))


def errors(
    cells: Sequence[Cell], pools: Mapping[int, World], sizes: Sequence[int], progress: Callable[[str], None]
) -> Iterator[Error]:
    """Every quantity of every cell, computed in every way. `progress` hears of each way before it runs."""
    for cell in cells:
        truth = reference(cell)
        for mode, ranks, ran, compute in ways(pools, sizes):
            progress(f"{cell.dtype_name} {cell.mask_name}, {mode}, {ranks} ranks")
            for quantity, max_abs, rel_l2 in compared(compute(cell), truth):
                yield Error(cell.dtype_name, cell.mask_name, mode, ranks, ran, quantity, max_abs, rel_l2)


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
