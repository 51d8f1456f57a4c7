"""What a CSV says about the cases of a suite: what is there, the table on the terminal, and who reaches the bars."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.measured import NOT_TIMED
from benchmarks.origin import Origin
from benchmarks.providers import BASELINE, PROVIDERS, meant_by_auto
from benchmarks.rows import Quantiles
from benchmarks.suite import BOTH, OF_BEST, OF_SINGLE, PEAK, SENT, Bar, Named


class Key(NamedTuple):
    """Whose results: provider, case (with its ranks) and mode, as the CSV has them."""

    provider: str
    case: str
    mode: str


class Found(NamedTuple):
    """The results of one run: quantiles by metric and unit; or what was wrong, or why the case was refused."""

    values: dict[tuple[str, str], Quantiles]
    wrong: str = ""
    refused: str = ""

    @property
    def timed(self) -> bool:
        return not self.wrong and not self.refused


Results = Mapping[Key, Found]


def read_results(path: Path, origin: Origin, threads: int = 1) -> Results:
    """The latest run of each provider, case and mode with this torch and commit on this device, in ranks of so many
    threads.
    """
    results: dict[Key, Found] = {}
    if not path.exists():
        return results
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["torch"], row["device"], row["commit"]) != (origin.torch, origin.device, origin.commit):
                continue
            if row["provider"] != BASELINE and int(row["threads"]) != threads:  # the baseline has those of all ranks
                continue
            key, metric = Key(row["provider"], row["case"], row["mode"]), (row["metric"], row["unit"])
            if row["metric"] in NOT_TIMED:
                results[key] = Found({}, **{row["metric"]: row["unit"]})
                continue
            if key not in results or not results[key].timed or metric in results[key].values:
                results[key] = Found({})  # a later run begins
            results[key].values[metric] = Quantiles(*(float(row[name]) for name in ("median", "p20", "p80")))
    return results


def missing(cases: Iterable[Named], providers: Sequence[str], results: Results) -> list[Named]:
    """The cases of which the results lack a provider in a mode."""
    return [
        named
        for named in cases
        if any(Key(provider, named.title, mode) not in results for provider, mode in _shown(named, providers))
    ]


def _shown(named: Named, providers: Sequence[str]) -> list[tuple[str, str]]:
    return [(BASELINE, mode) for mode in PROVIDERS[BASELINE].modes] + named.entrants(providers)


def auto_of(named: Named, device: str) -> str:
    """The mode that ringcp's "auto" is, with all ranks on one node."""
    return meant_by_auto(named.case, named.world_size, named.world_size, device)


def verdicts(named: Named, mode: str, results: Results, device: str) -> list[tuple[Bar, Quantiles]]:
    """The bars of a mode of ringcp in a case, with what was measured."""
    found = results[Key("ringcp", named.title, mode)]
    known, auto = dict(found.values), auto_of(named, device)
    others = [results.get(Key("ringcp", named.title, other)) for other in named.modes]
    times = [other.values[BOTH, "ms"] for other in others if other is not None and other.timed]
    if (BOTH, "ms") in known:
        known[BOTH, OF_BEST] = Quantiles(*[100 * min(time.median for time in times) / known[BOTH, "ms"].median] * 3)
    bars = [bar for bar in named.bars if bar.holds_for(mode, auto)]
    return [(bar, known[bar.metric, bar.unit]) for bar in bars if (bar.metric, bar.unit) in known]


def print_summary(
    console: Console, cases: Iterable[Named], providers: Sequence[str], results: Results, device: str
) -> None:
    """A line for each provider and mode in each case that has results, with the bars that ringcp has there."""
    title = (
        "Forward and backward, the slowest rank, medians of the rounds; in brackets the 20th (and 80th) percentile. "
        "% of one process: the speed of SDPA on all the cores of the ranks, round by round. Memory and bytes: of a "
        'call, on the rank that has most. * is what mode "auto" is'
    )
    table = Table(title=title, title_justify="left")
    for column in ("case", "ranks", "provider", "mode"):
        table.add_column(column, overflow="fold")
    for column in ("ms", "% of one\nprocess", "memory\nMB", "sent\nMB"):
        table.add_column(column, justify="right")
    table.add_column("bars: median (worse quantile) and bar")
    wrong, refused = [], []
    for named in cases:
        head, told = [f"{named.name}\n{named.case.name}", str(named.world_size)], auto_of(named, device)
        for provider, mode in _shown(named, providers):
            found = results.get(Key(provider, named.title, mode))
            if found is None:
                continue
            star = " *" if (provider, mode) == ("ringcp", told) else ""
            cells = [*head, provider, f"{mode}{star}"]
            head = ["", ""]
            if found.wrong:
                wrong.append(f"WRONG {provider} {mode}, {named.name}: {found.wrong}")
                table.add_row(*cells, "[red]wrong: see below[/]")
                continue
            if found.refused:
                refused.append(f"refused: {provider} {mode}, {named.name}: {found.refused}")
                table.add_row(*cells, "refused: see below")
                continue
            bars = verdicts(named, mode, results, device) if provider == "ringcp" else []
            table.add_row(*cells, *_numbers(found), "\n".join(_said(bar, measured) for bar, measured in bars))
        wrong += _wrong_companions(named, results)
        table.add_section()
    console.print(table)
    for line in wrong:
        console.print(line, style="red", markup=False, highlight=False)
    for line in refused:
        console.print(line, markup=False, highlight=False)


def _wrong_companions(named: Named, results: Results) -> list[str]:
    """What has no line of its own in the table, and is wrong."""
    beside = {key.mode: found for key, found in results.items() if (key.provider, key.case) == ("ringcp", named.title)}
    return [
        f"WRONG ringcp {mode}, {named.name}: {found.wrong}"
        for mode, found in beside.items()
        if found.wrong and mode not in named.modes
    ]


def _numbers(found: Found) -> list[str]:
    ms, percent = found.values[BOTH, "ms"], found.values.get((BOTH, OF_SINGLE))
    counts = [found.values.get((metric, "bytes")) for metric in (PEAK, SENT)]
    return [
        f"{ms.median:.1f} ({ms.p20:.1f} – {ms.p80:.1f})",
        f"{percent.median:.1f} ({percent.p20:.1f})" if percent else "",
        *(f"{count.median / 1e6:.1f}" if count else "" for count in counts),
    ]


def _said(bar: Bar, measured: Quantiles) -> str:
    worse = measured.p80 if bar.at_most else measured.p20
    of = escape(bar.unit if bar.metric == BOTH else f"{bar.unit}, {bar.metric}")
    if bar.value is None:
        return f"{measured.median:.2f} ({worse:.2f}) {of}"
    colour, word = ("green", "met") if bar.met(measured.median) else ("red", "missed")
    return f"[{colour}]{measured.median:.2f} ({worse:.2f}) {bar} {of}: {word}[/]"
