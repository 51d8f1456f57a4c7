"""What only a GPU can tell, by one command, in under six minutes: is it exact, how fast, how much memory, does it talk?

    python benchmarks/gpu_check.py
    python benchmarks/gpu_check.py --device cpu --smoke

Needs torch 2.11 or later and triton, nothing else. Every part runs in a process of its own and within its share
of the time; what did not fit, or failed, is said with its reason, and stops nothing else. gpu_check.json is rewritten
after each part, with all tracebacks; the table comes at the end. The exit status is 0 when the parts were run, whatever
they found.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Run as a script; let its folder's modules be benchmarks.*, so that they hide no others.
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

from benchmarks.gpu.plan import plan
from benchmarks.gpu.runner import Result, run_part
from benchmarks.gpu.table import line_of, table
from benchmarks.origin import Origin

_START = time.monotonic()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=summary, epilog=rest, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=330.0, help="seconds for all parts together (330)")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for gpu_check.json (%(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda, which has to be there")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: only try whether all of it works")
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts whose names begin so, such as a, d or facts")
    args = parser.parse_args(argv)
    if args.budget_s <= 0:
        parser.error(f"--budget-s: expected seconds above 0, got {args.budget_s:g}")
    args.device = args.device or "cuda"
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device: expected a GPU, got none that torch sees; on a CPU pass --device cpu --smoke")
    args.parts = [part for part in plan(args.device) if not args.only or part.name.startswith(tuple(args.only))]
    if not args.parts:
        names = ", ".join(part.name for part in plan(args.device))
        parser.error(f"--only: expected the beginning of a part's name, got {' '.join(args.only)}; there are {names}")
    return args


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    until = _START + args.budget_s
    origin = Origin.of(args.device, shlex.join(["python", "benchmarks/gpu_check.py", *argv]))
    results: list[Result] = []
    for i, part in enumerate(args.parts):
        shares = [other.seconds for other in args.parts[i:]]
        allowed = max(0.0, until - time.monotonic()) * shares[0] / sum(shares)
        print(f"\n{part.name}: at most {allowed:.0f} s", flush=True)
        results.append(
            run_part(part, args.device, args.smoke, allowed, lambda row: print(f"  {line_of(row)}", flush=True))
        )
        _write(args.out / "gpu_check.json", origin, results)
    print(f"\n{table(results)}\n{time.monotonic() - _START:.0f} s; {args.out / 'gpu_check.json'}")


def _write(path: Path, origin: Origin, results: Sequence[Result]) -> None:
    content = {
        **vars(origin),
        "seconds": time.monotonic() - _START,
        "parts": [
            {
                "name": result.name,
                "allowed_s": result.allowed,
                "seconds": result.seconds,
                "rows": [row._asdict() for row in result.rows],
            }
            for result in results
        ],
    }
    half = path.with_suffix(".part")
    half.write_text(json.dumps(content, indent=1))
    os.replace(half, path)


if __name__ == "__main__":
    main(sys.argv[1:])
