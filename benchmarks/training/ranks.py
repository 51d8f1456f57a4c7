"""What each rank of the training benchmark does: it trains the same small decoder in every mode, and measures that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringcp
from benchmarks.harness import SPIN_S
from benchmarks.peak_memory import peak_memory
from examples.model import Decoder
from ringcp.modes import choose_mode

SINGLE = "single"  # plain torch in one process, without ringcp: what everything is compared with
ROUNDED = "single, rounded"  # the same from weights that are one rounding step away: what rounding alone does
ULYSSES_DEGREE = 2  # of mode "usp"
_ALONE = (SINGLE, ROUNDED)
_UNTIMED_STEPS = 3
# At the demo's 6e-3 training turns unstable after 100 steps, and rounding alone grows to per cents of the loss.
_LR, _LR_WARMUP = 2e-3, 10


@dataclass(frozen=True)
class Plan:
    """What one launch is to do. `lengths` are timed in all `modes`; `curves` are the modes that train `steps` steps on
    `curve_len` tokens. `together` is the number of threads of a single process.
    """

    device: str
    world_size: int
    threads: int
    together: int
    modes: tuple[str, ...]
    lengths: tuple[int, ...]
    rounds: int
    curves: tuple[str, ...]
    curve_len: int
    steps: int

    @property
    def devices(self) -> int:
        """How many times the hardware of one process the ranks have."""
        return self.world_size if self.device == "cuda" else 1

    def cost(self) -> float:
        """The sum of the costs of all its steps, as `step_cost` counts."""
        timed = sum(map(step_cost, self.lengths)) * len(self.modes) * (_UNTIMED_STEPS + self.rounds)
        return timed + step_cost(self.curve_len) * len(self.curves) * self.steps


@dataclass(frozen=True)
class Progress:
    """A step is over; `doing` is for people."""

    cost: float
    doing: str


@dataclass(frozen=True)
class Timed:
    """A mode at a length: seconds of a step by round, on the slowest rank, and the peak of the rank that needs most.

    mode: with what "auto" turned out to be.
    """

    world_size: int
    mode: str
    seq_len: int
    seconds: list[float]
    peak_bytes: int


@dataclass(frozen=True)
class Curve:
    """Mean loss and norm of the gradient before clipping, by step."""

    world_size: int
    mode: str
    losses: list[float]
    norms: list[float]


Said = Progress | list[Timed] | Curve  # the list is of all modes at one length, the single process first
Say = Callable[[Said], None]


def step_cost(seq_len: int) -> float:
    """What a step takes, for the time left; no unit. At 1,500 tokens attention is as dear as the rest."""
    return seq_len * (seq_len + 1500.0)


def meant(mode: str, seq_len: int, world_size: int, device: str) -> str:
    """The mode that "auto" is for the decoder on ranks of one machine; another is itself."""
    if mode != "auto":
        return mode
    model = Decoder()
    return choose_mode(
        q_heads=model.embed.embedding_dim // model.head_dim,
        kv_heads=model.num_kv_heads,
        seq_len=seq_len,
        world_size=world_size,
        ranks_per_node=world_size,
        mask=None,
        device_type=device,
    ).mode


def text() -> Tensor:
    """The documentation that comes with Python, as bytes: int64 (number of bytes,)."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n\n".join(topics.values()).encode()), dtype=torch.uint8).long()


def batches(seq_len: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and labels, int64 (1, seq_len) each, from places of the text that are the same in every run.

    Labels are shifted here, over the whole sequence: in a shard, the next row is not always the next token.

    Raises:
        ValueError: the text is shorter.
    """
    data = text().to(device)
    if seq_len >= len(data):
        raise ValueError(f"seq_len: expected less than the {len(data)} bytes of the text, got {seq_len}")
    generator = torch.Generator().manual_seed(0)
    while True:
        start = int(torch.randint(len(data) - seq_len, (), generator=generator))
        window = data[None, start : start + seq_len + 1]
        yield window[:, :-1].clone(), window[:, 1:].clone()


class Trainer:
    """A decoder in training, in one mode. Ranks of all modes but the single ones make the same calls."""

    def __init__(self, mesh: DeviceMesh, mode: str) -> None:
        self.mode = mode
        self._mesh = None if mode in _ALONE else mesh
        torch.manual_seed(0)  # the same parameters on every rank, and in every mode
        self.model = Decoder().to(mesh.device_type)
        if mode == ROUNDED:
            with torch.no_grad():
                for weight in self.model.parameters():
                    weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=_LR, betas=(0.9, 0.95))
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: min(1.0, (step + 1) / _LR_WARMUP)
        )

    def step(self, ids: Tensor, labels: Tensor) -> tuple[float, float]:
        """One optimizer step on a whole sequence that every rank holds: its mean loss, and the norm of the gradient."""
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        num_tokens = labels.numel()  # of the whole sequence, so before it is sharded
        with self._sharded(ids, labels, positions):
            logits = self.model(ids, positions)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_tokens
            loss.backward()
        total = loss.detach()
        if self._mesh is not None:
            group = self._mesh.get_group()
            sum_over(group, [p.grad for p in self.model.parameters() if p.grad is not None])
            dist.all_reduce(total, group=group)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._schedule.step()
        return total.item(), norm.item()

    def _sharded(self, *buffers: Tensor) -> AbstractContextManager[object]:
        if self._mesh is None:
            return nullcontext()
        degree = ULYSSES_DEGREE if self.mode == "usp" else None
        return ringcp.context_parallel(
            self._mesh,
            buffers=buffers,
            buffer_seq_dims=[1] * len(buffers),
            mode=self.mode,
            ulysses_degree=degree,
        )


def sum_over(group: dist.ProcessGroup, grads: Sequence[Tensor]) -> None:
    """Each rank has the gradient of its part of the loss; the gradient of the loss is their sum, in one message."""
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat, group=group)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


class Ranks:
    """The ranks of a launch, which take turns: all of them in a mode of ringcp, or rank 0 alone while others sleep.

    Every method is collective.
    """

    def __init__(self, mesh: DeviceMesh, threads: int, together: int) -> None:
        self.mesh, self._threads, self._together = mesh, threads, together
        self._control = dist.new_group(backend="gloo")  # its waiting ranks sleep; NCCL's would spin
        torch.set_num_threads(threads)

    def timed(self, modes: Sequence[str], seq_len: int, rounds: int, say: Say) -> None:
        """Says what it measured. Every round has a step of each mode, in turns, so that drifts hit all alike."""
        source = batches(seq_len, self.mesh.device_type)
        batch = next(source)
        trainers: list[Trainer | None] = []
        peaks = []
        for mode in modes:
            with self._turn(mode) as mine:
                trainer, peak = self._prepared(mode, *batch) if mine else (None, 0)
            trainers.append(trainer)
            peaks.append(int(self._largest(peak)))
            say(Progress(_UNTIMED_STEPS * step_cost(seq_len), f"{seq_len:,} tokens, {mode}: memory"))
        seconds: list[list[float]] = [[] for _ in modes]
        for i in range(rounds):
            batch = next(source)  # on every rank, so that all hold the same sequence
            order = range(len(modes)) if i % 2 == 0 else reversed(range(len(modes)))
            for j in order:
                spent = 0.0
                with self._turn(modes[j]):
                    start = self._now()
                    if trainer := trainers[j]:
                        trainer.step(*batch)
                        spent = self._now() - start
                seconds[j].append(self._largest(spent))
                say(Progress(step_cost(seq_len), f"{seq_len:,} tokens, {modes[j]}"))
        names = [self._name(mode, seq_len) for mode in modes]
        say(
            [
                Timed(self.mesh.size(), name, seq_len, by_round, peak_bytes)
                for name, by_round, peak_bytes in zip(names, seconds, peaks, strict=True)
            ]
        )

    def _prepared(self, mode: str, ids: Tensor, labels: Tensor) -> tuple[Trainer, int]:
        """A trainer that is warm, and the peak of its memory in bytes."""
        Trainer(self.mesh, mode).step(ids, labels)  # what a process keeps from a first step, as plans, does not count
        with peak_memory(self.mesh.device_type) as peak:
            trainer = Trainer(self.mesh, mode)
            for _ in range(_UNTIMED_STEPS - 1):  # the optimizer's state is there from the second on
                trainer.step(ids, labels)
        return trainer, peak.num_bytes

    def curve(self, mode: str, seq_len: int, steps: int, say: Say) -> None:
        """Says the `Curve` of a mode, as rank 0 sees it."""
        losses, norms = [], []
        with self._turn(mode) as mine:
            if mine:
                trainer = Trainer(self.mesh, mode)
                for i, batch in zip(range(steps), batches(seq_len, self.mesh.device_type), strict=False):
                    loss, norm = trainer.step(*batch)
                    losses.append(loss)
                    norms.append(norm)
                    say(Progress(step_cost(seq_len), f"{mode}: loss {loss:.3f} at step {i + 1}"))
        self._largest(0.0)  # the ranks that had nothing to do sleep here
        say(Curve(1 if mode in _ALONE else self.mesh.size(), mode, losses, norms))

    @contextmanager
    def _turn(self, mode: str) -> Iterator[bool]:
        """From a common start, with the threads of the mode; whether this rank computes."""
        time.sleep(SPIN_S)  # idle OpenMP workers of the last step spin on
        dist.barrier(self._control)
        torch.set_num_threads(self._together if mode in _ALONE else self._threads)
        try:
            yield mode not in _ALONE or self.mesh.get_local_rank() == 0
        finally:
            torch.set_num_threads(self._threads)

    def _name(self, mode: str, seq_len: int) -> str:
        choice = meant(mode, seq_len, self.mesh.size(), self.mesh.device_type)
        return mode if choice == mode else f"{mode}: {choice}"

    def _largest(self, value: float) -> float:
        over_ranks = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(over_ranks, dist.ReduceOp.MAX, group=self._control)
        return over_ranks.item()

    def _now(self) -> float:
        if self.mesh.device_type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def run(rank: int, plan: Plan, store: str, pipe: Connection) -> None:
    """The whole of one rank; rank 0 speaks through the pipe."""
    if plan.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if plan.device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=plan.world_size,
        timeout=timedelta(hours=1),  # others wait while one trains alone; who started the ranks sees one die
    )
    try:
        ranks = Ranks(init_device_mesh(plan.device, (plan.world_size,)), plan.threads, plan.together)
        say: Say = pipe.send if rank == 0 else lambda _: None
        for seq_len in plan.lengths:
            ranks.timed(plan.modes, seq_len, plan.rounds, say)
        for mode in plan.curves:
            ranks.curve(mode, plan.curve_len, plan.steps, say)
    finally:
        dist.destroy_process_group()
