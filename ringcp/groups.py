"""Process groups: the state that ringcp keeps of each, and the host channel on which its ranks vote."""

from __future__ import annotations

import os
import threading
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringcp.board import NodeChannel
from ringcp.channels import Channel, GlooChannel, StoreChannel
from ringcp.errors import LayoutError, PeerError
from ringcp.modes import ranks_per_node
from ringcp.page import Page
from ringcp.peer_memory import PeerMemory
from ringcp.transport import P2P, Transport


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
_GRID_TAG = (1 << 30) + 4  # beside those of votes, `collectives` and `page`


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
    """A group of all ranks of a grid, those of one exchange behind one another, made by these ranks alone.

    Raises:
        LayoutError: on every rank, if that is not the order of their numbers, which torch gives to a group.
    """
    exchange_group = _resolved(exchange_name)
    most_of_row = max(n for (n,) in _told(state_of(exchange_group), [_num_groups()]))
    told = _told(state, [most_of_row, *dist.get_process_group_ranks(exchange_group)])
    rows = [row for _, *row in told]
    ranks = [rank for row in rows for rank in row]
    if ranks != sorted(ranks):
        raise LayoutError(
            f"mesh: expected ranks in ascending order, row by row, as torch numbers a group, got {rows}; make it "
            "with torch.distributed.device_mesh.init_device_mesh"
        )
    # torch names such a group by the number of groups that a rank is in; with another name it would wait for ever.
    for _ in range(max(most for most, *_ in told) - _num_groups()):
        dist.new_group([dist.get_rank()], use_local_synchronization=True, group_desc="ringcp_alone")
    timeout = _timeout_of(ring_group)
    return dist.new_group(ranks, timeout=timeout, use_local_synchronization=True, group_desc="ringcp_grid")


def _num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_names)


def _told(state: GroupState, numbers: list[int]) -> list[list[int]]:
    """The numbers of each rank."""
    state.check_usable()
    message = array("q", numbers).tobytes()
    try:
        messages = [message] if state.channel is None else state.channel.exchange(message, _GRID_TAG, None)
    except BaseException as error:
        state.break_off(error)
        raise
    return [list(array("q", each)) for each in messages]


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device(next(iter(group._device_types)))).options._timeout


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

    @property
    def page(self) -> Page | None:
        """The one that its ranks share, once they have met there."""
        return self.channel.page if isinstance(self.channel, NodeChannel) else None

    def reads(self, device: torch.device) -> bool:
        """Whether messages on a device are copied from memory to memory. The same on all ranks after the same votes; a
        call that does not vote, in another thread than the group's first vote, may find another answer.
        """
        return self.page is not None and self.page.reads and device.type == "cpu"

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
        if self.channel is None:
            return
        try:  # first, since what peers could read is given back after that
            self.channel.leave()
        finally:
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


def transport_of(
    group: dist.ProcessGroup | None, state: GroupState, timeout: float | None, by_memory: bool
) -> Transport:
    """How a call's messages reach the other ranks. by_memory: what `GroupState.reads` was in forward.

    Raises:
        PeerError: if ranks of this group share no page: forward was called on another one, of the same name.
    """
    if by_memory:
        if state.page is None:
            raise PeerError(
                f"rank {state.rank}: expected the group that forward was called on, got another one of its name; run "
                "backward before the process group is destroyed"
            )
        return PeerMemory(state.page, timeout)
    return P2P(group, timeout)  # of a rank alone, nothing is ever posted


def _channel(group: dist.ProcessGroup, rank: int, world_size: int) -> Channel | None:
    if world_size == 1:
        return None
    of_group = weakref.ref(group)  # the group is the key of what holds the channel

    def own_timeout() -> float:
        alive = of_group()
        assert alive is not None, "whoever votes holds the group"
        return _timeout_of(alive).total_seconds()

    return NodeChannel(_far_channel(group, rank, world_size), rank, world_size, own_timeout)


def _far_channel(group: dist.ProcessGroup, rank: int, world_size: int) -> Channel:
    if torch.device("cpu") in group._device_types:
        return GlooChannel(group)
    return StoreChannel(group.get_group_store(), rank, world_size)
