"""Pictures of a suite's results: speed by length, bytes and memory by ranks, and who did what when in one call."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.origin import Origin
from benchmarks.rows import Quantiles
from benchmarks.suite import BARE, BOTH, OF_SINGLE, PEAK, SENT, Named
from benchmarks.summary import Key, Results
from benchmarks.usage import Span

_COLOURS = {"alone": "#4c72b0", "moving": "#55a868", "wait": "#c44e52", "other": "#d8d8d8"}
_WORDS = {
    "alone": "computes, nothing under way",
    "moving": "computes while rows travel",
    "wait": "waits for rows",
    "other": "all else: vote, packing, autograd",
}

Lines = dict[str, list[tuple[int, Quantiles]]]


def draw_all(cases: Sequence[Named], results: Results, path: Path, origin: Origin) -> list[Path]:
    """Draws what the results of a CSV file have, into PNG files beside it; which those are."""
    figures = {"speed": speed_by_length(cases, results), "ranks": by_ranks(cases, results)}
    for named in cases:
        steps = path.with_name(f"{path.stem}-steps-{named.name}.json")
        if named.drawn and steps.exists():
            recorded = json.loads(steps.read_text())
            if (recorded["commit"], recorded["device"]) == (origin.commit, origin.device):
                figures[f"steps-{named.name}"] = timeline(recorded["case"], recorded["modes"])
    drawn = []
    for name, figure in figures.items():
        if figure is not None:
            drawn.append(path.with_name(f"{path.stem}-{name}.png"))
            figure.savefig(drawn[-1], dpi=120)
    return drawn


def speed_by_length(cases: Iterable[Named], results: Results) -> Figure | None:
    """Percent of the speed of one process on the same cores: causal, a panel for each dtype, kind of heads and number
    of ranks, a line a mode, the 20th to 80th percentile shaded. None if there is nothing to show.
    """
    panels: dict[str, Lines] = {}
    for named in cases:
        case = named.case
        if case.mask != "causal" or BARE in named.companions:
            continue
        title = f"causal, {case.dtype}, {case.heads}/{case.kv_heads} heads, {named.world_size} ranks"
        for mode in named.modes:
            found = results.get(Key("ringcp", named.title, mode))
            if found is not None and found.timed:
                panels.setdefault(title, {}).setdefault(mode, []).append((case.seq_len, found.values[BOTH, OF_SINGLE]))
    several = {title: lines for title, lines in panels.items() if any(len(points) > 1 for points in lines.values())}
    shown = several or panels
    if not shown:
        return None
    figure, axes = _panels(len(shown))
    for axis, (title, lines) in zip(axes, shown.items(), strict=True):
        axis.axhline(100, color="grey", linewidth=0.8)
        _draw(axis, lines)
        axis.set(title=title, xlabel="tokens", ylabel="% of the speed of one process")
    return figure


def by_ranks(cases: Iterable[Named], results: Results) -> Figure | None:
    """Bytes sent and peak memory of a call, on the rank that has most: the case that was measured on most numbers of
    ranks. None if there is nothing to show.
    """
    by_case: dict[str, dict[str, Lines]] = {}
    for named in sorted(cases, key=lambda named: named.world_size):
        for metric, mode in product((SENT, PEAK), named.modes):
            found = results.get(Key("ringcp", named.title, mode))
            if found is not None and (metric, "bytes") in found.values and BARE not in named.companions:
                count = found.values[metric, "bytes"]
                megabytes = Quantiles(count.median / 1e6, count.p20 / 1e6, count.p80 / 1e6)
                lines = by_case.setdefault(named.case.name, {SENT: {}, PEAK: {}})[metric]
                lines.setdefault(mode, []).append((named.world_size, megabytes))
    if not by_case:
        return None
    name, counts = max(by_case.items(), key=lambda item: max(map(len, item[1][SENT].values())))
    figure, axes = _panels(2)
    for axis, metric, label in zip(axes, (SENT, PEAK), ("MB sent", "peak MB, beside the inputs"), strict=True):
        _draw(axis, counts[metric])
        axis.set(title=name, xlabel="ranks", ylabel=label)
        axis.set_ylim(bottom=0)
    return figure


def timeline(case: str, modes: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """One call, forward and backward, by mode and rank: when it computed, with or without transfers under way, and when
    it waited for them.

    modes: by mode the `benchmarks.harness.Timeline` of each rank, as dicts.
    """
    figure = Figure(figsize=(11, 1.2 + sum(0.5 + 0.35 * len(ranks) for ranks in modes.values())), layout="constrained")
    axes = figure.subplots(len(modes), 1, squeeze=False, sharex=True)[:, 0]
    for axis, (mode, ranks) in zip(axes, modes.items(), strict=True):
        for rank, told in enumerate(ranks):
            axis.barh(rank, 1e3 * told["end"], color=_COLOURS["other"], label=_WORDS["other"])
            axis.plot([1e3 * told["forward"]] * 2, [rank - 0.4, rank + 0.4], color="black", linewidth=1.2)
            steps = [Span(*span) for span in told["spans"]]
            under_way = [(step.start, step.done - step.wait) for step in steps if step.moving]
            for step in steps:
                computed = step.start, step.start + step.compute
                _bar(axis, rank, "alone", *computed)
                for start, end in under_way:
                    _bar(axis, rank, "moving", max(start, computed[0]), min(end, computed[1]))
                _bar(axis, rank, "wait", step.done - step.wait, step.done)
        axis.set(ylabel=mode, yticks=range(len(ranks)), yticklabels=[f"rank {rank}" for rank in range(len(ranks))])
        axis.invert_yaxis()
    axes[0].set_title(case)
    axes[-1].set_xlabel("ms; a black line is the end of forward")
    known = {
        label: bar for axis in axes for bar, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }  # once each
    figure.legend(known.values(), known.keys(), loc="outside upper center", ncols=len(known), frameon=False)
    return figure


def _bar(axis: Axes, rank: int, kind: str, start: float, end: float) -> None:
    if start < end:
        axis.barh(rank, 1e3 * (end - start), left=1e3 * start, color=_COLOURS[kind], label=_WORDS[kind])


def _panels(count: int) -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(5.5 * count, 4), layout="constrained")
    return figure, figure.subplots(1, count, squeeze=False)[0]


def _draw(axis: Axes, lines: Lines) -> None:
    """A line a mode over powers of two, with its quantiles."""
    for mode, points in sorted(lines.items()):
        at, values = zip(*sorted(points, key=lambda point: point[0]), strict=True)
        axis.plot(at, [q.median for q in values], marker="o", label=mode)
        axis.fill_between(at, [q.p20 for q in values], [q.p80 for q in values], alpha=0.2)
    axis.set_xscale("log", base=2)
    ticks = sorted({x for points in lines.values() for x, _ in points})
    axis.set_xticks(ticks, [f"{x:,}" for x in ticks])
    axis.legend(frameon=False)
