"""The one adapter for how torch dispatches on this thread: private, so only this file touches it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from operator import or_

import torch

_KEYS = torch._C.DispatchKey.__members__.items()
_AUTOCAST = reduce(or_, (torch._C.DispatchKeySet(key) for name, key in _KEYS if name.startswith("Autocast")))


@contextmanager
def from_the_top() -> Iterator[None]:
    """Inside a registered op, dispatch as outside of it: autograd and functorch are there again.

    Autograd excludes itself around an op, and code that AOT has compiled functorch (vmap) as well.
    """
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded & _AUTOCAST):
        yield
