"""One call on one rank: an exchange among neighbouring ranks, composed with a schedule over the ring ranks.

==========  ========================  =========================
mode        exchange among            schedule over
==========  ========================  =========================
`ring`      nobody                    all ranks, ring or direct
`gather`    nobody (or degree ranks)  all ranks, gather
`ulysses`   all ranks                 one ring rank: local
`usp`       degree ranks              world / degree ring ranks
==========  ========================  =========================
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from ringcp import exchange as exchanged
from ringcp import executor
from ringcp.exchange import Exchange, Placements
from ringcp.executor import Job
from ringcp.grouped import Grid, grouped
from ringcp.kernels.base import Kernel
from ringcp.layout import Layout
from ringcp.lower import plan
from ringcp.mask import Mask
from ringcp.modes import Choice, head_shares
from ringcp.schedule import Heads
from ringcp.topology import ring
from ringcp.transport import Among, Pending, Transport

_ring = lru_cache(maxsize=64)(ring)


@dataclass(frozen=True)
class Run:
    """The generators of a call, to be driven: see `executor`."""

    job: Job
    exchange: Exchange | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Generator[Pending, None, tuple[Tensor, Tensor]]:
        """out and lse of the local rows."""
        if self.exchange is None:
            return executor.forward(self.job, q, k, v)
        return exchanged.forward(self.job, self.exchange, q, k, v)

    def backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Generator[Pending, None, tuple[Tensor, Tensor, Tensor]]:
        """dq, dk and dv of the local rows."""
        if self.exchange is None:
            return executor.backward(self.job, dout, dlse, q, k, v, out, lse)
        return exchanged.backward(self.job, self.exchange, dout, dlse, q, k, v, out, lse)


def make_run(
    mode: Choice,
    layout: Layout,
    kv_layout: Layout | None,
    mask: Mask,
    heads: Heads,
    rank: int,
    kernel: Kernel,
    scale: float,
    transport: Transport,
    gather_memory: int | None,
    call: int = 0,
    fingerprint: int = 0,
) -> Run:
    """The run of `rank` for one call.

    layout, kv_layout: of all ranks; None is the same one. heads: of q and of k and v, as they are given.
    """
    degree = mode.ulysses_degree
    gather = mode.mode == "gather"
    if degree == 1:
        steps = plan(layout, mask, _ring(layout.world_size), rank, heads, kernel.caps, kv_layout=kv_layout)
        return Run(Job(steps, kernel, scale, transport, call, fingerprint), None)
    grid = Grid(layout.world_size, degree)
    rows = grouped(layout, degree)
    kv_rows = None if kv_layout is None else grouped(kv_layout, degree)
    ring_rank, place = grid.ring_rank(rank), grid.place(rank)
    shares = head_shares(heads.q, heads.kv, degree)
    (q0, q1), (kv0, kv1) = shares[place]
    own = Heads(q1 - q0, kv1 - kv0) if q0 < q1 else Heads(1, 1)  # without heads, nothing runs
    steps = plan(rows, mask, _ring(rows.world_size), ring_rank, own, kernel.caps, kv_layout=kv_rows)
    among_ring = Among(transport, grid.ring(rank))
    placements = Placements(rows.placements(ring_rank), (kv_rows or rows).placements(ring_rank))
    exchange = Exchange(place, shares, placements, Among(transport, grid.exchange(rank)))
    return Run(Job(steps, kernel, scale, among_ring, call, fingerprint), exchange)
