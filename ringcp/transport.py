"""Transports: how messages reach other ranks. The only place, besides agreement and the public layer, that knows
`torch.distributed`.

A transport posts one step's sends and receives together and returns a `Pending`; the executor computes and then waits.
Peers are group ranks. Buffers must not be touched between post and wait.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ringcp.errors import PeerError

T = TypeVar("T")


class Parcel(NamedTuple):
    """One message. `tag` matches a send to its receive; `what` is said in errors."""

    tensor: Tensor
    peer: int
    tag: int
    what: str


class Pending(Protocol):
    """Transfers under way."""

    def go_on(self) -> None:
        """Between calls of kernels: whatever takes this rank's own processor time, and can be done without waiting."""
        ...

    def wait(self) -> None:
        """Return when they are done (on CUDA: when the current stream has been told to wait for them)."""
        ...


class Transport(Protocol):
    """What the executor needs of the wires."""

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], where: str) -> Pending:
        """Start all transfers; `where` ("forward step 2") is said in errors."""
        ...


def deadline_of(timeout: float | None) -> float | None:
    """When a wait that begins now must end; None for the group's own timeout."""
    return None if timeout is None else time.monotonic() + timeout


def wait_until(work: dist.Work, deadline: float | None) -> None:
    """Wait on gloo. A RuntimeError, late or not, leaves the group unusable."""
    if deadline is None:
        work.wait()
    else:
        work.wait(timedelta(seconds=max(1e-3, deadline - time.monotonic())))


def give_way() -> None:
    """Let gloo's threads run, which send and receive, around each round of messages.

    They share the cores with what computes. One that wakes up beside a thread in its time slice (3 to 4 ms) waits for
    the end of that; not beside one that has just given way.
    """
    os.sched_yield()


def limit_text(timeout: float | None) -> str:
    """A timeout, as errors say it."""
    return "the group's timeout" if timeout is None else f"{timeout:g} s"


class P2P:
    """Point-to-point messages in one process group: gloo on CPUs, NCCL on GPUs.

    timeout: seconds to wait for one step's transfers on gloo; None for the group's own timeout. On NCCL the waiting is
        the stream's, and the watchdog decides.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float | None = None) -> None:
        self._group = group
        self._timeout = timeout

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], where: str) -> Pending:
        # Sends before receives, in one batch, in the same order on every rank: NCCL matches by order alone.
        ops = [(dist.isend, parcel) for parcel in sends] + [(dist.irecv, parcel) for parcel in recvs]
        batch = [dist.P2POp(op, p.tensor, group=self._group, group_peer=p.peer, tag=p.tag) for op, p in ops]
        on_host = not ops[0][1].tensor.is_cuda
        batches = [batch]
        if on_host:
            give_way()
        else:
            rank, world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
            batches = by_distance(batch, [p.peer for _, p in ops], rank, world_size)
        try:
            works = [work for each in batches for work in dist.batch_isend_irecv(each)]
        except RuntimeError as error:
            raise self._peer_error(where, ops[0][1], "sending to", error) from error
        if on_host:
            give_way()
        return _Works(self, works, sends, recvs, where)

    def _peer_error(self, where: str, parcel: Parcel, verb: str, error: RuntimeError) -> PeerError:
        return not_through(dist.get_rank(self._group), where, verb, parcel, self._timeout, error)


_NEAR = 32


def by_distance(ops: Sequence[T], peers: Sequence[int], rank: int, world_size: int) -> list[list[T]]:
    """The operations in batches, each of which meets its counterparts in one batch of each peer.

    NCCL has hung on more than about 256 operations in a batch: these have at most 2 * 32 peers, with each of which a
    step has at most 4. Up to 64 ranks all is one batch.
    """
    batches: dict[int, list[T]] = {}
    for op, peer in zip(ops, peers, strict=True):
        distance = min((peer - rank) % world_size, (rank - peer) % world_size)
        batches.setdefault((distance - 1) // _NEAR, []).append(op)
    return [batches[i] for i in sorted(batches)]


def not_through(rank: int, where: str, verb: str, parcel: Parcel, timeout: float | None, why: object) -> PeerError:
    """The error of a rank with a message that did not reach it, or that it could not send."""
    return PeerError(
        f"rank {rank}, {where}: {verb} rank {parcel.peer}: {parcel.what} of "
        f"{parcel.tensor.numel() * parcel.tensor.element_size()} bytes did not go through within "
        f"{limit_text(timeout)}; the peer died, or did not come: look for its error, or raise timeout=. ({why})"
    )


class Among:
    """A transport whose peers are some of another one's, renumbered.

    ranks: by their number here, their number there.
    """

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self._transport = transport
        self._ranks = tuple(ranks)

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], where: str) -> Pending:
        return self._transport.post(self._renumbered(sends), self._renumbered(recvs), where)

    def _renumbered(self, parcels: Sequence[Parcel]) -> list[Parcel]:
        return [parcel._replace(peer=self._ranks[parcel.peer]) for parcel in parcels]


def warm_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """One operation of all ranks, before the first batch of P2P in an NCCL group.

    NCCL makes a group's communicator in its first operation, and every rank must take part in that.
    """
    dist.all_reduce(torch.zeros(1, device=device), group=group)


class _Works:
    def __init__(
        self, transport: P2P, works: list[dist.Work], sends: Sequence[Parcel], recvs: Sequence[Parcel], where: str
    ) -> None:
        self._transport = transport
        self._works = works
        self._sends = sends
        self._recvs = recvs
        self._where = where

    def go_on(self) -> None:
        """Gloo's threads and NCCL's kernels go on by themselves."""

    def wait(self) -> None:
        parcels = [("sending to", p) for p in self._sends] + [("receiving from", p) for p in self._recvs]
        if parcels[0][1].tensor.is_cuda:  # one work for the batch; the stream waits, the host goes on
            for work in self._works:
                work.wait()
            return
        deadline = deadline_of(self._transport._timeout)
        give_way()
        # Receives first: a missing message is the better clue.
        for work, (verb, parcel) in reversed(list(zip(self._works, parcels, strict=True))):
            try:
                wait_until(work, deadline)
            except RuntimeError as error:
                raise self._transport._peer_error(self._where, parcel, verb, error) from error
        give_way()


class InProcess:
    """The ranks of one process: a send waits in a mailbox until the receiver copies it. See `executor.drive_all`."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int, int], deque[_Letter]] = {}

    def endpoint(self, rank: int) -> Transport:
        """The transport of one rank."""
        return _Endpoint(self._boxes, rank)


class _Letter:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.delivered = False


class _Endpoint:
    def __init__(self, boxes: dict[tuple[int, int, int], deque[_Letter]], rank: int) -> None:
        self._boxes = boxes
        self._rank = rank

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], where: str) -> Delivery:
        letters = []
        for parcel in sends:
            letters.append(_Letter(parcel.tensor))
            self._boxes.setdefault((self._rank, parcel.peer, parcel.tag), deque()).append(letters[-1])
        return Delivery(self._boxes, self._rank, letters, list(recvs), where)


class Delivery:
    """A `Pending` that is polled, since nothing in one process may block."""

    def __init__(
        self,
        boxes: dict[tuple[int, int, int], deque[_Letter]],
        rank: int,
        letters: list[_Letter],
        recvs: list[Parcel],
        where: str,
    ) -> None:
        self._boxes = boxes
        self._rank = rank
        self._letters = letters
        self._recvs = recvs
        self.where = where

    def ready(self) -> bool:
        """Take what has arrived; whether all receives are in and all sends are taken."""
        waiting = []
        for parcel in self._recvs:
            box = self._boxes.get((parcel.peer, self._rank, parcel.tag))
            if not box:
                waiting.append(parcel)
                continue
            letter = box.popleft()
            assert letter.tensor.numel() == parcel.tensor.numel(), f"{self.where}: {parcel.what} of another length"
            parcel.tensor.copy_(letter.tensor)
            letter.delivered = True
        self._recvs = waiting
        return not waiting and all(letter.delivered for letter in self._letters)

    def go_on(self) -> None:
        """`drive_all` asks whether it is ready."""

    def wait(self) -> None:
        if not self.ready():
            raise RuntimeError(
                f"rank {self._rank}, {self.where}: nothing in one process can be waited for; use drive_all"
            )
