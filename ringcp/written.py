"""What a plan leaves to say of the pairs of a call, made for one kernel call at a time from the positions of its rows
and keys: masks that functions say, ALiBi, dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringcp.kernels.pairwise import Alibi, Allowed, AttnMask, Dropout
from ringcp.layout import Span
from ringcp.lower import Call
from ringcp.mask import Mask
from ringcp.needs import Placing, positions_of, whole
from ringcp.steps import Step


class Extras(NamedTuple):
    """What an attention call does to pairs beside masking them.

    alibi_slopes: (Hq,) or (B, Hq) of all query heads, fp32, or None. dropout_p, seed: of dropout; p = 0 is none.
    attn_mask: (B | 1, Hq | 1, rows | 1, S) of bool or floating, of all keys and of the rows that this rank computes, in
        their order; or None.
    """

    alibi_slopes: Tensor | None = None
    dropout_p: float = 0.0
    seed: int = 0
    attn_mask: Tensor | None = None


class Fused(NamedTuple):
    """The first fields of an `Allowed`."""

    functions: tuple[Callable[..., Any], ...]
    by_row: bool
    by_head: bool


@dataclass(frozen=True)
class Written:
    """What the pieces of a plan leave to say, on one rank.

    q, k: where the ranks have queries and keys. first_head: of this rank's query heads among all.
    """

    mask: Mask
    q: Placing
    k: Placing
    rank: int
    extras: Extras
    first_head: int = 0

    @property
    def empty(self) -> bool:
        extras = self.extras
        unbiased = extras.alibi_slopes is None and extras.attn_mask is None
        return not self.mask.explicit and unbiased and extras.dropout_p == 0

    def of_step(self, step: Step, q: Tensor) -> WrittenStep:
        """For calls of local queries (B, Hq, S, D) on the block in hand in a step."""
        spans = list(step.positions)
        if step.source is not None:
            spans += positions_of(self.k, step.source, step.rows)
        rows = positions_of(self.q, self.rank, whole(self.q, self.rank))
        return WrittenStep(self, _positions(rows, q.device), _positions(spans, q.device), q.shape[0], q.shape[1])


@dataclass(frozen=True)
class WrittenStep:
    """Positions of the local rows and of the keys in hand, and how many batch rows and query heads there are."""

    of: Written
    rows: Tensor
    keys: Tensor
    batch: int
    heads: int

    def keywords(self, call: Call, functions: bool) -> dict[str, Any]:
        """The keywords of a kernel that there are: `allowed`, in its band or outside, `alibi`, `attn_mask`,
        `dropout`.

        functions: whether the kernel takes masks as functions, where they are such that it can.
        """
        first, (start, stop) = self.of.first_head, call.q_heads or (0, self.heads)
        batch, heads = call.batch or (0, self.batch), (first + start, first + stop)
        rows, keys = self.rows[slice(*call.q)], self.keys[slice(*call.k)]
        slopes, dropout_p, seed, attn_mask = self.of.extras
        found: dict[str, Any] = {}
        if self.of.mask.explicit:
            if functions and self._fused is not None:
                of_batch, of_heads = (torch.arange(*each, device=rows.device) for each in (batch, heads))
                found["allowed"] = Allowed(*self._fused, of_batch, of_heads, rows, keys)
            else:
                found["allowed"] = self.of.mask.written(rows, keys, batch, heads)
        if slopes is not None:
            of_rows = slopes[slice(*batch)] if slopes.ndim == 2 else slopes[None]
            found["alibi"] = Alibi(of_rows[:, slice(*heads)], rows, keys)
        if attn_mask is not None:
            found["attn_mask"] = AttnMask(attn_mask, keys).of(batch, heads, call.q)
        if dropout_p:
            of_batch, of_heads = (torch.arange(*each, device=rows.device) for each in (batch, heads))
            found["dropout"] = Dropout(dropout_p, seed, of_batch, of_heads, rows, keys)
        return found

    @cached_property
    def _fused(self) -> Fused | None:
        """Asked in each step: what a function does may change with what it captures."""
        return fused(self.of.mask, self.rows.device)


def fused(mask: Mask, device: torch.device) -> Fused | None:
    """The functions in `mask` for a kernel that takes them; None if it cannot."""
    mods = mask.conjunction
    if not mods or not all(mod.pointwise(device) for mod in mods):
        return None
    by_row, by_head = (any(which) for which in zip(*(mod.depends(device) for mod in mods), strict=True))
    return Fused(tuple(mod.fn for mod in mods), by_row, by_head)


def _positions(spans: Sequence[Span], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(*span, device=device) for span in spans] or [torch.arange(0, device=device)])
