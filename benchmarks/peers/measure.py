"""One case on the ranks of a launch: who is right in it and not far slower is timed, round by round."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.cases import Case
from benchmarks.harness import Checked, Entrant, Harness
from benchmarks.peers import cpu_flash
from benchmarks.peers.adapters import installed
from benchmarks.peers.cases import Named
from benchmarks.peers.record import DONE, Record
from benchmarks.peers.results import OURS, SLOW, Result
from benchmarks.providers import BASELINE, PROVIDERS, Provider, Setting
from benchmarks.rows import quantiles
from benchmarks.usage import Usage

# Slower than this many times ringcp: the first rounds say enough.
SLOWER, FIRST_ROUNDS = 3.0, 3
# Slower than this many times ringcp, and a call of the case takes more than so many seconds: the first call does.
FAR_SLOWER, LONG_S = 5.0, 2.0
# A slow call that took less than this is made again: the machine may have been at something else.
_AGAIN_S = 15.0


@dataclass(frozen=True)
class Effort:
    """rounds: at most so many, and as many as end by `until` (as `time.time()`); one in any case."""

    rounds: int
    until: float


def competitors(libraries: Sequence[str]) -> Mapping[str, Provider]:
    """ringcp, SDPA in one process, and of the libraries those that are installed."""
    return {**PROVIDERS, **{name: p for name, p in installed().items() if name.rpartition(" ")[0] in libraries}}


def measure(harness: Harness, named: Named, effort: Effort, record: Record) -> list[Result]:
    """Checks and times those providers of the harness that the record has not settled. Runs on every rank; rank 0 keeps
    the record.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    # Redrawn between the calls that are timed: a thread that does it would take a core from them.
    with Progress(*columns, console=Console(quiet=harness.rank != 0), auto_refresh=False, transient=True) as bar:
        case = _OneCase(harness, named, record, bar)
        case.admit()
        if case.entrants and case.entrants[0].provider == OURS:
            case.time(effort)
        case.end()
        return case.results()


class _OneCase:
    """A case under way, the same on every rank."""

    def __init__(self, harness: Harness, named: Named, record: Record, bar: Progress) -> None:
        self.entrants: list[Entrant] = []
        self._asked: list[str] = []  # the mode that each was asked for
        self._harness, self._named, self._record, self._bar = harness, named, record, bar
        self._mesh = init_device_mesh("cpu", (harness.world_size,), mesh_dim_names=("cp",))
        self._settled = record.settled()
        self._seconds: list[list[list[float]]] = []
        self._usages: dict[int, Usage] = {}

    def admit(self) -> None:
        """Chooses who is timed: a call in a small case, in a part of a long one, and in the case itself. After each of
        these a mode that is wrong or far slower than ringcp is left out of the next.
        """
        known = {(result.provider, result.mode) for result in self._settled}
        theirs = [name for name in self._harness.providers if name not in (OURS, BASELINE)]
        everyone = [(OURS, mode) for mode in self._named.modes]
        everyone += [(name, mode) for name in (BASELINE, *theirs) for mode in self._harness.providers[name].modes]
        going_on = [who for who in everyone if who not in known]
        case = self._named.case
        going_on, _ = self._called(going_on, case.small(), "checking", compared=False)
        if tried := self._named.tried:
            going_on, _ = self._called(going_on, tried, "trying", compared=True)
        going_on, checked = self._called(going_on, case, "checking in full", compared=True)
        self._asked = [mode for _, mode in going_on]
        self.entrants = [one.entrant for one in checked]
        self._seconds = [[] for _ in self.entrants]

    def _called(
        self, who: Sequence[tuple[str, str]], case: Case, doing: str, *, compared: bool
    ) -> tuple[list[tuple[str, str]], list[Checked]]:
        """One call each in a case; those that go on. compared: with ringcp's time, which is the first's."""
        going_on: list[tuple[str, str]] = []
        kept: list[Checked] = []
        task = self._bar.add_task("", total=len(who))
        for provider, mode in who:
            self._begin(provider, mode, doing)
            self._bar.update(task, description=f"{self._named.name}: {doing} {provider} {mode}", refresh=True)
            setting = Setting(case, self._mesh, mode, "auto", "call")
            checked = self._harness.checked(provider, setting, by_rows=case != self._named.case.small())
            problem = Result.of_problem(self._named.name, provider, mode, checked.problem) if checked.problem else None
            if compared and kept and not problem and provider not in (OURS, BASELINE):
                problem = self._too_slow(provider, mode, case, checked.seconds, kept[0].seconds)
                if problem and checked.seconds < _AGAIN_S:
                    ((again, *_),) = self._calls(checked.entrant)
                    problem = self._too_slow(provider, mode, case, min(checked.seconds, again), kept[0].seconds)
            if problem:
                self._settled.append(problem)
                self._write()
            else:
                going_on.append((provider, mode))
                kept.append(checked)
            self._bar.update(task, advance=1, refresh=True)
        self._bar.remove_task(task)
        return going_on, kept

    def _too_slow(self, provider: str, mode: str, case: Case, seconds: float, ours: float) -> Result | None:
        longer = self._named.case.pairs / case.pairs
        if seconds <= FAR_SLOWER * ours or longer * seconds <= LONG_S:
            return None
        where = "" if case == self._named.case else f" of {case.name}"
        problem = f"ms a call{where}, {seconds / ours:.0f} times ringcp's {1e3 * ours:.0f}: left out"
        return Result(self._named.name, provider, mode, verdict=SLOW, problem=problem, seen=seconds)

    def time(self, effort: Effort) -> None:
        """A few rounds of all, then of those that are not slow; bytes and memory are counted after the first. The calls
        that checked them were the warm-up.
        """
        going_on = list(range(len(self.entrants)))
        for i in range(effort.rounds):
            if i == FIRST_ROUNDS:
                going_on = [j for j in going_on if self._stays(j)]
            if i and self._harness.same(time.time()) + sum(self._typical(j) for j in going_on) > effort.until:
                break
            self._round(i, going_on)
            if i == 0:
                self._count()

    def _round(self, number: int, who: Sequence[int]) -> None:
        task = self._bar.add_task(f"{self._named.name}: round {number + 1}", total=len(who))
        for j in who if number % 2 == 0 else reversed(who):
            self._begin(self.entrants[j].provider, self._asked[j], f"round {number + 1}")
            self._seconds[j] += self._calls(self.entrants[j])
            self._write()
            self._bar.update(task, advance=1, refresh=True)
        self._bar.remove_task(task)

    def _calls(self, entrant: Entrant) -> list[list[float]]:
        """Seconds of one call, by metric."""
        return self._harness.rounds([entrant], warmup=0, rounds=1, progress=lambda: None)[0]

    def _count(self) -> None:
        """Bytes and memory of one more call."""
        for j, entrant in enumerate(self.entrants):
            self._begin(entrant.provider, self._asked[j], "counting bytes and memory")
            with cpu_flash.corner_only():
                self._usages[j] = self._harness.usage(entrant)
        self._write()

    def _stays(self, j: int) -> bool:
        """What the others are held against does."""
        return self.entrants[j].provider in (OURS, BASELINE) or self._typical(j) <= SLOWER * self._typical(0)

    def _typical(self, j: int) -> float:
        return quantiles([s[0] for s in self._seconds[j]]).median

    def end(self) -> None:
        """What ends the process from now on is no mode's call."""
        self._write()
        self._begin("", "", DONE)

    def results(self) -> list[Result]:
        """Of those that were timed so far, ringcp first, then of the others."""
        providers = [entrant.provider for entrant in self.entrants]
        ours = {entrant.mode: j for j, entrant in enumerate(self.entrants) if entrant.provider == OURS}
        single = self._seconds[providers.index(BASELINE)] if BASELINE in providers else []
        timed = []
        for j, entrant in enumerate(self.entrants):
            if not self._seconds[j]:
                continue
            usage = self._usages.get(j, Usage(0.0, 0.0))
            result = Result(
                self._named.name, entrant.provider, entrant.mode, self._seconds[j], sent=usage.sent, peak=usage.peak,
                threads=self._harness.threads_of(entrant.provider),
            )  # fmt: skip
            if entrant.provider != BASELINE:
                result = replace(result, single=single)
            if entrant.provider not in (OURS, BASELINE):
                beside = ours.get(entrant.mode, 0)
                our_peak = self._usages[beside].peak if beside in self._usages else 0.0
                result = replace(result, ours=self._seconds[beside], our_peak=our_peak)
            timed.append(result)
        return timed + self._settled

    def _begin(self, provider: str, mode: str, what: str) -> None:
        if self._harness.rank == 0:
            self._record.begin(provider, mode, what)

    def _write(self) -> None:
        if self._harness.rank == 0:
            self._record.write(self.results())
