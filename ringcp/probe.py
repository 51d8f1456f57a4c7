"""What the forward of an attention module computes, found out by calling it on small tensors of the CPU.

That code which is about to be replaced is attention cannot be read off its name: it may be causal, scale, cap or drop
scores, or hold its tensors in another order. So its outputs are held against plain attention in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringcp.checks import shown
from ringcp.errors import UnsupportedError
from ringcp.interception import local_attention
from ringcp.mask import Mask

HONOURED = ("is_causal", "scale", "enable_gqa", "attn_mask")
UNSAID = "or pass probe=False to say that it is F.scaled_dot_product_attention of its q, k, v and keywords"

# Scores are tens and no ones, so that a soft cap shows. fp32 kernels are off by 1e-5 at most.
_SPREAD, _TOLERANCE = 2.0, 1e-4
_SCALE = 0.3
_NO_MATCH = float("inf")


class Meaning(NamedTuple):
    """What a forward makes of its keywords.

    causal: whether attention is causal, by the `is_causal` of the call; None where it is not passed.
    keywords: those of `HONOURED` that mean what they mean in `F.scaled_dot_product_attention`.
    grouped: whether it takes fewer key and value heads without being told.
    """

    causal: Mapping[bool | None, bool]
    keywords: frozenset[str]
    grouped: bool


class _Shape(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    head_dim: int


_SMALL = _Shape(2, 4, 4, 5, 8)
_GROUPED = _Shape(2, 4, 2, 5, 8)
_LONG = _Shape(1, 2, 2, 1031, 8)  # for windows


def unprobed(takes: Callable[[str], bool]) -> Meaning:
    """That of `F.scaled_dot_product_attention`, as far as the forward takes its keywords."""
    keywords = frozenset(name for name in HONOURED if takes(name))
    return Meaning({None: False, False: False, True: True}, keywords, "enable_gqa" not in keywords)


def probed(module: nn.Module, takes: Callable[[str], bool], scale: float | None, mask: Mask | None) -> Meaning:
    """What the forward of `module` means. Its state and torch's are left as they are.

    Args:
        module: a module without parameters, in whose place attention is to run.
        takes: whether its forward can be called with a keyword.
        scale: its default for the keyword of this name.
        mask: one that it may hold to already.

    Raises:
        UnsupportedError: if it is not attention, full, causal or under `mask`; or cannot be called so.
    """
    before = dict(vars(module))
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.autocast("cpu", enabled=False))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(local_attention())
            stack.enter_context(torch.device("cpu"))
            meaning = _Probe(module, mask).meaning(takes, scale)
    finally:
        after = dict(vars(module))
        vars(module).clear()
        vars(module).update(before)
    for name in sorted({*before, *after} - {"training"}):
        if name not in before or name not in after or before[name] is not after[name]:
            raise UnsupportedError(
                f"{_forward_of(module)}: expected a forward that only attends, got one that changes self.{name}; "
                f"keep that outside of the module, {UNSAID}"
            )
    return meaning


class _Probe:
    def __init__(self, module: nn.Module, mask: Mask | None) -> None:
        self._module, self._mask = module, mask
        self._known: dict[tuple[_Shape, float | None], dict[str, Tensor]] = {}

    def meaning(self, takes: Callable[[str], bool], scale: float | None) -> Meaning:
        """See `probed`."""
        try:
            off = self._off((_SMALL, _LONG), scale, {})
        except Exception as error:
            raise UnsupportedError(
                f"{_forward_of(self._module)}: expected one that can be called with tensors {_SMALL[:2] + _SMALL[3:]} "
                f"of fp32 on the CPU, to see what it computes, got {type(error).__name__}: {_line(error)}; "
                f"let it take any shape, {UNSAID}"
            ) from error
        found = next((name for name in off if off[name] <= _TOLERANCE), None)
        if found is None:
            raise UnsupportedError(self._refusal(off))
        causal: dict[bool | None, bool] = {None: found == "causal"}
        keywords = set()
        if takes("is_causal"):
            off_by = [self._try((_SMALL, _LONG), scale, {"is_causal": value}) for value in (False, True)]
            if all(min(each.values(), default=_NO_MATCH) <= _TOLERANCE for each in off_by):
                keywords.add("is_causal")
                causal[False], causal[True] = (min(each, key=each.__getitem__) == "causal" for each in off_by)
        if takes("scale") and self._holds(found, _SMALL, _SCALE, {"scale": _SCALE}):
            keywords.add("scale")
        if takes("enable_gqa") and self._holds(found, _GROUPED, scale, {"enable_gqa": True}):
            keywords.add("enable_gqa")
        if takes("attn_mask") and self._adds_a_mask(scale):
            keywords.add("attn_mask")
        return Meaning(causal, frozenset(keywords), self._holds(found, _GROUPED, scale, {}))

    def _holds(self, name: str, shape: _Shape, scale: float | None, keywords: Mapping[str, Any]) -> bool:
        return self._try((shape,), scale, keywords).get(name, _NO_MATCH) <= _TOLERANCE

    def _adds_a_mask(self, scale: float | None) -> bool:
        """Whether an `attn_mask`, of bool or floating, is all there is then: also where it is causal without one."""
        q, k, v = _inputs(_SMALL)
        generator = torch.Generator("cpu").manual_seed(1)
        numbers = torch.randn(_SMALL.batch, 1, _SMALL.tokens, _SMALL.tokens, generator=generator, dtype=torch.float32)
        masks = numbers, numbers > -0.5, numbers[:, :, :1], numbers[:, :, :1] > -0.5
        for mask, training in product(masks, (False, True)):
            self._module.training = training
            try:
                out = self._module.forward(q.clone(), k.clone(), v.clone(), attn_mask=mask.clone())
            except Exception:  # it does not take one
                return False
            expected = _attend(q, k, v, mask if mask.dtype == torch.bool else mask.double(), scale)
            if _difference(out, expected) > _TOLERANCE:
                return False
        return True

    def _try(self, shapes: Sequence[_Shape], scale: float | None, keywords: Mapping[str, Any]) -> dict[str, float]:
        try:
            return self._off(shapes, scale, keywords)
        except Exception:  # it does not take them
            return {}

    def _off(self, shapes: Sequence[_Shape], scale: float | None, keywords: Mapping[str, Any]) -> dict[str, float]:
        """How far outputs are from attention, at most, under each mask, in training and not."""
        worst: dict[str, float] = {}
        for shape in shapes:
            q, k, v = _inputs(shape)
            expected = self._expected(shape, scale)
            for training in (False,) if shape is _LONG else (False, True):
                self._module.training = training
                out = self._module.forward(q.clone(), k.clone(), v.clone(), **keywords)
                for name in ("full", "causal", *["mask"] * (self._mask is not None)):
                    difference = _difference(out, expected[name]) if name in expected else _NO_MATCH
                    worst[name] = max(worst.get(name, 0.0), difference)
        return worst

    def _expected(self, shape: _Shape, scale: float | None) -> dict[str, Tensor]:
        """Attention under each mask that the forward may hold to."""
        if (shape, scale) not in self._known:
            at = torch.arange(shape.tokens)
            masks: dict[str, Tensor | None] = {"full": None, "causal": at[:, None] >= at}
            if self._mask is not None and not self._mask.problem(shape.batch, shape.tokens, q_heads=shape.heads):
                masks["mask"] = self._mask.dense(at, at, batch=shape.batch, heads=shape.heads)
            attended = {name: _attend(*_inputs(shape), allowed, scale) for name, allowed in masks.items()}
            self._known[shape, scale] = attended
        return self._known[shape, scale]

    def _refusal(self, off: Mapping[str, float]) -> str:
        by = ", ".join(f"by {value:.2g} from {name}" for name, value in off.items())
        q, k, v = _inputs(_SMALL)
        got = _described(self._module.forward(q.clone(), k.clone(), v.clone()), q, k, v) or f"outputs off {by}"
        masks = "full or causal" if self._mask is None else "full, causal or under mask"
        return (
            f"{_forward_of(self._module)}: expected softmax(q k^T / sqrt(D)) v of tensors (B, H, S, D), {masks}, as "
            f"F.scaled_dot_product_attention gives it, got {got}; keep what else it does outside of the module, a "
            "window in mask=, and a scale in a keyword of this name"
        )


def _inputs(shape: _Shape) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (torch.randn(shape.batch, n, *shape[3:], generator=generator, dtype=torch.float32) for n in heads)
    return q * _SPREAD, k * _SPREAD, v


def _attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float | None) -> Tensor:
    q, k, v = q.double(), k.double(), v.double()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale, enable_gqa=True)


def _difference(out: object, expected: Tensor) -> float:
    if not isinstance(out, Tensor) or out.shape != expected.shape:
        return _NO_MATCH
    difference = (out.double() - expected).abs().max().item()
    return difference if difference >= 0 else _NO_MATCH  # NaN is no match


def _described(out: object, q: Tensor, k: Tensor, v: Tensor) -> str:
    """What stands out in an output, if anything does."""
    if not isinstance(out, Tensor):
        return type(out).__name__
    if out.shape != q.shape:
        return f"{shown(out)} for q of shape {tuple(q.shape)}"
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    off = [_difference(out.transpose(1, 2), _attend(q, k, v, allowed, None)) for allowed in (None, causal)]
    return "that of tensors (B, S, H, D)" if min(off) <= _TOLERANCE else ""


def _forward_of(module: nn.Module) -> str:
    return f"{type(module).__name__}.forward"


def _line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
