"""What every rank holds a copy of: how copies get equal shares of a gradient, and how results of all ranks meet.

Copies count as one value, their mean. So a copy's gradient is the sum of what all ranks found for theirs, divided by
their number: the same on every rank, and the sum over ranks is the whole, layer after layer. Sums are taken in rank
order, in the accumulator's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ringcp.collectives import gather, reduce
from ringcp.errors import UnsupportedError
from ringcp.groups import group_named, state_of
from ringcp.merge import accumulator_dtype


@torch.library.custom_op("ringcp::copies", mutates_args=())
def copies(tensors: Sequence[Tensor], group_name: str) -> list[Tensor]:
    """The tensors, of which every rank holds a copy; backward shares their gradients out."""
    return [x.clone() for x in tensors]


@copies.register_fake
def _(tensors: Sequence[Tensor], group_name: str) -> list[Tensor]:
    return [x.clone() for x in tensors]


@torch.library.custom_op("ringcp::copies_backward", mutates_args=())
def copies_backward(grads: Sequence[Tensor], group_name: str) -> list[Tensor]:
    """The mean over ranks, for all tensors in one message."""
    group = group_named(group_name)
    state = state_of(group)
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    parts = gather(flat, group, state, [flat.numel()] * state.world_size, 0)
    total = parts[0].to(accumulator_dtype(flat.dtype), copy=True)
    for part in parts[1:]:
        total += part
    means = (total / state.world_size).to(flat.dtype).split([grad.numel() for grad in grads])
    return [mean.reshape(grad.shape).clone() for mean, grad in zip(means, grads, strict=True)]


@copies_backward.register_fake
def _(grads: Sequence[Tensor], group_name: str) -> list[Tensor]:
    return [torch.empty_like(grad, memory_format=torch.contiguous_format) for grad in grads]


def _setup_copies(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.group_name = inputs[1]


def _copies_grad(ctx: Any, grads: list[Tensor]) -> tuple[Any, None]:
    return copies_backward(grads, ctx.group_name), None


copies.register_autograd(_copies_grad, setup_context=_setup_copies)


@torch.library.custom_op("ringcp::of_all_ranks", mutates_args=())
def of_all_ranks(out: Tensor, lse: Tensor, group_name: str, world_size: int) -> tuple[Tensor, Tensor]:
    """Every rank's out (P, B, H, n, D) and lse (P, B, H, n), of equal shapes on all ranks, by rank."""
    group = group_named(group_name)
    state = state_of(group)
    lengths = [out.shape[0]] * world_size
    outs, lses = (torch.stack(gather(x, group, state, lengths, 0)) for x in (out, lse))
    return outs, lses


@of_all_ranks.register_fake
def _(out: Tensor, lse: Tensor, group_name: str, world_size: int) -> tuple[Tensor, Tensor]:
    return out.new_empty((world_size, *out.shape)), lse.new_empty((world_size, *lse.shape))


@torch.library.custom_op("ringcp::of_all_ranks_backward", mutates_args=())
def of_all_ranks_backward(douts: Tensor, dlses: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    """The gradient of this rank's out and lse: the sum of what all ranks found for them."""
    group = group_named(group_name)
    state = state_of(group)
    lengths = [douts.shape[1]] * state.world_size
    dout, dlse = (reduce(x.unbind(0), group, state, lengths, 0) for x in (douts, dlses))
    return dout.contiguous(), dlse.contiguous()


@of_all_ranks_backward.register_fake
def _(douts: Tensor, dlses: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    return douts.new_empty(douts.shape[1:]), dlses.new_empty(dlses.shape[1:])


def _setup_all_ranks(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.group_name = inputs[2]


def _all_ranks_grad(ctx: Any, douts: Tensor, dlses: Tensor) -> tuple[Any, ...]:
    return *of_all_ranks_backward(douts, dlses, ctx.group_name), None, None


of_all_ranks.register_autograd(_all_ranks_grad, setup_context=_setup_all_ranks)


def _refuse_double_backward(ctx: Any, *grads: Any) -> None:
    raise UnsupportedError(
        "double backward: ringcp.attention is differentiable once, got a backward pass through its gradient; "
        "call backward without create_graph=True"
    )


for _backward in (copies_backward, of_all_ranks_backward):
    _backward.register_autograd(_refuse_double_backward)
