"""Nodes of masks that say something of each batch row: where documents, a prefix or padding end."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from ringcp.band import Band, crop, full
from ringcp.mask_nodes import Exact, diagonal
from ringcp.node import Indices, Pair, Sizes


@dataclass(frozen=True)
class DocumentsNode(Exact):
    """Both in one document.

    edges: for each batch row, or once for all, the edges 0 < e1 < e2 < ... of its documents.
    given: for how many batch rows they were given. whole: lengths of the sequence that were given with them.
    """

    edges: tuple[tuple[int, ...], ...]
    given: int = field(default=1, compare=False)
    whole: tuple[int, ...] = field(default=(), compare=False)
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
        if longest > sizes.q_len:
            return f"documents of at most {sizes.q_len} tokens in all, got {longest}"
        wrong = [length for length in self.whole if length != sizes.q_len]
        if wrong:
            return f"the position ids of all {sizes.q_len} tokens of the whole sequence, got those of {wrong[0]}"
        return _rows_problem(self.given, sizes)

    def __str__(self) -> str:
        return f"Documents({_listed([[b - a for a, b in pairwise(edges)] for edges in self.edges])})"


@dataclass(frozen=True)
class PrefixNode(Exact):
    """A key in the prefix, or not after the query.

    n: the length of the prefix, for each batch row or once for all. given: for how many batch rows.
    """

    n: tuple[int, ...]
    given: int = field(default=1, compare=False)
    reach: ClassVar[None] = None
    needs_band: ClassVar[bool] = False
    of_one_sequence: ClassVar[bool] = False

    @property
    def rows(self) -> int | None:
        return _num_rows(self.n)

    def pieces(self, pair: Pair, row: int) -> list[Band]:
        cut = pair.keys(0, _of_row(self.n, row))[1]
        prefix = full((0, pair.num_q), (0, cut))
        rest = [crop(band, band.q, (cut, pair.num_k)) for band in diagonal(pair, 0, None)]
        return [band for band in (prefix, *rest) if band is not None]

    def allows(self, at: Indices, row: int) -> Tensor:
        return (at.k < _of_row(self.n, row)) | (at.q >= at.k)

    def problem(self, sizes: Sizes) -> str:
        if max(self.n) > sizes.q_len:
            return f"a prefix of at most {sizes.q_len} tokens, got {max(self.n)}"
        return _rows_problem(self.given, sizes)

    def __str__(self) -> str:
        return f"Prefix({_listed(list(self.n))})"


@dataclass(frozen=True)
class PaddingNode(Exact):
    """Both valid.

    valid: for each batch row, or once for all, the first valid position and the one after the last.
    given: for how many batch rows. whole: the length of the sequence, if it was given with it.
    """

    valid: tuple[tuple[int, ...], ...]
    given: int = field(default=1, compare=False)
    whole: tuple[int, ...] = field(default=(), compare=False)
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
        if any(length != sizes.q_len for length in self.whole):
            return f"seq_len={sizes.q_len}, the length of the whole sequence, got {self.whole[0]}"
        longest = max(stop for _, stop in self.valid)
        if longest > sizes.q_len:
            return f"at most {sizes.q_len} valid tokens, got {longest}"
        return _rows_problem(self.given, sizes)

    def __str__(self) -> str:
        return f"Padding({_listed([list(valid) for valid in self.valid])})"


@dataclass(frozen=True)
class BlocksNode(Exact):
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


def _rows_problem(given: int, sizes: Sizes) -> str:
    if given == 1 or sizes.batch in (None, given):
        return ""
    return f"one entry for each of {sizes.batch} batch rows, or one for all, got {given}"


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
