"""The buffers of a context, as they are given: what is no buffer is refused, and how long the sequence is follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ringcp.active import sessions
from ringcp.balance import choose_layout
from ringcp.checks import shown
from ringcp.errors import ArgumentError, LayoutError, UnsupportedError
from ringcp.integers import is_int
from ringcp.layout import Layout, layout_named
from ringcp.mask import Mask


class Given(NamedTuple):
    """A buffer as given."""

    tensor: Tensor
    dim: int
    name: str
    restore: bool

    @property
    def seq_len(self) -> int:
        return self.tensor.shape[self.dim]

    def __str__(self) -> str:
        notes = (" requires_grad" * self.tensor.requires_grad) + (" not restored" * (not self.restore))
        return f"{tuple(self.tensor.shape)} {self.tensor.dtype} along dim {self.dim % self.tensor.ndim}{notes}"


def checked_buffers(buffers: object, dims: object, no_restore: object) -> list[Given]:
    """Every buffer by itself: a tensor that can be exchanged in place, with a dim, once."""
    tensors = listed("buffers", buffers, "tensors")
    seq_dims = listed("buffer_seq_dims", dims, "integers")
    kept = listed("no_restore_buffers", no_restore, "tensors")
    if len(tensors) != len(seq_dims):
        raise ArgumentError(
            f"buffer_seq_dims: expected one for each of the {len(tensors)} buffers, got {len(seq_dims)}; "
            "give one sequence dim a buffer"
        )
    for i, x in enumerate(kept):
        if not any(x is buffer for buffer in tensors):
            raise ArgumentError(
                f"no_restore_buffers: expected tensors of buffers, got another as number {i}; list it in buffers too, "
                "or shard it with ringcp.shard"
            )
    given: list[Given] = []
    for i, (x, dim) in enumerate(zip(tensors, seq_dims, strict=True)):
        restore = not any(x is buffer for buffer in kept)
        _check_buffer(x, dim, f"buffers[{i}]", restore)
        twice = next((g.name for g in given if g.tensor is x), None)
        if twice is not None:
            raise ArgumentError(f"buffers[{i}]: expected each tensor once, got {twice} again; list it once")
        given.append(Given(x, dim, f"buffers[{i}]", restore))
    return given


def listed(name: str, value: object, what: str) -> list[Any]:
    """The argument as a list; none is empty, and what is no list of several things is refused."""
    if value is None:
        return []
    if isinstance(value, (Tensor, str, Mapping)) or not isinstance(value, Iterable):
        got = shown(value) if isinstance(value, Tensor) else type(value).__name__
        raise ArgumentError(f"{name}: expected a list of {what}, got {got}; write {name}=[...]")
    return list(value)


def _check_buffer(x: object, dim: object, name: str, restore: bool) -> None:
    if not isinstance(x, Tensor):
        raise ArgumentError(
            f"{name}: expected a tensor, got {type(x).__name__}; pass a mask as mask=, and what holds tensors through "
            "ringcp.shard"
        )
    if x.is_nested or is_traceable_wrapper_subclass(x) or x.layout != torch.strided:
        raise UnsupportedError(
            f"{name}: expected a plain dense tensor, got {type(x).__name__} with layout {x.layout}; "
            "pass what it holds, or use ringcp.shard"
        )
    if not is_int(dim) or not -x.ndim <= dim < x.ndim:
        raise LayoutError(
            f"buffer_seq_dims: expected a dim of {name} with {x.ndim} dims, got {dim!r}; name its sequence dim"
        )
    if not x.is_leaf:
        raise ArgumentError(
            f"{name}: expected a leaf, or a tensor that requires no gradient, got the result of {x.grad_fn}; "
            f"cut it differentiably: ringcp.shard(x, mesh, dim={dim})"
        )
    if x.grad is not None and not restore:
        raise ArgumentError(
            f"{name}: expected no .grad on a buffer that stays a shard, got one of shape {tuple(x.grad.shape)}; "
            "set it to None, or use ringcp.shard"
        )
    if any(session.holds(x) for session in sessions()):
        raise ArgumentError(
            f"{name}: expected a tensor with the whole sequence, got one that an enclosing context_parallel has "
            "sharded; leave it out here, or use ringcp.shard"
        )


def check_no_documents(given: Sequence[Given], layout: Layout | str) -> None:
    """Refuse position ids that start anew, for which no mask was given: the documents would see each other."""
    for g in given:
        x = g.tensor
        if not _holds_integers(x) or not x.numel():
            continue
        rows = x.movedim(g.dim, -1).reshape(-1, g.seq_len).long()  # of some integers there are no comparisons
        if isinstance(layout, Layout):  # behind replicated tokens, the rest may count from 0 again
            rows = rows[:, layout_of(g, layout).replicated :]
        if _restarts(rows):
            raise ArgumentError(
                f"mask: expected one, since {g.name} looks like the position ids of packed documents (0, 1, 2, ... "
                "anew in each), got None; pass mask=ringcp.Documents(position_ids=...), or ringcp.Full() if all attend "
                "(is_causal= counts in both cases)"
            )


def _restarts(rows: Tensor) -> bool:
    """Whether each row is runs 0, 1, 2, ..., and some row two or more, one of them longer than one token."""
    starts = rows == 0
    runs = starts[:, 1:] | (rows[:, 1:] == rows[:, :-1] + 1)
    packed = (starts.sum(1) > 1) & ~starts.all(1)
    return bool((starts[:, 0] & runs.all(1)).all() and packed.any())


def _holds_integers(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def numbers_text(given: Sequence[Given]) -> list[str]:
    """Words of a vote on what integer buffers hold: ranks whose loaders drew different batches fall out by them."""
    return [
        f"the numbers in {g.name} (whole, and the same on every rank)=#{_hash(g.tensor):016x}"
        for g in given
        if _holds_integers(g.tensor)
    ]


def _hash(x: Tensor) -> int:
    """64 bits of the numbers of `x` and their places: the sum of each one's, mixed as splitmix64 does."""
    mixed = x.detach().reshape(-1).long()
    mixed = (mixed ^ (torch.arange(len(mixed), device=x.device) * -0x61C8864680B583EB)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 30)) * -0x6B2FB644ECCEEE15
    return int((mixed ^ (mixed >> 27)).sum()) % (1 << 64)


def sized(
    layout: Layout | str, given: Sequence[Given], mask: Mask | None, world_size: int, around: Layout | str | None
) -> Layout | str:
    """The layout with its length, from the buffers if there are any.

    around: the layout of a context around this one on the same mesh. Without buffers, what this one's body attends to
    are shards of that.
    """
    if isinstance(layout, Layout):
        expected, like = f"{layout.seq_len} tokens", repr(layout)
        lengths = {layout.seq_len, layout.rest.seq_len}
        if layout.replicated:
            expected += f", or the {layout.rest.seq_len} that are not on every rank,"
    elif given:
        seq_len = Counter(g.seq_len for g in given).most_common(1)[0][0]
        like = next(g.name for g in given if g.seq_len == seq_len)
        expected, lengths = f"{seq_len} tokens", {seq_len}
    else:
        return (around or "head_tail") if layout == "auto" else layout
    for g in given:
        if g.seq_len not in lengths:
            raise LayoutError(
                f"{g.name}: expected {expected} in dim {g.dim}, like {like}, got {g.seq_len}; cut a longer table "
                "to the length of the sequence, and what is no part of it with ringcp.shard"
            )
    if isinstance(layout, Layout):
        return layout
    if layout == "auto" and mask is not None:
        return choose_layout(mask, seq_len, world_size)
    return layout_named(layout, seq_len, world_size)


def layout_of(given: Given, layout: Layout) -> Layout:
    """Of one buffer: with the replicated tokens in front, or of the rest alone."""
    return layout if given.seq_len == layout.seq_len else layout.rest
