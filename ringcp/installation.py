"""Changes to torch that are there while any thread is in a context, and taken back after the last one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Undo = ExitStack


class Installation:
    """A lock-guarded count of those who need the changes that `install` makes."""

    def __init__(self, install: Callable[[Undo], None]) -> None:
        self._install = install
        self._lock = threading.Lock()
        self._count = 0
        self._undo = Undo()

    @contextmanager
    def needed(self) -> Iterator[None]:
        """The changes are there in the body."""
        with self._lock:
            if self._count == 0:
                self._undo = Undo()
                try:
                    self._install(self._undo)
                except BaseException:
                    self._undo.close()
                    raise
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if self._count == 0:
                    self._undo.close()


def patch(undo: Undo, owner: type, name: str, value: Any) -> None:
    """Set an attribute of a class until `undo` is closed."""
    inherited = object()
    before = vars(owner).get(name, inherited)
    undo.callback(lambda: delattr(owner, name) if before is inherited else setattr(owner, name, before))
    setattr(owner, name, value)
