"""The launches of a case: a mode that hangs, or ends its process, costs itself alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from benchmarks.peers.record import DONE, Record
from benchmarks.peers.results import FAILED, OURS, Result
from benchmarks.providers import BASELINE

# Imports, on a machine that has other things to do as well.
_START_S = 300.0
# What torchrun and its ranks may take to end.
_END_S = 60.0
_TICK_S = 1.0
# What torchrun, torch, its profiler and transformers would say about each rank.
_QUIET: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "KINETO_LOG_LEVEL": "99",
    "TRANSFORMERS_VERBOSITY": "error",
}


def torchrun(ranks: int, options: Sequence[str]) -> list[str]:
    """The command of one launch."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*start, "--module", "benchmarks.peers.bench", *options]


def run_case(name: str, command: Sequence[str], record: Record, patience: float) -> str:
    """Launches until all modes of a case are timed or settled; what went wrong, empty if nothing did. What was found is
    in the record, also when this raises.

    A launch that fails, or is longer than `patience` seconds at one call, costs the mode whose call it was. If a round
    had begun the case ends there, with what was timed; else the others are launched again. What ends a launch after all
    calls costs nothing.
    """
    record.settle([])
    while problem := _launch(command, record, patience):
        at, found = record.doing(), record.results()
        if at and at.what == DONE:
            return ""
        if at is None or at.provider in (OURS, BASELINE):
            return problem if at is None else f"{problem}, {at.what} {at.provider} {at.mode}"
        late = Result(name, at.provider, at.mode, verdict=FAILED, problem=f"{at.what}: {problem}")
        others = [r for r in found if (r.provider, r.mode) != (at.provider, at.mode)]
        if any(r.provider == OURS and r.seconds for r in found):
            record.write([*others, late])
            return ""
        record.settle([*(r for r in others if r.verdict), late])
    return ""


def _launch(command: Sequence[str], record: Record, patience: float) -> str:
    """Runs the ranks once."""
    # On a signal torchrun ends its ranks; killed, it would leave them.
    with subprocess.Popen(command, env=_QUIET | os.environ) as launch:
        # Seconds that this process was awake in, so that a machine which slept is not taken for a call that hangs.
        stamp, waited, allowed = record.stamp(), 0.0, _START_S
        while waited <= allowed:
            try:
                code = launch.wait(timeout=_TICK_S)
                return f"the launch failed with status {code}" if code else ""
            except subprocess.TimeoutExpired:
                waited += _TICK_S
            if record.stamp() != stamp:
                stamp, waited, allowed = record.stamp(), 0.0, patience
        launch.terminate()
        try:
            launch.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            launch.kill()
        return f"it took more than {allowed:.0f} s"
