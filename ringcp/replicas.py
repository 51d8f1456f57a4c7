"""What every rank holds a copy of: how copies get equal shares of a gradient, and how results of all ranks meet.

Copies count as one value, their mean. So a copy's gradient is the sum of what all ranks found for theirs, divided by
their number: the same on every rank, and the sum over ranks is the whole, layer after layer. Sums are taken in rank
order, in the accumulator's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringcp.checks import refuse_double_backward
from ringcp.collectives import gather, reduce
from ringcp.groups import group_named, state_of
from ringcp.merge import accumulator_dtype


@torch.library.custom_op("ringcp::split_copies", mutates_args=())
def split_copies(
    q: Tensor, k: Tensor, v: Tensor, num_q: int, num_k: int, group_name: str, timeout: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k and v, each as the first rows, of which every rank holds a copy, and the rest. timeout: of backward."""
    q_copy, q_rest, k_copy, k_rest, v_copy, v_rest = (
        part.clone(memory_format=torch.contiguous_format)
        for x, n in ((q, num_q), (k, num_k), (v, num_k))
        for part in (x[:, :, :n], x[:, :, n:])
    )
    return q_copy, q_rest, k_copy, k_rest, v_copy, v_rest


@split_copies.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, num_q: int, num_k: int, *_: Any) -> tuple[Tensor, ...]:
    parts = [part for x, n in ((q, num_q), (k, num_k), (v, num_k)) for part in (x[:, :, :n], x[:, :, n:])]
    return tuple(torch.empty_like(part, memory_format=torch.contiguous_format) for part in parts)


@torch.library.custom_op("ringcp::split_copies_backward", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def split_copies_backward(
    dq_copy: Tensor,
    dq_rest: Tensor,
    dk_copy: Tensor,
    dk_rest: Tensor,
    dv_copy: Tensor,
    dv_rest: Tensor,
    group_name: str,
    timeout: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; of copies the mean over ranks, all in one message. In compiled code it also waits for the rests."""
    group = group_named(group_name)
    state = state_of(group)
    copies = dq_copy, dk_copy, dv_copy
    flat = torch.cat([grad.reshape(-1) for grad in copies])
    parts = gather(flat, group, state, [flat.numel()] * state.world_size, 0, timeout)
    total = parts[0].to(accumulator_dtype(flat.dtype), copy=True)
    for part in parts[1:]:
        total += part
    means = (total / state.world_size).to(flat.dtype).split([grad.numel() for grad in copies])
    dq, dk, dv = (
        torch.cat([mean.view(copy.shape), rest], 2)
        for mean, copy, rest in zip(means, copies, (dq_rest, dk_rest, dv_rest), strict=True)
    )
    return dq, dk, dv


@split_copies_backward.register_fake
def _(
    dq_copy: Tensor,
    dq_rest: Tensor,
    dk_copy: Tensor,
    dk_rest: Tensor,
    dv_copy: Tensor,
    dv_rest: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.cat(pair, 2) for pair in ((dq_copy, dq_rest), (dk_copy, dk_rest), (dv_copy, dv_rest)))
    return dq, dk, dv


def _setup_split(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.where = inputs[5:]


def _split_grad(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    return *split_copies_backward(*grads, *ctx.where), None, None, None, None


split_copies.register_autograd(_split_grad, setup_context=_setup_split)


@torch.library.custom_op("ringcp::of_all_ranks", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def of_all_ranks(
    out: Tensor, lse: Tensor, after: Tensor, world_size: int, group_name: str, timeout: float | None
) -> tuple[Tensor, Tensor]:
    """Every rank's out (P, B, H, n, D) and lse (P, B, H, n), of equal shapes on all ranks, by rank.

    after: what must have been computed before, and whose gradient after: compiled code keeps no other order, and ranks
    that do this and another call in different orders wait for each other for ever.
    """
    group = group_named(group_name)
    state = state_of(group)
    lengths = [out.shape[0]] * world_size
    outs, lses = (torch.stack(gather(x, group, state, lengths, 0, timeout)) for x in (out, lse))
    return outs, lses


@of_all_ranks.register_fake
def _(out: Tensor, lse: Tensor, after: Tensor, world_size: int, *_: Any) -> tuple[Tensor, Tensor]:
    return out.new_empty((world_size, *out.shape)), lse.new_empty((world_size, *lse.shape))


@torch.library.custom_op("ringcp::of_all_ranks_backward", mutates_args=(), tags=torch.Tag.cudagraph_unsafe)
def of_all_ranks_backward(
    douts: Tensor, dlses: Tensor, after: Tensor, group_name: str, timeout: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of this rank's out and lse: the sum of what all ranks found for them. And zeros, for `after`."""
    group = group_named(group_name)
    state = state_of(group)
    lengths = [douts.shape[1]] * state.world_size
    dout, dlse = (reduce(x.unbind(0), group, state, lengths, 0, timeout) for x in (douts, dlses))
    return dout.contiguous(), dlse.contiguous(), torch.zeros_like(after)


@of_all_ranks_backward.register_fake
def _(douts: Tensor, dlses: Tensor, after: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return douts.new_empty(douts.shape[1:]), dlses.new_empty(dlses.shape[1:]), torch.empty_like(after)


def _setup_all_ranks(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[2])
    ctx.where = inputs[4:]


def _all_ranks_grad(ctx: Any, douts: Tensor, dlses: Tensor) -> tuple[Any, ...]:
    return *of_all_ranks_backward(douts, dlses, *ctx.saved_tensors, *ctx.where), None, None, None


of_all_ranks.register_autograd(_all_ranks_grad, setup_context=_setup_all_ranks)


for _backward in (split_copies_backward, of_all_ranks_backward):
    _backward.register_autograd(refuse_double_backward)
