"""Buffers in place: the tensors of the user that hold the whole sequence outside a context, and a shard inside.

The tensor object stays and its data is exchanged (``x.data = shard``), so the whole is never written to: views that
overlap, strided views and what others see of the same memory stay as they are. What autograd makes of that is mended
here: nodes that saved a buffer, gradients in the shard's shape, and graphs of before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcp.checks import refuse_create_graph
from ringcp.errors import UnsupportedError
from ringcp.groups import GroupState
from ringcp.layout import Layout
from ringcp.sharding import gather_rows, vote

_log = logging.getLogger(__name__)


class Buffer:
    """One buffer of a context.

    name: what errors call it.
    restore: whether it is whole again after the context.
    shard: this rank's rows; a copy, so what a graph has saved of it outlives the context.
    """

    def __init__(
        self,
        tensor: Tensor,
        dim: int,
        name: str,
        restore: bool,
        layout: Layout,
        group: dist.ProcessGroup,
        state: GroupState,
    ) -> None:
        self.tensor, self.dim, self.name, self.restore = tensor, dim % tensor.ndim, name, restore
        self.shard = layout.shard(tensor.data, state.rank, dim)
        self.needs_grad = tensor.requires_grad and not torch.is_inference_mode_enabled()
        self._layout, self._group, self._state = layout, group, state
        self.inside = False

    @property
    def gathers(self) -> bool:
        """Whether leaving the context gathers its gradient."""
        return self.needs_grad and self.restore

    def enter(self) -> None:
        """Exchange the whole for the shard."""
        x = self.tensor
        self._whole = x.data
        if self.needs_grad:
            self._grad, x.grad = x.grad, None
            self._guard = _accumulator(x).register_prehook(self._refuse_graph_of_before)
        self.inside = True
        self._put(self.shard)
        if self.needs_grad:
            # Held, since autograd keeps it only as long as a graph does.
            self._node = _accumulator(x)
            self._node.register_prehook(self._before_accumulating)
            self._node.register_hook(self._after_accumulating)

    def leave(self, *, whole: bool) -> Tensor | None:
        """Undo `enter`, or leave the shard if not `whole`; the gradient of the shard that came meanwhile."""
        if not self.inside:
            return None
        x, local = self.tensor, None
        if self.needs_grad:
            self._guard.remove()
            local = x.grad
            del self._node
        if whole:
            if self.needs_grad:
                x.grad = None
            self.inside = False
            self._put(self._whole)
            if self.needs_grad:
                x.grad, self._grad = self._grad, None
        del self._whole
        return local

    def add_grad(self, rows: Tensor) -> None:
        """Gather a gradient from every rank's rows, and add it to that of the whole."""
        x, grad = self.tensor, gather_rows(rows, self._group, self._state, self._layout, self.dim)
        if x.grad is None:
            x.grad = grad
        else:
            x.grad.add_(grad)

    def _put(self, data: Tensor) -> None:
        x = self.tensor
        if self.needs_grad:
            # A new dtype, if only for a moment, gives the leaf a new accumulator: the old one has the old shape, and
            # its graphs have their own hooks.
            other = torch.float64 if x.dtype != torch.float64 else torch.float32
            x.data = torch.empty(0, dtype=other, device=x.device)
        x.data = data

    # Backward after the context: the gradient has the shape of the shard, the leaf has not, and torch lets no hook
    # change the size of a gradient. So it is accumulated into a leaf of that shape, and gathered then.

    def _before_accumulating(self, grads: tuple[Tensor, ...]) -> None:
        x = self.tensor
        refuse_create_graph(f"the gradient of {self.name}")
        if self.inside:
            return
        if x.shape[self.dim] != self._layout.seq_len:
            raise UnsupportedError(
                f"{self.name}: expected it whole, or in its own context, when its gradient arrives, got it sharded by "
                "another context; run backward before that one"
            )
        self._grad, x.grad = x.grad, None
        self._whole = x.data
        x.data = self._whole.narrow(self.dim, 0, self.shard.shape[self.dim])

    def _after_accumulating(self, _: Any, __: Any) -> None:
        x = self.tensor
        if self.inside:
            return
        local, x.grad = x.grad, None
        x.data = self._whole
        x.grad, self._grad = self._grad, None
        del self._whole
        if local is not None:
            self.add_grad(local)

    def _refuse_graph_of_before(self, grads: tuple[Tensor, ...]) -> None:
        if self.inside:
            raise UnsupportedError(
                f"{self.name}: expected no backward of a graph from before the context while the buffer is sharded, "
                "got one; run it before or after the context"
            )


def _accumulator(leaf: Tensor) -> Any:
    """The autograd node that adds to the leaf's gradient."""
    with torch.enable_grad():
        return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


@contextmanager
def sharded_in_place(buffers: Sequence[Buffer], state: GroupState, timeout: float | None) -> Iterator[None]:
    """The buffers as shards in the body.

    After it they are whole again, also if it or entering it raised; the gradients that came in the body are gathered
    then, unless it raised.
    """
    try:
        for buffer in buffers:
            buffer.enter()
        yield
    except BaseException:
        for buffer in reversed(buffers):
            if buffer.leave(whole=True) is not None:
                _log.warning("rank %d: the body raised; the gradient of %s is dropped", state.rank, buffer.name)
        raise
    rows = [buffer.leave(whole=buffer.restore) for buffer in buffers]
    differentiable = [(buffer, grad) for buffer, grad in zip(buffers, rows, strict=True) if buffer.gathers]
    for start in range(0, len(differentiable), _FLAGS):
        _gather_grads(differentiable[start : start + _FLAGS], state, timeout)


# As many as fit into the one number of a vote.
_FLAGS = 62


def _gather_grads(grads: Sequence[tuple[Buffer, Tensor | None]], state: GroupState, timeout: float | None) -> None:
    """A rank without a gradient takes part with zeros: which ranks have one is voted."""
    mine = sum(1 << i for i, (_, grad) in enumerate(grads) if grad is not None)
    names = [buffer.name for buffer, _ in grads]
    votes = vote(state, f"call=gradients of the buffers of context_parallel; buffers={names}", mine, None, timeout)
    for i, (buffer, grad) in enumerate(grads):
        if any(vote >> i & 1 for vote in votes):
            buffer.add_grad(torch.zeros_like(buffer.shard) if grad is None else grad)


@contextmanager
def saving_shards(buffers: Sequence[Buffer]) -> Iterator[None]:
    """In the body, nodes that save a buffer save its shard: by itself, autograd keeps the tensor object, whose data is
    another one when backward runs after the context.

    Hooks for saved tensors do not compose in torch, so those that are active are called from ours.
    """
    mine = {id(buffer.tensor): buffer.tensor for buffer in buffers}
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(x: Tensor) -> Any:
        x = x.detach() if mine.get(id(x)) is x else x
        return x if outer is None else outer[0](x)

    def unpack(packed: Any) -> Tensor:
        return packed if outer is None else outer[1](packed)

    if not mine:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
