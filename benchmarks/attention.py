"""How fast attention over ranks is, next to one process that computes the whole sequence on the same cores.

    torchrun --standalone --nproc-per-node=2 benchmarks/attention.py --seq-len 2048 8192 --dtype fp32 bf16
    torchrun --standalone --nproc-per-node=2 benchmarks/attention.py --mode ring gather ulysses --kv-heads 2

Each round times the baseline (`F.scaled_dot_product_attention` on rank 0 with all cores, the other ranks asleep) and
every provider, forward and backward, agreement of the ranks included. All ranks are timed from a barrier on, and the
slowest counts. Each provider is first held against the fp64 reference, in a small case and by some rows of the case;
one that is wrong, or refuses the case, is reported, not timed. `benchmarks/bench.py` runs whole suites of cases. With
CUDA the same runs on NCCL, one device a rank, and the percentages are of the baseline's one device times the number of
devices.

The results are appended to build/attention/attention.csv, or to the FILE of `--csv FILE`. `--breakdown` adds what
`ringcp.record()` sees, `--smoke` only tries whether all of it works. Nothing else should run on the machine. Needs rich
(`pip install ringcp[dev]`).
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

# torchrun runs this file as a script; let its folder's modules be benchmarks.*, so that they hide no others.
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler that counts memory announces itself otherwise

from torch.distributed.device_mesh import DeviceMesh

from benchmarks.cases import DTYPES, Case
from benchmarks.harness import Harness
from benchmarks.measured import Measured, print_breakdown, print_table
from benchmarks.meters import ByWork, quiet_unless
from benchmarks.origin import Origin
from benchmarks.providers import BASELINE, PROVIDERS, Setting
from benchmarks.rows import append_csv
from benchmarks.runner import Effort, Job, ranks, run_case
from ringcp.layout import LAYOUT_NAMES

_FOLDER = Path("build/attention")
_SMOKE_LEN = 128


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, `--smoke` applied; `cases` are their product."""
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=summary, epilog=rest, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--seq-len", type=int, nargs="+", default=[2048, 8192], help="lengths of the whole sequence")
    add("--dtype", nargs="+", default=["fp32", "bf16"], choices=DTYPES)
    add("--batch", type=int, default=1)
    add("--heads", type=int, default=8)
    add("--kv-heads", type=int, help="default: as many as heads")
    add("--head-dim", type=int, default=64)
    add(
        "--mask",
        nargs="+",
        default=["causal"],
        help="causal, full, window:N, N tokens with the query's own, or documents:N,N,...",
    )
    add("--provider", nargs="+", default=["ringcp"], choices=PROVIDERS, help=f"{BASELINE}, the baseline, always runs")
    add(
        "--mode",
        nargs="+",
        default=["auto"],
        help="auto (the table shows what that is), ring, gather, ulysses, usp; a provider runs in those that it knows",
    )
    add("--ulysses-degree", type=int, default=2, help="in mode usp: neighbouring ranks that exchange heads")
    add("--layout", default="auto", choices=LAYOUT_NAMES)
    add("--agree", default="call", choices=["auto", "call", "context"], help="when the ranks vote")
    add("--rounds", type=int, default=11)
    add("--warmup", type=int, default=2, help="rounds that do not count")
    add(
        "--threads",
        type=int,
        default=1,
        help="of each rank; the baseline has the sum, up to the cores",
    )
    add("--breakdown", action="store_true", help="tiles, bytes, computing and waiting, by direction")
    add("--csv", type=Path, help=f"file to append the results to ({_FOLDER}/attention.csv)")
    add("--smoke", action="store_true", help=f"at most {_SMOKE_LEN} tokens and one round")
    args = parser.parse_args(argv)
    args.csv = args.csv or _FOLDER / ("attention-smoke.csv" if args.smoke else "attention.csv")
    if args.smoke:
        args.seq_len = sorted({min(n, _SMOKE_LEN) for n in args.seq_len})
        args.rounds, args.warmup = 1, 0
    if args.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {args.rounds}")
    if args.threads < 1:
        parser.error(f"--threads: expected at least 1, got {args.threads}")
    try:
        args.cases = [
            Case(n, dtype, mask, args.batch, args.heads, args.kv_heads or args.heads, args.head_dim)
            for mask in args.mask
            for dtype in args.dtype
            for n in args.seq_len
        ]
    except ValueError as error:
        parser.error(str(error))
    known = {mode for name in args.provider for mode in PROVIDERS[name].modes}
    if unknown := [mode for mode in args.mode if mode not in known]:
        parser.error(f"--mode: expected modes among {', '.join(sorted(known))}, got {', '.join(unknown)}")
    return args


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    if "RANK" not in os.environ:
        raise SystemExit("attention.py: expected a launch by torchrun, got no RANK; --help shows the command")
    with ranks(args.threads) as (harness, mesh):
        _run(harness, mesh, args, argv)


def _run(harness: Harness, mesh: DeviceMesh, args: argparse.Namespace, argv: Sequence[str]) -> None:
    first = harness.rank == 0
    console = quiet_unless(first)
    start = f"torchrun --standalone --nproc-per-node={harness.world_size} benchmarks/attention.py"
    origin = Origin.of(harness.device, f"{start} {shlex.join(argv)}".strip())
    about = f"{origin.device}, torch {origin.torch}, {harness.world_size} ranks x {args.threads} threads"
    console.print(f"{about}, commit {origin.commit or 'unknown'}\n{origin.command}", markup=False, highlight=False)
    if first:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        append_csv(args.csv, [])  # a file with other columns is refused now, not after the first measurement
    names = [(BASELINE, mode) for mode in PROVIDERS[BASELINE].modes]
    names += [(p, mode) for p in args.provider if p != BASELINE for mode in args.mode if mode in PROVIDERS[p].modes]
    effort = Effort(args.rounds, args.warmup, breakdown=args.breakdown)
    results: list[Measured] = []
    meter = ByWork(console, sum(case.flops * len(names) * effort.turns for case in args.cases))
    with meter.progress:
        for case in args.cases:
            meter.weight = case.flops
            settings = [
                (name, Setting(case, mesh, mode, args.layout, args.agree, args.ulysses_degree)) for name, mode in names
            ]
            measured = run_case(harness, Job(settings), effort, meter)
            if first:
                rows = [row for result in measured for row in result.rows(origin, harness.threads_of(result.provider))]
                append_csv(args.csv, rows)
            results += measured
    print_table(console, results, world_size=harness.world_size, baseline_threads=harness.baseline_threads)
    if args.breakdown:
        print_breakdown(console, results)
    console.print(f"appended to: {args.csv}", markup=False, highlight=False)


if __name__ == "__main__":
    main(sys.argv[1:])
