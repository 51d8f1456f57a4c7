"""What context parallelism costs and gives a small decoder in training, and whether it trains as one process does.

    python -m benchmarks.training

starts 2 ranks, then 4, on this machine: gloo on the CPU, or NCCL with a GPU for each rank. Two parts, `--part`:

speed   Rounds of whole steps (forward, backward, sum of the gradients, optimizer), in every mode and in one process
        of plain torch, in turns; the slowest rank counts. One process has as many threads as all ranks together, up to
        the cores. Peak memory is measured apart, of the rank that needs most: all tensors, the parameters' among them.
curves  Losses and norms of the gradient over `--steps` steps, laid over those of one process. What rounding alone does
        to it is shown as well: one process again, with each weight one rounding step higher. If the first steps
        differ, the mode is wrong, which the exit code says, too.

The model is that of examples/model.py in fp32, the text is the documentation that comes with Python. In
--out, results are appended to training.csv, each step of the curves to training-curves.csv, and two PNGs drawn anew.
Nothing else should run on the machine while speed is measured.
Needs rich and matplotlib (`pip install ringcp[dev]`).
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import multiprocessing

from benchmarks.origin import Origin, num_cores
from benchmarks.rows import append_csv
from benchmarks.training import ranks, report
from benchmarks.training.plots import draw_curves, draw_speed
from benchmarks.training.ranks import ROUNDED, SINGLE, ULYSSES_DEGREE, Curve, Plan, Timed
from ringcp.modes import MODES

_SMOKE = {"seq_len": [128], "rounds": 1, "curve_len": 128, "steps": 3}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, `--smoke` applied."""
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=summary, epilog=rest, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--part", nargs="+", default=["speed", "curves"], choices=["speed", "curves"])
    add("--ranks", type=int, nargs="+", default=[2, 4], help="a launch for each (default: 2 4)")
    add(
        "--mode",
        nargs="+",
        default=["auto", *MODES],
        choices=["auto", *MODES],
        help=f"default: all; usp, with exchanges of {ULYSSES_DEGREE}, runs from 4 ranks on. A curve of auto is one of\n"
        "the mode that it is",
    )
    add("--seq-len", type=int, nargs="+", default=[256, 1024, 2048, 4096, 8192], help="lengths for speed")
    add("--rounds", type=int, default=9, help="timed steps of each mode and length (default: 9)")
    add("--curve-len", type=int, default=2048, help="tokens of a step of the curves (default: 2048)")
    add("--steps", type=int, default=200, help="of a curve (default: 200)")
    add("--threads", type=int, default=1, help="of each rank (default: 1)")
    add("--out", type=Path, default=Path("build/training"), help="folder for what is written (default: %(default)s)")
    add("--smoke", action="store_true", help="128 tokens, one round, 3 steps: whether all of it works")
    args = parser.parse_args(argv)
    if args.smoke:
        vars(args).update(_SMOKE)
    args.csv = args.out / ("training-smoke.csv" if args.smoke else "training.csv")
    args.seq_len = sorted(set(args.seq_len))
    for name in ("ranks", "seq_len", "rounds", "curve_len", "steps", "threads"):
        given = getattr(args, name)
        if min(given if isinstance(given, list) else [given]) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, got {given}")
    longest, most = max(*args.seq_len, args.curve_len), len(ranks.text()) - 1
    if longest > most:
        parser.error(f"--seq-len, --curve-len: expected at most the {most} tokens of the text, got {longest}")
    for world_size in args.ranks:
        if not _modes(args.mode, world_size):
            parser.error(f"--mode: expected one that runs on {world_size} ranks, got {' '.join(args.mode)}")
    return args


def plans(args: argparse.Namespace, device: str, cores: int) -> list[Plan]:
    """A launch for each number of ranks; the first has the curves of one process."""
    made: list[Plan] = []
    for world_size in args.ranks:
        modes = _modes(args.mode, world_size)
        resolved = dict.fromkeys(ranks.meant(mode, args.curve_len, world_size, device) for mode in modes)
        alone = () if made else (SINGLE, ROUNDED)
        made.append(
            Plan(
                device,
                world_size,
                args.threads,
                together=min(cores, world_size * args.threads),
                modes=(SINGLE, *modes),
                lengths=tuple(args.seq_len) if "speed" in args.part else (),
                rounds=args.rounds,
                curves=(*alone, *resolved) if "curves" in args.part else (),
                curve_len=args.curve_len,
                steps=args.steps,
            )
        )
    return made


def _modes(modes: Sequence[str], world_size: int) -> list[str]:
    """Those that run on so many ranks."""
    return [m for m in modes if m != "usp" or (world_size > ULYSSES_DEGREE and world_size % ULYSSES_DEGREE == 0)]


def launch(plan: Plan) -> Generator[ranks.Said, None, None]:
    """Start the ranks of a plan, and hear what rank 0 says.

    Raises:
        torch.multiprocessing.ProcessException: a rank raised or died; the others are ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.training.ranks", "torch._dynamo"])  # imported once, not by each rank
    reader, writer = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder, reader:
        started = multiprocessing.start_processes(
            ranks.run,
            (plan, f"{folder}/store", writer),
            nprocs=plan.world_size,
            join=False,
            start_method="forkserver",
        )
        writer.close()  # so that the pipe ends with the ranks
        try:
            while not started.join(timeout=0):
                while reader.poll(0.2):
                    try:
                        yield reader.recv()
                    except EOFError:
                        started.join()
                        break
        finally:
            for process in started.processes:
                process.kill()


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and torch.cuda.device_count() < max(args.ranks):
        raise SystemExit(
            f"--ranks: expected a GPU for each, got {max(args.ranks)} ranks and {torch.cuda.device_count()} GPUs; "
            "run fewer, or hide the GPUs to use the CPU: CUDA_VISIBLE_DEVICES="
        )
    # The profiler's notes on itself would break into the progress; ranks inherit this.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    args.out.mkdir(parents=True, exist_ok=True)
    append_csv(args.csv, [])  # a file with other columns is refused now, not after the first measurement
    append_csv(_steps(args.csv), [], report.Step)
    cores = num_cores()
    command = shlex.join(["python", "-m", "benchmarks.training", *argv])
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    origin = Origin.of(device, command)
    about = f"{origin.device}, {cores} cores, torch {origin.torch}, commit {origin.commit or 'unknown'}"
    console.print(f"{about}\n{command}", markup=False)
    planned = plans(args, device, cores)
    timed, curves = _measure(planned, args.csv, origin, console)
    for plan in planned:
        here = [t for t in timed if t[0].world_size == plan.world_size]
        if here:
            report.print_speed(console, here, plan, cores)
    if curves:
        report.print_curves(console, curves, args.curve_len)
    _draw(args.csv, timed, curves, about, args.curve_len, console)
    if any(report.difference(curve, curves[0]).wrong for curve in curves):
        raise SystemExit("training: expected curves like that of one process, got those marked as wrong above")


def _measure(
    planned: Sequence[Plan], csv: Path, origin: Origin, console: Console
) -> tuple[list[list[Timed]], list[Curve]]:
    """All launches, with progress; what was measured is appended to the CSV as it comes."""
    timed: list[list[Timed]] = []
    curves: list[Curve] = []
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(elapsed_when_finished=True)
    # Refreshed between the steps that are timed; a thread that redraws would take a core from them.
    with Progress(
        *columns, console=console, auto_refresh=False, speed_estimate_period=600, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=sum(plan.cost() for plan in planned))
        for plan in planned:
            bar.update(task, description=f"starting {plan.world_size} ranks", refresh=True)
            with closing(launch(plan)) as heard:
                for said in heard:
                    if isinstance(said, ranks.Progress):
                        doing = f"{plan.world_size} ranks, {said.doing}"
                        bar.update(task, advance=said.cost, description=doing, refresh=True)
                        continue
                    if isinstance(said, Curve):
                        curves.append(said)
                        rows = report.curve_rows(said, curves[0], plan, origin)
                        append_csv(_steps(csv), report.steps(said, plan, origin), report.Step)
                        console.print(report.curve_line(said, curves[0]))
                    else:
                        timed.append(said)
                        rows = report.speed_rows(said, plan, origin)
                        console.print(report.speed_line(said, plan))
                    append_csv(csv, rows)
    return timed, curves


def _steps(csv: Path) -> Path:
    """The file of the curves, beside the one of the quantiles."""
    return csv.with_name(f"{csv.stem}-curves.csv")


def _draw(
    csv: Path, timed: Sequence[Sequence[Timed]], curves: Sequence[Curve], about: str, curve_len: int, console: Console
) -> None:
    """The pictures of what was measured, beside the CSV."""
    console.print(f"{csv}: a line for each number; {_steps(csv)}: for each step", markup=False)
    if timed:
        path = csv.with_name(f"{csv.stem}-speed.png")
        draw_speed(path, timed, f"Training a small decoder, fp32; one process has the threads of all ranks. {about}")
        console.print(f"{path}: tokens a second and peak memory by length", markup=False)
    if curves:
        path = csv.with_name(f"{csv.stem}-curves.png")
        draw_curves(path, curves, f"Training a small decoder on {curve_len:,} tokens a step, fp32. {about}")
        console.print(f"{path}: loss and gradient norm by step", markup=False)


if __name__ == "__main__":
    main(sys.argv[1:])
