"""ringcp beside other libraries, from their released packages, in the same rounds: `make bench-peers`.

    python -m benchmarks.peers.bench
    python -m benchmarks.peers.bench --only documents window --csv results.csv

One launch of ranks a case. Each library and mode is first held against the fp64 reference in a small case of the kind,
with the code that checks ringcp. It is not timed if it has no way to say the case ("refused"), is wrong, is far slower
than ringcp in its first call ("slow"), or raises, hangs or ends its process ("failed"), which costs no other its
results. Timed is forward plus backward, on ranks of one thread each; the slowest rank counts. Ratios and percents are
taken round by round, so that drifts of the machine cancel; one process (SDPA on all the cores of the ranks) runs in
every round. Peak memory and bytes sent are of one further call.
Without flash-attn the libraries run on a stand-in for it, which makes the kernel calls that ringcp makes (see
`cpu_flash.py`): what is compared is the schedule, the transfers and the code around the kernel.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from rich.console import Console

from benchmarks.harness import Harness
from benchmarks.meters import quiet_unless
from benchmarks.origin import Origin
from benchmarks.peers.adapters import ADAPTERS, PATIENCE, installed
from benchmarks.peers.cases import CASES, Named
from benchmarks.peers.launches import run_case, torchrun
from benchmarks.peers.measure import FIRST_ROUNDS, Effort, competitors, measure
from benchmarks.peers.record import Record
from benchmarks.peers.results import OURS, Result
from benchmarks.peers.tables import print_results, print_summary
from benchmarks.rows import append_csv

_FOLDER = Path("build/peers")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, `--smoke` applied; `command` is what the CSV says."""
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=summary, epilog=rest, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    names = [named.name for named in CASES]
    add("--only", nargs="+", default=names, choices=names, metavar="CASE", help=f"of {', '.join(names)}")
    library = f"of {', '.join(ADAPTERS)}"
    add("--library", nargs="+", default=list(ADAPTERS), choices=ADAPTERS, metavar="NAME", help=library)
    add("--minutes", type=float, default=17.0, help="for all cases together (%(default)g); none begins later")
    add("--rounds", type=int, default=25, help="at most so many (%(default)s)")
    add("--patience", type=float, default=90.0, help="seconds that one call may take (%(default)g)")
    add("--csv", type=Path, help=f"file to append the results to ({_FOLDER}/peers.csv)")
    add("--smoke", action="store_true", help="tiny sizes and one round: does all of it work?")
    # Of a launch: where its ranks put their results, and when they should end.
    add("--to", type=Path, help=argparse.SUPPRESS)
    add("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for name in ("minutes", "rounds", "patience"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name}: expected more than 0, got {getattr(args, name)}")
    args.command = _typed(args, parser)
    args.csv = args.csv or _FOLDER / ("peers-smoke.csv" if args.smoke else "peers.csv")
    args.cases = [named for named in CASES if named.name in args.only]
    if args.smoke:
        args.cases = [named.shrunk() for named in args.cases]
        args.rounds = 1
    return args


def _typed(args: argparse.Namespace, parser: argparse.ArgumentParser) -> str:
    """The command, without what changes no number, such as paths."""
    words = ["python", "-m", "benchmarks.peers.bench"]
    for name in ("only", "library", "minutes", "rounds", "patience"):
        value = getattr(args, name)
        if value != parser.get_default(name):
            words += [f"--{name}", *(value if isinstance(value, list) else [f"{value:g}"])]
    return shlex.join([*words, *(["--smoke"] if args.smoke else [])])


def _rank(args: argparse.Namespace) -> None:
    """One rank of one launch: one case."""
    warnings.simplefilter("ignore", FutureWarning)  # of torch, about how the libraries call it
    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        harness = Harness("cpu", threads=1, providers=competitors(args.library))
        (named,) = args.cases
        measure(harness, named, Effort(args.rounds, args.until), Record(args.to))
    finally:
        dist.destroy_process_group()


class _Plan:
    """How long the cases take: shares by their cost of what is left, and of that what the rounds are likely to need."""

    def __init__(self, cases: Sequence[Named], rounds: int, seconds: float) -> None:
        self._cases, self._rounds = cases, rounds
        self._began = time.time()
        self._until = self._began + seconds
        self._pace = 1.0  # seconds that a case took, by those it was thought to

    def share(self, number: int) -> float:
        """When a case should end, as `time.time()`."""
        costs = [named.seconds(min(self._rounds, FIRST_ROUNDS)) for named in self._cases[number:]]
        now = time.time()
        return now + max(0.0, self._until - now) * costs[0] / sum(costs)

    def left(self, number: int) -> float:
        """Seconds for this case and those after it."""
        most = self._pace * sum(named.seconds(self._rounds) for named in self._cases[number:])
        return max(0.0, min(most, self._until - time.time()))

    def ended(self, number: int) -> None:
        """The case has; it may have had fewer rounds than it was thought to."""
        thought = sum(named.seconds(self._rounds) for named in self._cases[: number + 1])
        self._pace = min(1.0, (time.time() - self._began) / thought)


def main(argv: Sequence[str]) -> int:
    """All cases. Exit status 0, unless a case was not measured or ringcp was wrong (2 for a CSV with other columns); a
    target that is missed is in the table.
    """
    args = parse(argv)
    if "RANK" in os.environ:
        _rank(args)
        return 0
    console = quiet_unless(first=True)
    here = set(installed())
    if missing := [name for name in args.library if not any(label.startswith(f"{name} ") for label in here)]:
        console.print(f"not installed here: {', '.join(missing)}; make bench-peers installs them", markup=False)
    origin = Origin.of("cpu", args.command)
    about = f"{origin.device}, torch {origin.torch}, commit {origin.commit or 'unknown'}; {len(args.cases)} cases"
    console.print(about, markup=False, highlight=False)
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    try:
        append_csv(args.csv, [])
    except ValueError as error:  # now, not after the first case
        console.print(f"--{error}", style="red", markup=False, highlight=False)
        return 2
    results, failed = _run(console, args, origin)
    print_results(console, results, args.cases)
    print_summary(console, results, args.cases)
    console.print(f"appended to: {args.csv}", markup=False, highlight=False)
    return int(failed or any(result.verdict for result in results if result.provider == OURS))


def _run(console: Console, args: argparse.Namespace, origin: Origin) -> tuple[list[Result], bool]:
    """All results, and whether a case has none of ringcp's."""
    plan = _Plan(args.cases, args.rounds, 60 * args.minutes)
    results: list[Result] = []
    failed = False
    for i, named in enumerate(args.cases):
        if i and not plan.left(i):
            names = " ".join(named.name for named in args.cases[i:])
            console.print(f"not measured, the time is up: --only {names}", style="red", markup=False, highlight=False)
            return results, True
        left = f"about {plan.left(i) / 60:.0f} min left"
        console.print(f"[{i + 1}/{len(args.cases)}] {named.name}: {named.title}, {left}", markup=False, highlight=False)
        with tempfile.TemporaryDirectory() as folder:
            options = [
                "--only", named.name, "--library", *args.library, "--rounds", str(args.rounds), "--to", folder,
                "--until", str(plan.share(i)), *(["--smoke"] if args.smoke else []),
            ]  # fmt: skip
            record = Record(Path(folder))
            try:
                problem = run_case(named.name, torchrun(named.world_size, options), record, args.patience)
            finally:  # interrupted, too
                found = record.results()
                append_csv(args.csv, [row for result in found for row in result.rows(named.title, origin)])
        results += found
        plan.ended(i)
        if problem:
            failed = True
            console.print(f"{named.name}: {problem}", style="red", markup=False)
    return results, failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
