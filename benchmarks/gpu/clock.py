"""Time on the device, and rounds of several things in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch

# About 5 ms: the host gets so far ahead that its own time is hidden, as it is in training.
_AHEAD_CYCLES = 10_000_000


class Clock:
    """Marks in the work of the current stream; on a CPU, of the clock on the wall."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, a: Any, b: Any) -> float:
        """Seconds; waits for b."""
        if not self._on_cuda:
            return b - a
        b.synchronize()
        return a.elapsed_time(b) / 1e3

    def settle(self) -> None:
        """Before a measurement: nothing is under way, and the device waits for the host to get ahead."""
        if self._on_cuda:
            torch.cuda.synchronize()
            torch.cuda._sleep(_AHEAD_CYCLES)


class Times(NamedTuple):
    """Seconds of forward and backward on the device, and of both on the host."""

    forward: float
    backward: float
    host: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


def timed(clock: Clock, work: Any) -> Times:
    """One forward and backward of anything with these two methods."""
    clock.settle()
    host = time.perf_counter()
    start = clock.mark()
    results = work.forward()
    middle = clock.mark()
    work.backward(*results)
    end = clock.mark()
    host = time.perf_counter() - host
    return Times(clock.between(start, middle), clock.between(middle, end), host)


def rounds(
    clock: Clock, works: Sequence[Any], seconds: float, most: int, left: Callable[[], float]
) -> list[list[Times]]:
    """The times of each, round by round, in turn and every other round backwards; as many rounds as take `seconds`, at
    least three (one if there is no time `left`), at most `most`. Everything has to have run before.
    """
    start = time.monotonic()
    times: list[list[Times]] = [[] for _ in works]
    order = list(range(len(works)))
    for done in range(most):
        if done >= (3 if left() > 0 else 1) and time.monotonic() - start > seconds * done / (done + 1):
            break
        for i in order:
            times[i].append(timed(clock, works[i]))
        order.reverse()
    return times


def slowest(ranks: Sequence[Sequence[Times]]) -> list[Times]:
    """Round by round that of the rank which takes longest."""
    return [max(of_round, key=lambda times: times.both) for of_round in zip(*ranks, strict=True)]


def percent(one: Sequence[float], other: Sequence[float]) -> float:
    """The speed of the other in percent of that of the one: the median over rounds."""
    return median(100 * a / b for a, b in zip(one, other, strict=True))
