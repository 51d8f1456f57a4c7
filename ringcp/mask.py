"""Masks: which pairs of global positions attend. A small algebra, closed under ``&`` and ``|``.

The one question to a mask is `Mask.pieces`: the disjoint bands of one rectangle of the score matrix. The answer is
as long as the number of pieces, never as the area. A new mask is a new class in `_NODES`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ringcp.band import Band, intersect, subtract, trim
from ringcp.errors import ArgumentError
from ringcp.layout import Span
from ringcp.spec import host_int64

# Specs are padded to a multiple of this, so that different masks have specs of one shape and compile once.
_SPEC_WORDS = 16


class Pieces(Hashable, Protocol):
    """What a schedule needs to know of a mask. Implementations are hashable: schedules are memoised by them."""

    rows: int | None
    """How many rows of the batch have masks of their own; None if all rows share one."""

    reach: int | None
    """No pair further apart than this attends; None if there is no such bound."""

    def pieces(self, q_span: Span, k_span: Span, row: int = 0) -> list[Band]:
        """Disjoint trimmed bands, counted in elements of the two spans, that hold exactly the allowed pairs."""
        ...


class Mask:
    """Which query positions attend to which key positions. Make one with `Full`, `Causal`, `Window`, ``&``, ``|``.

    Attributes:
        spec: int64 CPU tensor that encodes the mask; all that traced code touches.
        rows, reach: see `Pieces`.
    """

    rows: int | None = None

    def __init__(self, node: _Node) -> None:
        self._node = node
        words = _encode(node)
        words += [0] * (-len(words) % _SPEC_WORDS)
        self.spec = host_int64(words)
        if len(words) > _SPEC_WORDS:
            torch._dynamo.maybe_mark_dynamic(self.spec, 0)

    @property
    def reach(self) -> int | None:
        return self._node.reach

    @property
    def needs_band(self) -> bool:
        """Whether a kernel must take more than full and causal rectangles."""
        return self._node.needs_band

    def pieces(self, q_span: Span, k_span: Span, row: int = 0) -> list[Band]:
        """The disjoint bands of allowed pairs; see `Pieces.pieces`."""
        if q_span.step == k_span.step or min(q_span.length, k_span.length) <= 1:
            step = q_span.step if q_span.length > 1 else k_span.step
            return self._node.pieces(Pair(q_span.start, q_span.length, k_span.start, k_span.length, step), row)
        # Bands need a common step: take the shorter span element by element.
        if q_span.length <= k_span.length:
            one_by_one = [(i, 0, Span(p, p + 1), k_span) for i, p in enumerate(range(*q_span))]
        else:
            one_by_one = [(0, j, q_span, Span(p, p + 1)) for j, p in enumerate(range(*k_span))]
        return [band.shift(i, j) for i, j, q, k in one_by_one for band in self.pieces(q, k, row)]

    def dense(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """The mask written out: bool (Sq, Sk), True where the query attends to the key. For checks and small cases."""
        return self._node.allows(q_positions[:, None], k_positions[None, :])

    def __and__(self, other: Mask) -> Mask:
        return Mask(_And(self._node, other._node)) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return Mask(_Or(self._node, other._node)) if isinstance(other, Mask) else NotImplemented

    def __bool__(self) -> bool:
        raise TypeError(
            "mask: expected & or | between masks, got and, or, not or if; write a & b, or compare with None"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self._node == other._node

    def __hash__(self) -> int:
        return hash(self._node)

    def __repr__(self) -> str:
        return str(self._node)


def Full() -> Mask:
    """Every query attends to every key."""
    return Mask(_Full())


def Causal() -> Mask:
    """A query attends to itself and to everything before it."""
    return Mask(_Causal())


def Window(left: int, right: int = 0) -> Mask:
    """A query attends to `left` tokens before itself, itself, and `right` after: ``-right <= q_pos - k_pos <= left``.

    ``Window(w - 1)`` is the causal sliding window of w tokens of most models.

    Raises:
        ArgumentError: if `left` or `right` is not an integer of at least 0.
    """
    for name, value in (("left", left), ("right", right)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ArgumentError(
                f"{name}: expected a number of tokens of at least 0, got {value!r}; "
                "for an unbounded side use Causal() or Full()"
            )
    return Mask(_Window(left, right))


class Pair(NamedTuple):
    """A rectangle of positions: row i is ``q_start + step * i``, key j is ``k_start + step * j``."""

    q_start: int
    num_q: int
    k_start: int
    num_k: int
    step: int


class _Node(Protocol):
    """One node of a mask: a frozen dataclass whose fields are integers or further nodes."""

    @property
    def reach(self) -> int | None: ...

    @property
    def needs_band(self) -> bool: ...

    def pieces(self, pair: Pair, row: int) -> list[Band]: ...

    def allows(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """Whether pairs attend, for positions that broadcast."""
        ...


@dataclass(frozen=True)
class _Full:
    reach: ClassVar[None] = None
    needs_band: ClassVar[bool] = False

    def pieces(self, pair: Pair, row: int) -> list[Band]:
        return _diagonal(pair, None, None)

    def allows(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return torch.ones_like(q_pos - k_pos, dtype=torch.bool)

    def __str__(self) -> str:
        return "Full()"


@dataclass(frozen=True)
class _Causal:
    reach: ClassVar[None] = None
    needs_band: ClassVar[bool] = False

    def pieces(self, pair: Pair, row: int) -> list[Band]:
        return _diagonal(pair, 0, None)

    def allows(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return q_pos >= k_pos

    def __str__(self) -> str:
        return "Causal()"


@dataclass(frozen=True)
class _Window:
    left: int
    right: int
    needs_band: ClassVar[bool] = True

    @property
    def reach(self) -> int:
        return max(self.left, self.right)

    def pieces(self, pair: Pair, row: int) -> list[Band]:
        return _diagonal(pair, -self.right, self.left)

    def allows(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return (q_pos - k_pos >= -self.right) & (q_pos - k_pos <= self.left)

    def __str__(self) -> str:
        return f"Window({self.left}, {self.right})"


@dataclass(frozen=True)
class _And:
    a: _Node
    b: _Node

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

    def allows(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return self.a.allows(q_pos, k_pos) & self.b.allows(q_pos, k_pos)

    def __str__(self) -> str:
        return f"({self.a} & {self.b})"


@dataclass(frozen=True)
class _Or:
    a: _Node
    b: _Node
    needs_band: ClassVar[bool] = True  # what one side leaves of the other can have any two edges

    @property
    def reach(self) -> int | None:
        return None if self.a.reach is None or self.b.reach is None else max(self.a.reach, self.b.reach)

    def pieces(self, pair: Pair, row: int) -> list[Band]:
        left, rest = self.a.pieces(pair, row), self.b.pieces(pair, row)
        for x in left:
            rest = [part for y in rest for part in subtract(y, x)]
        return left + rest

    def allows(self, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        return self.a.allows(q_pos, k_pos) | self.b.allows(q_pos, k_pos)

    def __str__(self) -> str:
        return f"({self.a} | {self.b})"


def _diagonal(pair: Pair, least: int | None, most: int | None) -> list[Band]:
    """The pairs with ``least <= q_pos - k_pos <= most``."""
    # q_pos - k_pos = ahead + step * (i - j)
    ahead = pair.q_start - pair.k_start
    lo = -pair.num_k if least is None else -((ahead - least) // pair.step)
    hi = pair.num_q if most is None else (most - ahead) // pair.step
    band = trim((0, pair.num_q), (0, pair.num_k), lo, hi)
    return [] if band is None else [band]


# The place in this tuple is the node's code in a spec.
_NODES: tuple[type, ...] = (_Full, _Causal, _Window, _And, _Or)


def _encode(node: _Node) -> list[int]:
    """Prefix notation: the code, then the fields."""
    words = [_NODES.index(type(node))]
    for value in vars(node).values():
        words += [value] if isinstance(value, int) else _encode(value)
    return words


def _decode(words: Iterator[int]) -> _Node:
    cls = _NODES[next(words)]
    return cls(*(next(words) if field.type == "int" else _decode(words) for field in fields(cls)))


@lru_cache(maxsize=256)
def decode_mask(words: tuple[int, ...]) -> Mask:
    """The mask of a spec."""
    return Mask(_decode(iter(words)))
