"""Topologies: in which order the ranks of a group are wired into a ring. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ringcp.errors import ArgumentError


@dataclass(frozen=True)
class Topology:
    """A ring over the ranks of a group: each rank receives from the one before it and sends to the one after it.

    order: the group ranks along the ring.
    """

    order: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.order))):
            raise ArgumentError(f"order: expected a permutation of {len(self.order)} ranks, got {self.order}")

    @property
    def world_size(self) -> int:
        return len(self.order)

    def upstream(self, rank: int, hops: int) -> int:
        """The rank whose block reaches `rank` after so many hops."""
        return self.order[(self.order.index(rank) - hops) % self.world_size]

    def downstream(self, rank: int, hops: int) -> int:
        return self.upstream(rank, -hops)


def ring(world_size: int) -> Topology:
    """The ring 0, 1, ..., world_size - 1."""
    return Topology(tuple(range(world_size)))
