"""What Dynamo does not look into: calling it, or entering and leaving it, is a graph break in compiled code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from functools import lru_cache, wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from pathlib import Path
from types import FunctionType, TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from ringcp.errors import UnsupportedError

P = ParamSpec("P")
T = TypeVar("T")


def untraced(make: Callable[P, AbstractContextManager[T]]) -> Callable[P, Untraced[T]]:
    """The function, whose context managers are entered and left untraced. They also serve as decorators."""

    @wraps(make)
    def called(*args: P.args, **kwargs: P.kwargs) -> Untraced[T]:
        return Untraced(lambda: make(*args, **kwargs))

    return called


class Untraced(ContextDecorator, AbstractContextManager[T], Generic[T]):
    """A context manager that is made when it is entered."""

    def __init__(self, make: Callable[[], AbstractContextManager[T]]) -> None:
        self._make = make
        self._manager: AbstractContextManager[T] | None = None

    def _recreate_cm(self) -> Untraced[T]:  # for each call of what it decorates
        return Untraced(self._make)

    def __call__(self, function: Any) -> Any:
        if isgeneratorfunction(function) or iscoroutinefunction(function) or isasyncgenfunction(function):
            raise UnsupportedError(
                f"{function.__name__}: expected a plain function to decorate, got one whose body runs later; "
                "write the with statement inside it"
            )
        return super().__call__(function)

    def __enter__(self) -> T:
        if self._manager is not None:
            raise UnsupportedError(
                "with: expected a context that is not entered yet, got one inside its own body; make another"
            )
        self._manager = call_untraced(self._make)
        try:
            return call_untraced(self._manager.__enter__)
        except BaseException:
            self._manager = None
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        manager, self._manager = self._manager, None
        assert manager is not None, "entered before"
        return call_untraced(manager.__exit__, kind, error, trace)


def call_untraced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call it, with Dynamo looking away."""
    # Importing Dynamo takes a second, and where nobody has (or it is just being imported), nothing is traced.
    if hasattr(sys.modules.get("torch._dynamo"), "disable"):
        lasting = isinstance(function, FunctionType) and function.__closure__ is None
        lasting = lasting and not torch.compiler.is_compiling()  # Dynamo does not like caches
        function = _disabled(function) if lasting else torch.compiler.disable(function)
    return function(*args, **kwargs)


@lru_cache(maxsize=16)
def _disabled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compiler.disable(function)


def skip_alone(function: Callable[P, T]) -> Callable[P, T]:
    """A decorator: Dynamo traces the function where it traces its caller, but never by itself.

    What `torch._dynamo.skip_code` does, without importing Dynamo. Versions of torch that have it under other names
    compile the function, where a graph break has left it eager, for nothing.
    """
    eval_frame = torch._C._dynamo.eval_frame
    if hasattr(eval_frame, "set_code_exec_strategy") and hasattr(eval_frame, "_FrameExecStrategy"):
        strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def eager(function: Callable[P, T]) -> Callable[P, T]:
    """The function, at whose calls compiled code breaks its graph."""

    @wraps(function)
    @skip_alone
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        return call_untraced(function, *args, **kwargs)

    return called


def callers_level() -> int:
    """The `stacklevel` at which a warning of our own caller points to the code of the user."""
    ours = (str(Path(__file__).parent), str(Path(torch.__file__).parent), contextlib.__file__)
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        level, frame = level + 1, frame.f_back
    return level
