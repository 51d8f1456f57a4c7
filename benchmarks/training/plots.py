"""The pictures of the training benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.rows import quantiles
from benchmarks.training.ranks import ROUNDED, SINGLE, Curve, Timed
from benchmarks.training.report import relative

_COLORS = {
    SINGLE: "0.15",
    ROUNDED: "0.6",
    "ring": "tab:blue",
    "gather": "tab:orange",
    "ulysses": "tab:green",
    "usp": "tab:purple",
    "auto": "tab:red",
}
_LINES = ("-", "--", ":", "-.")


def draw_speed(path: Path, by_length: Sequence[Sequence[Timed]], title: str) -> None:
    """Tokens a second and peak memory by length, a column for each number of ranks.

    Args:
        by_length: what was timed at one length, for each length and number of ranks.
    """
    worlds = list(dict.fromkeys(timed[0].world_size for timed in by_length))
    fig = Figure(figsize=(5.2 * len(worlds) + 1, 8), layout="constrained")
    fig.suptitle(title, fontsize="medium")
    axes = fig.subplots(2, len(worlds), sharex=True, sharey="row", squeeze=False)
    for column, world_size in enumerate(worlds):
        here = [timed for timed in by_length if timed[0].world_size == world_size]
        speed, memory = axes[:, column]
        for i in range(len(here[0])):
            lines = [timed[i] for timed in here]
            lengths = [t.seq_len for t in lines]
            rates = [quantiles([t.seq_len / s for s in t.seconds]) for t in lines]
            style = _style(lines[0].mode, 0)
            spread = [[q.median - q.p20 for q in rates], [q.p80 - q.median for q in rates]]
            speed.errorbar(lengths, [q.median for q in rates], spread, marker="o", ms=4, capsize=2, **style)
            memory.plot(lengths, [t.peak_bytes / 1e6 for t in lines], marker="o", ms=4, **style)
        speed.set_title(f"{world_size} ranks")
        memory.set(xscale="log", yscale="log", xlabel="tokens of the sequence")
        memory.set_xticks(lengths, [f"{n:,}" for n in lengths])
        memory.set_xticks([], minor=True)
        memory.legend(fontsize="small", loc="upper left")
    axes[0, 0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("tokens a second; 20th to 80th percentile")
    axes[1, 0].set_ylabel("peak memory of a rank, MB")
    fig.savefig(path, dpi=120)


def draw_curves(path: Path, curves: Sequence[Curve], title: str) -> None:
    """Loss and gradient norm by step, over one another, and below how far each is from the first, of one process."""
    single, *others = curves
    worlds = list(dict.fromkeys(curve.world_size for curve in others))
    fig = Figure(figsize=(13, 8), layout="constrained")
    fig.suptitle(title, fontsize="medium")
    axes = fig.subplots(2, 2, sharex=True)
    steps = range(1, len(single.losses) + 1)
    for name, values, column in (("loss", "losses", 0), ("norm of the gradient", "norms", 1)):
        above, below = axes[:, column]
        expected: list[float] = getattr(single, values)
        above.plot(steps, expected, lw=4, alpha=0.4, **_style(SINGLE, 0))
        for curve in others:
            style = _style(curve.mode, worlds.index(curve.world_size))
            if curve.mode != ROUNDED:
                style["label"] = f"{curve.world_size} ranks, {curve.mode}"
            found: list[float] = getattr(curve, values)
            above.plot(steps, found, lw=1, **style)
            below.plot(steps, relative(found, expected), lw=2 if curve.mode == ROUNDED else 0.9, **style)
        above.set(ylabel=name)
        below.set(yscale="log", xlabel="step", ylabel=f"{name}: relative difference")
    axes[0, 0].legend(fontsize="small", loc="upper right")
    fig.savefig(path, dpi=120)


def _style(mode: str, world: int) -> dict[str, Any]:
    label = {SINGLE: "one process", ROUNDED: "one process, weights one rounding step higher"}.get(mode, mode)
    return {"color": _COLORS[mode.partition(":")[0]], "ls": _LINES[world % len(_LINES)], "label": label}
