"""The cases of a suite on one number of ranks: what `benchmarks/bench.py` launches by torchrun."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

# torchrun runs this file as a script; let its folder's modules be benchmarks.*, so that they hide no others.
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])
# The profiler that counts memory announces itself otherwise, and each block that is older than it.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from torch.distributed.device_mesh import DeviceMesh

from benchmarks.harness import Harness
from benchmarks.measured import Measured
from benchmarks.meters import ByPlan, Pace, quiet_unless
from benchmarks.origin import Origin
from benchmarks.providers import BASELINE, PROVIDERS, Setting
from benchmarks.rows import append_csv
from benchmarks.runner import Effort, Job, ranks, run_case
from benchmarks.suite import SUITES, TWO_RANKS, Named


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options that `bench.py` gives."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--suite", choices=SUITES, required=True)
    add("--case", nargs="+", required=True, help="names, in the suite")
    add("--smoke", action="store_true")
    add("--provider", nargs="+", required=True, choices=PROVIDERS)
    add("--threads", type=int, required=True)
    add("--csv", type=Path, required=True)
    add("--until", type=float, required=True, help="when this launch should be over, in seconds since the epoch")
    add("--planned", type=float, nargs="+", required=True, help="seconds that the cases are planned to take")
    add("--planned-before", type=float, required=True, help="those of this run in earlier launches together")
    add("--planned-after", type=float, required=True, help="those in later launches together")
    add("--began", type=float, required=True, help="when this run did, in seconds since the epoch")
    add("--before", type=int, required=True, help="cases of this run in earlier launches")
    add("--of", type=int, required=True, help="cases of this run")
    add("--command", required=True, help="what the user typed; the CSV says it")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    suite = SUITES[args.suite].only(args.case)
    suite = suite.smoke() if args.smoke else suite
    with ranks(args.threads) as (harness, mesh):
        console = quiet_unless(harness.rank == 0)
        two = DeviceMesh(harness.device, [0, 1]) if harness.world_size > 2 else None
        meter = ByPlan(console, Pace(args.began, args.planned_before), args.planned, args.planned_after)
        with meter.progress:
            for i, named in enumerate(suite.cases):
                meter.start(f"{args.before + i + 1} of {args.of}, {named.name}: ")
                now = time.time()
                effort = Effort(
                    suite.most_rounds,
                    calls=named.calls,
                    until=now + max(0.0, args.until - now) / (len(suite.cases) - i),
                    least=suite.least_rounds,
                    drawn=named.drawn,
                )
                results = run_case(harness, job_of(named, args.provider, mesh, two), effort, meter)
                if harness.rank == 0:
                    _write(results, harness, named, args.csv, args.command)


def job_of(named: Named, providers: Sequence[str], mesh: DeviceMesh, two: DeviceMesh | None) -> Job:
    """The case with its entrants; those that run on two ranks are the ones that exist there."""
    settings = [(BASELINE, mode) for mode in PROVIDERS[BASELINE].modes] + named.entrants(providers)

    def on(where: DeviceMesh, provider: str, mode: str) -> tuple[str, Setting]:
        return provider, Setting(named.case, where, mode, "auto", "call")

    on_two = []
    if two is not None and TWO_RANKS in named.companions:
        on_two = [on(two, "ringcp", mode) for mode in named.modes if mode != "usp"]  # an exchange of 2 is all of it
    return Job([on(mesh, *setting) for setting in settings], named.companions, on_two)


def _write(results: Sequence[Measured], harness: Harness, named: Named, path: Path, command: str) -> None:
    """A line a metric into the CSV, and beside it a file with the steps of the calls that are drawn."""
    origin = Origin.of(harness.device, command)
    append_csv(path, [row for r in results for row in r.rows(origin, harness.threads_of(r.provider))])
    drawn = {r.mode: [asdict(rank) for rank in r.timelines] for r in results if r.timelines}
    if drawn:
        about = {"case": named.title, "commit": origin.commit, "device": origin.device, "modes": drawn}
        path.with_name(f"{path.stem}-steps-{named.name}.json").write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
