"""How far it is, on the terminal of rank 0.

Redrawn between the calls that are timed: a thread that redraws would take a core from them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

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


_PRIOR_S = 60.0


@dataclass
class Pace:
    """How a run keeps to its plan.

    began: as `time.time()`.
    done: seconds that what is over was planned to take.
    """

    began: float
    done: float

    def left(self, case: float, in_case: float, later: float) -> float:
        """Seconds until the end, from what the rest is planned to take: the case at hand, which has run for `in_case`
        seconds, and those after it. As much as it took so far, in units of the plan; that counts for little at first.
        """
        spent = time.time() - self.began - in_case
        factor = (spent + _PRIOR_S) / (self.done + _PRIOR_S)
        return max(0.0, factor * case - in_case) + factor * later


class ByPlan:
    """Time left from what cases are planned to take, and what those that are over took.

    Without a terminal it prints a line a case.
    """

    def __init__(self, console: Console, pace: Pace, planned: Sequence[float], after: float) -> None:
        self._pace, self._planned, self._after = pace, list(planned), after
        self._total = pace.done + sum(planned) + after
        self._bar = _Bar(console, self._total)
        self.progress = self._bar.progress
        self._console = console
        self._prefix, self._case, self._started = "", 0.0, 0.0

    def start(self, prefix: str) -> None:
        """A case begins, and the one before it is over."""
        self._pace.done += self._case
        self._prefix, self._case, self._started = prefix, self._planned.pop(0), time.time()
        if not self._console.is_terminal:
            self._console.print(f"{prefix}{left_text('about', self._left())}", markup=False, highlight=False)

    def say(self, what: str) -> None:
        self._show(f"{self._prefix}{what}")

    def turn(self, count: int = 1) -> None:
        self._show()

    def _left(self) -> float:
        return self._pace.left(self._case, time.time() - self._started, sum(self._planned) + self._after)

    def _show(self, what: str | None = None) -> None:
        done = self._pace.done + min(self._case, time.time() - self._started)
        self._bar.show(done, left_text("about", self._left()), what)
