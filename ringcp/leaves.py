"""Leaves in place: the gradient of a buffer that requires grad has the shape of the shard, and must become whole."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcp.checks import refuse_create_graph
from ringcp.errors import UnsupportedError
from ringcp.groups import GroupState
from ringcp.layout import Layout
from ringcp.sharding import gather_gradient, vote


class Leaf:
    """The gradient of one leaf whose data is exchanged.

    Inside the context ``.grad`` is this rank's rows of it. Backward after the context finds a leaf of the full shape,
    and torch lets no hook change the size of a gradient: so it is accumulated into a leaf of the shard's shape, and
    gathered then. Both hold for graphs that the leaf enters inside the context: it has an accumulator of its own there.
    """

    def __init__(
        self,
        tensor: Tensor,
        dim: int,
        name: str,
        layout: Layout,
        group: dist.ProcessGroup,
        state: GroupState,
        timeout: float | None,
    ) -> None:
        self.tensor, self.name = tensor, name
        self._dim, self._layout, self._group, self._state, self._timeout = dim, layout, group, state, timeout
        self._inside = False
        self._before: Tensor | None = None
        # What the body finds as .grad, its version, and a copy.
        self._before_rows: tuple[Tensor, int, Tensor] | None = None
        self._guard: Any = None

    def enter(self, shard: Tensor) -> None:
        """Exchange the data, and put the gradient of before aside."""
        x = self.tensor
        self._before = x.grad
        self._inside = True
        self._guard = _accumulator(x).register_prehook(self._refuse_graph_of_before)
        rows = None if x.grad is None else self._layout.shard(x.grad, self._state.rank, self._dim)
        if rows is not None:  # in the shard's strides, as autograd wants them
            rows = torch.empty_strided(shard.shape, shard.stride(), dtype=rows.dtype, device=rows.device).copy_(rows)
        x.grad = None
        _exchange(x, shard)
        if rows is not None:
            x.grad, self._before_rows = rows, (rows, rows._version, rows.clone())
        # Held, since autograd keeps it only as long as a graph does.
        self._node = _accumulator(x)
        self._node.register_prehook(self._before_accumulating)
        self._node.register_hook(self._after_accumulating)

    def leave(self, whole: Tensor) -> Tensor | None:
        """Undo `enter`; this rank's rows of what the body added to the gradient."""
        x = self.tensor
        rows, x.grad = x.grad, None
        if self._before_rows is not None:
            given, version, kept = self._before_rows
            if rows is None:
                self._before = None  # the body has set it to None
            elif rows is given and rows._version == version:
                rows = None
            else:
                rows = rows - kept  # also right if the body has zeroed or scaled it
        self._become(whole)
        return rows

    def restore(self, whole: Tensor) -> bool:
        """Undo `enter` after a failure; whether a gradient was dropped."""
        x = self.tensor
        dropped = x.grad is not None and (self._before_rows is None or x.grad._version != self._before_rows[1])
        x.grad = None
        self._become(whole)
        return dropped

    def _become(self, whole: Tensor) -> None:
        """The leaf as it was before, with the gradient of before."""
        self._inside = False
        self._before_rows = None
        self._node = None
        if self._guard is not None:
            self._guard.remove()
        _exchange(self.tensor, whole)
        self.tensor.grad, self._before = self._before, None

    def add_grad(self, rows: Tensor) -> None:
        """Gather a gradient from every rank's rows, and add it to that of the whole."""
        x, grad = self.tensor, gather_gradient(rows, self._group, self._state, self._layout, self._dim)
        if x.grad is None:
            x.grad = grad
        else:
            x.grad.add_(grad)

    def no_rows(self) -> Tensor:
        """The part in a gradient of a rank that has none."""
        shape = list(self.tensor.shape)
        shape[self._dim] = self._layout.local_len(self._state.rank)
        return self.tensor.new_zeros(shape)

    def _before_accumulating(self, grads: tuple[Tensor, ...]) -> None:
        x = self.tensor
        refuse_create_graph(f"the gradient of {self.name}")
        if any(grad is not None and grad.layout != torch.strided for grad in grads):
            raise UnsupportedError(
                f"{self.name}: expected a dense gradient, got a sparse one; use sparse=False, or ringcp.shard"
            )
        if self._inside:
            return
        if x.shape[self._dim] != self._layout.seq_len:
            raise UnsupportedError(
                f"{self.name}: expected it whole, or in its own context, when its gradient arrives, got it sharded by "
                "another context; run backward before that one"
            )
        words = f"call=the gradient of {self.name} of a context_parallel that has ended"
        vote(self._state, words, 0, None, self._timeout)
        # The user's hooks are to see the whole gradient: they are called afterwards.
        hooks = x._post_accumulate_grad_hooks
        self._hooks = OrderedDict() if hooks is None else OrderedDict(hooks)
        if hooks is not None:
            hooks.clear()
        self._before, x.grad = x.grad, None
        self._whole = x.data
        x.data = self._whole.narrow(self._dim, 0, self._layout.local_len(self._state.rank))

    def _after_accumulating(self, _: Any, __: Any) -> None:
        x = self.tensor
        if self._inside:
            return
        rows, x.grad = x.grad, None
        x.data = self._whole
        x.grad, self._before = self._before, None
        hooks, self._hooks = self._hooks, OrderedDict()
        del self._whole
        if hooks:
            x._post_accumulate_grad_hooks.update(hooks)  # type: ignore[union-attr]
        if rows is not None:
            self.add_grad(rows)
        for hook in hooks.values():
            hook(x)

    def _refuse_graph_of_before(self, grads: tuple[Tensor, ...]) -> None:
        if self._inside:
            raise UnsupportedError(
                f"{self.name}: expected no backward of a graph from before the context while the buffer is sharded, "
                "got one; run it before or after the context"
            )


def gather_grads(grads: Sequence[tuple[Leaf, Tensor | None]], state: GroupState, timeout: float | None) -> None:
    """Add what the bodies of all ranks added to each leaf. A rank without a gradient takes part with zeros."""
    for start in range(0, len(grads), _FLAGS):
        some = grads[start : start + _FLAGS]
        mine = sum(1 << i for i, (_, rows) in enumerate(some) if rows is not None)
        words = f"call=the gradients of the buffers of context_parallel; buffers={[leaf.name for leaf, _ in some]}"
        _, votes = vote(state, words, mine, None, timeout)
        for i, (leaf, rows) in enumerate(some):
            if any(flags >> i & 1 for flags in votes):
                leaf.add_grad(leaf.no_rows() if rows is None else rows)


# As many as fit into the one number of a vote.
_FLAGS = 62


def _exchange(leaf: Tensor, data: Tensor) -> None:
    """Give a leaf other data, and a new accumulator: the old one has the old shape, and the hooks of its graphs.

    Torch drops the accumulator when the dtype changes, if only for a moment.
    """
    other = torch.float64 if leaf.dtype != torch.float64 else torch.float32
    leaf.data = torch.empty(0, dtype=other, device=leaf.device)
    leaf.data = data


def _accumulator(leaf: Tensor) -> Any:
    """The autograd node that adds to the leaf's gradient."""
    with torch.enable_grad():
        return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
