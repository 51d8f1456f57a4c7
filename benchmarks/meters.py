"""How far it is, on the terminal of rank 0.

Redrawn between the calls that are timed: a thread that redraws would take a core from them.
"""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


def quiet_unless(first: bool) -> Console:
    """A console that only the first rank writes to; wide enough for a table where there is no terminal."""
    console = Console(quiet=not first)
    return console if console.is_terminal else Console(quiet=not first, width=180)


def left_text(word: str, seconds: float) -> str:
    return f"{word} {int(seconds) // 60}:{int(seconds) % 60:02d} left"


class _Bar:
    def __init__(self, console: Console, total: float) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}")
        self.progress = Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal)
        self._task = self.progress.add_task("", total=total, left="")

    def show(self, completed: float, left: str, what: str | None = None) -> None:
        self.progress.update(self._task, completed=completed, left=left, description=what, refresh=True)


class ByWork:
    """Time left from what was done so far, in calls that are weighted by what they take."""

    def __init__(self, console: Console, total: float) -> None:
        self._bar = _Bar(console, total)
        self.progress = self._bar.progress
        self.weight = 0.0
        self._total, self._done, self._began = total, 0.0, time.monotonic()

    def say(self, what: str) -> None:
        self._show(what)

    def turn(self, count: int = 1) -> None:
        self._done += self.weight * count
        self._show()

    def _show(self, what: str | None = None) -> None:
        spent, done = time.monotonic() - self._began, self._done
        self._bar.show(done, left_text("about", spent * (self._total - done) / done) if done else "", what)


class ByTime:
    """Time left of what a suite may take; it ends earlier where fewer rounds are wanted than there is time for.

    Without a terminal it prints a line a case.
    """

    def __init__(self, console: Console, until: float, seconds: float) -> None:
        self._bar = _Bar(console, seconds)
        self.progress = self._bar.progress
        self._console = console
        self._until, self._seconds = until, seconds
        self._prefix = ""

    def start(self, prefix: str) -> None:
        """A case begins."""
        self._prefix = prefix
        if not self._console.is_terminal:
            self._console.print(f"{prefix}{left_text('at most', self._left())}", markup=False, highlight=False)

    def say(self, what: str) -> None:
        self._show(f"{self._prefix}{what}")

    def turn(self, count: int = 1) -> None:
        self._show()

    def _left(self) -> float:
        return max(0.0, self._until - time.time())

    def _show(self, what: str | None = None) -> None:
        self._bar.show(self._seconds - self._left(), left_text("at most", self._left()), what)
