"""What masks are made of: nodes that answer which pairs of positions attend.

A new mask is a new class here, or in `row_nodes.py` if it says something of each batch row, one in `_NODES` of
`mask_spec.py`, and a function that makes it in `mask.py`. What every node answers is in `node.py`; the node of a
function is in `predicate_node.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ringcp.band import Band, intersect, subtract, trim
from ringcp.errors import ArgumentError
from ringcp.mask_mods import MaskMod
from ringcp.node import Indices, Node, Pair, Sizes


class Exact:
    """Without functions."""

    mods: ClassVar[tuple[MaskMod, ...]] = ()

    def superset(self) -> Node:
        return self  # type: ignore[return-value]


class _AnySequence(Exact):
    """One mask for all batch rows, that fits any length."""

    rows: ClassVar[None] = None

    def problem(self, sizes: Sizes) -> str:
        return ""


@dataclass(frozen=True)
class FullNode(_AnySequence):
    """Every pair."""

    reach: ClassVar[None] = None
    needs_band: ClassVar[bool] = False
    of_one_sequence: ClassVar[bool] = False

    def pieces(self, pair: Pair, row: int) -> list[Band]:
        return diagonal(pair, None, None)

    def allows(self, at: Indices, row: int) -> Tensor:
        return torch.ones_like(at.q - at.k, dtype=torch.bool)

    def __str__(self) -> str:
        return "Full()"


@dataclass(frozen=True)
class CausalNode(_AnySequence):
    """A key that is not after the query."""

    reach: ClassVar[None] = None
    needs_band: ClassVar[bool] = False
    of_one_sequence: ClassVar[bool] = False

    def pieces(self, pair: Pair, row: int) -> list[Band]:
        return diagonal(pair, 0, None)

    def allows(self, at: Indices, row: int) -> Tensor:
        return at.q >= at.k

    def __str__(self) -> str:
        return "Causal()"


@dataclass(frozen=True)
class WindowNode(_AnySequence):
    """At most `left` before the query and `right` after it."""

    left: int
    right: int
    needs_band: ClassVar[bool] = True
    of_one_sequence: ClassVar[bool] = False

    @property
    def reach(self) -> int:
        return max(self.left, self.right)

    def pieces(self, pair: Pair, row: int) -> list[Band]:
        return diagonal(pair, -self.right, self.left)

    def allows(self, at: Indices, row: int) -> Tensor:
        return (at.q - at.k >= -self.right) & (at.q - at.k <= self.left)

    def __str__(self) -> str:
        return f"Window({self.left}, {self.right})"


@dataclass(frozen=True)
class _Both:
    """Two masks, joined in some way."""

    a: Node
    b: Node

    def __post_init__(self) -> None:
        if None not in (self.a.rows, self.b.rows) and self.a.rows != self.b.rows:
            raise ArgumentError(
                f"mask: expected masks for equal numbers of batch rows, got {self.a} for {self.a.rows} and {self.b} "
                f"for {self.b.rows}; give both one entry a batch row"
            )

    @property
    def rows(self) -> int | None:
        return self.b.rows if self.a.rows is None else self.a.rows

    @property
    def of_one_sequence(self) -> bool:
        return self.a.of_one_sequence or self.b.of_one_sequence

    def problem(self, sizes: Sizes) -> str:
        return self.a.problem(sizes) or self.b.problem(sizes)

    @property
    def mods(self) -> tuple[MaskMod, ...]:
        return self.a.mods + self.b.mods


@dataclass(frozen=True)
class AndNode(_Both):
    """The pairs of both."""

    @property
    def reach(self) -> int | None:
        return min((node.reach for node in (self.a, self.b) if node.reach is not None), default=None)

    @property
    def needs_band(self) -> bool:
        return self.a.needs_band or self.b.needs_band

    def pieces(self, pair: Pair, row: int) -> list[Band]:
        right = self.b.pieces(pair, row)
        both = (intersect(x, y) for x in self.a.pieces(pair, row) for y in right)
        return [band for band in both if band is not None]

    def allows(self, at: Indices, row: int) -> Tensor:
        return self.a.allows(at, row) & self.b.allows(at, row)

    def superset(self) -> Node:
        if not self.mods:
            return self
        parts = [part for part in (self.a.superset(), self.b.superset()) if part != FullNode()]
        return AndNode(*parts) if len(parts) == 2 else next(iter(parts), FullNode())

    def __str__(self) -> str:
        return f"({self.a} & {self.b})"


@dataclass(frozen=True)
class OrNode(_Both):
    """The pairs of either."""

    needs_band: ClassVar[bool] = True  # what one side leaves of the other can have any two edges

    @property
    def reach(self) -> int | None:
        return None if self.a.reach is None or self.b.reach is None else max(self.a.reach, self.b.reach)

    def pieces(self, pair: Pair, row: int) -> list[Band]:
        left, rest = self.a.pieces(pair, row), self.b.pieces(pair, row)
        for x in left:
            rest = [part for y in rest for part in subtract(y, x)]
        return left + rest

    def allows(self, at: Indices, row: int) -> Tensor:
        return self.a.allows(at, row) | self.b.allows(at, row)

    def superset(self) -> Node:
        if not self.mods:
            return self
        a, b = self.a.superset(), self.b.superset()
        return FullNode() if FullNode() in (a, b) else OrNode(a, b)

    def __str__(self) -> str:
        return f"({self.a} | {self.b})"


@dataclass(frozen=True)
class ChunkedNode(_AnySequence):
    """Both in one chunk of `size`."""

    size: int
    needs_band: ClassVar[bool] = False
    of_one_sequence: ClassVar[bool] = False

    @property
    def reach(self) -> int:
        return self.size - 1

    def pieces(self, pair: Pair, row: int) -> list[Band]:
        first, last = pair.overlap()
        starts = range(first - first % self.size, last, self.size)
        return [band for start in starts for band in pair.square(start, start + self.size)]

    def allows(self, at: Indices, row: int) -> Tensor:
        return at.q // self.size == at.k // self.size

    def __str__(self) -> str:
        return f"Chunked({self.size})"


def diagonal(pair: Pair, least: int | None, most: int | None) -> list[Band]:
    """The pairs with ``least <= q_pos - k_pos <= most``."""
    # q_pos - k_pos = ahead + step * (i - j)
    ahead = pair.q_start - pair.k_start
    lo = -pair.num_k if least is None else -((ahead - least) // pair.step)
    hi = pair.num_q if most is None else (most - ahead) // pair.step
    band = trim((0, pair.num_q), (0, pair.num_k), lo, hi)
    return [] if band is None else [band]
