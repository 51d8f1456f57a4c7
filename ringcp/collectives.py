"""Gathering and reducing over the ranks of a group, for callers whose ranks have agreed before.

On CPUs they are messages from rank to rank. Gloo's collectives hand tensors to a thread that lets go of them a moment
after they are done; if the program is ending by then, that aborts the process (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ringcp.errors import PeerError
from ringcp.groups import GroupState, transport_of
from ringcp.merge import accumulator_dtype
from ringcp.transport import Parcel

_TAG = 3 << 29  # apart from those of `executor.tag_of` and of votes


def gather(
    x: Tensor,
    group: dist.ProcessGroup,
    state: GroupState,
    lengths: list[int],
    dim: int,
    timeout: float | None = None,
    call: int = 0,
) -> list[Tensor]:
    """Every rank's rows of `dim`, by rank.

    timeout: seconds to wait on CPUs; None for the group's own. call: the number of the call that this is of, if ranks
        could come to different ones at once; then their messages do not meet on CPUs.
    """
    rows = x.movedim(dim, 0)
    if not x.is_cuda:
        sent = rows.clone(memory_format=torch.contiguous_format)
        parts = [
            sent if rank == state.rank else rows.new_empty((length, *rows.shape[1:]))
            for rank, length in enumerate(lengths)
        ]
        _swap(group, state, "all-gather", [sent] * state.world_size, parts, timeout, call)
        return [part.movedim(0, dim) for part in parts]
    # Parts of different lengths travel padded to the longest one, as bytes.
    sent = rows.new_zeros((max(lengths), *rows.shape[1:]))
    sent[: rows.shape[0]] = rows
    received = rows.new_empty((state.world_size, *sent.shape))
    if sent.numel():
        flat_in, flat_out = sent.view(-1).view(torch.uint8), received.view(-1).view(torch.uint8)
        # Renamed in torch 2.13.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        _collective(state, "all-gather", lambda: gather(flat_out, flat_in, group=group))
    return [received[rank, :length].movedim(0, dim) for rank, length in enumerate(lengths)]


def reduce(
    parts: Sequence[Tensor],
    group: dist.ProcessGroup,
    state: GroupState,
    lengths: list[int],
    dim: int,
    timeout: float | None = None,
    call: int = 0,
) -> Tensor:
    """Part r of all ranks, summed on rank r in the accumulator's dtype and in rank order, whatever the backend."""
    rows = [part.movedim(dim, 0) for part in parts]
    own = rows[state.rank]
    if not own.is_cuda:
        leaving = [part.contiguous() for part in rows]
        coming = [leaving[rank] if rank == state.rank else own.new_empty(own.shape) for rank in range(state.world_size)]
        _swap(group, state, "all-to-all", leaving, coming, timeout, call)
    else:
        sent = own.new_zeros((state.world_size, max(lengths), *own.shape[1:]))
        for rank, part in enumerate(rows):
            sent[rank, : part.shape[0]] = part
        received = torch.empty_like(sent)
        if sent.numel():
            flat_in, flat_out = sent.view(-1), received.view(-1)
            _collective(state, "all-to-all", lambda: dist.all_to_all_single(flat_out, flat_in, group=group))
        coming = list(received[:, : lengths[state.rank]])
    total = coming[0].to(accumulator_dtype(own.dtype), copy=True)
    for part in coming[1:]:
        total += part
    return total.to(own.dtype).movedim(0, dim)


def _swap(
    group: dist.ProcessGroup,
    state: GroupState,
    name: str,
    leaving: Sequence[Tensor],
    coming: Sequence[Tensor],
    timeout: float | None,
    call: int,
) -> None:
    """Send the tensor of each other rank, and receive into the tensor of each."""

    def parcels(tensors: Sequence[Tensor]) -> list[Parcel]:
        others = [(rank, x) for rank, x in enumerate(tensors) if rank != state.rank and x.numel()]
        return [Parcel(x.view(-1).view(torch.uint8), rank, tag, "rows") for rank, x in others]

    state.check_usable()
    tag = _TAG | call % (1 << 17) << 12
    sends, recvs = parcels(leaving), parcels(coming)
    if not sends and not recvs:
        return
    try:
        reads = state.reads((*sends, *recvs)[0].tensor.device)
        transport_of(group, state, timeout, reads).post(sends, recvs, name).wait()
    except BaseException as error:  # peers may read what is sent until they know
        state.break_off(error)
        raise


def _collective(state: GroupState, name: str, run: Callable[[], object]) -> None:
    state.check_usable()
    try:
        run()
    except RuntimeError as error:
        state.break_off(error)
        raise PeerError(
            f"rank {state.rank}: {name} did not go through; a peer died, or did not come: look for its error. ({error})"
        ) from error
