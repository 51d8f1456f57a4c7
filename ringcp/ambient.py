"""The one adapter for ambient state: what holds for everything that a block of code calls.

A context variable can't be traced by Dynamo and is empty on the autograd engine's threads; torch's thread-local store
reaches them. It is private, so only this file touches it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def ambient(key: str) -> Any:
    """The object that `ambience` has set for `key` around the caller, or None."""
    name = f"ringcp.{key}"
    return torch._C._get_obj_in_tls(name) if torch._C._is_key_in_tls(name) else None


@contextmanager
def ambience(key: str, value: Any) -> Iterator[None]:
    """Set `value` for `key` in the body, in this thread and in the backward passes that it starts."""
    before = ambient(key)
    torch._C._stash_obj_in_tls(f"ringcp.{key}", value)
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(f"ringcp.{key}", before)
