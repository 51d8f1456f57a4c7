"""A picture of a schedule: who owns which tokens, what each rank computes in each step, and what it sends to whom.

    python -m ringcp.draw --world-size 4 --seq-len 4096 --out docs/ring.png

`figure` draws what `ringcp.traces.trace` tells, with matplotlib (the extra `plot`). Pure: no rank has to run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringcp.errors import ArgumentError, RingcpError, UnsupportedError
from ringcp.layout import LAYOUT_NAMES, Span, layout_named
from ringcp.mask import Causal, Full, Mask, Window
from ringcp.traces import Trace, Wire, Work, num_rows_text, short, text, trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_RANKS = 16
# Up to so many positions each pair of tokens is a cell of its own; beyond, regions are polygons.
_MAX_CELLS = 64


Point = tuple[float, float]


def outlines(work: Work, *, cells: bool = False, shown: int | None = None) -> list[list[Point]]:
    """The polygons, in (key position, query position), that show one piece of work; token t lies between t and t + 1.

    cells: a square a pair; otherwise one polygon with straight edges, as large as the pairs within one of them.
    shown: leave out cells from this position on.
    """
    (q0, q1), (k0, k1), lo, hi = work.band
    if cells:
        pairs = product(enumerate(_first(work.q, shown)), enumerate(_first(work.k, shown)))
        return [[(x, y), (x + 1, y), (x + 1, y + 1), (x, y + 1)] for (i, y), (j, x) in pairs if work.band.allows(i, j)]
    corners: list[Point] = [(k0, q0), (k1, q0), (k1, q1), (k0, q1)]
    corners = _clip(corners, -1.0, lo - 0.5)
    corners = _clip(corners, 1.0, -hi - 0.5)
    return [[(x + work.k.start, y + work.q.start) for x, y in corners]]


def _first(span: Span, shown: int | None) -> range:
    """The positions of a run before `shown`."""
    return range(span.start, span.stop if shown is None else min(span.stop, shown), span.step)


def _clip(corners: list[Point], sign: float, least: float) -> list[Point]:
    """The part of a convex polygon with ``sign * (x - y) >= least``."""
    result: list[Point] = []
    for (x0, y0), (x1, y1) in zip(corners, corners[1:] + corners[:1], strict=True):
        a, b = sign * (x0 - y0) - least, sign * (x1 - y1) - least
        if a >= 0:
            result.append((x0, y0))
        if (a < 0) != (b < 0):
            at = a / (a - b)
            result.append((x0 + at * (x1 - x0), y0 + at * (y1 - y0)))
    return result


def figure(traced: Trace, wire: Wire | None = None) -> Figure:
    """The picture, as a matplotlib figure: ``figure(trace(layout, mask)).savefig("ring.png")``.

    One colour a rank. Above, the sequence and its owners; then for each step the score matrix with what each rank
    computes; below, a lane a rank with the block of keys in hand and where it is sent.

    Raises:
        ArgumentError: more ranks than can be drawn, or an empty sequence.
        UnsupportedError: matplotlib is not installed.
    """
    layout = traced.layout
    if layout.world_size > _MAX_RANKS or not layout.seq_len:
        raise ArgumentError(
            f"layout: expected at most {_MAX_RANKS} ranks and at least one token to draw, got {layout!r}; "
            "draw a smaller layout of the same kind"
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "matplotlib: expected it installed to draw, got no such module; "
            "pip install matplotlib, or use ringcp.draw.text"
        ) from error
    return _Page(traced, wire or Wire(), Figure).fig


# Okabe and Ito's colours, which readers with any colour vision tell apart; numbers stand beside all of them.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#333333", "#C8B400")
_DARK = {"#0072B2", "#009E73", "#D55E00", "#333333"}
_INK, _FAINT, _TO_COME, _PALE = "#222222", "#595959", "#E8E8E8", 0.3

# Inches.
_EDGE, _LEFT, _GAP, _STRIP, _LANE = 0.12, 0.82, 0.5, 0.14, 0.64

_ARROW: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 9, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 0}


class _Page:
    """Draws the figure. All coordinates are inches from the upper left corner."""

    def __init__(self, traced: Trace, wire: Wire, make: type[Figure]) -> None:
        from matplotlib import collections, patches

        self.collections, self.patches = collections, patches
        self.traced, self.wire, self.layout = traced, wire, traced.layout
        self.ranks = range(self.layout.world_size)
        strided = any(s.step > 1 for rank in self.ranks for s in self.layout.spans(rank))
        # Tokens that take turns are too fine to see: then the first ones are shown, large.
        self.shown = min(self.layout.seq_len, 8 * self.layout.world_size) if strided else self.layout.seq_len
        self.cells = strided or self.shown <= _MAX_CELLS
        self.panel = 2.1 if traced.num_steps < 3 else 1.45 if len(self.ranks) < 10 else 1.6
        sequence, matrices = 0.86, 1.76
        lanes = matrices + self.panel + 0.52
        self.width = max(7.0, self.left(traced.num_steps) + max(self.panel, 1.6) + _EDGE)
        self.height = lanes + _LANE * len(self.ranks) + 0.05
        self.fig = make(figsize=(self.width, self.height), dpi=160, facecolor="white")
        self.axes: Axes = self.fig.add_axes((0, 0, 1, 1), xlim=(0, self.width), ylim=(self.height, 0))
        self.axes.axis("off")
        self.title(0.2)
        self.sequence(sequence)
        for column in range(traced.num_steps + 1):
            self.matrix(column, matrices)
        self.legend(matrices + self.panel + 0.3)
        self.lanes(lanes)

    def left(self, column: int) -> float:
        return _LEFT + column * (self.panel + _GAP)

    def write(self, x: float, y: float, words: str, size: float = 8, **style: Any) -> None:
        self.axes.text(x, y, words, **{"fontsize": size, "color": _INK, "ha": "left", "va": "center", **style})

    def box(self, x: float, y: float, width: float, height: float, colour: str, **style: Any) -> None:
        style = {"facecolor": colour, "linewidth": 0, **style}
        self.axes.add_patch(self.patches.Rectangle((x, y), width, height, **style))

    def title(self, y: float) -> None:
        traced, layout, wire = self.traced, self.layout, self.wire
        ranks = f"{len(self.ranks)} ranks" if len(self.ranks) > 1 else "1 rank"
        words = f"{layout.seq_len:,} tokens on {ranks}: {traced.mask!r}, layout {layout.name}, {traced.kind} plan"
        fits = int(self.width / 0.1)
        self.write(_EDGE, y, words if len(words) <= fits else words[:fits] + " ...", 11.5, weight="bold")
        batch = f" x {wire.batch} sequences" if wire.batch > 1 else ""
        weight = f"2 x {wire.kv_heads} heads x {wire.head_dim} x {wire.element_size} bytes{batch} = {wire.row_bytes:,}"
        words = f"One colour a rank. A row, keys and values of a token, is {weight} bytes."
        self.write(_EDGE, y + 0.21, words, color=_FAINT)

    def owners(self) -> Iterator[tuple[int, int, int]]:
        """(rank, start, stop) of each run of shown positions."""
        for rank in self.ranks:
            for span in self.layout.spans(rank):
                first = _first(span, self.shown)
                runs = [(span.start, span.stop)] if span.step == 1 else [(p, p + 1) for p in first]
                yield from ((rank, a, b) for a, b in runs)

    def strip(self, x: float, y: float, length: float, *, thick: float, down: bool, word: str, size: float) -> None:
        """The positions as a bar, in the colours of their owners."""
        scale = length / self.shown
        for rank, a, b in self.owners():
            start, extent = a * scale, (b - a) * scale
            place = (x, y + start, thick, extent) if down else (x + start, y, extent, thick)
            self.box(*place, _colour(rank), edgecolor="white", linewidth=0.5)
            fits = min(size, extent / 0.016)
            if fits > 4.5:
                label = f"{word}{rank}" if extent > 0.01 * size * len(word + "00") else str(rank)
                at = (x + thick / 2, y + start + extent / 2) if down else (x + start + extent / 2, y + thick / 2)
                self.write(*at, label, fits, ha="center", color=_on(rank), va="center_baseline")

    def sequence(self, y: float) -> None:
        length = self.width - 2 * _EDGE
        part = f" (the first {self.shown:,} of {self.layout.seq_len:,})" if self.shown < self.layout.seq_len else ""
        self.write(_EDGE, y - 0.15, f"who owns which tokens{part}", 9, weight="bold")
        self.strip(_EDGE, y, length, thick=0.26, down=False, word="rank ", size=8.5)
        edges = sorted({a for _, a, _ in self.owners()} | {self.shown})
        inner = [edge for edge in edges[: -1 : -(-len(edges) // 17)] if (self.shown - edge) * length > 0.6 * self.shown]
        for edge in [*inner, self.shown]:
            side = "left" if edge == 0 else "right" if edge == self.shown else "center"
            self.write(_EDGE + edge * length / self.shown, y + 0.35, f"{edge:,}", 7, ha=side, color=_FAINT)

    def matrix(self, column: int, y: float) -> None:
        traced, x, size = self.traced, self.left(column), self.panel
        total = column == traced.num_steps
        heading = "all steps" if total else "step 0: own block" if column == 0 else f"step {column}"
        self.write(x + size / 2, y - _STRIP - 0.14, heading, 9, ha="center", weight="bold")
        self.strip(x, y - _STRIP - 0.03, size, thick=_STRIP, down=False, word="", size=6.5)
        self.strip(x - _STRIP - 0.03, y, size, thick=_STRIP, down=True, word="", size=6.5)
        if column == 0:
            self.write(x - 0.3, y + size / 2, "queries", 7.5, ha="center", rotation=90)
            self.write(x + size / 2, y + size + 0.09, "keys", 7.5, ha="center")
        self.box(x, y, size, size, "white", edgecolor="#BBBBBB", linewidth=0.6)
        for rank in self.ranks:
            works = [w for w in traced.work if w.rank == rank]
            self.regions([w for w in works if w.step > column], x, y, _TO_COME)
            self.regions([w for w in works if w.step < column and not total], x, y, _mix(_colour(rank), _PALE))
            self.regions([w for w in works if total or w.step == column], x, y, _colour(rank))

    def regions(self, works: Sequence[Work], x: float, y: float, colour: str) -> None:
        scale = self.panel / self.shown
        polygons = [
            [(x + k * scale, y + q * scale) for k, q in polygon]
            for work in works
            for polygon in outlines(work, cells=self.cells, shown=self.shown)
        ]
        style: dict[str, Any] = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.0 if self.cells else 0.4}
        self.axes.add_collection(self.collections.PolyCollection(polygons, **style), autolim=False)

    def legend(self, y: float) -> None:
        x = self.left(0)
        now, before, later = "computed in this step, by the rank of this colour", "computed before", "still to come"
        for colour, words in ((_colour(0), now), (_mix(_colour(0), _PALE), before), (_TO_COME, later)):
            self.box(x, y - 0.05, 0.14, 0.1, colour)
            self.write(x + 0.2, y, words, 7.5, color=_FAINT)
            x += 0.45 + 0.05 * len(words)

    def lanes(self, y: float) -> None:
        """A lane a rank: the block in hand in each step, and an arrow to where it, or a part of one's own, goes."""
        traced = self.traced
        for rank in self.ranks:
            middle = y + (rank + 0.5) * _LANE
            self.box(_EDGE, middle - 0.13, _LEFT - _EDGE - 0.1, 0.26, _colour(rank))
            centre = (_EDGE + _LEFT - 0.1) / 2
            self.write(centre, middle, f"rank {rank}", 8.5, ha="center", color=_on(rank), weight="bold")
            for step in range(traced.num_steps):
                self.cell(rank, step, middle)
            self.totals(rank, middle)
        for t in traced.transfers:
            start = self.left(t.step) + self.panel + 0.02, y + (t.sender + 0.5) * _LANE
            end = self.left(t.step + 1) - 0.02, y + (t.receiver + 0.5) * _LANE
            self.axes.add_patch(self.patches.FancyArrowPatch(start, end, color=_colour(t.owner), **_ARROW))

    def cell(self, rank: int, step: int, middle: float) -> None:
        x, top, source = self.left(step), middle - _LANE / 2 + 0.05, self.traced.source(rank, step)
        keys = self.traced.keys(rank, step)
        height = _LANE - 0.1
        if not keys:
            self.box(x, top, self.panel, height, "#F6F6F6", edgecolor="#CCCCCC", linewidth=0.6)
        else:
            self.box(x, top, self.panel, height, "white", edgecolor=_colour(rank), linewidth=1)
            fill, ink = (_FAINT, "white") if source is None else (_colour(source), _on(source))
            self.box(x, top, self.panel, 0.18, fill)
            self.write(x + 0.06, top + 0.09, f"keys of {keys}", color=ink, weight="bold")
        pairs = self.traced.pairs(rank, step)
        self.write(x + 0.06, top + 0.28, short(pairs, " pairs") if pairs else "nothing to compute", 7.5)
        posted = self.traced.posted(rank, step)
        if posted:
            to = f"{posted[0].receiver}" if len(posted) == 1 else f"{len(posted)} ranks"
            size = short(round(sum(t.num_rows * self.wire.row_bytes * t.share for t in posted)), "B")
            rows = num_rows_text(sum(t.num_rows for t in posted))
            self.write(x + 0.06, top + 0.43, f"→ {to}: {rows}, {size}", 7.5)

    def totals(self, rank: int, middle: float) -> None:
        traced = self.traced
        x, pairs, rows = self.left(traced.num_steps), traced.pairs(rank), traced.sent(rank)
        share = 100 * pairs / max(1, sum(traced.pairs(r) for r in self.ranks))
        self.write(x, middle - 0.08, f"{short(pairs, ' pairs')}, {share:.3g} %", 8.5, weight="bold")
        size = short(rows * self.wire.row_bytes, "B")
        self.write(x, middle + 0.09, f"sends {num_rows_text(rows)}, {size}" if rows else "sends nothing", 7.5)


def _colour(rank: int) -> str:
    return _COLOURS[rank % len(_COLOURS)]


def _on(rank: int) -> str:
    """The colour of letters on the rank's colour."""
    return "white" if _colour(rank) in _DARK else _INK


def _mix(colour: str, share: float) -> str:
    """A colour on white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - share * (255 - part)):02X}" for part in parts)


def save(traced: Trace, path: str | Path, wire: Wire | None = None) -> None:
    """Write `figure` to a file: a small PNG, or what else the name ends in (SVG, PDF)."""
    drawn = figure(traced, wire)
    if Path(path).suffix.lower() != ".png":
        drawn.savefig(path)
        return
    from PIL import Image  # which matplotlib needs, too

    pixels = BytesIO()
    drawn.savefig(pixels, format="png")
    Image.open(pixels).convert("RGB").quantize(128).save(path, optimize=True)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ringcp.draw", description="Draw the schedule of one attention.")
    add = parser.add_argument
    add("--seq-len", type=int, default=4096, help="tokens of the whole sequence")
    add("--world-size", type=int, default=4, help="ranks")
    add("--layout", default="auto", choices=LAYOUT_NAMES)
    add("--mask", default="causal", help="causal, full, or window:N, N tokens with the query's own")
    add("--kv-heads", type=int, default=8)
    add("--head-dim", type=int, default=64)
    add("--element-size", type=int, default=2, help="bytes of one number")
    add("--out", type=Path, help="the picture, a PNG, SVG or PDF; without it, the text is printed")
    return parser.parse_args(argv)


def _mask(words: str) -> Mask:
    kind, _, tokens = words.partition(":")
    if kind == "window" and tokens.isdecimal() and int(tokens) > 0:
        return Window(int(tokens) - 1)
    if words not in ("causal", "full"):
        raise ArgumentError(f"mask: expected causal, full or window:N, got {words!r}; for example window:1024")
    return Causal() if words == "causal" else Full()


def main(argv: Sequence[str]) -> None:
    """The command line; see the top of this file."""
    args = _parse(argv)
    try:
        traced = trace(layout_named(args.layout, args.seq_len, args.world_size), _mask(args.mask))
        wire = Wire(args.kv_heads, args.head_dim, args.element_size)
        print(text(traced, wire)) if args.out is None else save(traced, args.out, wire)
    except (RingcpError, ValueError, OSError) as error:
        raise SystemExit(f"draw: {error}") from error


if __name__ == "__main__":
    main(sys.argv[1:])
