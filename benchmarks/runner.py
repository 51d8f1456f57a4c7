"""One case on the ranks of this launch: who is right is counted and timed, beside what the numbers are held against."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.cases import DTYPES, Case
from benchmarks.harness import METRICS, Entrant, Harness, Refusal
from benchmarks.measured import Measured, Values
from benchmarks.memory import Layer
from benchmarks.providers import BASELINE, PROVIDERS, Setting
from benchmarks.rows import percent_of_baseline
from benchmarks.suite import (
    BARE,
    BOTH,
    DENSE,
    DENSE_LEN,
    FORWARD_OVER_BARE,
    OF_DENSE,
    OF_FORMULA,
    OF_TWO,
    OVER_BARE,
    PEAK,
    SENT,
    TWO_RANKS,
)
from benchmarks.usage import Usage

_BREAKDOWN_CALLS = 5


@dataclass(frozen=True)
class Effort:
    """How often a case is measured.

    rounds: as many, or with `until` at most as many as end by then, and at least `least`.
    warmup: rounds that do not count, after the two calls in which an entrant is checked and its memory counted.
    calls: of an entrant in a row, in each round.
    until: as `time.time()`.
    breakdown, drawn: record further calls, step by step.
    """

    rounds: int
    warmup: int = 0
    calls: int = 1
    until: float | None = None
    least: int = 1
    breakdown: bool = False
    drawn: bool = False

    @property
    def turns(self) -> int:
        """Of an entrant; those calls apart that are recorded."""
        return self.rounds + self.warmup + 2


@contextmanager
def ranks(threads: int) -> Iterator[tuple[Harness, DeviceMesh]]:
    """This process as a rank of the launch by torchrun that it is in."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=timedelta(minutes=10))
    try:
        harness = Harness(device, threads)
        yield harness, init_device_mesh(device, (harness.world_size,), mesh_dim_names=("cp",))
    finally:
        dist.destroy_process_group()


class Meter(Protocol):
    """Who is told how far it is, between calls."""

    def say(self, what: str) -> None: ...

    def turn(self, count: int = 1) -> None:
        """An entrant has made its call, or is not timed and will not make so many."""
        ...


@dataclass(frozen=True)
class Job:
    """A case, and who computes it; the baseline comes first.

    companions: of `benchmarks.suite`.
    on_two: the settings of those that run on the first two ranks as well.
    """

    settings: Sequence[tuple[str, Setting]]
    companions: Sequence[str] = ()
    on_two: Sequence[tuple[str, Setting]] = ()

    @property
    def case(self) -> Case:
        return self.settings[0][1].case


def run_case(harness: Harness, job: Job, effort: Effort, meter: Meter) -> list[Measured]:
    """Checks, counts and times all entrants. Every rank gets the same results."""
    title = f"{job.case.name} W{harness.world_size}"
    entrants, not_timed = _admitted(harness, job, effort, meter, title)
    began = time.time()
    usages = []
    for entrant in entrants:
        usages.append(harness.usage(entrant))
        meter.turn()
    meter.say(job.case.name)
    rounds = _num_rounds(harness, effort, began)
    seconds = harness.rounds(entrants, warmup=effort.warmup, rounds=rounds, progress=meter.turn, calls=effort.calls)
    by_mode = {(e.provider, e.mode): s for e, s in zip(entrants, seconds, strict=True)}
    results = []
    for entrant, usage in zip(entrants, usages, strict=True):
        recorded = not entrant.single_process and not entrant.companion
        calls = _BREAKDOWN_CALLS if effort.rounds > 1 else 1
        results.append(
            Measured(
                entrant.provider,
                title,
                entrant.mode,
                by_mode[entrant.provider, entrant.mode],
                _percents(harness, entrant, by_mode),
                breakdown=tuple(harness.breakdown(entrant, calls=calls)) if effort.breakdown and recorded else (),
                more=tuple(_further(harness, job.case, entrant, usage, by_mode)),
                timelines=tuple(harness.timeline(entrant)) if effort.drawn and recorded else (),
            )
        )
    return results + not_timed


def _admitted(
    harness: Harness, job: Job, effort: Effort, meter: Meter, title: str
) -> tuple[list[Entrant], list[Measured]]:
    """All that are to be timed, the baseline first; and those that are wrong, or refuse the case."""
    entrants, not_timed = [], []
    for provider, setting in (*job.settings, *job.on_two):
        meter.say(f"{job.case.name}: checking {provider} {setting.mode}")
        admitted = harness.admit(provider, setting)
        on_two = setting.mesh.size() < harness.world_size
        suffix = f" {TWO_RANKS}" if on_two else ""
        if isinstance(admitted, Entrant):
            entrants.append(replace(admitted, mode=f"{admitted.mode}{suffix}", companion=TWO_RANKS if on_two else ""))
            meter.turn()
        elif provider == BASELINE:
            raise RuntimeError(f"the baseline is wrong, so that nothing can be held against it: {admitted}")
        else:
            said = {"refused" if isinstance(admitted, Refusal) else "wrong": admitted}
            not_timed.append(Measured(provider, title, f"{setting.mode}{suffix}", [], [], **said))
            meter.turn(effort.turns)
    if DENSE in job.companions:
        case = replace(job.case, mask="full", seq_len=min(DENSE_LEN, job.case.seq_len))
        dense = harness.entrant(BASELINE, replace(job.settings[0][1], case=case))
        entrants.append(replace(dense, mode=DENSE, companion=DENSE))
    if BARE in job.companions:
        entrants += [harness.bare(e) for e in entrants if e.provider == "ringcp"]
    return entrants, not_timed


def _num_rounds(harness: Harness, effort: Effort, began: float) -> int:
    """As many as there is time for, when all entrants have made one call since `began`."""
    now = time.time()
    fit = effort.rounds if effort.until is None else int((effort.until - now) / (now - began))
    return int(harness.same(min(max(fit, effort.least), effort.rounds)))


_Seconds = dict[tuple[str, str], list[list[float]]]


def _percents(harness: Harness, entrant: Entrant, seconds: _Seconds) -> list[list[float]]:
    """Speed in percent of the baseline's, by round and metric."""
    if entrant.companion in (DENSE, BARE):
        return []
    baseline, mine = seconds[BASELINE, PROVIDERS[BASELINE].modes[0]], seconds[entrant.provider, entrant.mode]
    devices = _devices(harness)
    by_metric = [
        percent_of_baseline([s[i] for s in baseline], [s[i] for s in mine], devices=devices)
        for i in range(len(METRICS))
    ]
    return [list(by_round) for by_round in zip(*by_metric, strict=True)]


def _devices(harness: Harness) -> int:
    """How many times the hardware of one process the ranks have: on CPU none, since they share its cores."""
    return min(harness.world_size, torch.cuda.device_count()) if harness.device == "cuda" else 1


def _further(harness: Harness, case: Case, entrant: Entrant, usage: Usage, seconds: _Seconds) -> Iterator[Values]:
    """What there is beside times and percents of the baseline."""
    if entrant.companion == BARE:
        return
    yield Values(PEAK, "bytes", [usage.peak])
    yield Values(SENT, "bytes", [usage.sent])
    if entrant.companion:
        return
    mine = seconds[entrant.provider, entrant.mode]
    if dense := seconds.get((BASELINE, DENSE)):
        work = case.pairs / min(DENSE_LEN, case.seq_len) ** 2 / _devices(harness)
        yield Values(BOTH, OF_DENSE, [100 * work * d[0] / m[0] for d, m in zip(dense, mine, strict=True)])
    if on_two := seconds.get((entrant.provider, f"{entrant.mode} {TWO_RANKS}")):
        yield Values(BOTH, OF_TWO, [100 * m[0] / t[0] for t, m in zip(on_two, mine, strict=True)])
    if bare := seconds.get((entrant.provider, f"{BARE} {entrant.mode}")):
        for i, metric in enumerate((OVER_BARE, FORWARD_OVER_BARE)):
            yield Values(metric, "ms", [1e3 * (m[i] - b[i]) for b, m in zip(bare, mine, strict=True)])
    passes_blocks = entrant.mode == "ring" and harness.world_size > 2 and case.mask in ("causal", "full")
    if entrant.provider == "ringcp" and passes_blocks:
        yield Values(PEAK, OF_FORMULA, [100 * usage.peak / ring_bytes(case, harness.world_size)])


def ring_bytes(case: Case, ranks: int) -> int:
    """What a ring's rank allocates at once in backward, by the formula of `ringcp/executor.py`: its buffers, beside out
    and lse, and the gradients where the accumulators are not themselves those.
    """
    size = DTYPES[case.dtype].itemsize
    layer = Layer(case.seq_len, case.heads, case.kv_heads, case.head_dim, case.batch, size)
    tokens = case.batch * -(-case.seq_len // ranks)
    kept = tokens * case.heads * (case.head_dim * size + 4)
    gradients = tokens * (case.heads + 2 * case.kv_heads) * case.head_dim * size if size < 4 else 0
    return kept + layer.backward_buffers(ranks) + gradients
