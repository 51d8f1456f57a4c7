"""The peak of what torch allocates, on CPU as well, where it keeps no such count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass
class Peak:
    """Bytes; known when the body of `peak_memory` is over."""

    num_bytes: int = 0


@contextmanager
def peak_memory(device: str) -> Iterator[Peak]:
    """The most bytes of tensors that were alive at once in the body, of those that it allocated.

    On CPU it is the profiler's running sum of all allocations and frees of this process, on any thread, inside custom
    ops and kernels too. What is no tensor, as the buffers of gloo's sockets, is not in it. It slows the body down: time
    something else. On CUDA it is the allocator's own peak.
    """
    peak = Peak()
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield peak
        peak.num_bytes = torch.cuda.max_memory_allocated() - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        yield peak
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    peak.num_bytes = max(accumulate(changes), default=0)
