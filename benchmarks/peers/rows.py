"""Where the libraries compared keep which token, and in which order a tensor lies in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import ringcp


@dataclass(frozen=True)
class Rows:
    """As the layouts of ringcp: which positions each rank has, in local order.

    sequence_first: shards are (B, H, S, D) tensors that lie in memory as (B, S, H, D), so that a library which takes
        the latter gets a contiguous view, and is not charged for a copy.
    """

    by_rank: tuple[Tensor, ...]
    sequence_first: bool = True

    @classmethod
    def of(cls, layout: ringcp.Layout, *, sequence_first: bool = True) -> Rows:
        return cls(tuple(layout.positions(rank) for rank in range(layout.world_size)), sequence_first)

    def positions(self, rank: int) -> Tensor:
        return self.by_rank[rank]

    def shard(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """The rank's rows of a (B, H, S, D) tensor."""
        local = x.index_select(dim, self.by_rank[rank].to(x.device))
        return local.transpose(1, 2).contiguous().transpose(1, 2) if self.sequence_first else local

    def unshard(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole tensor from those of all ranks."""
        order = torch.cat(self.by_rank).argsort()
        return torch.cat(tuple(parts), dim).index_select(dim, order.to(parts[0].device))


def in_each_document(lengths: Sequence[int], world_size: int, *, head_tail: bool) -> Rows:
    """Each packed document is cut among all ranks: in contiguous parts, or a part of the head and one of the tail.

    Raises:
        ValueError: a document whose length the parts do not divide.
    """
    parts = (2 if head_tail else 1) * world_size
    if uneven := [n for n in lengths if n % parts]:
        raise ValueError(f"documents: expected lengths that {parts} parts divide, got {uneven}")
    by_rank = []
    for rank in range(world_size):
        chosen = (rank, parts - 1 - rank) if head_tail else (rank,)
        runs, start = [], 0
        for n in lengths:
            size = n // parts
            runs += [torch.arange(start + part * size, start + (part + 1) * size) for part in chosen]
            start += n
        by_rank.append(torch.cat(runs))
    return Rows(tuple(by_rank))
