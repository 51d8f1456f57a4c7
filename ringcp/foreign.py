"""Autograd functions of other libraries: checkpoints that recompute attention, and attention that no op of torch sees.

A checkpoint that is not torch's is an `autograd.Function` whose forward attends without a graph, and whose backward may
do so again: right inside the context, refused outside, where nobody would notice that it is local.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.utils.checkpoint as checkpoint

from ringcp.active import Session, active_session
from ringcp.errors import UnsupportedError
from ringcp.sdpa import LOCAL
from ringcp.untraced import call_untraced

ATTENTION = re.compile(r"attention|attn|_transformer_encoder_layer_fwd", re.IGNORECASE)

_MARK = "_ringcp_session"
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def mark_foreign_checkpoints(session: Session) -> None:
    """Mark every function of another library in whose forward the caller runs."""
    frame: FrameType | None = sys._getframe(1)
    compiled = False
    while frame is not None:
        caller = frame.f_back
        compiled |= frame.f_code.co_qualname.endswith("compile_wrapper")
        if caller is not None and caller.f_code is _APPLY:
            function = caller.f_locals["cls"]
            known = function.__module__.startswith(("torch.", "ringcp."))
            if not known and not issubclass(function, checkpoint.CheckpointFunction):
                _mark(session, function.__name__, frame, compiled)
        frame = caller


def _mark(session: Session, name: str, forward: FrameType, compiled: bool) -> None:
    arguments = forward.f_code.co_varnames[: forward.f_code.co_argcount]
    passed = [forward.f_locals.get(argument) for argument in arguments]
    ctx = next((value for value in passed if isinstance(value, torch.autograd.function.BackwardCFunction)), None)
    if compiled:
        raise UnsupportedError(
            f"{name}: expected no compiled code that attends in the forward of an autograd.Function inside "
            "context_parallel, got some; checkpoint with torch.utils.checkpoint, or do not compile there"
        )
    if ctx is None:
        raise UnsupportedError(
            f"{name}: expected attention in the forward of an autograd.Function inside context_parallel to have ctx as "
            "its first argument, got a forward with setup_context; checkpoint with torch.utils.checkpoint"
        )
    if getattr(ctx, _MARK, None) is session:
        return

    def check(_: Any) -> None:
        if active_session() is not session:
            raise UnsupportedError(
                f"{name}: expected backward inside the context_parallel in which its forward attended, got it outside, "
                "where a recomputation would be local; call backward inside, or checkpoint with torch.utils.checkpoint"
            )

    setattr(ctx, _MARK, session)
    ctx.register_prehook(check)


def marked_session() -> Session | None:
    """The context in which the function attended whose backward is running."""
    return getattr(torch._C._current_autograd_node(), _MARK, None)


def foreign_attention(base: Any = torch.autograd.Function) -> Iterator[Any]:
    """Functions that compute attention by no op of torch, by their names."""
    for cls in base.__subclasses__():
        if is_foreign_attention(cls):
            yield cls
        yield from foreign_attention(cls)


def is_foreign_attention(cls: type) -> bool:
    """Whether a function computes attention; those that torch generates for ops are seen as ops."""
    return ATTENTION.search(cls.__name__) is not None and not cls.__name__.startswith("GeneratedBackwardFor_")


def refusing_forward(function: Any) -> Any:
    """The function's `forward`, to be refused inside a context. Kept references to `apply` look it up in the class."""
    forward: Callable[..., Any] = function.forward
    name = function.__name__

    def forward_outside(*args: Any, **kwargs: Any) -> Any:
        call_untraced(_refuse_inside, name)
        return forward(*args, **kwargs)

    return staticmethod(forward_outside)


def _refuse_inside(name: str) -> None:
    if active_session() is not None:
        refuse_way(name)


def refuse_way(name: str) -> NoReturn:
    """Raise UnsupportedError for a way into attention that is not ringcp's."""
    raise UnsupportedError(
        f"{name}: expected attention by F.scaled_dot_product_attention or ringcp.attention inside context_parallel, "
        f"got {name}, which would see this rank's shard only; change the model's attention implementation, or {LOCAL}"
    )
