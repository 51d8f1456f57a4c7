"""Gathering and reducing over the ranks of a group, for callers whose ranks have agreed before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ringcp.errors import PeerError
from ringcp.groups import GroupState
from ringcp.merge import accumulator_dtype
from ringcp.transport import deadline_of, limit_text, wait_until


def gather(
    x: Tensor, group: dist.ProcessGroup, state: GroupState, lengths: list[int], dim: int, timeout: float | None = None
) -> list[Tensor]:
    """Every rank's rows of `dim`, by rank. Parts of different lengths travel padded to the longest one, as bytes.

    timeout: seconds to wait on gloo; None for the group's own.
    """
    rows = x.movedim(dim, 0)
    longest = max(lengths)
    sent = rows.new_zeros((longest, *rows.shape[1:]))
    sent[: rows.shape[0]] = rows
    received = rows.new_empty((state.world_size, *sent.shape))
    if sent.numel():
        flat_in, flat_out = sent.view(-1).view(torch.uint8), received.view(-1).view(torch.uint8)
        # Renamed in torch 2.13.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        start = partial(gather, flat_out, flat_in, group=group, async_op=True)
        _collective(state, "all-gather", start, None if x.is_cuda else timeout)
    return [received[rank, :length].movedim(0, dim) for rank, length in enumerate(lengths)]


def reduce(
    parts: Sequence[Tensor],
    group: dist.ProcessGroup,
    state: GroupState,
    lengths: list[int],
    dim: int,
    timeout: float | None = None,
) -> Tensor:
    """Part r of all ranks, summed on rank r in the accumulator's dtype and in rank order, whatever the backend."""
    rows = [part.movedim(dim, 0) for part in parts]
    sent = rows[0].new_zeros((state.world_size, max(lengths), *rows[0].shape[1:]))
    for rank, part in enumerate(rows):
        sent[rank, : part.shape[0]] = part
    received = torch.empty_like(sent)
    if sent.numel():
        start = partial(dist.all_to_all_single, received.view(-1), sent.view(-1), group=group, async_op=True)
        _collective(state, "all-to-all", start, None if sent.is_cuda else timeout)
    mine = received[:, : lengths[state.rank]].to(accumulator_dtype(sent.dtype))
    total = mine[0].clone()
    for rank in range(1, state.world_size):
        total += mine[rank]
    return total.to(sent.dtype).movedim(0, dim)


def _collective(state: GroupState, name: str, start: Callable[[], dist.Work], timeout: float | None) -> None:
    state.check_usable()
    try:
        wait_until(start(), deadline_of(timeout))
    except RuntimeError as error:
        state.break_off(error)
        within, fix = ("", "") if timeout is None else (f" within {limit_text(timeout)}", ", or raise timeout=")
        raise PeerError(
            f"rank {state.rank}: {name} did not go through{within}; a peer died, or did not come: look for its "
            f"error{fix}. ({error})"
        ) from error
