"""What was found about a library in a case, and the lines for the CSV."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.harness import METRICS
from benchmarks.origin import Origin
from benchmarks.rows import Row, percent_of_baseline
from benchmarks.suite import OF_SINGLE, PEAK, SENT

OURS = "ringcp"
# Why a mode has no times.
REFUSED = "refused"  # it has no way to say the case
WRONG = "wrong"  # its numbers are
SLOW = "slow"  # so much that it was not called again
FAILED = "failed"  # it raised, hung, or ended its process

_RAISED = re.compile(r"rank \d+ raised (\w+): ")
_REFUSALS = "NotImplementedError", "ValueError"  # ours in the adapters, and what libraries say themselves


@dataclass(frozen=True)
class Result:
    """A library in a mode and case: its seconds by round and metric; or why it was not timed.

    ours, single: those of ringcp and of one process, for the rounds that all of them have made.
    verdict, problem: of the words above, and the reason in words; empty for what was timed.
    seen: seconds of the one call of a slow one.
    sent, peak, our_peak: bytes of one call on the rank that sends and needs most; 0 where they were not counted.
    threads: of each process that computes.
    """

    case: str
    provider: str
    mode: str
    seconds: list[list[float]] = field(default_factory=list)
    ours: list[list[float]] = field(default_factory=list)
    single: list[list[float]] = field(default_factory=list)
    verdict: str = ""
    problem: str = ""
    seen: float = 0.0
    sent: float = 0.0
    peak: float = 0.0
    our_peak: float = 0.0
    threads: int = 1

    @classmethod
    def of_problem(cls, case: str, provider: str, mode: str, problem: str) -> Result:
        """From what `Harness.checked` says is wrong."""
        raised = _RAISED.match(problem)
        if raised and raised[1] in _REFUSALS:
            return cls(case, provider, mode, verdict=REFUSED, problem=problem[raised.end() :])
        return cls(case, provider, mode, verdict=FAILED if raised else WRONG, problem=problem)

    @property
    def ratios(self) -> list[float]:
        """How many times as fast ringcp was, by round."""
        return [theirs[0] / ours[0] for theirs, ours in zip(self.seconds, self.ours, strict=False)]

    def percents(self, metric: int = 0) -> list[float]:
        """Speed in percent of one process with all the cores of the ranks, by round."""
        both = list(zip(self.single, self.seconds, strict=False))
        return percent_of_baseline([single[metric] for single, _ in both], [mine[metric] for _, mine in both])

    def rows(self, title: str, origin: Origin) -> list[Row]:
        """Lines for the CSV. One that was not timed has one, whose metric is the verdict and whose unit says why."""

        def row(metric: str, unit: str, values: Sequence[float]) -> Row:
            who = self.provider, title, self.mode
            return Row.of(who, metric, unit, values, threads=self.threads, origin=origin)

        if self.verdict:
            return [row(self.verdict, self.problem, [1e3 * self.seen] if self.verdict == SLOW else [])]
        rows = []
        for i, metric in enumerate(METRICS):
            rows.append(row(metric, "ms", [1e3 * s[i] for s in self.seconds]))
            if percents := self.percents(i):
                rows.append(row(metric, OF_SINGLE, percents))
        if self.peak:
            rows += [row(SENT, "bytes", [self.sent]), row(PEAK, "bytes", [self.peak])]
        return [*rows, row(METRICS[0], "x ringcp's time", self.ratios)] if self.ours else rows
