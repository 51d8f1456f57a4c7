"""`ringcp.record()`: what each call computed, sent and waited for, step by step; and labels for the profiler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from ringcp.ambient import ambience, ambient
from ringcp.steps import owner_words


@dataclass
class StepRecord:
    """One step of one call. Times are seconds; on CUDA they are the stream's, read when first asked for.

    source: the owner of the block in hand; None if it is gathered from all ranks.
    tiles: kernel launches.
    bytes_sent, bytes_received: what the transfers posted in this step move. They are under way from `start_s` until
        the end of the wait.
    """

    call: int
    direction: str
    step: int
    source: int | None
    tiles: int
    bytes_sent: int
    bytes_received: int
    _marks: list[Any] = field(default_factory=list, repr=False)
    _origin: Any = field(default=None, repr=False)

    def _between(self, start: int) -> float:
        return _seconds(*self._marks[start : start + 2]) if len(self._marks) > start + 1 else 0.0

    @property
    def start_s(self) -> float:
        """When the step began, its transfers posted: since `record()` was entered."""
        return _seconds(self._origin, self._marks[0])

    @property
    def done_s(self) -> float:
        """When its transfers were done, likewise."""
        return _seconds(self._origin, self._marks[-1])

    @property
    def compute_s(self) -> float:
        """Time from posting the step's transfers to the end of its calls and merges."""
        return self._between(0)

    @property
    def wait_s(self) -> float:
        """Time in the wait for the transfers, which begins there; in an exchange of heads, when their turn has come."""
        return self._between(len(self._marks) - 2) if len(self._marks) > 2 else 0.0


def _mark(on_cuda: bool) -> Any:
    """A point in time: on CUDA of the current stream."""
    if not on_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(a: Any, b: Any) -> float:
    if isinstance(a, float):
        return b - a
    b.synchronize()
    return a.elapsed_time(b) / 1e3


class Recorder:
    """What `record` collects. `steps` holds one `StepRecord` per step of every call, forward and backward."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self._origins = {False: _mark(on_cuda=False)}
        if torch.cuda.is_initialized():
            self._origins[True] = _mark(on_cuda=True)

    def _origin(self, on_cuda: bool) -> Any:
        """When recording began; on CUDA that was first used since then, when its first step does."""
        if on_cuda not in self._origins:
            self._origins[on_cuda] = _mark(on_cuda)
        return self._origins[on_cuda]

    @property
    def bytes_sent(self) -> int:
        return sum(step.bytes_sent for step in self.steps)

    @property
    def bytes_received(self) -> int:
        return sum(step.bytes_received for step in self.steps)

    @property
    def compute_s(self) -> float:
        return sum(step.compute_s for step in self.steps)

    @property
    def wait_s(self) -> float:
        return sum(step.wait_s for step in self.steps)

    def table(self) -> str:
        """A line a step, and the totals."""
        head = ("call", "direction", "step", "block of", "tiles", "sent MB", "received MB", "compute ms", "wait ms")
        rows = [
            (
                str(s.call), s.direction, str(s.step), owner_words(s.source), str(s.tiles),
                f"{s.bytes_sent / 1e6:.3f}", f"{s.bytes_received / 1e6:.3f}",
                f"{s.compute_s * 1e3:.3f}", f"{s.wait_s * 1e3:.3f}",
            )
            for s in self.steps
        ]  # fmt: skip
        total = (
            "total", "", "", "", str(sum(s.tiles for s in self.steps)),
            f"{self.bytes_sent / 1e6:.3f}", f"{self.bytes_received / 1e6:.3f}",
            f"{self.compute_s * 1e3:.3f}", f"{self.wait_s * 1e3:.3f}",
        )  # fmt: skip
        widths = [max(len(row[i]) for row in (head, total, *rows)) for i in range(len(head))]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in (head, *rows, total)
        ]
        return "\n".join(lines)


@contextmanager
def record() -> Iterator[Recorder]:
    """Collect what the attention calls in the body, and the backward passes started in it, do on this rank.

    Nearly free when off: one look-up a call. Of nested ones the innermost records.
    """
    recorder = Recorder()
    with ambience("record", recorder):
        yield recorder


class CallLog:
    """Writes one call's steps into the recorder, if one is listening."""

    def __init__(self, call: int, direction: str, device: torch.device) -> None:
        self._recorder: Recorder | None = ambient("record")
        self._call = call
        self._direction = direction
        self._on_cuda = device.type == "cuda"

    def step(self, step: int, source: int | None, tiles: int, bytes_sent: int, bytes_received: int) -> None:
        """A step begins: its transfers have been posted."""
        if self._recorder is not None:
            record = StepRecord(self._call, self._direction, step, source, tiles, bytes_sent, bytes_received)
            record._origin = self._recorder._origin(self._on_cuda)
            self._recorder.steps.append(record)
            self._current = record
            self.mark()

    def mark(self) -> None:
        """A phase ends: computing, then waiting."""
        if self._recorder is not None:
            self._current._marks.append(_mark(self._on_cuda))


def label(text: str) -> AbstractContextManager[Any]:
    """A profiler range, if a profiler is running."""
    return torch.profiler.record_function(text) if torch.autograd._profiler_enabled() else nullcontext()
