"""ringcp beside other libraries, from their released packages, in the same rounds: `make bench-peers`.

    python -m benchmarks.peers.bench
    python -m benchmarks.peers.bench --only documents window --csv results.csv

One launch of ranks a case, so that a library that hangs or spoils its process group spoils one case. Each library and
mode is first held against the fp64 reference in a small case of the kind, with the code that checks ringcp; one that is
wrong, or has no way to say the mask, is listed with the reason and not timed. Timed is forward plus backward, on ranks
of one thread each; the slowest rank counts. The ratio is taken round by round, so that drifts of the machine cancel.
Without flash-attn the libraries run on a stand-in for it, which makes the kernel calls that ringcp makes (see
`cpu_flash.py`): what is compared is the schedule, the transfers and the code around the kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.cases import Case
from benchmarks.harness import METRICS, Entrant, Harness
from benchmarks.meters import quiet_unless
from benchmarks.origin import Origin
from benchmarks.peers.adapters import ADAPTERS, installed
from benchmarks.providers import BASELINE, PROVIDERS, Setting
from benchmarks.rows import Row, append_csv, quantiles
from benchmarks.suite import DOCUMENTS, PEAK
from benchmarks.usage import Usage

OURS = "ringcp"
_FIRST_ROUNDS = 3
# Slower than this many times ringcp: the first rounds say enough.
_SLOW = 3.0
# A launch, the imports, the checks, and what a call may take that is not counted.
_LAUNCH_S = 300
# What torchrun, torch, its profiler and transformers would say about each rank.
_QUIET = {
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "KINETO_LOG_LEVEL": "99",
    "TRANSFORMERS_VERBOSITY": "error",
}
_SMOKE_DIVISOR = 8


@dataclass(frozen=True)
class Named:
    """A case by a short name; ringcp is to be at least `target` times as fast as each library that is right in it.

    modes: of ringcp. A library's mode is held against the one of the same name, or else against the first.
    memory: whether bytes are counted, and ringcp is to need less than each library.
    """

    name: str
    case: Case
    target: float | None = None
    world_size: int = 2
    modes: tuple[str, ...] = ("auto",)
    memory: bool = False


CASES = (
    Named("documents", Case(sum(DOCUMENTS), "bf16", f"documents:{','.join(map(str, DOCUMENTS))}"), 1.25),
    Named("window", Case(16384, "bf16", "window:1024"), 1.5),
    Named("gqa-8k", Case(8192, "bf16", kv_heads=2), 1.0),
    Named("causal-2k", Case(2048, "bf16"), 1.0),
    Named("causal-2k-fp32", Case(2048), 1.0),
    Named("causal-8k", Case(8192, "bf16"), 0.98),
    Named("causal-8k-fp32", Case(8192), 0.98),
    Named("causal-8k-w4", Case(8192, "bf16"), world_size=4, modes=("ring", "ulysses"), memory=True),
)


@dataclass(frozen=True)
class Result:
    """A library in a mode and case: its seconds and ringcp's, by round; or why it was not timed.

    sent, peak, our_peak: bytes of one call on the rank that sends and needs most; 0 where they were not counted.
    """

    case: str
    provider: str
    mode: str
    seconds: list[list[float]]
    ours: list[list[float]]
    problem: str = ""
    sent: float = 0.0
    peak: float = 0.0
    our_peak: float = 0.0

    @property
    def ratios(self) -> list[float]:
        """How many times as fast ringcp was, by round."""
        return [theirs[0] / ours[0] for theirs, ours in zip(self.seconds, self.ours, strict=False)]

    def rows(self, title: str, origin: Origin) -> list[Row]:
        """Lines for the CSV."""

        def row(metric: str, unit: str, values: Sequence[float]) -> Row:
            q = quantiles(values) if values else None
            shown = ["", "", ""] if q is None else [float(f"{x:.6g}") for x in (q.median, q.p20, q.p80)]
            return Row(self.provider, title, self.mode, metric, unit, *shown, threads=1, **vars(origin))

        if self.problem:
            return [row("wrong", " ".join(self.problem.split()), [])]
        rows = [row(metric, "ms", [1e3 * s[i] for s in self.seconds]) for i, metric in enumerate(METRICS)]
        if self.peak:
            rows += [row("sent", "bytes", [self.sent]), row(PEAK, "bytes", [self.peak])]
        return rows if self.provider == OURS else [*rows, row(METRICS[0], "x ringcp's time", self.ratios)]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, `--smoke` applied."""
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=summary, epilog=rest, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    names = [named.name for named in CASES]
    add("--only", nargs="+", default=names, choices=names, metavar="CASE", help=f"of {', '.join(names)}")
    library = f"of {', '.join(ADAPTERS)}"
    add("--library", nargs="+", default=list(ADAPTERS), choices=ADAPTERS, metavar="NAME", help=library)
    add("--minutes", type=float, default=15.0, help="for the rounds of all cases together; there are at least three")
    add("--rounds", type=int, default=25, help="at most so many")
    add("--csv", type=Path, help="file to append the results to")
    add("--smoke", action="store_true", help="tiny sizes and one round")
    add("--to", type=Path, help=argparse.SUPPRESS)  # where the ranks of a launch put their results
    args = parser.parse_args(argv)
    for name in ("minutes", "rounds"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name}: expected more than 0, got {getattr(args, name)}")
    args.cases = [named for named in CASES if named.name in args.only]
    if args.smoke:
        args.cases = [replace(named, case=named.case.shrunk(_SMOKE_DIVISOR)) for named in args.cases]
        args.rounds = 1
    return args


def measure(harness: Harness, named: Named, libraries: Sequence[str], rounds: int, seconds: float) -> list[Result]:
    """Checks and times ringcp and the libraries in one case. Runs on every rank."""
    PROVIDERS.update({name: p for name, p in installed().items() if name.rpartition(" ")[0] in libraries})
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    # Redrawn between the calls that are timed: a thread that does it would take a core from them.
    with Progress(*columns, console=Console(quiet=harness.rank != 0), auto_refresh=False, transient=True) as bar:
        entrants, refused = _admitted(harness, named, bar)
        if not entrants or entrants[0].provider != OURS:
            return refused
        usages = [harness.usage(e) if named.memory else Usage(0.0, 0.0) for e in entrants]
        by_entrant = _timed(harness, named.name, entrants, rounds, seconds, bar)
    ours = {e.mode: i for i, e in enumerate(entrants) if e.provider == OURS}
    timed = []
    for entrant, usage, by_round in zip(entrants, usages, by_entrant, strict=True):
        held_against = ours.get(entrant.mode, 0)
        compared = by_entrant[held_against], "", *usage, usages[held_against].peak
        timed.append(Result(named.name, entrant.provider, entrant.mode, by_round, *compared))
    return timed + refused


def _admitted(harness: Harness, named: Named, bar: Progress) -> tuple[list[Entrant], list[Result]]:
    """Who is right in the case, ringcp first, and what is wrong with the others."""
    mesh = init_device_mesh("cpu", (harness.world_size,), mesh_dim_names=("cp",))
    theirs = [(name, mode) for name in PROVIDERS if name not in (BASELINE, OURS) for mode in PROVIDERS[name].modes]
    everyone = [(OURS, mode) for mode in named.modes] + theirs
    entrants, refused = [], []
    task = bar.add_task("", total=len(everyone))
    for provider, mode in everyone:
        bar.update(task, description=f"{named.name}: checking {provider} {mode}", refresh=True)
        admitted = harness.admit(provider, Setting(named.case, mesh, mode, "auto", "call"))
        if isinstance(admitted, Entrant):
            entrants.append(admitted)
        else:
            refused.append(Result(named.name, provider, mode, [], [], admitted))
        bar.update(task, advance=1, refresh=True)
    bar.remove_task(task)
    return entrants, refused


def _timed(
    harness: Harness, name: str, entrants: Sequence[Entrant], rounds: int, seconds: float, bar: Progress
) -> list[list[list[float]]]:
    """Seconds by entrant, round and metric: a few rounds of all, then as many as there is time for of those that are
    not slow.
    """

    def run(chosen: Sequence[Entrant], rounds: int) -> list[list[list[float]]]:
        task = bar.add_task(f"{name}: rounds", total=rounds * len(chosen))

        def progress() -> None:
            bar.update(task, advance=1, refresh=True)

        # The calls that checked them were the warm-up.
        seconds = harness.rounds(chosen, warmup=0, rounds=rounds, progress=progress)
        bar.remove_task(task)
        return seconds

    first = min(rounds, _FIRST_ROUNDS)
    by_entrant = run(entrants, first)
    # The same on every rank, as the seconds are.
    typical = [quantiles([s[0] for s in by_round]).median for by_round in by_entrant]
    going_on = [i for i, t in enumerate(typical) if t <= _SLOW * typical[0]]
    time_left = seconds - first * sum(typical)
    more = min(rounds - first, int(time_left / sum(typical[i] for i in going_on)))
    if more > 0:
        later = run([entrants[i] for i in going_on], more)
        for i, by_round in zip(going_on, later, strict=True):
            by_entrant[i] += by_round
    return by_entrant


def print_results(console: Console, results: Sequence[Result], cases: Sequence[Named]) -> None:
    """A table of how many times as fast ringcp was, and whether that meets the target."""
    title = (
        "forward plus backward; how many times as fast ringcp was, median of the rounds, 20th percentile in brackets"
    )
    table = Table(title=title, title_justify="left")
    for column in ("case", "library", "mode"):
        table.add_column(column)
    for column in ("ms", "rounds", "ringcp is x as fast", "target", "peak MiB", "x ringcp's"):
        table.add_column(column, justify="right")
    for named in cases:
        table.add_section()
        shown = f"{named.name}\n{named.case.name} W{named.world_size}"
        for result in (r for r in results if r.case == named.name):
            cells = [shown, result.provider, result.mode]
            shown = ""
            if result.problem:
                table.add_row(*cells, "not timed")
                continue
            cells += [f"{quantiles([1e3 * s[0] for s in result.seconds]).median:.1f}", str(len(result.seconds))]
            peak = f"{result.peak / 2**20:.1f}" if result.peak else ""
            if result.provider == OURS:
                table.add_row(*cells, "", "", peak)
                continue
            speed = quantiles(result.ratios)
            goal = more = ""
            if named.target is not None:
                goal = f"{named.target:g} {_word(speed.median >= named.target)}"
            if named.memory:
                more = f"{result.peak / result.our_peak:.2f} {_word(result.peak > result.our_peak)}"
            table.add_row(*cells, f"{speed.median:.2f} ({speed.p20:.2f})", goal, peak, more)
    console.print(table)
    for result in results:
        if result.problem:
            line = f"not timed: {result.provider} {result.mode}, {result.case}: {' '.join(result.problem.split())}"
            console.print(line, markup=False, highlight=False)


def _word(met: bool) -> str:
    return "met" if met else "MISSED"


def _rank(args: argparse.Namespace) -> None:
    """One rank of one launch: one case."""
    warnings.simplefilter("ignore", FutureWarning)  # of torch, about how the libraries call it
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    try:
        harness = Harness("cpu", threads=1)
        (named,) = args.cases
        results = measure(harness, named, args.library, args.rounds, 60 * args.minutes)
        if harness.rank == 0:
            args.to.write_text(json.dumps([asdict(result) for result in results]))
    finally:
        dist.destroy_process_group()


def _launch(named: Named, args: argparse.Namespace, minutes: float, path: Path) -> str:
    """Runs the ranks of one case; what went wrong, empty if nothing did."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={named.world_size}",
        "--module", "benchmarks.peers.bench", "--only", named.name,
        "--library", *args.library, "--minutes", f"{minutes:g}", "--rounds", str(args.rounds), "--to", str(path),
        *(["--smoke"] if args.smoke else []),
    ]  # fmt: skip
    # On a signal torchrun ends its ranks; killed, it would leave them.
    with subprocess.Popen(command, env=_QUIET | os.environ) as launch:
        try:
            code = launch.wait(timeout=3 * 60 * minutes + _LAUNCH_S)
        except subprocess.TimeoutExpired as late:
            launch.terminate()
            return f"it took more than {late.timeout:.0f} s"
    return f"the launch failed with status {code}" if code else ""


def main(argv: Sequence[str]) -> int:
    """All cases. Exit status 0, unless a launch failed or ringcp was wrong; a target that is missed is in the table."""
    args = parse(argv)
    if "RANK" in os.environ:
        _rank(args)
        return 0
    console = quiet_unless(first=True)
    here = set(installed())
    if missing := [name for name in args.library if not any(label.startswith(f"{name} ") for label in here)]:
        console.print(f"not installed here: {', '.join(missing)}; make bench-peers installs them", markup=False)
    origin = Origin.of("cpu", f"python -m benchmarks.peers.bench {shlex.join(argv)}".strip())
    console.print(f"{origin.device}, torch {origin.torch}, commit {origin.commit or 'unknown'}", highlight=False)
    start = time.monotonic()
    results: list[Result] = []
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for i, named in enumerate(args.cases):
            done = time.monotonic() - start
            left = f", about {done / i * (len(args.cases) - i) / 60:.0f} min left" if i else ""
            console.print(
                f"[{i + 1}/{len(args.cases)}] {named.name}: {named.case.name} W{named.world_size}{left}", markup=False
            )
            path = Path(folder, f"{named.name}.json")
            problem = _launch(named, args, args.minutes / len(args.cases), path)
            if problem or not path.exists():
                failed = True
                console.print(f"{named.name}: no results: {problem}", style="red", markup=False)
                continue
            of_case = [Result(**fields) for fields in json.loads(path.read_text())]
            results += of_case
            if args.csv:
                title = f"{named.case.name} W{named.world_size}"
                append_csv(args.csv, [row for result in of_case for row in result.rows(title, origin)])
    print_results(console, results, args.cases)
    return int(failed or any(result.problem for result in results if result.provider == OURS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
