"""Interception: what sends attention inside a context to ringcp, wherever it is called from.

Three ways, since none sees all calls. A function mode sees names of any origin, and Dynamo honours and guards it; but
it is off inside `F.multi_head_attention_forward` and in all of backward. A kernel for
``aten::scaled_dot_product_attention`` sees those. And `torch.utils.checkpoint`, which recomputes in backward, is made
to enter the context again for it. Other ways to compute attention are refused by name.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, wraps
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpoint
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from ringcp.ambient import ambience, ambient
from ringcp.errors import UnsupportedError
from ringcp.saving import enter_detaching
from ringcp.sdpa import LOCAL, Context, sdpa
from ringcp.untraced import untraced

_ATEN = torch.ops.aten.scaled_dot_product_attention
_SDPA = frozenset({F.scaled_dot_product_attention, _ATEN, _ATEN.default})
_MHA = F.multi_head_attention_forward
_MHA_NEED_WEIGHTS = 15  # its place among the arguments


class Session(Protocol):
    """A context that can be entered again, where backward recomputes."""

    context: Context
    calls: int
    outer: Session | None

    def holds(self, x: Tensor) -> bool: ...

    def resume(self) -> AbstractContextManager[None]: ...


class Active(NamedTuple):
    """What is ambient inside a context.

    session: None in a region whose attention stays local.
    task: the backward pass in which it was entered, or -1.
    """

    session: Session | None
    task: int

    def saw_attention(self, needs_grad: bool) -> None:
        """Called by ringcp's op."""
        if self.session is not None:
            self.session.calls += 1
            if not needs_grad:
                _mark_foreign_checkpoint(self.session)


def active_session() -> Session | None:
    """The innermost context around the caller, unless the caller is in a local region."""
    found: Active | None = ambient("context")
    return None if found is None else found.session


def is_active(session: Session) -> bool:
    """Whether the caller is in `session`, and in the same forward or backward pass as when it was entered."""
    return ambient("context") == Active(session, torch._C._current_graph_task_id())


@contextmanager
def intercepted(session: Session) -> Iterator[None]:
    """Attention in the body, on this thread, belongs to `session`."""
    router = _Router(session.context)
    with _installed(), ambience("context", Active(session, torch._C._current_graph_task_id())):
        _push_mode(router)
        try:
            yield
        finally:
            router.open = False  # for a thread on whose stack it stays
            _take_off([router])


@untraced
@contextmanager
def local_attention() -> Iterator[None]:
    """Inside a `context_parallel`, a region whose attention stays local to each rank: an encoder, a cross-attention.

    Outside of one it does nothing.
    """
    routers = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, _Router)]
    with ambience("context", Active(None, torch._C._current_graph_task_id())):
        _take_off(routers)
        try:
            yield
        finally:
            for router in routers:
                if router.open:
                    _push_mode(router)


def _take_off(modes: list[_Router]) -> None:
    """Take modes off the stack, wherever they are in it."""
    kept = [mode for mode in _get_current_function_mode_stack() if mode not in modes]
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in kept:
        _push_mode(mode)


class _Router(TorchFunctionMode):
    """Sees the calls of torch's functions."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context
        self.open = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.open:
            return func(*args, **kwargs)
        if func in _SDPA:
            return sdpa(self.context, *args, **kwargs)
        if func is _MHA:
            _check_mha(*args, **kwargs)
        elif _is_attention(func):
            refuse_way(func)
        return func(*args, **kwargs)


def _check_mha(*args: Any, **kwargs: Any) -> None:
    """`nn.MultiheadAttention` reaches the kernel of aten, where neither Dynamo nor functorch can be seen."""
    if kwargs.get("need_weights", args[_MHA_NEED_WEIGHTS] if len(args) > _MHA_NEED_WEIGHTS else True):
        raise UnsupportedError(
            "nn.MultiheadAttention: expected need_weights=False inside context_parallel, got need_weights=True, its "
            f"default, which writes the whole score matrix out; pass need_weights=False, or {LOCAL}"
        )
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "nn.MultiheadAttention: expected it outside of compiled code inside context_parallel, got it under "
            "torch.compile(fullgraph=True); call F.scaled_dot_product_attention, or allow the graph break"
        )
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedError(
            "torch.func: expected torch.autograd alone inside context_parallel, got nn.MultiheadAttention under vmap, "
            "grad, vjp or jvp; use torch.autograd.grad or backward"
        )


_ATTENTION = re.compile(r"attention|attn|_transformer_encoder_layer_fwd", re.IGNORECASE)


def _is_attention(func: Any) -> bool:
    """Whether a function of torch, or an op of any library, computes attention: by its name."""
    return type(func) not in _METHODS and _named_attention(func)


# As torch.compiler.assume_constant_result does, which would import Dynamo.
_is_attention._dynamo_marked_constant = True  # type: ignore[attr-defined]

_METHODS = frozenset({MethodDescriptorType, WrapperDescriptorType, MethodWrapperType})


@lru_cache(maxsize=4096)
def _named_attention(func: Any) -> bool:
    name = _name(func)
    return _ATTENTION.search(name) is not None and not name.startswith("ringcp")


def _name(func: Any) -> str:
    return func.__name__ if isinstance(func, (FunctionType, BuiltinFunctionType, type)) else str(func)


def refuse_way(func: Any) -> NoReturn:
    """Raise UnsupportedError for a way into attention that is not ringcp's."""
    raise UnsupportedError(
        f"{_name(func)}: expected attention by F.scaled_dot_product_attention or ringcp.attention inside "
        f"context_parallel, got {_name(func)}, which would see this rank's shard only; change the model's attention "
        f"implementation, or {LOCAL}"
    )


def _aten_sdpa(*args: Any, **kwargs: Any) -> Tensor:
    """What ``aten::scaled_dot_product_attention`` runs while some thread is in a context."""
    found: Active | None = ambient("context")
    if found is None or found.session is None:
        return _ATEN.default._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    if torch._C._are_functorch_transforms_active():
        _check_mha(need_weights=False)
    if torch._C._current_graph_task_id() != found.task and _foreign_session() is not found.session:
        raise UnsupportedError(
            "backward: expected attention inside context_parallel to be recomputed by torch.utils.checkpoint of a "
            "forward in the same context, got a call in backward of unknown origin; run that backward outside of "
            "the context, or the forward inside"
        )
    return sdpa(found.session.context, *args, **kwargs)


# Checkpoints that are not torch's: an autograd.Function whose forward computes attention without a graph.

_MARK = "_ringcp_session"


def _mark_foreign_checkpoint(session: Session) -> None:
    """If the caller runs in the forward of an autograd.Function, whose backward may recompute: refuse that outside."""
    frame, compiled = sys._getframe(2), False
    while frame is not None:
        compiled |= frame.f_code.co_filename.endswith("eval_frame.py")
        ctx = frame.f_locals.get("ctx") if frame.f_code.co_name == "forward" else None
        if isinstance(ctx, torch.autograd.function.BackwardCFunction):
            break
        frame = frame.f_back  # type: ignore[assignment]
    else:
        return
    name = type(ctx).__name__.removesuffix("Backward")
    if name == checkpoint.CheckpointFunction.__name__ or getattr(ctx, _MARK, None) is session:
        return
    if compiled:
        raise UnsupportedError(
            f"{name}: expected no compiled code that attends in the forward of an autograd.Function inside "
            "context_parallel, got one; checkpoint with torch.utils.checkpoint, or do not compile there"
        )

    def check(_: Any) -> None:
        if active_session() is not session:
            raise UnsupportedError(
                f"{name}: expected backward inside the context_parallel in which its forward attended, got it outside, "
                "where a recomputation would be local; call backward inside, or checkpoint with torch.utils.checkpoint"
            )

    setattr(ctx, _MARK, session)
    ctx.register_prehook(check)


def _foreign_session() -> Session | None:
    return getattr(torch._C._current_autograd_node(), _MARK, None)


def _in_same_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, to run in what is ambient now: a context, a local region, or neither."""
    session = active_session()

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with local_attention() if session is None else session.resume():
            return function(*args, **kwargs)

    return run


# The process-wide part: there while any thread is in a context, and of no effect on other threads.


class _Installation:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.undo: list[Callable[[], None]] = []


_installation = _Installation()


@contextmanager
def _installed() -> Iterator[None]:
    with _installation.lock:
        if _installation.count == 0:
            _install(_installation.undo)
        _installation.count += 1
    try:
        yield
    finally:
        with _installation.lock:
            _installation.count -= 1
            if _installation.count == 0:
                while _installation.undo:
                    _installation.undo.pop()()


def _install(undo: list[Callable[[], None]]) -> None:
    library = torch.library.Library("aten", "IMPL")
    undo.append(library._destroy)
    for key in ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA"):
        library.impl("scaled_dot_product_attention", _aten_sdpa, key)

    apply = checkpoint.CheckpointFunction.apply
    new_frame = checkpoint._CheckpointFrame.__init__

    def apply_in_context(function: Callable[..., Any], *args: Any) -> Any:
        return apply(_in_same_context(function), *args)

    def frame_in_context(self: Any, recompute: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        new_frame(self, _in_same_context(recompute), *args, **kwargs)

    _patch(undo, saved_tensors_hooks, "__enter__", enter_detaching)
    _patch(undo, checkpoint.CheckpointFunction, "apply", staticmethod(apply_in_context))
    _patch(undo, checkpoint._CheckpointFrame, "__init__", frame_in_context)
    for function in _foreign_attention(torch.autograd.Function):
        _patch(undo, function, "apply", staticmethod(_refused_inside(function)))


def _patch(undo: list[Callable[[], None]], owner: type, name: str, value: Any) -> None:
    inherited = object()
    before = vars(owner).get(name, inherited)
    undo.append(lambda: delattr(owner, name) if before is inherited else setattr(owner, name, before))
    setattr(owner, name, value)


def _foreign_attention(base: Any) -> Iterator[Any]:
    """Autograd functions of other libraries that compute attention by no op of torch; by their names."""
    for cls in base.__subclasses__():
        if _ATTENTION.search(cls.__name__) and not cls.__name__.startswith("GeneratedBackwardFor_"):
            yield cls
        yield from _foreign_attention(cls)


def _refused_inside(function: Any) -> Callable[..., Any]:
    apply = function.apply

    def apply_outside(*args: Any, **kwargs: Any) -> Any:
        if active_session() is not None:
            refuse_way(function)
        return apply(*args, **kwargs)

    return apply_outside
