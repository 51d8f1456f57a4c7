"""`set_rotate_method`, by torch's name: which mode "auto" means in a `context_parallel` of code written for torch's."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Literal

from ringcp.errors import UnsupportedError

_MODES: dict[str, Literal["gather", "ring"]] = {"allgather": "gather", "alltoall": "ring"}

_method: ContextVar[str | None] = ContextVar("ringcp.rotate_method", default=None)


def set_rotate_method(rotate_method: str | None) -> None:
    """How keys and values move, in torch's words. Read when a `context_parallel` with ``mode="auto"`` is entered.

    "allgather" is ``mode="gather"``, "alltoall" is ``mode="ring"``. A mode that a context is given wins. None, which
    torch does not have, takes it back: then ``mode="auto"`` chooses by its rule, as it does if this is never called
    (torch's default is "allgather").

    It holds for the present `contextvars` context, where torch's holds for the process: a new thread starts without it
    and an asyncio task with that of its maker.

    Raises:
        UnsupportedError: anything else.
    """
    if rotate_method is not None and not (isinstance(rotate_method, str) and rotate_method in _MODES):
        raise UnsupportedError(
            f"rotate_method: expected 'allgather', 'alltoall' or None, got {rotate_method!r}; choose one of these, or "
            "pass mode= to ringcp.context_parallel"
        )
    _method.set(rotate_method)


def rotate_mode() -> Literal["gather", "ring"] | None:
    """The mode of the method that is set; None if none is."""
    method = _method.get()
    return None if method is None else _MODES[method]
