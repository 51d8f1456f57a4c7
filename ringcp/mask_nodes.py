"""What masks are made of: nodes that answer which pairs of positions attend.

A new mask is a new class here, one in `_NODES` of `mask_spec.py`, and a function that makes it in `mask.py`. What every
node answers is in `node.py`; the node of a function is in `predicate_node.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from ringcp.band import Band, crop, full, intersect, subtract, trim
from ringcp.errors import ArgumentError
from ringcp.mask_mods import MaskMod
from ringcp.node import Indices, Node, Pair, Sizes


class _Exact:
    """Without functions."""

    mods: ClassVar[tuple[MaskMod, ...]] = ()

    def superset(self) -> Node:
        return self  # type: ignore[return-value]


class _AnySequence(_Exact):
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
        return _diagonal(pair, None, None)

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
        return _diagonal(pair, 0, None)

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
        return _diagonal(pair, -self.right, self.left)

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
class DocumentsNode(_Exact):
    """Both in one document.

    edges: for each batch row, or once for all, the edges 0 < e1 < e2 < ... of its documents.
    """

    edges: tuple[tuple[int, ...], ...]
    needs_band: ClassVar[bool] = False
    of_one_sequence: ClassVar[bool] = True

    @property
    def rows(self) -> int | None:
        return _num_rows(self.edges)

    @property
    def reach(self) -> int:
        return max((b - a - 1 for edges in self.edges for a, b in pairwise(edges)), default=0)

    def pieces(self, pair: Pair, row: int) -> list[Band]:
        edges = _of_row(self.edges, row)
        first, last = pair.overlap()
        at = max(bisect_right(edges, first) - 1, 0)
        result = []
        while at + 1 < len(edges) and edges[at] < last:
            result += pair.square(edges[at], edges[at + 1])
            at += 1
        return result

    def allows(self, at: Indices, row: int) -> Tensor:
        edges = torch.tensor(_of_row(self.edges, row), dtype=torch.int64, device=at.q.device)
        q_doc, k_doc = (torch.bucketize(pos, edges, right=True) for pos in (at.q, at.k))
        return (q_doc == k_doc) & (at.q < edges[-1])

    def problem(self, sizes: Sizes) -> str:
        longest = max(edges[-1] for edges in self.edges)
        return f"documents of at most {sizes.q_len} tokens in all, got {longest}" if longest > sizes.q_len else ""

    def __str__(self) -> str:
        return f"Documents({_listed([[b - a for a, b in pairwise(edges)] for edges in self.edges])})"


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


@dataclass(frozen=True)
class PrefixNode(_Exact):
    """A key in the prefix, or not after the query.

    n: the length of the prefix, for each batch row or once for all.
    """

    n: tuple[int, ...]
    reach: ClassVar[None] = None
    needs_band: ClassVar[bool] = False
    of_one_sequence: ClassVar[bool] = False

    @property
    def rows(self) -> int | None:
        return _num_rows(self.n)

    def pieces(self, pair: Pair, row: int) -> list[Band]:
        cut = pair.keys(0, _of_row(self.n, row))[1]
        prefix = full((0, pair.num_q), (0, cut))
        rest = [crop(band, band.q, (cut, pair.num_k)) for band in _diagonal(pair, 0, None)]
        return [band for band in (prefix, *rest) if band is not None]

    def allows(self, at: Indices, row: int) -> Tensor:
        return (at.k < _of_row(self.n, row)) | (at.q >= at.k)

    def problem(self, sizes: Sizes) -> str:
        return f"a prefix of at most {sizes.q_len} tokens, got {max(self.n)}" if max(self.n) > sizes.q_len else ""

    def __str__(self) -> str:
        return f"Prefix({_listed(list(self.n))})"


@dataclass(frozen=True)
class PaddingNode(_Exact):
    """Both valid.

    valid: for each batch row, or once for all, the first valid position and the one after the last.
    """

    valid: tuple[tuple[int, ...], ...]
    reach: ClassVar[None] = None
    needs_band: ClassVar[bool] = False
    of_one_sequence: ClassVar[bool] = True

    @property
    def rows(self) -> int | None:
        return _num_rows(self.valid)

    def pieces(self, pair: Pair, row: int) -> list[Band]:
        return pair.square(*_of_row(self.valid, row))

    def allows(self, at: Indices, row: int) -> Tensor:
        start, stop = _of_row(self.valid, row)
        return (at.q >= start) & (at.q < stop) & (at.k >= start) & (at.k < stop)

    def problem(self, sizes: Sizes) -> str:
        longest = max(stop for _, stop in self.valid)
        return f"at most {sizes.q_len} valid tokens, got {longest}" if longest > sizes.q_len else ""

    def __str__(self) -> str:
        return f"Padding({_listed([list(valid) for valid in self.valid])})"


@dataclass(frozen=True)
class BlocksNode(_Exact):
    """In one of some rectangles.

    rectangles: for each batch row, or once for all, disjoint (first query, query after the last, first key, key after
    the last), in the order of the queries; of any two the queries are the same or disjoint.
    """

    rectangles: tuple[tuple[tuple[int, ...], ...], ...]
    needs_band: ClassVar[bool] = False
    of_one_sequence: ClassVar[bool] = False

    @property
    def rows(self) -> int | None:
        return _num_rows(self.rectangles)

    @property
    def reach(self) -> int:
        return max((max(q1 - 1 - k0, k1 - 1 - q0) for row in self.rectangles for q0, q1, k0, k1 in row), default=0)

    def pieces(self, pair: Pair, row: int) -> list[Band]:
        rectangles = _of_row(self.rectangles, row)
        last = pair.q_start + (pair.num_q - 1) * pair.step
        result = []
        for q0, q1, k0, k1 in rectangles[bisect_right(rectangles, pair.q_start, key=itemgetter(1)) :]:
            if q0 > last:
                break
            q, k = pair.rows(q0, q1), pair.keys(k0, k1)
            band = full(q, k) if q[0] < q[1] and k[0] < k[1] else None
            result += [] if band is None else [band]
        return result

    def allows(self, at: Indices, row: int) -> Tensor:
        allowed = torch.zeros_like(at.q - at.k, dtype=torch.bool)
        for q0, q1, k0, k1 in _of_row(self.rectangles, row):
            allowed |= (at.q >= q0) & (at.q < q1) & (at.k >= k0) & (at.k < k1)
        return allowed

    def problem(self, sizes: Sizes) -> str:
        return ""  # the function beside it knows its sizes

    def __str__(self) -> str:
        digest = blake2b(repr(self.rectangles).encode(), digest_size=8).hexdigest()
        return f"{sum(map(len, self.rectangles))} rectangles of blocks #{digest}"


def _num_rows(per_row: tuple[Any, ...]) -> int | None:
    return len(per_row) if len(per_row) > 1 else None


def _of_row(per_row: tuple[Any, ...], row: int) -> Any:
    return per_row[row] if len(per_row) > 1 else per_row[0]


_PRINTED = 120


def _listed(values: list[Any]) -> str:
    """The values, of a single row without its brackets; a long text shortened, with a hash in place of the rest."""
    text = str(values[0] if len(values) == 1 else values)
    if len(text) <= _PRINTED:
        return text
    digest = blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{text[: _PRINTED // 2]}... #{digest}"


def _diagonal(pair: Pair, least: int | None, most: int | None) -> list[Band]:
    """The pairs with ``least <= q_pos - k_pos <= most``."""
    # q_pos - k_pos = ahead + step * (i - j)
    ahead = pair.q_start - pair.k_start
    lo = -pair.num_k if least is None else -((ahead - least) // pair.step)
    hi = pair.num_q if most is None else (most - ahead) // pair.step
    band = trim((0, pair.num_q), (0, pair.num_k), lo, hi)
    return [] if band is None else [band]
