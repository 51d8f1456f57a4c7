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
from typing import NamedTuple

from torch import Tensor

from ringcp import exchange as exchanged
from ringcp import executor
from ringcp.executor import Job
from ringcp.grouped import Grid, grouped
from ringcp.kernels.base import Kernel
from ringcp.layout import Layout
from ringcp.lower import plan
from ringcp.mask import Mask
from ringcp.modes import Choice, head_shares, in_parts, replicates
from ringcp.needs import Placing
from ringcp.parts import Exchange, Part, Placements, kept_in
from ringcp.schedule import Heads
from ringcp.topology import ring
from ringcp.transport import Among, Pending, Transport
from ringcp.written import Extras, Written

_ring = lru_cache(maxsize=64)(ring)

_GATHER_MEMORY = 1 << 30
_MANY_BYTES = 1 << 24

_NO_EXTRAS = Extras()


@dataclass(frozen=True)
class Run:
    """The generators of a call, to be driven: see `executor`.

    job: what is run; None if there is an exchange around it. parts: those of that exchange.
    """

    job: Job | None
    parts: tuple[Part, ...] = ()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, keep: bool = False
    ) -> Generator[Pending, None, tuple[Tensor, Tensor, Tensor | None]]:
        """out and lse of the local rows; and what an exchange keeps for backward, bytes of uint8, if there is one and
        it is to be kept.
        """
        if self.job is not None:
            return *(yield from executor.forward(self.job, q, k, v)), None
        memory, kept = kept_in(None, self.parts, q, k, v) if keep else (None, None)
        return *(yield from exchanged.forward(self.parts, q, k, v, kept)), memory

    def backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        lse: Tensor | None,
        memory: Tensor | None = None,
    ) -> Generator[Pending, None, tuple[Tensor, Tensor, Tensor]]:
        """dq, dk and dv of the local rows.

        memory: what forward kept. Then q, k and v say shapes and dtypes alone, and out and lse may be None.
        """
        if self.job is not None:
            assert out is not None, "only exchanges keep anything"
            assert lse is not None, "saved with out"
            return executor.backward(self.job, dout, dlse, q, k, v, out, lse)
        kept = None if memory is None else kept_in(memory, self.parts, q, k, v)[1]
        return exchanged.backward(self.parts, dout, dlse, q, k, v, out, lse, kept)


class Sizes(NamedTuple):
    """In bytes.

    number: one element of the inputs. kv_head: of the keys and values of the whole sequence. gather_memory: for keys
    and values that a gather has in hand, or None.
    """

    number: int
    kv_head: int
    gather_memory: int | None

    def heads_at_a_time(self, kv_heads: int) -> int:
        """As many as there is memory for, at least one; without a word on memory at most half of them, so that there is
        something to compute while the others come.
        """
        fit = (self.gather_memory or _GATHER_MEMORY) // max(1, self.kv_head)
        return max(1, min(fit, kv_heads if self.gather_memory else -(-kv_heads // 2)))

    def parts(self, kv_heads: int) -> int:
        """How many an exchange should have: of few bytes, one, since each message has a price of its own."""
        return 2 if kv_heads * self.kv_head >= _MANY_BYTES else 1


def sizes_of(k: Tensor, v: Tensor, seq_len: int, gather_memory: int | None) -> Sizes:
    """For these local keys and values of a sequence of `seq_len` tokens."""
    return Sizes(k.itemsize, k.shape[0] * seq_len * (k.shape[3] + v.shape[3]) * k.itemsize, gather_memory)


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
    sizes: Sizes,
    call: int = 0,
    fingerprint: int = 0,
    softcap: float | None = None,
    extras: Extras = _NO_EXTRAS,
) -> Run:
    """The run of `rank` for one call.

    layout, kv_layout: of all ranks; None is the same one. heads: of q and of k and v, as they are given.
    """
    degree, caps = mode.ulysses_degree, kernel.caps.of(sizes.number)

    def job(q: Placing, k: Placing | None, rank: int, heads: Heads, transport: Transport, first_head: int = 0) -> Job:
        """What one rank of these layouts does for these of its heads."""
        at_a_time = sizes.heads_at_a_time(heads.kv) if mode.mode == "gather" else None
        steps = plan(q, mask.superset, _ring(q.world_size), rank, heads, caps, gather=at_a_time, kv_layout=k)
        written = Written(mask, q, k or q, rank, extras, first_head)
        return Job(steps, kernel, scale, transport, call, fingerprint, softcap, None if written.empty else written)

    if degree == 1:
        return Run(job(layout, kv_layout, rank, heads, transport))
    grid = Grid(layout.world_size, degree)
    rows = grouped(layout, degree)
    kv_rows = None if kv_layout is None else grouped(kv_layout, degree)
    ring_rank, place = grid.ring_rank(rank), grid.place(rank)
    shares, group = head_shares(heads.q, heads.kv, degree), heads.q // heads.kv
    among, among_ring = Among(transport, grid.exchange(rank)), Among(transport, grid.ring(rank))
    placements = Placements(rows.placements(ring_rank), (kv_rows or rows).placements(ring_rank))
    parts: list[Part] = []
    for of_part in in_parts(shares, group, sizes.parts(heads.kv)):
        (q0, q1), (kv0, kv1) = of_part[place]
        # A rank without heads runs nothing, and any plan will do.
        own = Heads(q1 - q0, kv1 - kv0, q0 - kv0 * group, group) if q0 < q1 else Heads(1, 1)
        exchange = Exchange(place, of_part, placements, among, replicates(shares))
        parts.append(Part(job(rows, kv_rows, ring_rank, own, among_ring, q0), exchange, first=not parts))
    return Run(None, tuple(parts))
