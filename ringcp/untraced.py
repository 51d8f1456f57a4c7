"""Context managers that Dynamo does not look into: entering and leaving them is a graph break in compiled code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ContextDecorator
from functools import wraps
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

import torch

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

    def _recreate_cm(self) -> Untraced[T]:  # for each call of what it decorates
        return Untraced(self._make)

    def __enter__(self) -> T:
        self._manager = _call_untraced(self._make)
        return _call_untraced(self._manager.__enter__)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return _call_untraced(self._manager.__exit__, kind, error, trace)


def _call_untraced(function: Callable[..., Any], *args: Any) -> Any:
    # Importing Dynamo takes a second, and where nobody has, nothing is traced.
    if "torch._dynamo" in sys.modules:
        function = torch.compiler.disable(function)
    return function(*args)
