"""What an exchange is made of: who has which rows and takes which heads, in which parts; and what is kept of a part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ringcp import boxes
from ringcp.band import length_of
from ringcp.executor import Job
from ringcp.grouped import Placed
from ringcp.merge import accumulator_dtype
from ringcp.modes import Share
from ringcp.transport import Transport

# As allocators align, for kernels that read many bytes at once.
_ALIGN = 64


class Placements(NamedTuple):
    """By place, where each rank's rows lie in those of the ring rank: of queries, and of keys and values."""

    q: tuple[tuple[Placed, ...], ...]
    kv: tuple[tuple[Placed, ...], ...]


@dataclass(frozen=True)
class Exchange:
    """One rank's part in an exchange.

    place: of this rank.
    shares: by place, each rank's share of the heads.
    rows: where each rank's rows lie.
    transport: whose peers are places.
    sums: whether gradients of a KV head come from several ranks, in this part of the call or another.
    """

    place: int
    shares: tuple[Share, ...]
    rows: Placements
    transport: Transport
    sums: bool

    @property
    def others(self) -> list[int]:
        return [place for place in range(len(self.shares)) if place != self.place]

    def whole(self, of: Literal["q", "kv"]) -> tuple[int, int]:
        """The heads of this rank, and the rows of the ring rank, which it has for these after an exchange."""
        heads, rows = getattr(self.shares[self.place], of), getattr(self.rows, of)
        return length_of(heads), sum(map(num_rows_of, rows))


class Part(NamedTuple):
    """Some of a rank's heads: how they are exchanged, and what is run on them."""

    job: Job
    exchange: Exchange
    first: bool


class Kept(NamedTuple):
    """What backward needs of a part, all rows of the ring rank: the inputs as exchanged, and the results."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def kept_in(memory: Tensor | None, parts: Sequence[Part], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Kept]]:
    """What is kept of each part, in this memory, a buffer of bytes, or in new one.

    Of the local q, k and v, only what shapes and dtypes say.
    """
    specs = [_kept_specs(part.exchange, q, k, v) for part in parts]
    sizes = [boxes.num_bytes(of_part, _ALIGN) for of_part in specs]
    if memory is None:
        memory = q.new_empty(sum(sizes), dtype=torch.uint8)
    pieces = zip(memory.split(sizes), specs, strict=True)
    return memory, [Kept(*boxes.views(piece, of_part, _ALIGN)) for piece, of_part in pieces]


def _kept_specs(exchange: Exchange, q: Tensor, k: Tensor, v: Tensor) -> list[boxes.Spec]:
    of_q, of_kv = (q.shape[0], *exchange.whole("q")), (q.shape[0], *exchange.whole("kv"))
    return [
        ((*of_q, q.shape[3]), q.dtype),
        ((*of_kv, k.shape[3]), k.dtype),
        ((*of_kv, v.shape[3]), v.dtype),
        ((*of_q, v.shape[3]), q.dtype),
        (of_q, accumulator_dtype(q.dtype)),
    ]


def num_rows_of(placed: Sequence[Placed]) -> int:
    """How many rows one rank has."""
    return placed[-1].rows[1] if placed else 0
