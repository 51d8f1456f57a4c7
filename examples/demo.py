"""What `make demo` runs: training over several ranks, the first steps again on one, and a picture.

    python examples/demo.py [--data FILE]

Runs examples/train.py by torchrun on every visible GPU, or on two CPU ranks where there is none; then its first steps
on one rank; compares the losses and fails if they differ; and draws who owns which tokens, and what each rank computes
and sends in each step. Options that are not listed go to examples/train.py, such as --data, --seq-len and --steps.
Needs rich and matplotlib.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import ringcp
from ringcp import draw

TRAIN = Path(__file__).with_name("train.py")
TOLERANCE = 1e-4


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and those for train.py."""
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=summary, epilog=rest, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=int, default=torch.cuda.device_count() or 2, help="default: a rank for each GPU, or 2")
    add("--compare-steps", type=int, default=5, metavar="N", help="steps to repeat on one rank (default: 5)")
    add("--out", type=Path, default=Path("demo.png"), help="the picture (default: demo.png)")
    args, others = parser.parse_known_args(argv)
    for name in ("ranks", "compare_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, got {getattr(args, name)}")
    return args, others


def num_cores() -> int:
    """The cores that this process may use, a container's limit included."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = Path("/sys/fs/cgroup/cpu.max")
    quota, _, period = (limit.read_text() if limit.exists() else "max").partition(" ")
    return cores if quota.strip() == "max" else max(1, min(cores, int(quota) // int(period)))


def train(ranks: int, options: Sequence[str], console: Console) -> dict[str, Any]:
    """Run train.py on so many ranks; what it measured."""
    launch = ["--standalone", f"--nproc-per-node={ranks}", os.path.relpath(TRAIN), *options]
    console.print(f"\n$ torchrun {shlex.join(launch)}", style="bold", markup=False)
    with tempfile.TemporaryDirectory() as folder:
        losses = Path(folder) / "losses.json"
        # torchrun gives each of several ranks one thread unless told; on a GPU the CPU's threads matter little.
        env = {"OMP_NUM_THREADS": str(max(1, num_cores() // ranks)), **os.environ}
        command = [sys.executable, "-m", "torch.distributed.run", *launch, "--losses", str(losses)]
        code = subprocess.run(command, env=env, check=False).returncode
        if code:
            raise SystemExit(code)
        measured: dict[str, Any] = json.loads(losses.read_text())
    return measured


def picture(measured: dict[str, Any], path: Path) -> None:
    layout = ringcp.HeadTail(measured["seq_len"], measured["world_size"])
    wire = draw.Wire(measured["kv_heads"], measured["head_dim"], element_size=4)
    draw.save(draw.trace(layout, ringcp.Causal()), path, wire)


def compare(many: dict[str, Any], one: dict[str, Any], console: Console) -> bool:
    """Print both losses of each step; whether these and the norms of the gradients are equal enough."""
    names = [f"{m['world_size']} rank{'s' * (m['world_size'] > 1)}" for m in (many, one)]
    title = (
        f"The first steps on {names[0]} and on {names[1]}: losses, and differences of these and of the gradient's norm"
    )
    table = Table(title=title, title_justify="left")
    for column in ("step", f"loss, {names[0]}", f"loss, {names[1]}", "relative difference", "of the gradient"):
        table.add_column(column, justify="right")
    differences = []
    for step, (a, b) in enumerate(zip(many["losses"], one["losses"], strict=False)):
        norms = many["gradient_norms"][step], one["gradient_norms"][step]
        both = [abs(x - y) / abs(y) for x, y in ((a, b), norms)]
        table.add_row(str(step + 1), f"{a:.6f}", f"{b:.6f}", *(f"{difference:.1e}" for difference in both))
        differences += both
    console.print()
    console.print(table)
    return all(difference <= TOLERANCE for difference in differences)  # False for NaN


def main(argv: Sequence[str]) -> None:
    start = time.perf_counter()
    args, others = parse(argv)
    console = Console(highlight=False, soft_wrap=True)
    if args.ranks == 1:
        console.print(
            "One rank: nothing is sent. For two ranks on the CPU, hide the GPU: CUDA_VISIBLE_DEVICES= make demo"
        )
    many = train(args.ranks, others, console)
    one = train(1, [*others, "--steps", str(min(args.compare_steps, len(many["losses"])))], console)
    picture(many, args.out)
    equal = compare(many, one, console)

    rates = [m["seq_len"] / sorted(m["seconds"])[len(m["seconds"]) // 2] for m in (many, one)]
    console.print(
        f"{many['seq_len']:,} tokens a step. Loss {many['losses'][0]:.3f} -> {many['losses'][-1]:.3f} in "
        f"{len(many['losses'])} steps at {rates[0]:,.0f} tokens/s; on one rank {rates[1]:,.0f} tokens/s (medians)."
    )
    console.print(f"{args.out.resolve()}: who owns which tokens, and what each rank computes and sends in each step")
    console.print(f"{time.perf_counter() - start:.0f} s in all.")
    if not equal:
        raise SystemExit(f"demo: expected losses that are equal to {TOLERANCE:.0e} relative, got those of the table")
    console.print(f"The losses are equal to {TOLERANCE:.0e} relative.", style="bold green")


if __name__ == "__main__":
    main(sys.argv[1:])
