"""The nodes of masks that a function says: `ringcp.Predicate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ringcp.band import Band
from ringcp.mask_mods import MaskMod
from ringcp.mask_nodes import FullNode
from ringcp.node import Indices, Node, Pair, Sizes


@dataclass(frozen=True)
class _OfFunction:
    """The pairs that a function allows."""

    mod: MaskMod
    needs_band: ClassVar[bool] = False
    of_one_sequence: ClassVar[bool] = False

    @property
    def mods(self) -> tuple[MaskMod, ...]:
        return (self.mod,)

    def allows(self, at: Indices, row: int) -> Tensor:
        return self.mod(at.batch, at.heads, at.q.flatten(), at.k.flatten())

    def problem(self, sizes: Sizes) -> str:
        if self.mod.shape is None:
            return ""
        wanted = (sizes.batch, sizes.q_heads, sizes.q_len, sizes.k_len)
        of_all = [got == 1 or want in (got, None) for got, want in zip(self.mod.shape[:2], wanted[:2], strict=True)]
        if all(of_all) and self.mod.shape[2:] == wanted[2:]:
            return ""
        return f"a BlockMask of (B, H, Q_LEN, KV_LEN) = {wanted}, or of B or H 1, got {self.mod.shape}"


@dataclass(frozen=True)
class PredicateNode(_OfFunction):
    """Of which pieces know nothing."""

    rows: ClassVar[None] = None
    reach: ClassVar[None] = None

    def pieces(self, pair: Pair, row: int) -> list[Band]:
        return FullNode().pieces(pair, row)

    def superset(self) -> Node:
        return FullNode()

    def __str__(self) -> str:
        return str(self.mod)


@dataclass(frozen=True)
class BlockMaskNode(_OfFunction):
    """All of which lie in some blocks, which is what pieces know."""

    within: Node

    @property
    def rows(self) -> int | None:
        return self.within.rows

    @property
    def reach(self) -> int | None:
        return self.within.reach

    def pieces(self, pair: Pair, row: int) -> list[Band]:
        return self.within.pieces(pair, row)

    def superset(self) -> Node:
        return self.within

    def __str__(self) -> str:
        return f"{self.mod} in {self.within}"
