"""Host channels, on which the ranks of a group tell each other a few numbers: never NCCL."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from ringcp.errors import PeerError
from ringcp.transport import deadline_of, give_way, limit_text, wait_until


class Channel(Protocol):
    """How the ranks of a group tell each other a few bytes."""

    def exchange(self, message: bytes, tag: int, timeout: float | None) -> list[bytes]:
        """Every rank's message (all of one length), in rank order.

        timeout: seconds; None for the group's own timeout.

        Raises:
            PeerError: if a rank does not come in time, by its number.
        """
        ...

    def leave(self) -> None:
        """This rank has failed, and comes to no exchange any more: what can be done to let the others know at once."""
        ...


class GlooChannel:
    """Pairwise messages on the group's CPU backend: one round, and a missing rank is known by its number."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Weak, since the group's state holds this channel: otherwise a destroyed group, its key, would live for ever.
        self._group = weakref.ref(group)
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)

    def exchange(self, message: bytes, tag: int, timeout: float | None) -> list[bytes]:
        group = self._group()
        assert group is not None, "whoever votes holds the group"
        peers = [rank for rank in range(self._world_size) if rank != self._rank]
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        received = {peer: bytearray(len(message)) for peer in peers}
        deadline = deadline_of(timeout)
        awaited = self._rank
        sends, recvs = [], []
        give_way()
        try:
            for peer in peers:
                awaited = peer
                sends.append((peer, group.send([mine], peer, tag)))
            for peer in peers:
                awaited = peer
                theirs = torch.frombuffer(received[peer], dtype=torch.uint8)
                recvs.append((peer, group.recv([theirs], peer, tag)))
            give_way()
            for peer, work in [*recvs, *sends]:
                awaited = peer
                wait_until(work, deadline)
        except RuntimeError as error:
            raise absent(self._rank, [awaited], timeout, error) from error
        give_way()
        return [bytes(received.get(rank, message)) for rank in range(self._world_size)]

    def leave(self) -> None:
        """Gloo itself closes a connection on which something has failed."""


class StoreChannel:
    """Messages through the group's key-value store, for groups without a CPU backend."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._round = 0
        # A store can outlive its group: votes of an earlier one must not be read.
        self._life = store.add(f"ringcp/lives/{rank}", 1)

    def exchange(self, message: bytes, tag: int, timeout: float | None) -> list[bytes]:
        self._round += 1
        keys = [self._key(self._round, rank) for rank in range(self._world_size)]
        self._store.set(keys[self._rank], message)  # type: ignore[arg-type]  # bytes are taken, typed as str
        try:
            if timeout is None:
                self._store.wait(keys)
            else:
                self._store.wait(keys, timedelta(seconds=timeout))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise absent(self._rank, missing, timeout, error) from error
        if self._round > 2:  # whoever has come to this round has read the one before the last
            self._store.delete_key(self._key(self._round - 2, self._rank))
        return [self._store.get(key) for key in keys]

    def leave(self) -> None:
        """Peers find out by their timeout."""

    def _key(self, round_: int, rank: int) -> str:
        return f"ringcp/{self._life}/{round_}/{rank}"


def absent(rank: int, missing: Sequence[int], timeout: float | None, why: object) -> PeerError:
    """The error of a rank whose peers have not come."""
    limit = limit_text(timeout)
    return PeerError(
        f"rank {rank}, vote before step 0: waited for the vote of rank {', '.join(map(str, missing))}, "
        f"which died or did not call within {limit}: look for its error, or raise timeout=. ({why})"
    )
