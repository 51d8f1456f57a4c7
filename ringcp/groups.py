"""Process groups: the state that ringcp keeps of each, and the host channel on which its ranks vote."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringcp.errors import LayoutError, PeerError
from ringcp.modes import ranks_per_node
from ringcp.spec import host_int64
from ringcp.transport import deadline_of, give_way, limit_text, wait_until


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The process group of all ranks of a 1-D or 2-D mesh. For a 2-D one, all its ranks have to come at first.

    Raises:
        LayoutError: if `mesh` is none of them, or there is no process group.
    """
    return group_named(group_name_of(mesh))


def group_name_of(mesh: DeviceMesh) -> str:
    """The name of that group; traced code stops here.

    Raises:
        LayoutError: as `group_of`.
    """
    if not isinstance(mesh, DeviceMesh):
        raise LayoutError(
            f"mesh: expected a 1-D or 2-D DeviceMesh, got {type(mesh).__name__}; make one with "
            "torch.distributed.device_mesh.init_device_mesh, or DeviceMesh.from_group for a process group"
        )
    if mesh.ndim != 1 and mesh.mesh_dim_names != GRID:
        raise LayoutError(
            f"mesh: expected a mesh of 1 dim, or of the dims {GRID}, in this order, got one of {mesh.ndim} dims "
            f'{mesh.mesh_dim_names}; take the slice over which the sequence is split, such as mesh["cp"], or name its '
            "ring and its exchange so"
        )
    try:
        return _BETWEEN.join([mesh.get_group(dim).group_name for dim in range(mesh.ndim)])
    except (RuntimeError, IndexError) as error:  # the latter on a rank that the mesh leaves out
        raise LayoutError(
            f"mesh: expected a mesh that this rank is part of and whose process group exists, got another ({error}); "
            "call torch.distributed.init_process_group, make the mesh after it, and call on its ranks only"
        ) from error


# The dims of a 2-D mesh: the ring, and the exchange of heads, whose ranks are neighbours.
GRID = "cp", "sp"
# Between the names of the groups of a 2-D mesh, the ring's and the exchange's.
_BETWEEN = "\n"
_GRID_TAG = (1 << 30) + 2  # beside those of votes


def group_named(name: str) -> dist.ProcessGroup:
    """The group of a name that `group_name_of` gave."""
    ring_name, *rest = name.split(_BETWEEN)
    ring_group = _resolved(ring_name)
    if not rest:
        return ring_group
    state = state_of(ring_group)
    with state.turn:
        group = state.grids.get(rest[0])
        if group is None:
            group = state.grids[rest[0]] = _grid_group(ring_group, state, rest[0])
    return group


def _resolved(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _grid_group(ring_group: dist.ProcessGroup, state: GroupState, exchange_name: str) -> dist.ProcessGroup:
    """A group of all ranks of a grid, those of one exchange behind one another, made by these ranks alone."""
    row = host_int64(dist.get_process_group_ranks(_resolved(exchange_name)))
    rows = [row] if state.channel is None else state.channel.exchange(row, _GRID_TAG, None)
    timeout = ring_group._get_backend(torch.device(next(iter(ring_group._device_types)))).options._timeout
    ranks = [rank for members in rows for rank in members.tolist()]
    return dist.new_group(ranks, timeout=timeout, use_local_synchronization=True, group_desc="ringcp_grid")


class Channel(Protocol):
    """How the ranks of a group tell each other a few numbers."""

    def exchange(self, message: torch.Tensor, tag: int, timeout: float | None) -> list[torch.Tensor]:
        """Every rank's message (all of one shape and dtype), in rank order.

        Raises:
            PeerError: if a rank does not come in time, by its number.
        """
        ...


class GlooChannel:
    """Pairwise messages on the group's CPU backend: one round, and a missing rank is known by its number."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Weak, since the group's state holds this channel: otherwise a destroyed group, its key, would live for ever.
        self._group = weakref.ref(group)
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)

    def exchange(self, message: torch.Tensor, tag: int, timeout: float | None) -> list[torch.Tensor]:
        group = self._group()
        assert group is not None, "whoever votes holds the group"
        peers = [rank for rank in range(self._world_size) if rank != self._rank]
        received = [torch.empty_like(message) for _ in range(self._world_size)]
        received[self._rank] = message
        deadline = deadline_of(timeout)
        awaited = self._rank
        sends, recvs = [], []
        give_way()
        try:
            for peer in peers:
                awaited = peer
                sends.append((peer, group.send([message], peer, tag)))
            for peer in peers:
                awaited = peer
                recvs.append((peer, group.recv([received[peer]], peer, tag)))
            give_way()
            for peer, work in [*recvs, *sends]:
                awaited = peer
                wait_until(work, deadline)
        except RuntimeError as error:
            raise _absent(self._rank, [awaited], timeout, error) from error
        give_way()
        return received


class StoreChannel:
    """Messages through the group's key-value store, for groups without a CPU backend."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank, self._world_size = rank, world_size
        self._round = 0
        # A store can outlive its group: votes of an earlier one must not be read.
        self._life = store.add(f"ringcp/lives/{rank}", 1)

    def exchange(self, message: torch.Tensor, tag: int, timeout: float | None) -> list[torch.Tensor]:
        self._round += 1
        keys = [self._key(self._round, rank) for rank in range(self._world_size)]
        self._store.set(keys[self._rank], bytes(message.view(torch.uint8).tolist()))  # type: ignore[arg-type]
        try:
            if timeout is None:
                self._store.wait(keys)
            else:
                self._store.wait(keys, timedelta(seconds=timeout))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise _absent(self._rank, missing, timeout, error) from error
        if self._round > 2:  # whoever has come to this round has read the one before the last
            self._store.delete_key(self._key(self._round - 2, self._rank))
        read = [torch.frombuffer(bytearray(self._store.get(key)), dtype=message.dtype) for key in keys]
        return [words.view(message.shape) for words in read]

    def _key(self, round_: int, rank: int) -> str:
        return f"ringcp/{self._life}/{round_}/{rank}"


def _absent(rank: int, missing: Sequence[int], timeout: float | None, error: BaseException) -> PeerError:
    limit = limit_text(timeout)
    return PeerError(
        f"rank {rank}, vote before step 0: waited for the vote of rank {', '.join(map(str, missing))}, "
        f"which died or did not call within {limit}: look for its error, or raise timeout=. ({error})"
    )


@dataclass
class GroupState:
    """What ringcp remembers of one process group.

    ranks_per_node: how many neighbouring ranks share a node, as torchrun numbers them; without it, all do.
    """

    rank: int
    world_size: int
    channel: Channel | None
    ranks_per_node: int
    calls: int = 0
    warm: bool = False
    broken: str = ""
    layout_left: str = "head_tail"
    """The layout of the context that was last left, or the one that contexts have by default."""
    grids: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    """The groups of 2-D meshes whose first dim this is, by the name of the other dim's group."""
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held for a whole forward: calls of two threads on one group are taken in turn."""

    def check_usable(self) -> None:
        if self.broken:
            raise PeerError(
                f"rank {self.rank}: the group was broken by an earlier failure and cannot be used any more; "
                f"destroy it and make a new one. The failure: {self.broken}"
            )

    def next_call(self) -> int:
        self.calls += 1
        return self.calls

    def break_off(self, error: BaseException) -> None:
        """Mark the group broken: messages of the failed call may still be under way."""
        if self.world_size > 1:
            self.broken = f"{type(error).__name__}: {error}"


def neighbours(ranks: Sequence[int]) -> int:
    """How many neighbours among these global ranks share a node, by torchrun's LOCAL_WORLD_SIZE; without it, all."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return ranks_per_node(ranks, int(local)) if local.isdecimal() and int(local) else len(ranks)


_states: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupState] = weakref.WeakKeyDictionary()
_states_lock = threading.Lock()


def state_of(group: dist.ProcessGroup) -> GroupState:
    """The state of a group, made on first use."""
    with _states_lock:
        state = _states.get(group)
        if state is None:
            rank, world_size = dist.get_rank(group), dist.get_world_size(group)
            per_node = neighbours(dist.get_process_group_ranks(group))
            state = _states[group] = GroupState(rank, world_size, _channel(group, rank, world_size), per_node)
        return state


def _channel(group: dist.ProcessGroup, rank: int, world_size: int) -> Channel | None:
    if world_size == 1:
        return None
    if torch.device("cpu") in group._device_types:
        return GlooChannel(group)
    return StoreChannel(group.get_group_store(), rank, world_size)
