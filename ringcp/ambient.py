"""The one adapter for ambient state: what holds for everything that a block of code calls.

A context variable can't be traced by Dynamo and is empty on the autograd engine's threads; torch's thread-local store
reaches them. It is private, so only this file touches it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


class _Entry:
    def __init__(self, value: Any) -> None:
        self.value = value
        self.open = True


def ambient(key: str) -> Any:
    """The object that the innermost open `ambience` has set for `key` around the caller, or None."""
    for entry in reversed(_entries(key)):
        if entry.open:
            return entry.value
    return None


@contextmanager
def ambience(key: str, value: Any) -> Iterator[None]:
    """Set `value` for `key` in the body, in this thread and in the backward passes that it starts.

    Bodies may end in any order, and on another thread than they began on, as those of generators do.
    """
    entry = _Entry(value)
    _set(key, [*_entries(key), entry])
    try:
        yield
    finally:
        entry.open = False  # for a thread that still lists it
        _set(key, _entries(key))


@contextmanager
def around_kernels(device: torch.device) -> Iterator[None]:
    """In the body no autocast and no context is seen: kernels are not the attention that these mean."""
    # Each way of entering takes its time, and mostly there is neither.
    autocast = torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
    context = nullcontext() if ambient("context") is None else ambience("context", None)
    with autocast, context:
        yield


def layout_around(group_name: str) -> Any:
    """The layout of the innermost `context_parallel` around the caller on this process group, or None."""
    found = context_around(group_name)
    return None if found is None else found.layout


def context_around(group_name: str) -> Any:
    """What that context has, a `ringcp.sdpa.Context`, or None."""
    found = ambient("context")
    session = None if found is None else found.session
    while session is not None:
        if session.context.group_name == group_name:
            return session.context
        session = session.outer
    return None


def _entries(key: str) -> tuple[_Entry, ...]:
    name = f"ringcp.{key}"
    return torch._C._get_obj_in_tls(name) if torch._C._is_key_in_tls(name) else ()


def _set(key: str, entries: Any) -> None:
    torch._C._stash_obj_in_tls(f"ringcp.{key}", tuple(entry for entry in entries if entry.open))
