"""What autograd saves of buffers: their shards, whatever the buffers are when backward runs.

By itself, autograd keeps the tensor object of a leaf, whose data is exchanged when a context ends. Hooks for saved
tensors keep the shard. Torch's hooks do not compose, and switch its check for writes in place off; ours call those that
were active, and check.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ringcp.ambient import ambience, ambient
from ringcp.untraced import skip_alone


class Stay:
    """One stay of a buffer in a context. left: its version when it left; None until then."""

    left: int | None = None


class Exchanged(Protocol):
    """A tensor whose data is a shard while it stays in a context; memory: all that is ever its data."""

    tensor: Tensor
    stay: Stay

    @property
    def memory(self) -> tuple[Tensor, Tensor]: ...


class _Packed(NamedTuple):
    tensor: Tensor
    version: int | None
    stay: Stay | None


class _Saving:
    """The hooks of the contexts around the caller, for the buffers of all of them.

    outer: the hooks of the user around them.
    """

    def __init__(self, buffers: Sequence[Exchanged]) -> None:
        around: _Saving | None = ambient("saving")
        self.outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if around is not None and self.outer is not None and self.outer[0] == around.pack:
            self.outer = around.outer
        self._buffers: dict[int, Exchanged] = {} if around is None else dict(around._buffers)
        self._buffers |= {id(buffer.tensor): buffer for buffer in buffers}
        # Aliases and views of a buffer have one version with it.
        self._memory: dict[int, Exchanged] = {} if around is None else dict(around._memory)
        self._memory |= {_storage(x): buffer for buffer in buffers for x in buffer.memory}

    def detach(self, x: Tensor) -> Tensor:
        """A buffer as its shard, whatever its data will be."""
        return x.detach() if id(x) in self._buffers else x

    def pack(self, x: Tensor) -> Any:
        if self.outer is not None:
            return self.outer[0](self.detach(x))
        buffer = self._memory.get(_storage(x))
        # Detached always: an output that its own node holds would never be freed.
        return _Packed(x.detach(), version_of(x), None if buffer is None else buffer.stay)

    def unpack(self, packed: Any) -> Tensor:
        if self.outer is not None:
            return self.outer[1](packed)
        x, version, stay = packed
        now = version_of(x) if stay is None or stay.left is None else stay.left
        if now != version:
            raise RuntimeError(
                f"backward: expected a saved tensor {tuple(x.shape)} of {x.dtype} as it was in forward, got it written "
                f"to in place (version {now}, saved at {version}); write to a copy"
            )
        return x


@contextmanager
def saving_shards(buffers: Sequence[Exchanged]) -> Iterator[None]:
    """In the body, nodes that save a buffer save its shard."""
    if not buffers:
        yield
        return
    saving = _Saving(buffers)
    hooks = torch._C._autograd
    with ambience("saving", saving):
        hooks._push_saved_tensors_default_hooks(saving.pack, saving.unpack)
        try:
            yield
        finally:
            _take_off(saving)


def _take_off(saving: _Saving) -> None:
    """Take the hooks off the stack, wherever they are in it: contexts in generators may end in any order."""
    hooks, above = torch._C._autograd, []
    while (top := hooks._top_saved_tensors_default_hooks(True)) is not None:
        hooks._pop_saved_tensors_default_hooks()
        if top[0] == saving.pack:
            break
        above.append(top)
    for pack, unpack in reversed(above):
        hooks._push_saved_tensors_default_hooks(pack, unpack)


def enter_detaching(hooks: saved_tensors_hooks) -> None:
    """`saved_tensors_hooks.__enter__`, for hooks of the user inside a context: they get the shard, too."""
    saving: _Saving | None = ambient("saving")
    pack = hooks.pack_hook
    if saving is not None:
        pack = lambda x: hooks.pack_hook(saving.detach(x))  # noqa: E731
    torch._C._autograd._push_saved_tensors_default_hooks(pack, hooks.unpack_hook)


def _storage(x: Tensor) -> int:
    """Which memory x is in; 0 for what has none of its own."""
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0


def version_of(x: Tensor) -> int | None:
    """How often x has been written to; None if torch does not count."""
    try:
        return x._version
    except RuntimeError:  # an inference tensor, even if its data is none for the moment
        return None


# Called by autograd in what a graph break leaves eager: Dynamo is not to compile them.
for _part in (_Saving.detach, _Saving.pack, _Saving.unpack, _storage, version_of):
    skip_alone(_part)
