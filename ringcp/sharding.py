"""`make_layout`, and `shard`, `unshard`, `all_gather`: between whole sequences and shards of a layout. Differentiable.

The gradients are those of the sum over ranks of each rank's loss: what one rank holds whole and all ranks cut from
is summed over all of them. They are our own functions, since the differentiable collectives of torch break in subgroups
on gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringcp.agreement import Told, agree
from ringcp.ambient import layout_around
from ringcp.balance import choose_layout
from ringcp.checks import check_layout, mask_problem, refuse_create_graph
from ringcp.collectives import gather, reduce
from ringcp.errors import ArgumentError, LayoutError, RingcpError
from ringcp.groups import GroupState, group_of, state_of
from ringcp.integers import is_int
from ringcp.layout import LAYOUT_NAMES, Layout, layout_named
from ringcp.mask import Mask
from ringcp.untraced import eager


def make_layout(mask: Mask | None, seq_len: int, mesh: DeviceMesh) -> Layout:
    """The layout that suits a mask: what ``layout="auto"`` means in a `context_parallel` with a mask.

    Head-tail for causal and for full attention; contiguous for a window that reaches less far than a rank's share of
    the tokens; `ringcp.Balanced` for documents and all else. Nothing is sent: every rank makes the same.

    Args:
        mask: the mask of the calls, with all that it leaves out (``Documents(...) & Causal()`` where calls are causal);
            None is full attention.
        seq_len: number of tokens of the whole sequence.
        mesh: the 1-D or 2-D mesh over which the sequence is split.

    Raises:
        ArgumentError: a `mask` that is none.
        LayoutError: a mesh that is not 1-D or 2-D, a length that is none, or a mask of a longer sequence.
    """
    group = group_of(mesh)
    wrong = mask_problem(mask)
    if wrong:
        raise ArgumentError(wrong)
    return choose_layout(mask, seq_len, state_of(group).world_size)


@eager
def shard(x: Tensor, mesh: DeviceMesh, *, dim: int, layout: Layout | str = "auto") -> Tensor:
    """This rank's rows of a whole tensor that every rank holds.

    Args:
        x: any tensor with the whole sequence in `dim`.
        mesh: the 1-D or 2-D mesh over which the sequence is split.
        layout: a `Layout`, or a name; "auto" is that of the `context_parallel` around the caller on this mesh, else
            head-tail.

    Returns:
        A copy of the rows that this rank owns, in the layout's order. Nothing is sent in forward; in backward, the
        gradients of all ranks are gathered, so that each has the whole gradient of x.

    Raises:
        LayoutError: a mesh that is not 1-D or 2-D, an unknown layout, or an `x` that is not as long as the layout.
        AgreementError: only if `x` requires grad: the ranks called with different shapes or layouts.
    """
    group = group_of(mesh)
    state = state_of(group)
    lay: Layout | None = None
    refusal: RingcpError | None = None
    try:
        _check_dim(x, dim)
        lay = _sized(_resolved(layout, group), x.shape[dim], state.world_size)
        if x.shape[dim] != lay.seq_len:
            raise LayoutError(
                f"x: expected {lay.seq_len} tokens in dim {dim} for {lay!r}, got {x.shape[dim]}; pass x whole"
            )
    except RingcpError as error:
        refusal = error
    needs_grad = isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()
    if needs_grad and state.world_size > 1:
        words = "" if refusal is not None else f"call=shard; x={tuple(x.shape)} {x.dtype}; dim={dim}; layout={lay!r}"
        call, _ = vote(state, words, 0, refusal)
    if refusal is not None:
        raise refusal
    assert lay is not None
    if needs_grad and state.world_size > 1:
        return _Shard.apply(x, group, state, lay, dim % x.ndim, call)
    return lay.shard(x, state.rank, dim)


@eager
def unshard(x: Tensor, mesh: DeviceMesh, *, dim: int, layout: Layout | str = "auto") -> Tensor:
    """The whole sequence, on every rank, from each rank's rows.

    Args:
        x: this rank's rows in `dim`, in the layout's order.
        mesh: the 1-D or 2-D mesh over which the sequence is split.
        layout: the layout that x was sharded with: a `Layout`, or a name, for which the length is the sum of the
            local lengths; "auto" is that of the `context_parallel` around the caller on this mesh, else head-tail.
            After the body of a context pass ``layout=context.layout``.

    Returns:
        The tensor in the order of the sequence. In backward each rank gets the sum over all ranks of the gradients of
        its rows.

    Raises:
        LayoutError: a mesh that is not 1-D or 2-D, an unknown layout, rows that do not fit it, or "auto" outside of
            contexts where the last one on this mesh had another layout than head-tail; on every rank.
        AgreementError: the ranks called with different shapes, dtypes or layouts.
        PeerError: a peer died or did not come.
    """
    group = group_of(mesh)
    state = state_of(group)
    try:
        layout = _resolved(layout, group)
        if layout == "auto":
            layout = layout_left(state, "auto")
    except LayoutError as refusal:
        vote(state, "", 0, refusal)
        raise
    call, lengths = _gather_vote(
        x, state, dim, f"call=unshard; layout={layout!r}", lambda: check_layout(layout, state.world_size)
    )
    lay = _sized(layout, sum(lengths), state.world_size)
    wrong = {r: n for r, n in enumerate(lengths) if n != lay.local_len(r)}
    if wrong:
        raise LayoutError(
            f"x: expected local lengths in dim {dim} that {lay!r} gives, {[lay.local_len(r) for r in wrong]} "
            f"on ranks {list(wrong)}, got {list(wrong.values())}; pass the layout that the shards were made with"
        )
    return lay.unshard(_gathered(x, group, state, lengths, dim, call), dim)


@eager
def all_gather(x: Tensor, mesh: DeviceMesh, *, dim: int) -> Tensor:
    """The tensors of all ranks behind one another in `dim`, in rank order; they may differ in length there.

    In backward each rank gets the sum over all ranks of the gradients of its rows.

    Raises:
        LayoutError: a mesh that is not 1-D or 2-D, or a dim that x does not have.
        AgreementError: the ranks called with different shapes (beside `dim`) or dtypes.
        PeerError: a peer died or did not come.
    """
    group = group_of(mesh)
    state = state_of(group)
    call, lengths = _gather_vote(x, state, dim, "call=all_gather", lambda: None)
    return torch.cat(_gathered(x, group, state, lengths, dim, call), dim)


def _gather_vote(
    x: Tensor, state: GroupState, dim: int, words: str, check: Callable[[], None]
) -> tuple[int, list[int]]:
    """The number of the call, and every rank's length in `dim`. words: what of the call, beside x, is the same on every
    rank.
    """
    refusal: RingcpError | None = None
    try:
        _check_dim(x, dim)
        check()
    except RingcpError as error:
        refusal = error
    if refusal is not None:
        return vote(state, "", 0, refusal)
    rest = [n for i, n in enumerate(x.shape) if i != dim % x.ndim]
    needs_grad = x.requires_grad and torch.is_grad_enabled()
    words = f"{words}; x={rest} beside dim {dim % x.ndim}; dtype={x.dtype}; requires_grad={needs_grad}"
    return vote(state, words, x.shape[dim], None)


def vote(
    state: GroupState, words: str, number: int, refusal: RingcpError | None, timeout: float | None = None
) -> tuple[int, list[int]]:
    """One vote of its own, for a call that is no attention: the call's, and every rank's number. See
    `ringcp.agreement.agree`.
    """
    with state.turn:
        state.check_usable()
        call = state.next_call()
        said = agree(state, call, words, Told(number, 0), refusal, timeout)
        return call, [told.q for told in said]


def _check_dim(x: Tensor, dim: int) -> None:
    if not isinstance(x, Tensor):
        raise ArgumentError(f"x: expected a tensor, got {type(x).__name__}; pass a tensor with the sequence in dim")
    if not is_int(dim):
        raise ArgumentError(f"dim: expected an integer, got {dim!r}; give the sequence dim")
    if not -x.ndim <= dim < x.ndim:
        raise LayoutError(f"dim: expected a dim of x with {x.ndim} dims, got {dim}; name the sequence dim")


def _resolved(layout: Layout | str, group: dist.ProcessGroup) -> Layout | str:
    """What "auto" means here: the kind of the layout of the context around, if there is one."""
    around: Layout | str | None = layout_around(group.group_name) if layout == "auto" else None
    if around is None:
        return layout
    return around.name if isinstance(around, Layout) and around.name in LAYOUT_NAMES else around


def layout_left(state: GroupState, given: str | None) -> str:
    """What shards are in, outside of contexts and where nobody says: head-tail.

    Raises:
        LayoutError: if the last context had another layout, since they may be of it.
    """
    left = state.layout_left
    if left != "head_tail":
        made = f'"{left}"' if left in LAYOUT_NAMES else "context.layout (what `with ... as context` gave)"
        raise LayoutError(
            f"layout: expected one, since the last context on this mesh was not head_tail, got {given!r}; pass "
            f'layout={made} for shards of that context, "head_tail" for others'
        )
    return left


def _sized(layout: Layout | str, seq_len: int, world_size: int) -> Layout:
    check_layout(layout, world_size)
    return layout if isinstance(layout, Layout) else layout_named(layout, seq_len, world_size)


def _gathered(
    x: Tensor, group: dist.ProcessGroup, state: GroupState, lengths: list[int], dim: int, call: int
) -> tuple[Tensor, ...]:
    if state.world_size == 1:
        return (x,)
    return _Gather.apply(x, group, state, lengths, dim % x.ndim, call)


class _Gather(torch.autograd.Function):
    """Each rank's part, on every rank; backward sums each part's gradients on its rank."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, state: GroupState, lengths: list[int], dim: int, call: int
    ) -> tuple[Tensor, ...]:
        ctx.options = group, state, lengths, dim, None, call
        return tuple(gather(x, *ctx.options))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        refuse_create_graph("unshard or all_gather")
        return reduce(grads, *ctx.options), None, None, None, None, None


class _Shard(torch.autograd.Function):
    """The rank's rows; backward gathers the gradients of all rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, state: GroupState, layout: Layout, dim: int, call: int
    ) -> Tensor:
        ctx.options = group, state, layout, dim, call
        return layout.shard(x, state.rank, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        refuse_create_graph("shard")
        return gather_gradient(grad, *ctx.options), None, None, None, None, None


def gather_gradient(
    x: Tensor, group: dist.ProcessGroup, state: GroupState, layout: Layout, dim: int, call: int = 0
) -> Tensor:
    """The whole gradient, of whose rows each rank holds its own, without a vote: callers' ranks have agreed before."""
    if state.world_size == 1:
        return x
    lengths = [layout.local_len(rank) for rank in range(layout.world_size)]
    return layout.whole_gradient(gather(x, group, state, lengths, dim, call=call), dim)
