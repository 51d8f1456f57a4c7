"""A mask_mod of FlexAttention, evaluated over ranges of indices with the results that it has for single ones.

A mask_mod is written for scalar indices, and `torch.vmap` says what it gives for many; so does torch's `create_mask`,
in tens of milliseconds. Where a function only computes pointwise and looks indices up in tensors, as nearly all do,
broadcast indices give the same in a hundredth of the time. Whether that holds is seen operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringcp.dispatch import from_the_top

_aten = torch.ops.aten
# Pointwise as well, though torch does not tag them so. Python's operators are taken apart only where autograd is, not
# inside a registered op.
_OPERATORS = (_aten.__and__, _aten.__or__, _aten.__xor__, _aten.__lshift__, _aten.__rshift__)
_COPIES = (_aten._to_copy.default, _aten.clone.default, _aten.ones_like.default, _aten.zeros_like.default)
_POINTWISE = frozenset(
    (*_COPIES, _aten.floor_divide.default, *(x for each in _OPERATORS for x in (each.Tensor, each.Scalar)))
)
# They take of a tensor its dtype and device alone.
_NEW = frozenset((_aten.new_ones.default, _aten.new_zeros.default, _aten.new_full.default))
_INTEGERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))


def vectorized(fn: Callable[..., Any], b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """``fn(b, h, q, k)`` for every combination of four 1-D index tensors of one device.

    Returns:
        (B, H, M, N), followed by the dims of a single result, where B or H is 1 if the results do not depend on it.
    """
    found, _ = _broadcast(fn, b, h, q, k)
    whole = _vmapped(fn, b, h, q, k) if found is None else found.expand(len(b), len(h), len(q), len(k))
    # Where nothing depends on a dim, it is an expanded one.
    once = [slice(1) if stride == 0 else slice(None) for stride in whole.stride()[:2]]
    return whole[tuple(once)]


def is_pointwise(fn: Callable[..., Any], device: torch.device) -> bool:
    """Whether `fn` only computes pointwise from its indices and looks them up in tensors, as a fused kernel can."""
    found, varies = _broadcast(fn, *torch.zeros(4, 1, dtype=torch.int64, device=device))
    return found is not None and varies


def _broadcast(fn: Callable[..., Any], b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor | None, bool]:
    """What it gives for broadcast indices, None if that is not what it gives for single ones; and whether that has been
    computed from them.
    """
    # Clones, since `fn` may write to what it is given.
    broadcast = [x.clone().view([-1 if at == dim else 1 for at in range(4)]) for dim, x in enumerate((b, h, q, k))]
    watch = _Watch(broadcast)
    try:
        with watch:
            found = fn(*broadcast)
    except Exception:  # what it means for single indices, vmap says
        return None, False
    if watch.exact and isinstance(found, Tensor) and (watch.varies(found) or found.ndim == 0):
        return found, watch.varies(found)
    return None, False


def _vmapped(fn: Callable[..., Any], b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import create_mask  # not before it is needed: it takes a while

    def at(i: Tensor, j: Tensor, m: Tensor, n: Tensor) -> Any:
        return fn(b[i], h[j], q[m], k[n])

    with from_the_top():
        return create_mask(at, len(b), len(h), len(q), len(k), device=q.device)  # type: ignore[arg-type]


class _Watch(TorchDispatchMode):
    """Sees whether all operations give for broadcast indices what they give for single ones.

    exact: whether they did so far.
    """

    def __init__(self, indices: Sequence[Tensor]) -> None:
        super().__init__()
        self.exact = True
        self._varying = {id(x): x for x in indices}  # held, so that no other tensor gets the id

    def varies(self, x: Tensor) -> bool:
        """Whether it has been computed from the indices."""
        return id(x) in self._varying

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.exact &= torch.Tag.nondeterministic_seeded not in func.tags  # vmap refuses chance
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(map(self.varies, tensors)):
            kept = func in _NEW and out.ndim == 0
            self.exact &= kept or (isinstance(out, Tensor) and self._is_exact(func, args, tensors, out))
            if not kept and isinstance(out, Tensor):
                self._varying[id(out)] = out
        return out

    def _is_exact(self, func: Any, args: tuple[Any, ...], tensors: Sequence[Tensor], out: Tensor) -> bool:
        if func._schema.is_mutable or any(x.device != out.device for x in tensors):
            return False
        if func is _aten.index.Tensor:
            table, places = args
            return (
                not self.varies(table)
                and len(places) == table.ndim
                and all(x is not None and x.dtype in _INTEGERS and (self.varies(x) or x.ndim == 0) for x in places)
            )
        # A scalar tensor weighs less than a larger one where dtypes are promoted, but as much as a single index.
        dtypes = {x.dtype for x in tensors if self.varies(x)}
        scalars = [x for x in tensors if not self.varies(x)]
        pointwise = torch.Tag.pointwise in func.tags or func in _POINTWISE
        return pointwise and all(x.ndim == 0 and x.dtype in dtypes for x in scalars)
