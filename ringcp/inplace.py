"""Buffers in place: the tensors of the user that hold the whole sequence outside a context, and a shard inside.

The tensor object stays and its data is exchanged (``x.data = shard``), so the whole is never written to: views that
overlap, strided views and what others see of the same memory stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ringcp.errors import UnsupportedError
from ringcp.groups import GroupState
from ringcp.layout import Layout
from ringcp.leaves import Leaf, gather_grads
from ringcp.saving import Stay, version_of

_log = logging.getLogger(__name__)

# Added to the version of a buffer inside: what a graph of before has saved of it is refused by autograd meanwhile.
_INSIDE = 1 << 20


class Buffer:
    """One buffer of a context.

    name: what errors call it.
    restore: whether it is whole again after the context.
    shard: this rank's rows; a copy, so what a graph has saved of it outlives the context.
    inside: whether it is a shard now.
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
        timeout: float | None,
    ) -> None:
        dim %= tensor.ndim
        self.tensor, self.name, self.restore = tensor, name, restore
        self.shard = layout.shard(tensor.data, state.rank, dim)
        needs_grad = tensor.requires_grad and not torch.is_inference_mode_enabled()
        self.leaf = Leaf(tensor, dim, name, layout, group, state, timeout) if needs_grad else None
        self.inside = False
        self.stay = Stay()
        self._requires_grad = tensor.requires_grad

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """The shard and the whole."""
        return self.shard, self._whole

    def enter(self) -> None:
        """Exchange the whole for the shard."""
        self._whole = self.tensor.data
        _shift_version(self.tensor, _INSIDE)
        self.inside, self.stay, self._version = True, Stay(), version_of(self.tensor)
        if self.leaf is None:
            self.tensor.data = self.shard
        else:
            self.leaf.enter(self.shard)

    def note_version(self) -> None:
        """Before any buffer leaves, since views have one version: from now on, writes are not to the shard."""
        if self.inside:
            self.stay.left = version_of(self.tensor)

    def leave(self) -> Tensor | None:
        """Undo `enter`; this rank's rows of the gradient that came inside."""
        if not self.restore:
            return None
        rows = None
        if self.leaf is None:
            self.tensor.data = self._whole
        else:
            rows = self.leaf.leave(self._whole)
        self._end()
        return rows

    def give_back(self) -> None:
        """Undo `enter` after a failure, as far as it came."""
        if not self.inside:
            return
        if self.leaf is None:
            self.tensor.data = self._whole
        elif self.leaf.restore(self._whole):
            _log.warning("the body of context_parallel raised; the gradient of %s is dropped", self.name)
        self._end()

    def _end(self) -> None:
        self.inside = False
        _shift_version(self.tensor, -_INSIDE)
        del self._whole

    def check_unchanged(self) -> None:
        """Raises UnsupportedError if the body has made it require a gradient, or has stepped it."""
        x = self.tensor
        if self.restore and self.leaf is not None and self.stay.left != self._version:
            raise UnsupportedError(
                f"{self.name}: expected no write to a leaf in the body of context_parallel, got one, to this rank's "
                "copy; call optimizer.step() after it"
            )
        if self.restore and x.requires_grad and not self._requires_grad:
            x.grad = None
            raise UnsupportedError(
                f"{self.name}: expected a buffer that requires a gradient to do so before the context, got "
                "requires_grad_() in its body; call it before"
            )


def _shift_version(x: Tensor, by: int) -> None:
    version = version_of(x)
    if version is not None:
        torch._C._autograd._unsafe_set_version_counter((x,), (version + by,))


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
        for buffer in buffers:
            buffer.note_version()
        with ExitStack() as every:  # whatever one of them raises
            for buffer in buffers:
                every.callback(buffer.give_back)
        raise
    for buffer in buffers:
        buffer.note_version()
    rows = [buffer.leave() for buffer in reversed(buffers)][::-1]
    for buffer in buffers:
        buffer.check_unchanged()
    differentiable = [(b.leaf, grad) for b, grad in zip(buffers, rows, strict=True) if b.leaf is not None and b.restore]
    if differentiable:
        gather_grads(differentiable, state, timeout)
