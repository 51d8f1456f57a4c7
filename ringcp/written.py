"""Masks that functions say, written out for one kernel call at a time: which positions its rows and keys have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringcp.layout import Span
from ringcp.lower import Call
from ringcp.mask import Mask
from ringcp.needs import Placing, positions_of, whole
from ringcp.steps import Step


@dataclass(frozen=True)
class Written:
    """What the pieces of a plan leave to say, on one rank.

    q, k: where the ranks have queries and keys. first_head: of this rank's query heads among all.
    """

    mask: Mask
    q: Placing
    k: Placing
    rank: int
    first_head: int = 0

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

    def allowed(self, call: Call) -> Tensor:
        """Whether the pairs of a call attend, in its band or outside: bool, broadcastable to (B, Hq, M, N)."""
        first, (start, stop) = self.of.first_head, call.q_heads or (0, self.heads)
        batch, heads = call.batch or (0, self.batch), (first + start, first + stop)
        return self.of.mask.written(self.rows[slice(*call.q)], self.keys[slice(*call.k)], batch, heads)


def _positions(spans: Sequence[Span], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(*span, device=device) for span in spans] or [torch.arange(0, device=device)])
