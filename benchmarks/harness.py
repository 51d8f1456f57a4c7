"""How it is checked and timed: every rank takes part, and the slowest counts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

import ringcp
from benchmarks.cases import DTYPES, parse_mask
from benchmarks.providers import BASELINE, PROVIDERS, Attention, Setting
from ringcp.testing import assert_close, reference_attention

METRICS = ("forward+backward", "forward", "backward")

# `set_num_threads` takes effect at once, in both directions and also under torchrun's OMP_NUM_THREADS=1 (torch 2.13,
# libgomp, 2 cores: 122, 237, 122, 237 ms for 2, 1, 2, 1 threads). But the idle workers spin on, 9 ms of CPU after the
# last parallel region, before they sleep. The wait policy stays what any user of SDPA has, so that the baseline is
# theirs; what follows it starts when the spinning is over.
_SPIN_S = 0.03


@dataclass(frozen=True)
class Entrant:
    """A provider in a mode, in one case, with this rank's tensors."""

    provider: str
    mode: str
    attention: Attention
    tensors: list[Tensor]
    layout: ringcp.Layout | None

    @property
    def single_process(self) -> bool:
        return PROVIDERS[self.provider].single_process


@dataclass(frozen=True)
class Breakdown:
    """One direction of one call on the rank that was slowest in it. Times in seconds; `other_s` is what lies outside
    the steps: vote, plan, the op and autograd.
    """

    direction: str
    rank: int
    tiles: int
    bytes_sent: int
    bytes_received: int
    seconds: float
    compute_s: float
    wait_s: float

    @property
    def other_s(self) -> float:
        return self.seconds - self.compute_s - self.wait_s


class Harness:
    """The ranks of one launch. Every method is collective."""

    def __init__(self, device: str, threads: int) -> None:
        self.device = device
        self.threads = threads
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # A group of its own on gloo, whose waiting ranks sleep: 6 ms of CPU in 2 s. NCCL's would spin.
        self._control = dist.new_group(backend="gloo")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.baseline_threads = min(cores, self.world_size * threads)
        torch.set_num_threads(threads)

    def threads_of(self, provider: str) -> int:
        """Threads of each process that computes."""
        return self.baseline_threads if PROVIDERS[provider].single_process else self.threads

    def entrant(self, provider: str, setting: Setting) -> Entrant:
        """Prepares a provider: its function, and this rank's part of the tensors."""
        prepared = PROVIDERS[provider].prepare(setting)
        tensors = setting.case.tensors(self.device)
        if prepared.layout is not None:
            tensors = [prepared.layout.shard(x, self.rank, 2) for x in tensors]
        elif self.rank != 0:
            tensors = []
        tensors = [x.requires_grad_(i < 3) for i, x in enumerate(tensors)]
        mode = f"{setting.mode}: {prepared.meant}" if prepared.meant else setting.mode
        return Entrant(provider, mode, prepared.attention, tensors, prepared.layout)

    def check(self, provider: str, setting: Setting) -> str:
        """What is wrong with a provider's out, dq, dk or dv in a small case of this kind; empty if nothing is."""
        setting = replace(setting, case=setting.case.small())
        results, error = None, ""
        try:
            entrant = self.entrant(provider, setting)
            if self.rank == 0 or not entrant.single_process:
                results = [x.detach().cpu() for x in compute(entrant.attention, entrant.tensors)]
        except Exception as raised:
            error = f"rank {self.rank} raised {type(raised).__name__}: {raised}"
        by_rank: list[tuple[list[Tensor] | None, str]] = [(None, "")] * self.world_size
        dist.all_gather_object(by_rank, (results, error), group=self._control)
        errors = [error for _, error in by_rank if error]
        verdict = [errors[0] if errors else ""]
        if self.rank == 0 and not errors:
            parts = [results for results, _ in by_rank if results is not None]
            whole = parts[0] if entrant.layout is None else [
                entrant.layout.unshard(part, 2) for part in zip(*parts, strict=True)
            ]  # fmt: skip
            verdict = [_compare(setting, whole)]
        dist.broadcast_object_list(verdict, src=0, group=self._control)
        return verdict[0]

    def rounds(
        self, entrants: Sequence[Entrant], *, warmup: int, rounds: int, progress: Callable[[], None]
    ) -> list[list[list[float]]]:
        """Seconds by entrant, round and metric (in the order of `METRICS`), on the slowest rank. Every round runs all
        entrants, forwards in one and backwards in the next, so that drifts of the machine hit all alike.
        """
        seconds: list[list[list[float]]] = [[] for _ in entrants]
        for i in range(warmup + rounds):
            order = range(len(entrants)) if i % 2 == 0 else reversed(range(len(entrants)))
            for j in order:
                measured = self._slowest(entrants[j])
                if i >= warmup:
                    seconds[j].append(measured)
                progress()
        return seconds

    def breakdown(self, entrant: Entrant, *, calls: int) -> list[Breakdown]:
        """What `ringcp.record` saw, by direction: the slowest rank of the median call. Empty if it saw nothing."""
        seen: list[list[Breakdown]] = []
        for _ in range(calls):
            dist.barrier(self._control)
            with ringcp.record() as recorder:
                _, forward, backward = self._clock(entrant)
            for direction, seconds in (("forward", forward), ("backward", backward)):
                steps = [step for step in recorder.steps if step.direction.startswith(direction)]  # and its exchange
                mine = Breakdown(
                    direction,
                    self.rank,
                    sum(step.tiles for step in steps),
                    sum(step.bytes_sent for step in steps),
                    sum(step.bytes_received for step in steps),
                    seconds,
                    sum(step.compute_s for step in steps),
                    sum(step.wait_s for step in steps),
                )
                by_rank = [mine] * self.world_size
                dist.all_gather_object(by_rank, mine, group=self._control)
                seen.append(by_rank)
        slowest = [max(by_rank, key=lambda b: b.seconds) for by_rank in seen]
        medians = []
        for direction in ("forward", "backward"):
            ordered = sorted((b for b in slowest if b.direction == direction), key=lambda b: b.seconds)
            medians.append(ordered[len(ordered) // 2])
        return [b for b in medians if b.tiles]

    def _slowest(self, entrant: Entrant) -> list[float]:
        seconds = [0.0] * len(METRICS)
        dist.barrier(self._control)
        if not entrant.single_process:
            seconds = self._clock(entrant)
        elif self.rank == 0:
            with self._all_cores():
                seconds = self._clock(entrant)
        times = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX, group=self._control)  # here the others sleep while rank 0 computes
        return times.tolist()

    @contextmanager
    def _all_cores(self) -> Iterator[None]:
        torch.set_num_threads(self.baseline_threads)
        try:
            yield
        finally:
            torch.set_num_threads(self.threads)
            time.sleep(_SPIN_S)

    def _clock(self, entrant: Entrant) -> list[float]:
        """Seconds on this rank, in the order of `METRICS`."""
        q, k, v, grad = entrant.tensors
        start = self._now()
        out = entrant.attention(q, k, v)
        middle = self._now()
        grads = torch.autograd.grad(out, (q, k, v), grad)
        end = self._now()
        del out, grads  # freed outside of the time, for all alike
        return [end - start, middle - start, end - middle]

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def compute(attention: Attention, tensors: Sequence[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv."""
    q, k, v, grad = tensors
    out = attention(q, k, v)
    return [out, *torch.autograd.grad(out, (q, k, v), grad)]


def _compare(setting: Setting, results: Sequence[Tensor]) -> str:
    """Held against fp64 attention, with the error of SDPA in the same dtype as the bar; empty if it is right."""

    def leaves(device: str) -> list[Tensor]:
        return [x.requires_grad_(i < 3) for i, x in enumerate(setting.case.tensors(device))]

    q, k, v, grad = leaves("cpu")
    out, _ = reference_attention(q, k, v, mask=parse_mask(setting.case.mask))
    expected = [out, *torch.autograd.grad(out, (q, k, v), grad.double())]
    baseline = [
        x.cpu() for x in compute(PROVIDERS[BASELINE].prepare(setting).attention, leaves(setting.mesh.device_type))
    ]
    for name, *tensors in zip(("out", "dq", "dk", "dv"), results, expected, baseline, strict=True):
        actual, wanted, one_kernel = (x.detach() for x in tensors)
        try:
            if actual.dtype != DTYPES[setting.case.dtype]:
                return f"{name}: expected {DTYPES[setting.case.dtype]}, got {actual.dtype}"
            assert_close(actual, wanted, baseline=one_kernel, name=name)
        except AssertionError as error:
            return str(error)
    return ""
