"""What masks are made of: nodes that answer which pairs of positions attend, and how they are written in a spec.

A new mask is a new class here, in `_NODES`, and a function that makes it in `mask.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ringcp.band import Band, Range, crop, full, intersect, subtract, trim
from ringcp.errors import ArgumentError


class Pair(NamedTuple):
    """A rectangle of positions: row i is ``q_start + step * i``, key j is ``k_start + step * j``."""

    q_start: int
    num_q: int
    k_start: int
    num_k: int
    step: int

    def overlap(self) -> tuple[int, int]:
        """The first position that could be among both, and the one after the last."""
        ends = (self.q_start + (self.num_q - 1) * self.step, self.k_start + (self.num_k - 1) * self.step)
        return max(self.q_start, self.k_start), min(ends) + 1

    def rows(self, start: int, stop: int) -> Range:
        """The rows whose positions are in ``[start, stop)``."""
        return _within(self.q_start, self.num_q, self.step, start, stop)

    def keys(self, start: int, stop: int) -> Range:
        """The keys whose positions are in ``[start, stop)``."""
        return _within(self.k_start, self.num_k, self.step, start, stop)

    def square(self, start: int, stop: int) -> list[Band]:
        """All pairs of positions in ``[start, stop)``."""
        q, k = self.rows(start, stop), self.keys(start, stop)
        return [Band(q, k, q[0] - k[1] + 1, q[1] - 1 - k[0])] if q[0] < q[1] and k[0] < k[1] else []


def _within(first: int, num: int, step: int, start: int, stop: int) -> Range:
    """Which i of ``range(num)`` have ``start <= first + step * i < stop``."""
    return min(max(0, -((first - start) // step)), num), min(max(0, -((first - stop) // step)), num)


class Node(Protocol):
    """One node of a mask: a frozen dataclass whose fields are integers, tuples of such fields, or further nodes.

    rows, reach: see `ringcp.mask.Pieces`. needs_band: whether a kernel must take more than full and causal rectangles.
    of_one_sequence: whether it says where in a sequence something ends, so that it has no meaning between two.
    """

    @property
    def rows(self) -> int | None: ...

    @property
    def reach(self) -> int | None: ...

    @property
    def needs_band(self) -> bool: ...

    @property
    def of_one_sequence(self) -> bool: ...

    def pieces(self, pair: Pair, row: int) -> list[Band]: ...

    def allows(self, q_pos: Tensor, k_pos: Tensor, row: int) -> Tensor:
        """Whether pairs attend, for positions that broadcast."""
        ...

    def problem(self, seq_len: int) -> str:
        """Why it does not fit a sequence of this length; empty if it does."""
        ...


class _AnySequence:
    """One mask for all batch rows, that fits any length."""

    rows: ClassVar[None] = None

    def problem(self, seq_len: int) -> str:
        return ""


@dataclass(frozen=True)
class FullNode(_AnySequence):
    """Every pair."""

    reach: ClassVar[None] = None
    needs_band: ClassVar[bool] = False
    of_one_sequence: ClassVar[bool] = False

    def pieces(self, pair: Pair, row: int) -> list[Band]:
        return _diagonal(pair, None, None)

    def allows(self, q_pos: Tensor, k_pos: Tensor, row: int) -> Tensor:
        return torch.ones_like(q_pos - k_pos, dtype=torch.bool)

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

    def allows(self, q_pos: Tensor, k_pos: Tensor, row: int) -> Tensor:
        return q_pos >= k_pos

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

    def allows(self, q_pos: Tensor, k_pos: Tensor, row: int) -> Tensor:
        return (q_pos - k_pos >= -self.right) & (q_pos - k_pos <= self.left)

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

    def problem(self, seq_len: int) -> str:
        return self.a.problem(seq_len) or self.b.problem(seq_len)


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

    def allows(self, q_pos: Tensor, k_pos: Tensor, row: int) -> Tensor:
        return self.a.allows(q_pos, k_pos, row) & self.b.allows(q_pos, k_pos, row)

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

    def allows(self, q_pos: Tensor, k_pos: Tensor, row: int) -> Tensor:
        return self.a.allows(q_pos, k_pos, row) | self.b.allows(q_pos, k_pos, row)

    def __str__(self) -> str:
        return f"({self.a} | {self.b})"


@dataclass(frozen=True)
class DocumentsNode:
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

    def allows(self, q_pos: Tensor, k_pos: Tensor, row: int) -> Tensor:
        edges = torch.tensor(_of_row(self.edges, row), dtype=torch.int64, device=q_pos.device)
        q_doc, k_doc = (torch.bucketize(pos, edges, right=True) for pos in (q_pos, k_pos))
        return (q_doc == k_doc) & (q_pos < edges[-1])

    def problem(self, seq_len: int) -> str:
        longest = max(edges[-1] for edges in self.edges)
        return f"documents of at most {seq_len} tokens in all, got {longest}" if longest > seq_len else ""

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

    def allows(self, q_pos: Tensor, k_pos: Tensor, row: int) -> Tensor:
        return q_pos // self.size == k_pos // self.size

    def __str__(self) -> str:
        return f"Chunked({self.size})"


@dataclass(frozen=True)
class PrefixNode:
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

    def allows(self, q_pos: Tensor, k_pos: Tensor, row: int) -> Tensor:
        return (k_pos < _of_row(self.n, row)) | (q_pos >= k_pos)

    def problem(self, seq_len: int) -> str:
        return f"a prefix of at most {seq_len} tokens, got {max(self.n)}" if max(self.n) > seq_len else ""

    def __str__(self) -> str:
        return f"Prefix({_listed(list(self.n))})"


@dataclass(frozen=True)
class PaddingNode:
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

    def allows(self, q_pos: Tensor, k_pos: Tensor, row: int) -> Tensor:
        start, stop = _of_row(self.valid, row)
        return (q_pos >= start) & (q_pos < stop) & (k_pos >= start) & (k_pos < stop)

    def problem(self, seq_len: int) -> str:
        longest = max(stop for _, stop in self.valid)
        return f"at most {seq_len} valid tokens, got {longest}" if longest > seq_len else ""

    def __str__(self) -> str:
        return f"Padding({_listed([list(valid) for valid in self.valid])})"


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


# The place in this tuple is the node's code in a spec.
_NODES: tuple[type, ...] = (
    FullNode,
    CausalNode,
    WindowNode,
    AndNode,
    OrNode,
    DocumentsNode,
    ChunkedNode,
    PrefixNode,
    PaddingNode,
)


def encode(node: Node) -> list[int]:
    """Prefix notation: the code, then the fields; a tuple as its length and its items."""
    return [_NODES.index(type(node)), *(word for value in vars(node).values() for word in _words(value))]


def _words(value: Any) -> list[int]:
    if isinstance(value, int):
        return [value]
    if isinstance(value, tuple):
        return [len(value), *(word for item in value for word in _words(item))]
    return encode(value)


def decode(words: Iterator[int]) -> Node:
    """The node that `encode` wrote."""
    cls = _NODES[next(words)]
    return cls(*(_value(field.type, words) for field in fields(cls)))


def _value(kind: Any, words: Iterator[int]) -> Any:
    if kind == "int":
        return next(words)
    if kind.startswith("tuple["):
        item = kind.removeprefix("tuple[").removesuffix(", ...]")
        return tuple(_value(item, words) for _ in range(next(words)))
    return decode(words)
