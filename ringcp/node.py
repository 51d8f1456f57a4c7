"""What a node of a mask answers, and about what."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from ringcp.band import Band, Range
from ringcp.mask_mods import MaskMod


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


class Indices(NamedTuple):
    """The pairs of some positions, q (M, 1) and k (1, N), for ranges of batch rows and of query heads."""

    q: Tensor
    k: Tensor
    batch: Range
    heads: Range


class Sizes(NamedTuple):
    """Of a call; None is not known."""

    batch: int | None
    q_heads: int | None
    q_len: int
    k_len: int


class Node(Protocol):
    """One node of a mask: a frozen dataclass whose fields are integers, tuples of such fields, further nodes, or one
    `MaskMod`.

    rows, reach: see `ringcp.mask.Pieces`. needs_band: whether a kernel must take more than full and causal rectangles.
    of_one_sequence: whether it says where in a sequence something ends, so that it has no meaning between two.
    mods: the functions in it; if there are any, `pieces` hold more than the allowed pairs.
    """

    @property
    def rows(self) -> int | None: ...

    @property
    def reach(self) -> int | None: ...

    @property
    def needs_band(self) -> bool: ...

    @property
    def of_one_sequence(self) -> bool: ...

    @property
    def mods(self) -> tuple[MaskMod, ...]: ...

    def pieces(self, pair: Pair, row: int) -> list[Band]: ...

    def allows(self, at: Indices, row: int) -> Tensor:
        """Whether pairs attend: bool, of a shape that broadcasts to (B, H, M, N), or (M, N) for all."""
        ...

    def problem(self, sizes: Sizes) -> str:
        """Why it does not fit a call of these sizes; empty if it does."""
        ...

    def superset(self) -> Node:
        """What `pieces` tell of it: a node without functions."""
        ...
