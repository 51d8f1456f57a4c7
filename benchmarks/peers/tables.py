"""What is said on the terminal: every mode in every case, and each library's best beside ringcp and one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.peers.cases import Named
from benchmarks.peers.results import OURS, Result
from benchmarks.providers import BASELINE
from benchmarks.rows import quantiles


def print_results(console: Console, results: Sequence[Result], cases: Sequence[Named]) -> None:
    """How fast each mode was, how many times as fast ringcp was, and whether that meets the target."""
    title = (
        "forward plus backward, medians of the rounds, 20th percentile in brackets; % of one process: of SDPA's speed "
        "on all the cores of the ranks; memory: beside what was there before the call, on the rank that needs most"
    )
    table = Table(title=title, title_justify="left")
    for column in ("case", "library", "mode"):
        table.add_column(column, overflow="fold")
    for column in (
        "ms", "rounds", "% of one\nprocess", "ringcp is x\nas fast", "target", "sent\nMiB", "memory\nMiB", "x ringcp's",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for named in cases:
        table.add_section()
        shown = f"{named.name}\n{named.title}"
        for result in (r for r in results if r.case == named.name):
            cells = [shown, result.provider, result.mode]
            shown = ""
            table.add_row(*cells, *([result.verdict] if result.verdict else _numbers(result, named)))
    console.print(table)
    for result in results:
        if result.verdict:
            number = f"{1e3 * result.seen:.0f} " if result.seen else ""
            line = f"{result.verdict}: {result.provider} {result.mode}, {result.case}: {number}{result.problem}"
            console.print(" ".join(line.split()), markup=False, highlight=False)


def _numbers(result: Result, named: Named) -> list[str]:
    ms = quantiles([1e3 * s[0] for s in result.seconds]).median
    ratios = result.ratios
    speed = quantiles(ratios) if ratios else None
    goal = more = ""
    if speed and named.target is not None:
        goal = f"{named.target:g} {_word(speed.median >= named.target)}"
    if result.peak and result.our_peak:
        more = f"{result.peak / result.our_peak:.2f}"
        more += f" {_word(result.peak > result.our_peak)}" if named.less_memory else ""
    return [
        f"{ms:.1f}",
        str(len(result.seconds)),
        _percent(result),
        f"{speed.median:.2f} ({speed.p20:.2f})" if speed else "",
        goal,
        *(f"{count / 2**20:.1f}" if result.peak else "" for count in (result.sent, result.peak)),
        more,
    ]


def print_summary(console: Console, results: Sequence[Result], cases: Sequence[Named]) -> None:
    """The fastest mode of each library by case, in percent of one process, and how many modes ringcp's target holds
    against.
    """
    table = Table(
        title="% of one process, the fastest mode of each; in brackets how many times as fast ringcp was",
        title_justify="left",
    )
    table.add_column("library", overflow="fold")
    for named in cases:
        table.add_column(named.name, justify="right")
    for provider in dict.fromkeys(r.provider for r in results if r.provider != BASELINE):
        own = [r for r in results if r.provider == provider]
        table.add_row(provider, *(_best([r for r in own if r.case == named.name]) for named in cases))
    table.add_section()
    table.add_row("target of ringcp", *(_target(results, named) for named in cases))
    console.print(table)


def _best(of_library: Sequence[Result]) -> str:
    timed = [r for r in of_library if not r.verdict]
    if not timed:
        return ", ".join(Counter(r.verdict for r in of_library))
    best = min(timed, key=lambda r: quantiles([s[0] for s in r.seconds]).median)
    ratio = f" ({quantiles(best.ratios).median:.2f})" if best.ratios else ""
    percents = best.percents()
    return f"{quantiles(percents).median:.1f}{ratio}\n{best.mode}" if percents else f"{ratio}\n{best.mode}"


def _target(results: Sequence[Result], named: Named) -> str:
    held_against = [r for r in results if r.case == named.name and r.provider not in (OURS, BASELINE) and r.ratios]
    if named.target is None or not held_against:
        return ""
    missed = sum(quantiles(r.ratios).median < named.target for r in held_against)
    against = f"by {missed} of {len(held_against)}" if missed else f"{len(held_against)} of {len(held_against)}"
    return f"{named.target:g} {_word(not missed)}\n{against}"


def _percent(result: Result) -> str:
    percents = result.percents()
    if not percents:
        return ""
    q = quantiles(percents)
    return f"{q.median:.1f} ({q.p20:.1f})"


def _word(met: bool) -> str:
    return "met" if met else "MISSED"
