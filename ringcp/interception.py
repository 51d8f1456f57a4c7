"""Interception: what sends attention inside a context to ringcp, wherever it is called from.

Four ways, since none sees all calls. A function mode sees names of any origin, and Dynamo honours and guards it; but it
is off inside `F.multi_head_attention_forward` and in all of backward. A kernel for
``aten::scaled_dot_product_attention`` sees those. `torch.utils.checkpoint`, which recomputes in backward, is made to
enter the context again for it. And autograd functions that compute attention by no op of torch are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, wraps
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpoint
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from ringcp.active import Active, Session, active_session, current_task, sessions
from ringcp.ambient import ambience, ambient
from ringcp.errors import UnsupportedError
from ringcp.foreign import (
    ATTENTION,
    foreign_attention,
    is_foreign_attention,
    mark_foreign_checkpoints,
    marked_session,
    refuse_way,
    refusing_forward,
)
from ringcp.installation import Installation, Undo, patch
from ringcp.saving import enter_detaching
from ringcp.sdpa import LOCAL, Context, sdpa
from ringcp.untraced import call_untraced, skip_alone, untraced

_ATEN = torch.ops.aten.scaled_dot_product_attention
_SDPA = frozenset({F.scaled_dot_product_attention, _ATEN, _ATEN.default})
_MHA = F.multi_head_attention_forward
_MHA_NEED_WEIGHTS = 15  # its place among the arguments
# Under a function mode Dynamo (torch 2.13) traces into the method, and fails at the `super()` in it.
_UNFLATTEN = Tensor.unflatten


@contextmanager
def intercepted(session: Session) -> Iterator[None]:
    """Attention in the body, on this thread, belongs to `session`."""
    router = _Router(session.context)
    active = Active(session, local=False, task=current_task(), on_call=mark_foreign_checkpoints)
    with _installation.needed(), ambience("context", active):
        _push_mode(router)
        try:
            yield
        finally:
            router.open = False  # for a thread on whose stack it stays
            _take_off(router)


@untraced
@contextmanager
def local_attention() -> Iterator[None]:
    """Inside a `context_parallel`, a region whose attention stays local to each rank: an encoder, a cross-attention.

    Outside of one it does nothing.
    """
    routers = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, _Router) and mode.open]
    session = next(sessions(), None)
    with ambience("context", Active(session, local=True, task=current_task(), on_call=mark_foreign_checkpoints)):
        for router in routers:
            router.open = False
        try:
            yield
        finally:
            for router in routers:
                router.open = router.entered


def _take_off(router: _Router) -> None:
    """Take it off the stack, wherever it is."""
    router.entered = False
    modes = list(_get_current_function_mode_stack())
    for _ in modes:
        _pop_mode()
    for mode in modes:
        if mode is not router:
            _push_mode(mode)


class _Router(TorchFunctionMode):
    """Sees the calls of torch's functions.

    open: whether it sends attention to ringcp. entered: whether its context is there still.
    """

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context
        self.open = self.entered = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.open:
            return func(*args, **kwargs)
        if func in _SDPA:
            return sdpa(self.context, *args, **kwargs)
        if func is _MHA:
            _check_mha(*args, **kwargs)
        elif _is_attention(func):
            refuse_way(_name(func))
        elif func is _UNFLATTEN and torch.compiler.is_compiling():
            return torch.unflatten(*args, **kwargs)
        elif torch.compiler.is_compiling() and _traces_a_body(func):
            _refuse_body(func)
        return func(*args, **kwargs)


def _check_mha(*args: Any, **kwargs: Any) -> None:
    """`nn.MultiheadAttention` reaches the kernel of aten, which neither Dynamo nor functorch sees."""
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
    _check_no_functorch()


def _check_no_functorch() -> None:
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedError(
            "torch.func: expected torch.autograd alone inside context_parallel, got attention under vmap, grad, vjp or "
            "jvp; use torch.autograd.grad or backward"
        )


def _is_attention(func: Any) -> bool:
    """Whether a function of torch, or an op of any library, computes attention: by its name."""
    return type(func) not in _METHODS and _named_attention(func)


def _traces_a_body(func: Any) -> bool:
    """Whether Dynamo traces a function of the user for it, with function modes off."""
    return isinstance(func, HigherOrderOperator) and str(func) in _WITH_BODIES


_WITH_BODIES = frozenset(
    {
        "tag_activation_checkpoint",
        "wrap_activation_checkpoint",
        "cond",
        "while_loop",
        "scan",
        "map_impl",
        "invoke_subgraph",
    }
)


def _refuse_body(func: Any) -> NoReturn:
    raise UnsupportedError(
        f"{func}: expected no function that is traced apart in compiled code inside context_parallel, got one "
        "(checkpoint, cond and the like), in which attention would be local; allow the graph break, "
        "or call it around the compiled code"
    )


# As torch.compiler.assume_constant_result does, which would import Dynamo.
for _constant in (_is_attention, _traces_a_body):
    _constant._dynamo_marked_constant = True  # type: ignore[attr-defined]
# Dynamo is to trace these where it traces their caller, and not by themselves in what a graph break leaves eager.
for _part in (_Router.__torch_function__, _check_mha, _check_no_functorch, _is_attention, _traces_a_body, _refuse_body):
    skip_alone(_part)

_METHODS = frozenset({MethodDescriptorType, WrapperDescriptorType, MethodWrapperType})


@lru_cache(maxsize=4096)
def _named_attention(func: Any) -> bool:
    name = _name(func)
    return ATTENTION.search(name) is not None and not name.startswith("ringcp")


def _name(func: Any) -> str:
    return func.__name__ if isinstance(func, (FunctionType, BuiltinFunctionType)) else str(func)


def _aten_kernel(*args: Any, **kwargs: Any) -> Tensor:
    """What ``aten::scaled_dot_product_attention`` runs from the first context on."""
    return call_untraced(_aten_sdpa, *args, **kwargs)


def _aten_sdpa(*args: Any, **kwargs: Any) -> Tensor:
    session = active_session()
    if session is None:
        return _ATEN.default._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    _check_no_functorch()
    if current_task() != ambient("context").task and marked_session() is not session:
        raise UnsupportedError(
            "backward: expected attention inside context_parallel to be recomputed by torch.utils.checkpoint of a "
            "forward in the same context, got a call in backward of unknown origin; run that backward outside of "
            "the context, or the forward inside"
        )
    return sdpa(session.context, *args, **kwargs)


def _in_same_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, to run in what is ambient now: a context, a local region, or neither."""
    session = active_session()

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with local_attention() if session is None else session.resume():
            return function(*args, **kwargs)

    return run


@cache
def _register_kernels() -> torch.library.Library:
    """Once, and for good: torch cannot take a kernel away while other threads may be calling it."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA"):
        library.impl("scaled_dot_product_attention", _aten_kernel, key)
    return library


def _install(undo: Undo) -> None:
    _register_kernels()
    apply = checkpoint.CheckpointFunction.apply.__func__  # type: ignore[attr-defined]
    new_frame = checkpoint._CheckpointFrame.__init__

    def apply_in_context(cls: Any, function: Callable[..., Any], *args: Any) -> Any:
        return apply(cls, _in_same_context(function), *args)

    def frame_in_context(self: Any, recompute: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        new_frame(self, _in_same_context(recompute), *args, **kwargs)

    def made(cls: Any, /, **kwargs: Any) -> None:
        call_untraced(refuse_newcomer, cls, **kwargs)

    def refuse_newcomer(cls: Any, /, **kwargs: Any) -> None:
        super(torch.autograd.Function, cls).__init_subclass__(**kwargs)
        if is_foreign_attention(cls):
            patch(undo, cls, "forward", refusing_forward(cls))

    patch(undo, saved_tensors_hooks, "__enter__", enter_detaching)
    patch(undo, checkpoint.CheckpointFunction, "apply", classmethod(apply_in_context))
    patch(undo, checkpoint._CheckpointFrame, "__init__", frame_in_context)
    for function in list(foreign_attention()):
        patch(undo, function, "forward", refusing_forward(function))
    patch(undo, torch.autograd.Function, "__init_subclass__", classmethod(made))


_installation = Installation(_install)
