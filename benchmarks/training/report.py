"""What is said about training: differences of curves, rows of the CSV, and the tables on the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.origin import Origin
from benchmarks.rows import Row, percent_of_baseline, quantiles
from benchmarks.training.ranks import ROUNDED, SINGLE, Curve, Plan, Timed

FIRST_STEPS = 3  # in which rounding has not grown yet
TOLERANCE = 1e-4  # in these, relative
_ALONE = (SINGLE, ROUNDED)


@dataclass(frozen=True)
class Difference:
    """Of a curve from that of one process: the largest relative differences, and the steps, from 1, that have them.

    first: the largest of loss and norm in the first `FIRST_STEPS` steps.
    """

    loss: float
    loss_step: int
    norm: float
    norm_step: int
    first: float

    @property
    def wrong(self) -> str:
        """What is wrong; empty if nothing is."""
        if self.first <= TOLERANCE:
            return ""
        limit = f"the first {FIRST_STEPS} losses and norms within {TOLERANCE:.0e} of one process"
        return f"expected {limit}, got a difference of {self.first:.1e}"


def difference(curve: Curve, single: Curve) -> Difference:
    losses, norms = relative(curve.losses, single.losses), relative(curve.norms, single.norms)
    loss, norm = max(losses), max(norms)
    first = max(losses[:FIRST_STEPS] + norms[:FIRST_STEPS])
    return Difference(loss, losses.index(loss) + 1, norm, norms.index(norm) + 1, first)


def relative(values: Sequence[float], expected: Sequence[float]) -> list[float]:
    """The difference of each pair as a share of what was expected; infinite where one is not a number."""
    shares = [abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True)]
    return [math.inf if math.isnan(share) else share for share in shares]


def percents(timed: Timed, single: Timed, devices: int) -> list[float]:
    """Speed in percent of one process, by round."""
    return percent_of_baseline(single.seconds, timed.seconds, devices=devices)


@dataclass(frozen=True)
class Step:
    """One line of the CSV of curves: what a step said, for the picture. The columns about its origin are those of
    `benchmarks.rows.Row`.
    """

    provider: str
    case: str
    mode: str
    step: int
    loss: float
    gradient_norm: float
    torch: str
    python: str
    device: str
    cores: int
    threads: int
    commit: str
    date: str
    command: str


def steps(curve: Curve, plan: Plan, origin: Origin) -> list[Step]:
    """Every step of a curve, from 1."""
    case, provider, threads = _curve_case(curve, plan), *_whose(curve.mode, plan)
    return [
        Step(provider, case, curve.mode, i, loss, norm, threads=threads, **vars(origin))
        for i, (loss, norm) in enumerate(zip(curve.losses, curve.norms, strict=True), 1)
    ]


def _curve_case(curve: Curve, plan: Plan) -> str:
    return f"decoder fp32 B1 S{plan.curve_len} W{curve.world_size}, {plan.steps} steps"


def _whose(mode: str, plan: Plan) -> tuple[str, int]:
    """Provider and threads of a process."""
    return ("torch", plan.together) if mode in _ALONE else ("ringcp", plan.threads)


def speed_rows(timed: Sequence[Timed], plan: Plan, origin: Origin) -> list[Row]:
    """Lines for the CSV, from what was timed at one length, the single process first."""
    rows = []
    for t in timed:
        case = f"decoder fp32 B1 S{t.seq_len} W{t.world_size}"
        for metric, unit, values in (
            ("step", "ms", [1e3 * s for s in t.seconds]),
            ("training", "tokens/s", [t.seq_len / s for s in t.seconds]),
            ("training", "% of one process", percents(t, timed[0], plan.devices)),
            ("peak memory", "bytes", [float(t.peak_bytes)]),
        ):
            rows.append(_row(case, t.mode, metric, unit, values, plan, origin))
    return rows


def curve_rows(curve: Curve, single: Curve, plan: Plan, origin: Origin) -> list[Row]:
    """Lines for the CSV: quantiles are over the steps."""
    case = _curve_case(curve, plan)
    apart = difference(curve, single)
    rows = [("loss", "last", [curve.losses[-1]])]
    if curve.mode != SINGLE:
        losses, norms = relative(curve.losses, single.losses), relative(curve.norms, single.norms)
        rows += [
            ("loss", "relative difference from one process", losses),
            ("loss", "largest relative difference from one process", [apart.loss]),
            ("gradient norm", "relative difference from one process", norms),
            ("gradient norm", "largest relative difference from one process", [apart.norm]),
        ]
    if apart.wrong:
        rows += [("wrong", apart.wrong, [])]
    return [_row(case, curve.mode, *row, plan, origin) for row in rows]


def _row(case: str, mode: str, metric: str, unit: str, values: Sequence[float], plan: Plan, origin: Origin) -> Row:
    provider, threads = _whose(mode, plan)
    return Row.of((provider, case, mode), metric, unit, values, threads=threads, origin=origin)


def speed_line(timed: Sequence[Timed], plan: Plan) -> str:
    """One line, as soon as a length is done."""
    single, *modes = timed
    speeds = [f"{t.mode} {quantiles(percents(t, single, plan.devices)).median:.0f} %" for t in modes]
    rate = single.seq_len / quantiles(single.seconds).median
    return f"{plan.world_size} ranks, {single.seq_len:,} tokens: one process {rate:,.0f} tokens/s; {', '.join(speeds)}"


def curve_line(curve: Curve, single: Curve) -> str:
    """One line, as soon as a curve is done."""
    ranks = f"{curve.world_size} rank{'s' * (curve.world_size > 1)}"
    line = f"{ranks}, {curve.mode}: loss {curve.losses[0]:.4f} -> {curve.losses[-1]:.4f} in {len(curve.losses)} steps"
    wrong = difference(curve, single).wrong
    return f"{line}; [red]wrong: {wrong}[/]" if wrong else line


def print_speed(console: Console, by_length: Iterable[Sequence[Timed]], plan: Plan, cores: int) -> None:
    """The table of one launch: medians over the rounds."""
    where = f"{plan.world_size} ranks of {_threads(plan.threads)} on {cores} cores"
    if plan.device == "cuda":
        where = f"{plan.world_size} GPUs"
    elif plan.world_size * plan.threads > cores:
        where += ", which is more ranks than cores: they can not be faster than fewer"
    one = "one GPU" if plan.device == "cuda" else f"one process of {_threads(plan.together)}"
    table = Table(title=f"Training on {where}\n{one} is 100 %; medians, 20th and 80th percentile", title_justify="left")
    table.add_column("tokens", justify="right")
    table.add_column("mode")
    for column in ("step, ms", "tokens/s", "% of its speed", "peak MB a rank", "% of its peak"):
        table.add_column(column, justify="right")
    for timed in by_length:
        for t in timed:
            ms, speed = quantiles([1e3 * s for s in t.seconds]), quantiles(percents(t, timed[0], plan.devices))
            table.add_row(
                f"{t.seq_len:,}" if t is timed[0] else "",
                "one process" if t.mode == SINGLE else t.mode,
                f"{ms.median:.1f} ({ms.p20:.1f} – {ms.p80:.1f})",
                f"{t.seq_len / ms.median * 1e3:,.0f}",
                "" if t is timed[0] else f"{speed.median:.1f} ({speed.p20:.1f} – {speed.p80:.1f})",
                f"{t.peak_bytes / 1e6:.1f}",
                "" if t is timed[0] else f"{100 * t.peak_bytes / timed[0].peak_bytes:.0f}",
            )
        table.add_section()
    console.print(table)


def print_curves(console: Console, curves: Sequence[Curve], seq_len: int) -> None:
    """The first curve is that of one process."""
    single = curves[0]
    table = Table(
        title=f"{len(single.losses)} steps of {seq_len:,} tokens: the largest relative difference from one process, "
        "and its step",
        title_justify="left",
    )
    table.add_column("ranks", justify="right")
    table.add_column("mode")
    for column in ("last loss", "of the loss", "of the gradient's norm", f"in the first {FIRST_STEPS} steps"):
        table.add_column(column, justify="right")
    for curve in curves:
        apart, cells = difference(curve, single), ["", "", ""]
        if curve is not single:
            cells = [f"{apart.loss:.1e} ({apart.loss_step})", f"{apart.norm:.1e} ({apart.norm_step})"]
            cells += [f"[red]{apart.first:.1e}, wrong[/]" if apart.wrong else f"{apart.first:.1e}"]
        table.add_row(str(curve.world_size), curve.mode, f"{curve.losses[-1]:.5f}", *cells)
    console.print(table)


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"
