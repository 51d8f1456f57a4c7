"""The benchmark in one command: named cases on 1, 2 and 4 ranks, a table with the bars, a CSV and pictures.

    python benchmarks/bench.py                  # 12 cases in ten minutes on 2 cores
    python benchmarks/bench.py --suite full     # one factor at a time; under 100 minutes, can be stopped and resumed
    python benchmarks/bench.py --only documents window

It starts the ranks itself. In every round all modes of a case run, and SDPA in one process on as many cores; each is
held against the fp64 reference before, in a small case and by rows of the case itself. One that is wrong, or refuses
the case, is not timed; the CSV says which, and why. Peak memory and bytes sent are of one further call. Short cases run
up to 41 rounds, long ones as many as there is time for, at least 3. With CUDA the same runs on NCCL, for as many ranks
as there are devices.

Nothing else should run on the machine. Results are appended to CSV files in --out, pictures are drawn beside them.
Ctrl-C ends it with the table of what is there, and the command for the rest. Needs rich and matplotlib
(`pip install ringcp[dev]`).
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

# Run as a script, as attention.py is.
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from rich.console import Console

from benchmarks import child
from benchmarks.meters import quiet_unless
from benchmarks.origin import Origin
from benchmarks.pictures import draw_all
from benchmarks.providers import PROVIDERS
from benchmarks.rows import append_csv
from benchmarks.suite import SUITES, Named, Suite, varied
from benchmarks.summary import missing, print_summary, read_results

_ROOT = Path(__file__).resolve().parents[1]
_OUT = Path("build/bench")


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Suite]:
    """The options, and the suite with those applied."""
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=summary, epilog=rest, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--suite", default="quick", choices=SUITES)
    add("--only", nargs="+", metavar="CASE", help="cases of the suite; --list names them")
    add("--list", action="store_true", help="name the cases, and measure nothing")
    add("--provider", nargs="+", default=["ringcp"], choices=PROVIDERS, help="beside the baseline")
    add("--threads", type=int, default=1, help="of each rank; the baseline has the sum, up to the cores")
    add("--again", action="store_true", help="in a suite that resumes: also what the CSV has of this commit")
    add("--out", type=Path, default=_OUT, help="folder for the CSV and the pictures (%(default)s)")
    add("--smoke", action="store_true", help="tiny cases, one round: does all of it work?")
    args = parser.parse_args(argv)
    if args.threads < 1:
        parser.error(f"--threads: expected at least 1, got {args.threads}")
    suite = SUITES[args.suite]
    try:
        suite = suite.only(args.only) if args.only else suite
    except ValueError as error:
        parser.error(f"--{error}")
    return args, suite.smoke() if args.smoke else suite


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, unless a launch failed, or ringcp was wrong or refused a case; 130 if it was interrupted. A bar
    that is missed is said in the table.
    """
    args, suite = parse(argv)
    console = quiet_unless(first=True)
    if args.list:
        _list(console, suite, SUITES[args.suite].cases)
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    origin = Origin.of(device, "")
    path = args.out / (f"{args.suite}-smoke.csv" if args.smoke else f"{args.suite}.csv")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        append_csv(path, [])
    except ValueError as error:  # now, not after the first case
        console.print(f"--out: {error}", style="red", markup=False, highlight=False)
        return 2
    rest = _rest(console, args, suite, path, origin)
    expected, most = sum(rest.planned().values()) / 60, rest.seconds / 60
    minutes = f"{len(rest.cases)} cases, about {max(1, round(expected))} minutes on 2 cores, at most {most:.0f}"
    about = f"{origin.device}, torch {origin.torch}, commit {origin.commit or 'unknown'}; {minutes}"
    console.print(about, markup=False, highlight=False)
    failed, stopped = [], False
    try:
        _launch_all(console, args, rest, path, device, failed)
    except KeyboardInterrupt:
        stopped = True
        console.show_cursor(True)  # the rank that had hidden it is gone
        console.print()
    results = read_results(path, origin, args.threads)
    print_summary(console, suite.cases, args.provider, results, device)
    for drawn in draw_all(suite.cases, results, path, origin):
        console.print(f"drawn: {drawn}", markup=False, highlight=False)
    console.print(f"appended to: {path}", markup=False, highlight=False)
    if stopped:
        left = [named.name for named in missing(rest.cases, args.provider, results)]
        words = f"to go on: {_going_on(args, suite, left, origin)}" if left else "nothing was left"
        console.print(f"stopped; {words}", markup=False, highlight=False, soft_wrap=True)
        return 130
    for line in failed:
        console.print(line, style="red", markup=False, highlight=False)
    titles = {named.title for named in suite.cases}
    wrong = any(not found.timed for key, found in results.items() if key.provider == "ringcp" and key.case in titles)
    return 1 if failed or wrong else 0


def _list(console: Console, suite: Suite, bases: Sequence[Named]) -> None:
    """A line for each case, with what it varies."""
    for named in suite.cases:
        base = varied(named, bases)
        line = f"{named.name:20} {named.title:45}{f' {base[1]} of {base[0]} varied' if base else ''}"
        console.print(line.rstrip(), markup=False, highlight=False)


def _rest(console: Console, args: argparse.Namespace, suite: Suite, path: Path, origin: Origin) -> Suite:
    """What is to be measured: of a suite that resumes, what the CSV does not have yet, in what its time leaves."""
    if not suite.resumes or args.again:
        return suite
    if origin.commit.endswith("+"):
        console.print("This tree differs from its commit: no earlier result counts as one of it.", markup=False)
        return suite
    due = missing(suite.cases, args.provider, read_results(path, origin, args.threads))
    if passed := [named.name for named in suite.cases if named not in due]:
        words = f"{path} has them of commit {origin.commit}, passed over: {', '.join(passed)} (--again: not so)"
        console.print(words, markup=False, highlight=False)
    planned = suite.planned()
    return replace(suite, cases=tuple(due), seconds=suite.seconds - sum(planned[name] for name in passed))


def _launch_all(
    console: Console, args: argparse.Namespace, suite: Suite, path: Path, device: str, failed: list[str]
) -> None:
    """One launch for each number of ranks, with its share of the time. `failed` gets a line for each that did."""
    began, before, due, planned = time.time(), 0, suite.cases, suite.planned()
    until, done = began + suite.seconds, 0.0
    for world_size in sorted({named.world_size for named in due}):
        names = [named.name for named in due if named.world_size == world_size]
        first, before = before, before + len(names)
        expected = [planned.pop(name) for name in names]
        if device == "cuda" and world_size > torch.cuda.device_count():
            failed.append(f"not measured, {world_size} ranks need as many devices: {', '.join(names)}")
            continue
        now = time.time()
        share = (until - now) * len(names) / (len(due) - first)
        options = {
            "--suite": [args.suite],
            "--case": names,
            "--provider": args.provider,
            "--threads": [args.threads],
            "--csv": [path.resolve()],
            "--until": [now + share],
            "--planned": expected,
            "--planned-before": [done],
            "--planned-after": [sum(planned.values())],
            "--began": [began],
            "--before": [first],
            "--of": [len(due)],
            "--command": [_typed(args)],
            **({"--smoke": []} if args.smoke else {}),
        }
        done += sum(expected)
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        words = [str(word) for option, values in options.items() for word in (option, *values)]
        # Without the variable torchrun sets it to 1 and warns; each rank sets its threads itself.
        environment = {"OMP_NUM_THREADS": str(args.threads), "PYTHONUNBUFFERED": "1"} | os.environ
        if status := child.run([*start, "benchmarks/launch.py", *words], cwd=_ROOT, env=environment):
            failed.append(f"the launch on {world_size} ranks failed with status {status}; its error is above")
    console.print(f"measured in {(time.time() - began) / 60:.1f} minutes", markup=False, highlight=False)


def _going_on(args: argparse.Namespace, suite: Suite, left: Sequence[str], origin: Origin) -> str:
    """The command for what is left; a suite that resumes finds that itself."""
    resumes = suite.resumes and not args.again and not origin.commit.endswith("+")
    again = argparse.Namespace(**{**vars(args), "only": args.only if resumes else left})
    out = ["--out", str(args.out)] if args.out != _OUT else []
    return shlex.join([*shlex.split(_typed(again)), *out])


def _typed(args: argparse.Namespace) -> str:
    """The command, for the CSV: without what changes no number."""
    words = ["python", "benchmarks/bench.py", "--suite", args.suite]
    words += ["--only", *args.only] if args.only else []
    words += ["--provider", *args.provider] if args.provider != ["ringcp"] else []
    words += ["--threads", str(args.threads)] if args.threads != 1 else []
    return shlex.join([*words, *(["--smoke"] if args.smoke else [])])


if __name__ == "__main__":
    sys.exit(main())
