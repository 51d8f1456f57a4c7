"""The schedules of all ranks, put back on global positions, as data and as text: what pictures are made of. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from ringcp.band import Band, Range, count, crop, length_of
from ringcp.errors import ArgumentError
from ringcp.layout import Layout, Span
from ringcp.mask import Mask
from ringcp.needs import from_zero, placed, positions_of
from ringcp.schedule import Heads, Message, Step, build
from ringcp.steps import owner_words
from ringcp.topology import Topology, ring


class Work(NamedTuple):
    """Pairs that `rank` computes in `step`, on global positions.

    source: the owner of the keys; None if they are gathered from all ranks.
    q, k: positions of the query rows and of the keys.
    band: the pairs, counted in elements of `q` and `k`: element i of q and j of k attend if the band allows (i, j).
    share: of the query heads.
    """

    rank: int
    step: int
    source: int | None
    q: Span
    k: Span
    band: Band
    share: Fraction = Fraction(1)


class Transfer(NamedTuple):
    """Rows of keys and values of `owner` that `sender` posts in `step`, for `receiver` to use in the next one.

    share: of the KV heads.
    """

    step: int
    sender: int
    receiver: int
    owner: int
    num_rows: int
    share: Fraction = Fraction(1)


@dataclass(frozen=True)
class Trace:
    """The forward pass of all ranks: what a picture shows.

    kind: of the plan: "local", "ring", "direct" or "gather".
    """

    layout: Layout
    mask: Mask
    kind: str
    num_steps: int
    work: tuple[Work, ...]
    transfers: tuple[Transfer, ...]

    def source(self, rank: int, step: int) -> int | None:
        """The owner of the keys that `rank` computes with in `step`; None if it computes nothing, or with all keys."""
        return next((w.source for w in self.work if (w.rank, w.step) == (rank, step)), None)

    def keys(self, rank: int, step: int) -> str:
        """Whose keys `rank` computes with in `step`: "rank 2", "all ranks", or "" if it computes nothing."""
        works = any((w.rank, w.step) == (rank, step) for w in self.work)
        return owner_words(self.source(rank, step)) if works else ""

    def posted(self, rank: int, step: int) -> list[Transfer]:
        """What `rank` sends in `step`."""
        return [t for t in self.transfers if (t.sender, t.step) == (rank, step)]

    def pairs(self, rank: int, step: int | None = None) -> int:
        """Number of (query, key) pairs that `rank` computes, in one step or in all; the mean over the query heads."""
        return round(sum(count(w.band) * w.share for w in self.work if w.rank == rank and step in (None, w.step)))

    def sent(self, rank: int, step: int | None = None) -> int:
        """Rows of keys (and as many of values) that `rank` sends, in one step or in all; the mean over the KV heads."""
        return round(sum(t.num_rows * t.share for t in self.transfers if t.sender == rank and step in (None, t.step)))


def trace(
    layout: Layout,
    mask: Mask,
    *,
    topology: Topology | None = None,
    row: int = 0,
    heads: Heads | None = None,
    gather: int | None = None,
) -> Trace:
    """What every rank computes and sends in every step of forward, on global positions.

    Args:
        topology: how the ranks are wired; None is the ring 0, 1, 2, ...
        row: the row of the batch, for masks that differ between rows.
        heads, gather: as in `ringcp.schedule.build`.

    Raises:
        ArgumentError: what is no layout or mask, or a mask that does not fit the length.
        LayoutError: if layout and topology differ in the number of ranks.
    """
    if not isinstance(layout, Layout) or not hasattr(mask, "pieces"):
        raise ArgumentError(
            f"trace: expected a layout and a mask, got {layout!r} and {mask!r}; write "
            "trace(ringcp.HeadTail(seq_len, world_size), ringcp.Causal())"
        )
    pieces = mask.superset if isinstance(mask, Mask) else mask
    problem = pieces.problem(None, layout.seq_len) if isinstance(pieces, Mask) else ""
    if problem:
        raise ArgumentError(problem)
    topology = ring(layout.world_size) if topology is None else topology
    schedules = [build(layout, pieces, topology, rank, heads, gather=gather) for rank in range(layout.world_size)]
    steps = [(rank, at, step) for rank, of in enumerate(schedules) for at, step in enumerate(of.forward)]
    work = (piece for rank, at, step in steps for piece in _work(layout, rank, at, step, row, heads))
    transfers = (
        Transfer(at, rank, m.peer, _owner(rank, step, m), m.num_rows, _share(m.kv_heads, heads and heads.kv))
        for rank, at, step in steps
        for m in step.sends
    )
    return Trace(layout, mask, schedules[0].kind, len(schedules[0].forward), tuple(work), tuple(transfers))


def _owner(rank: int, step: Step, message: Message) -> int:
    if message.own_rows is not None:
        return rank
    assert step.source is not None, "a gathered block is not passed on"
    return step.source


def _share(some: Range | None, heads: int | None) -> Fraction:
    return Fraction(1) if some is None or heads is None else Fraction(length_of(some), heads)


def _work(layout: Layout, rank: int, at: int, step: Step, row: int, heads: Heads | None) -> Iterator[Work]:
    queries = placed(layout, rank)
    in_hand = step.positions if step.source is None else positions_of(layout, step.source, step.rows)
    keys = from_zero(in_hand)
    for tile in step.tiles:
        if tile.batch is not None and not tile.batch[0] <= row < tile.batch[1]:
            continue
        share = _share(tile.q_heads, heads and heads.q)
        for q_at, q in queries:
            for k_at, k in keys:
                band = crop(tile.band, (q_at, q_at + q.length), (k_at, k_at + k.length))
                if band is not None:
                    yield Work(rank, at, step.source, q, k, band.shift(-q_at, -k_at), share)


@dataclass(frozen=True)
class Wire:
    """What one row of keys and values weighs when it is sent."""

    kv_heads: int = 8
    head_dim: int = 64
    element_size: int = 2
    batch: int = 1

    @property
    def row_bytes(self) -> int:
        return 2 * self.batch * self.kv_heads * self.head_dim * self.element_size


def text(traced: Trace, wire: Wire | None = None) -> str:
    """The same in words: the layout, and a line for each rank and step."""
    wire = wire or Wire()
    lines = [str(traced.layout), f"{traced.mask!r}, {traced.kind} plan"]
    for step in range(traced.num_steps):
        lines.append(f"step {step}")
        for rank in range(traced.layout.world_size):
            keys = traced.keys(rank, step)
            line = f"  rank {rank}: {traced.pairs(rank, step):,} pairs"
            line += f" with keys of {keys}" if keys else ""
            for t in traced.posted(rank, step):
                size = short(round(t.num_rows * wire.row_bytes * t.share), "B")
                line += f"; sends {t.num_rows:,} rows of rank {t.owner} to rank {t.receiver}, {size}"
            lines.append(line)
    return "\n".join(lines)


def short(number: int, what: str) -> str:
    """Three digits: "2.1 M pairs" of " pairs", "2.1 MB" of "B"."""
    for unit, prefix in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= 0.9995 * unit:
            return f"{number / unit:.3g} {prefix}{what}"
    return f"{number} {what.strip()}"


def num_rows_text(number: int) -> str:
    """ "1,024 rows", and three digits of many."""
    return f"{number:,} rows" if number < 100_000 else short(number, " rows")
