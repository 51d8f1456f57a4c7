"""How it is checked and timed: every rank takes part, and the slowest counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ringcp
from benchmarks.checks import Rows, compare, results_at, sampled
from benchmarks.origin import num_cores
from benchmarks.providers import PROVIDERS, Attention, Provider, Setting
from benchmarks.suite import BARE, BOTH
from benchmarks.usage import Batch, Span, Usage, batches, spans, usage_of

METRICS = (BOTH, "forward", "backward")

# `set_num_threads` takes effect at once, in both directions and also under torchrun's OMP_NUM_THREADS=1 (torch 2.13,
# libgomp, 2 cores: 122, 237, 122, 237 ms for 2, 1, 2, 1 threads). But the idle workers spin on, 9 ms of CPU after the
# last parallel region, before they sleep. The wait policy stays what any user of SDPA has, so that the baseline is
# theirs; what follows it starts when the spinning is over.
SPIN_S = 0.03


@dataclass(frozen=True)
class Entrant:
    """A provider in a mode, in one case, with this rank's tensors; none on a rank that only waits.

    companion: what it is there for, of the words in `benchmarks/suite.py`; empty for those that are compared.
    single_process: as the provider's.
    """

    provider: str
    mode: str
    attention: Attention
    tensors: list[Tensor]
    layout: ringcp.Layout | None
    companion: str = ""
    single_process: bool = False

    @property
    def waits(self) -> bool:
        return not self.tensors

    def forward(self) -> Any:
        """What is timed as forward; `backward` takes what it returns."""
        return self.attention(*self.tensors[:3])

    def backward(self, out: Any) -> Any:
        *inputs, grad = self.tensors
        return torch.autograd.grad(out, inputs, grad)


@dataclass(frozen=True)
class Transfers(Entrant):
    """Only the messages of another entrant's call: as many, as long, in the same batches and order, nothing else.

    batches: those of forward, and those of backward; their buffers are there before the time starts.
    """

    batches: tuple[Sequence[Batch], Sequence[Batch]] = ((), ())

    def forward(self) -> Any:
        self._move(self.batches[0])

    def backward(self, out: Any) -> Any:
        self._move(self.batches[1])

    def _move(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            for work in dist.batch_isend_irecv(batch):
                work.wait()


@dataclass(frozen=True)
class Timeline:
    """One call on one rank: its steps, and when forward and all of it ended. Seconds from its start."""

    spans: list[Span]
    forward: float
    end: float


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


class Refusal(str):
    """What a provider said that raised NotImplementedError, as one does that cannot compute the case."""


class Checked(NamedTuple):
    """One call of a provider against the reference: what is wrong, empty if nothing is, and the seconds of the call on
    the slowest rank. The last two are the same on every rank.
    """

    entrant: Entrant
    problem: str
    seconds: float


class Harness:
    """The ranks of one launch. Every method is collective.

    providers: those that can be asked for, by name.
    """

    def __init__(self, device: str, threads: int, providers: Mapping[str, Provider] = PROVIDERS) -> None:
        self.device = device
        self.threads = threads
        self.providers = providers
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # A group of its own on gloo, whose waiting ranks sleep: 6 ms of CPU in 2 s. NCCL's would spin.
        self._control = dist.new_group(backend="gloo")
        self.baseline_threads = min(num_cores(), self.world_size * threads)
        torch.set_num_threads(threads)

    def threads_of(self, provider: str) -> int:
        """Threads of each process that computes."""
        return self.baseline_threads if self.providers[provider].single_process else self.threads

    def entrant(self, provider: str, setting: Setting) -> Entrant:
        """Prepares a provider: its function, and this rank's part of the tensors."""
        single = self.providers[provider].single_process
        if self.rank >= (1 if single else setting.mesh.size()):
            return Entrant(provider, setting.mode, _absent, [], None, single_process=single)
        prepared = self.providers[provider].prepare(setting)
        tensors = setting.case.tensors(self.device)
        if prepared.layout is not None:
            tensors = [prepared.layout.shard(x, self.rank, 2) for x in tensors]
        tensors = [x.requires_grad_(i < 3) for i, x in enumerate(tensors)]
        mode = f"{setting.mode}: {prepared.meant}" if prepared.meant else setting.mode
        return Entrant(provider, mode, prepared.attention, tensors, prepared.layout, single_process=single)

    def admit(self, provider: str, setting: Setting) -> Entrant | str:
        """Prepares a provider, and holds it against the reference: in a small case of this kind, then by rows in the
        case itself, which is a first call and warms up. Or what is wrong with its out, dq, dk or dv; or its refusal.
        """
        problem = self.checked(provider, replace(setting, case=setting.case.small()), by_rows=False).problem
        if problem:
            return problem
        entrant, problem, _ = self.checked(provider, setting, by_rows=True)
        return problem or entrant

    def checked(self, provider: str, setting: Setting, *, by_rows: bool) -> Checked:
        """Prepares a provider, and holds one call of it against the reference, in all rows or in some."""
        case = setting.case
        rows = sampled(case) if by_rows else None
        entrant = Entrant(provider, setting.mode, _absent, [], None)
        found, error, seconds = None, "", 0.0
        try:
            entrant = self.entrant(provider, setting)
            if not entrant.waits:
                with self._cores(entrant):
                    start = self._now()
                    found = results_at(rows, entrant.attention, entrant.tensors, entrant.layout, self.rank)
                    seconds = self._now() - start
        except Exception as raised:
            kind = Refusal if isinstance(raised, NotImplementedError) else str
            error = kind(f"rank {self.rank} raised {type(raised).__name__}: {raised}")
        by_rank: list[tuple[Rows | None, str, float]] = [(None, "", 0.0)] * self.world_size
        dist.all_gather_object(by_rank, (found, error, seconds), group=self._control)
        errors = [error for _, error, _ in by_rank if error]
        # A rank that refuses may leave its peers waiting for it, so their errors count.
        verdict = [next((e for e in errors if not isinstance(e, Refusal)), errors[0] if errors else "")]
        if self.rank == 0 and not errors:
            with self._all_cores():
                verdict = [compare(case, rows, [found for found, *_ in by_rank if found is not None], self.device)]
        dist.broadcast_object_list(verdict, src=0, group=self._control)
        return Checked(entrant, verdict[0], max(seconds for *_, seconds in by_rank))

    def same(self, value: float) -> float:
        """Rank 0's value, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def usage(self, entrant: Entrant) -> Usage:
        """Bytes sent and peak memory of a call, each on the rank where it is largest."""
        mine = Usage(0.0, 0.0)
        dist.barrier(self._control)
        if not entrant.waits:
            with self._cores(entrant):
                mine = usage_of(lambda: entrant.backward(entrant.forward()), self.device)
        most = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._control)
        return Usage(*most.tolist())

    def timeline(self, entrant: Entrant) -> list[Timeline]:
        """A call's steps by rank."""
        dist.barrier(self._control)
        with ringcp.record() as recorder:
            both, forward, _ = self._clock(entrant)
        mine = Timeline(spans(recorder), forward, both)
        by_rank = [mine] * self.world_size
        dist.all_gather_object(by_rank, mine, group=self._control)
        return by_rank

    def bare(self, entrant: Entrant) -> Transfers:
        """The transfers of a call by themselves. Of one that waits for each batch before it posts the next."""
        with batches() as forward:
            out = entrant.forward()
        with batches() as backward:
            entrant.backward(out)
        moved = forward, backward
        return Transfers(
            entrant.provider, f"{BARE} {entrant.mode}", _absent, entrant.tensors, None, BARE, batches=moved
        )

    def rounds(
        self,
        entrants: Sequence[Entrant],
        *,
        warmup: int,
        rounds: int,
        progress: Callable[[], None],
        calls: int = 1,
    ) -> list[list[list[float]]]:
        """Seconds by entrant, round and metric (in the order of `METRICS`), on the slowest rank. Every round runs all
        entrants, forwards in one and backwards in the next, so that drifts of the machine hit all alike.

        calls: of an entrant in a row, of which the median counts.
        """
        seconds: list[list[list[float]]] = [[] for _ in entrants]
        for i in range(warmup + rounds):
            order = range(len(entrants)) if i % 2 == 0 else reversed(range(len(entrants)))
            for j in order:
                measured = self._slowest(entrants[j], calls)
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

    def _slowest(self, entrant: Entrant, calls: int) -> list[float]:
        seconds = [[0.0] * len(METRICS)] * calls
        dist.barrier(self._control)
        if not entrant.waits:
            with self._cores(entrant):
                seconds = [self._clock(entrant) for _ in range(calls)]
        times = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX, group=self._control)  # here the others sleep while rank 0 computes
        return [statistics.median(of_calls) for of_calls in times.T.tolist()]

    def _cores(self, entrant: Entrant) -> AbstractContextManager[None]:
        return self._all_cores() if entrant.single_process else nullcontext()

    @contextmanager
    def _all_cores(self) -> Iterator[None]:
        torch.set_num_threads(self.baseline_threads)
        try:
            yield
        finally:
            torch.set_num_threads(self.threads)
            time.sleep(SPIN_S)

    def _clock(self, entrant: Entrant) -> list[float]:
        """Seconds on this rank, in the order of `METRICS`."""
        start = self._now()
        out = entrant.forward()
        middle = self._now()
        grads = entrant.backward(out)
        end = self._now()
        del out, grads  # freed outside of the time, for all alike
        return [end - start, middle - start, end - middle]

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _absent(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise AssertionError("this rank has no part in it")
