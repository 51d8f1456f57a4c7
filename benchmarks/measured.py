"""What was measured of one entrant: its rows for the CSV, and the tables of `attention.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.harness import METRICS, Breakdown, Timeline
from benchmarks.origin import Origin
from benchmarks.rows import Row, quantiles
from benchmarks.suite import OF_SINGLE


class Values(NamedTuple):
    """A further metric of an entrant: one value, or one for each round."""

    metric: str
    unit: str
    values: list[float]


# Instead of numbers: what it computed is wrong; or it said that it cannot, as of a mask or dtype that it does not have.
NOT_TIMED = ("wrong", "refused")


@dataclass(frozen=True)
class Measured:
    """An entrant's seconds by round and metric, likewise its speed in percent of the baseline, and what else there is;
    or what is wrong, or why it refused the case. `percents` is empty for what does not compute the case.
    """

    provider: str
    case: str
    mode: str
    seconds: list[list[float]]
    percents: list[list[float]]
    wrong: str = ""
    refused: str = ""
    breakdown: tuple[Breakdown, ...] = ()
    more: tuple[Values, ...] = ()
    timelines: tuple[Timeline, ...] = ()

    def rows(self, origin: Origin, threads: int) -> list[Row]:
        """Lines for the CSV. A provider that is not timed has one, whose metric is "wrong" or "refused" and whose unit
        says why.
        """

        row = partial(Row.of, (self.provider, self.case, self.mode), threads=threads, origin=origin)
        for verdict in NOT_TIMED:
            if why := getattr(self, verdict):
                return [row(verdict, why, [])]
        rows = []
        for i, metric in enumerate(METRICS):
            rows.append(row(metric, "ms", [1e3 * s[i] for s in self.seconds]))
            if self.percents:
                rows.append(row(metric, OF_SINGLE, [p[i] for p in self.percents]))
        rows += [row(*values) for values in self.more]
        for b in self.breakdown:
            rows.append(row(f"{b.direction} tiles", "count", [b.tiles]))
            rows.append(row(f"{b.direction} sent", "bytes", [b.bytes_sent]))
            rows.append(row(f"{b.direction} received", "bytes", [b.bytes_received]))
            rows.append(row(f"{b.direction} compute", "ms", [1e3 * b.compute_s]))
            rows.append(row(f"{b.direction} wait", "ms", [1e3 * b.wait_s]))
            rows.append(row(f"{b.direction} other", "ms", [1e3 * b.other_s]))
        return rows


def print_table(console: Console, results: Sequence[Measured], *, world_size: int, baseline_threads: int) -> None:
    """Medians over the rounds; the slowest rank counts."""
    ranks = f"{world_size} ranks" if world_size > 1 else "1 rank"
    single = f"{baseline_threads} threads" if baseline_threads > 1 else "1 thread"
    table = Table(
        title=f"{ranks}; % of single-process SDPA's speed ({single}), median of the rounds' ratios, 20th percentile in "
        "brackets",
        title_justify="left",
    )
    for column in ("case", "provider", "mode"):
        table.add_column(column)
    for metric in METRICS:
        table.add_column(f"{metric}\nms (p20 – p80)", justify="right")
        table.add_column("\n%", justify="right")
    last = ""
    for result in results:
        if last and result.case != last:
            table.add_section()
        cells = [result.case if result.case != last else "", result.provider, result.mode]
        last = result.case
        if result.wrong or result.refused:
            table.add_row(*cells, "[red]wrong: see below[/]" if result.wrong else "refused: see below")
            continue
        for i in range(len(METRICS)):
            t = quantiles([1e3 * s[i] for s in result.seconds])
            cells.append(f"{t.median:.1f} ({t.p20:.1f} – {t.p80:.1f})")
            p = quantiles([p[i] for p in result.percents]) if result.percents else None
            cells.append(f"{p.median:.1f} ({p.p20:.1f})" if p else "")
        table.add_row(*cells)
    console.print(table)
    for result in results:
        who = f"{result.provider} {result.mode}, {result.case}"
        if result.wrong:
            console.print(f"WRONG {who}: {result.wrong}", style="red", markup=False, highlight=False)
        if result.refused:
            console.print(f"refused: {who}: {result.refused}", markup=False, highlight=False)


def print_breakdown(console: Console, results: Sequence[Measured]) -> None:
    """The median call's slowest rank, by direction."""
    table = Table(title="Breakdown of the median recorded call, slowest rank in each direction", title_justify="left")
    for column in ("case", "provider", "mode", "direction", "rank"):
        table.add_column(column)
    for column in ("tiles", "sent MB", "received MB", "compute ms", "wait ms", "other ms", "total ms"):
        table.add_column(column, justify="right")
    for result in results:
        for b in result.breakdown:
            megabytes = [f"{x / 1e6:.3f}" for x in (b.bytes_sent, b.bytes_received)]
            times = [f"{1e3 * x:.2f}" for x in (b.compute_s, b.wait_s, b.other_s, b.seconds)]
            who = (result.case, result.provider, result.mode, b.direction, str(b.rank), str(b.tiles))
            table.add_row(*who, *megabytes, *times)
    console.print(table)
