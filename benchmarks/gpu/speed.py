"""Part (b): the time of each rank's work, against one call of the same kernel with as many FLOPs.

The one call is causal attention over the whole sequence with a rank's part of the heads. Nothing is sent; what is
measured is what a rank computes: kernels, merges, packing and conversions. The slowest of the first and the last rank
counts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.clock import Clock, Times, percent, rounds, slowest, timed
from benchmarks.gpu.exactness import refusals
from benchmarks.gpu.one_rank import Attention, OneCall, OneRank, Shape
from benchmarks.gpu.part import Bench, Found, Row
from ringcp import executor
from ringcp.kernels.base import Kernel
from ringcp.kernels.registry import KERNELS
from ringcp.merge import merge_
from ringcp.modes import Mode

TIMED_MODES: tuple[Mode, ...] = ("ring", "gather", "ulysses")
TARGET_TOKENS = 8192
# Percent of the kernel's speed, and the merge's part in forward.
BEST_MODE, RING, MERGE = 95.0, 90.0, 5.0


class Setting(NamedTuple):
    """One line of the plan: a shape, and how many kernels are timed on it, by preference."""

    shape: Shape
    num_kernels: int
    seconds: float


def settings(smoke: bool) -> list[Setting]:
    """In the order in which they are wanted."""
    if smoke:
        return [Setting(Shape(64, 2, 4, 2, 16, torch.bfloat16), 1, 0.1)]
    numbers = [(8192, 4, 9), (8192, 8, 2), (16384, 8, 1), (4096, 8, 1), (8192, 2, 1), (16384, 4, 1), (4096, 4, 1)]
    return [Setting(Shape(t, w, 32, 8, 128, torch.bfloat16), num, 6.0) for t, w, num in numbers]


def speed(bench: Bench) -> None:
    """A row for each shape, kernel and mode; then the targets."""
    clock = Clock(bench.device)
    others = "reference", "flex"  # slow, or compiled for every shape
    fit = [name for name in KERNELS if name not in others and not refusals(name, bench.device, dim=128)]
    bench.check("torch SDPA, one call", lambda: _torchs_own(bench, clock))
    reached: dict[Mode, _Mode] = {}
    for setting in settings(bench.smoke):
        for name in fit[: setting.num_kernels]:
            label = f"{name} {setting.shape.tokens} tokens x {setting.shape.world_size}"
            modes: dict[Mode, _Mode] = {}
            bench.check(f"{label}: one call", partial(_measure, bench, clock, setting, KERNELS[name], modes))
            for mode, of_mode in modes.items():
                bench.report(Row(f"{label}: {mode}", "info", "", of_mode.values(), 0.0))
            if setting == settings(bench.smoke)[0] and name == fit[0]:
                reached = dict(modes)
    if reached and not bench.smoke:
        _targets(bench, fit[0], reached)


class _Mode(NamedTuple):
    """What was measured of a mode. Shares are percent of the time of a direction."""

    one: list[Times]
    rank: list[Times]
    merge: float
    kernels_forward: float
    kernels_backward: float

    @property
    def percent(self) -> float:
        return percent([t.both for t in self.one], [t.both for t in self.rank])

    def values(self) -> dict[str, float]:
        def of(name: str) -> float:
            return percent([getattr(t, name) for t in self.one], [getattr(t, name) for t in self.rank])

        ratios = sorted(100 * a.both / b.both for a, b in zip(self.one, self.rank, strict=True))
        return {
            "% of kernel": self.percent,
            "worst round": ratios[0],
            "fwd %": of("forward"),
            "bwd %": of("backward"),
            "fwd ms": 1e3 * median(t.forward for t in self.rank),
            "bwd ms": 1e3 * median(t.backward for t in self.rank),
            "host ms": 1e3 * median(t.host for t in self.rank),
            "merge % of fwd": self.merge,
            "kernels % of fwd": self.kernels_forward,
            "kernels % of bwd": self.kernels_backward,
            "rounds": len(self.rank),
        }


def _measure(bench: Bench, clock: Clock, setting: Setting, kernel: Kernel, modes: dict[Mode, _Mode]) -> Found:
    shape = setting.shape
    one = OneCall(kernel, Attention.random(shape.share(), bench.device))
    given = Attention.random(shape, bench.device)
    ends = (0, shape.world_size - 1)
    works = {mode: [OneRank(mode, shape, rank, kernel, given) for rank in ends] for mode in TIMED_MODES}
    entrants: list[Any] = [one, *(work for of_mode in works.values() for work in of_mode)]
    for entrant in entrants:
        _warm(entrant)
    times = rounds(clock, entrants, setting.seconds, 1 if bench.smoke else 15, bench.left)
    for i, (mode, of_mode) in enumerate(works.items()):
        ranks = times[1 + i * len(ends) :][: len(ends)]
        modes[mode] = _Mode(times[0], slowest(ranks), *_shares(clock, of_mode[-1]))
    return Found(_one_call_values(times[0], shape))


def _warm(work: Any) -> None:
    if isinstance(work, OneRank):
        work.wires.fill = True
    for _ in range(2):
        work.backward(*work.forward())
    if isinstance(work, OneRank):
        work.wires.fill = False


def _one_call_values(times: list[Times], shape: Shape) -> dict[str, float]:
    forward, backward = (median(getattr(t, name) for t in times) for name in ("forward", "backward"))
    flops = shape.rank_flops()
    return {
        "fwd ms": 1e3 * forward,
        "bwd ms": 1e3 * backward,
        "fwd TFLOP/s": flops / forward / 1e12,
        "bwd TFLOP/s": 2.5 * flops / backward / 1e12,
        "TFLOP/s": 3.5 * flops / (forward + backward) / 1e12,
    }


class _Watch:
    """Marks around calls, by name."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spans: dict[str, list[tuple[Any, Any]]] = {}

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            start = self._clock.mark()
            result = function(*args, **options)
            self._spans.setdefault(name, []).append((start, self._clock.mark()))
            return result

        return watched

    def seconds(self, name: str) -> float:
        return sum(self._clock.between(*span) for span in self._spans.get(name, ()))


def _shares(clock: Clock, rank: OneRank) -> tuple[float, float, float]:
    """The merges' part in forward, the kernels' in forward and in backward, in percent; apart from the timed rounds."""
    kernel, watch = rank.kernel, _Watch(clock)
    names = [name for name in ("forward", "backward", "forward_packed", "backward_packed") if hasattr(kernel, name)]
    watched = {name: watch.around(f"kernel {name.partition('_')[0]}", getattr(kernel, name)) for name in names}
    rank.kernel = SimpleNamespace(name=kernel.name, caps=kernel.caps, **watched)  # type: ignore[assignment]
    try:
        with patch.object(executor, "merge_", watch.around("merge", merge_)):
            times = timed(clock, rank)
    finally:
        rank.kernel = kernel
    return (
        100 * watch.seconds("merge") / times.forward,
        100 * watch.seconds("kernel forward") / times.forward,
        100 * watch.seconds("kernel backward") / times.backward,
    )


class _Sdpa:
    """torch's own choice among its kernels, on the same tensors."""

    def __init__(self, given: Attention) -> None:
        self._leaves = [x.detach().requires_grad_() for x in given[:3]]
        self._dout = given.dout

    def forward(self) -> tuple[Tensor, None]:
        return F.scaled_dot_product_attention(*self._leaves, is_causal=True, enable_gqa=True), None

    def backward(self, out: Tensor, _: None) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self._leaves, self._dout)


def _torchs_own(bench: Bench, clock: Clock) -> Found:
    shape = settings(bench.smoke)[0].shape
    work = _Sdpa(Attention.random(shape.share(), bench.device))
    _warm(work)
    (times,) = rounds(clock, [work], 2.0, 1 if bench.smoke else 15, bench.left)
    return Found(_one_call_values(times, shape), f"causal, {shape.seq_len} tokens", "info")


def _targets(bench: Bench, kernel: str, reached: dict[Mode, _Mode]) -> None:
    best = max(reached, key=lambda mode: reached[mode].percent)
    ring = reached["ring"]
    for name, value, bar, met in (
        (f"best mode ({best})", reached[best].percent, f">= {BEST_MODE:g} %", reached[best].percent >= BEST_MODE),
        ("ring", ring.percent, f">= {RING:g} %", ring.percent >= RING),
        ("merge in a ring's forward", ring.merge, f"< {MERGE:g} %", ring.merge < MERGE),
    ):
        status = "ok" if met else "missed"
        detail = f"target {bar} of {kernel}, {TARGET_TOKENS} tokens a rank"
        bench.report(Row(f"target: {name}", status, detail, {"%": value}, 0.0))
