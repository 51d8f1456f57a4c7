"""Which context the caller is in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ringcp.ambient import ambient
from ringcp.sdpa import Context


class Session(Protocol):
    """One `context_parallel`, which can be entered again, where backward recomputes.

    calls: how many attention calls it has seen. outer: the one around it.
    """

    context: Context
    calls: int
    outer: Session | None

    def holds(self, x: Tensor) -> bool: ...

    def resume(self) -> AbstractContextManager[None]: ...


class Active(NamedTuple):
    """What is ambient inside a context, under the key "context".

    local: whether attention stays local, since the caller is in a local region.
    task: the backward pass in which this was entered, or -1.
    on_call: what to do for each attention call.
    """

    session: Session | None
    local: bool
    task: int
    on_call: Callable[[Session], None]

    def attended(self) -> None:
        """Ringcp's op has been called."""
        session = self.session
        if session is None or self.local:
            return
        self.on_call(session)
        while session is not None:
            session.calls += 1
            session = session.outer


def current_task() -> int:
    """The backward pass that this thread runs, or -1."""
    return torch._C._current_graph_task_id()


def sessions() -> Iterator[Session]:
    """The contexts around the caller, the innermost first, local regions or not."""
    found: Active | None = ambient("context")
    session = None if found is None else found.session
    while session is not None:
        yield session
        session = session.outer


def active_session() -> Session | None:
    """The innermost context around the caller, unless the caller is in a local region."""
    found: Active | None = ambient("context")
    return None if found is None or found.local else found.session


def is_active(session: Session) -> bool:
    """Whether the caller is in `session`, and in the same forward or backward pass as when it was entered."""
    found: Active | None = ambient("context")
    return found is not None and active_session() is session and found.task == current_task()
