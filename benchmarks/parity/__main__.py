"""Whether results are those of one process: errors, dependence, and what has gone wrong for others, as tables.

    python -m benchmarks.parity

writes parity.md, parity.csv and parity.png into build/parity (`--out` names another folder): errors against fp64 of
attention and of a model's step in every mode, mask and dtype on 1, 2, 4 and 8 ranks; which positions a moved token
changes; and which public reports the tests replay. It ends with exit code 1 if something is not as it must be. No GPU,
under ten minutes on two cores. `--smoke` tries whether all of it works, on few cells. Needs rich, matplotlib, pytest.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.origin import Origin
from benchmarks.parity.cells import MASKS, Cell
from benchmarks.parity.errors import Error, errors, ways
from benchmarks.parity.page import Parity, write
from benchmarks.parity.probe import Answer, answers, questions
from benchmarks.parity.reports import reports, run_tests
from ringcp.testing.pool import World

DTYPES = ("fp64", "fp32", "bf16")
OVER_GLOO = (1, 2, 4)
SIZES = (*OVER_GLOO, 8)
_SMOKE_LEN = 67


def main(argv: Sequence[str] | None = None) -> int:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=summary, epilog=rest, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/parity"))
    parser.add_argument("--smoke", action="store_true", help=f"one mask, {_SMOKE_LEN} tokens, and one test of reports")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # as the ranks have
    console = Console()
    cells = [Cell(mask, dtype) for dtype, mask in product(DTYPES, MASKS)]
    tests: list[str] = []
    if args.smoke:
        cells = [Cell("documents & causal", "fp64", seq_len=_SMOKE_LEN)]
        tests = ["tests/test_layout.py::test_labels_are_shifted_first_and_sharded_after"]
    found, probed = measure(console, cells)
    console.print("replaying the public reports, with pytest:")
    origin = Origin.of("cpu", "python -m benchmarks.parity" + " --smoke" * args.smoke)
    parity = Parity(found, probed, reports(), run_tests(tests), f"Attention: {about(cells[0])}.", origin)
    for path in write(parity, args.out):
        console.print(f"written: {path}", highlight=False, soft_wrap=True)
    failures = parity.failures()
    for failure in failures:
        console.print(f"NOT as it must be: {failure}", style="red", highlight=False, soft_wrap=True)
    return 1 if failures else 0


def about(cell: Cell) -> str:
    """The sizes of a cell."""
    heads = f"{cell.heads} query and {cell.kv_heads} key heads"
    return f"batch {cell.batch}, {cell.seq_len} tokens, {heads} of {cell.head_dim}"


def measure(console: Console, cells: Sequence[Cell]) -> tuple[list[Error], list[Answer]]:
    """The errors and the probe, with progress."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with ExitStack() as stack:
        preload = ("benchmarks.parity.probe",)
        pools = {n: stack.enter_context(World(n, timeout=300, preload=preload)) for n in OVER_GLOO}
        bar = stack.enter_context(Progress(*columns, console=console))
        seq_len = cells[0].seq_len
        of_probe = len(questions(seq_len)) * 4
        task = bar.add_task("", total=len(cells) * len(ways(pools, SIZES)) + of_probe)

        def progress(doing: str) -> None:
            bar.update(task, description=doing, advance=1)

        return list(errors(cells, pools, SIZES, progress)), list(answers(pools[4], seq_len, progress))


if __name__ == "__main__":
    sys.exit(main())
