"""Part (a), masks and biases that functions say: exact in a ring, the time of one call, and what does not compile.

A predicate, a `BlockMask` and ALiBi, each with kernel "flex" on a GPU: the first kernel that takes them there. The time
is held against kernel "reference" and against torch's SDPA with the mask, or the bias, written out before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import ringcp
from benchmarks.gpu.clock import Clock, Times, rounds, timed
from benchmarks.gpu.exactness import BATCH, KV_HEADS, NAMES, Q_HEADS, Tensors, graded, refusals, rounded
from benchmarks.gpu.exactness import Case as Given
from benchmarks.gpu.exactness import tensors as random_tensors
from benchmarks.gpu.part import Bench, Found, Row
from ringcp.errors import UnsupportedError
from ringcp.kernels.base import Kernel, problem_of
from ringcp.kernels.registry import KERNELS
from ringcp.testing import assert_close, in_process, reference_attention
from ringcp.trial import try_functions

RANKS = 2


def _of_types(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Causal, and by head: what a table of tokens would say."""
    return (q_idx >= kv_idx) & ((q_idx // 128 % 3 == kv_idx // 128 % 3) | (h % 2 == 0))


def _documents(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx // 300 == kv_idx // 300) & (q_idx >= kv_idx)


def _blocks(n: int, device: torch.device) -> ringcp.mask.Mask:
    from torch.nn.attention.flex_attention import create_block_mask  # not in every process of the other parts

    return ringcp.Predicate(create_block_mask(_documents, None, None, n, n, device), name="documents")


@dataclass(frozen=True)
class Case:
    """What attends, for a length and a device, and whether farther keys weigh less."""

    name: str
    mask: Callable[[int, torch.device], ringcp.mask.Mask]
    alibi: bool = False

    def slopes(self, heads: int) -> Tensor | None:
        return 0.5 ** torch.arange(1, heads + 1) if self.alibi else None


CASES = (
    Case("predicate", lambda n, device: ringcp.Predicate(_of_types) & ringcp.Causal()),
    Case("block mask", _blocks),
    Case("ALiBi", lambda n, device: ringcp.Causal(), alibi=True),
)


class Dense(NamedTuple):
    """Which pairs attend, and what is added to their scores: of all heads, written out."""

    allowed: Tensor
    bias: Tensor | None


def dense(case: Case, mask: ringcp.mask.Mask, n: int, heads: int, device: torch.device) -> Dense:
    at = torch.arange(n, device=device)
    slopes = case.slopes(heads)
    bias = None if slopes is None else -slopes.to(device)[:, None, None] * (at[:, None] - at).abs()
    return Dense(mask.dense(at, at, batch=BATCH, heads=heads), bias)


def functions(bench: Bench, kernel: str) -> None:
    """Two rows a case, and one for what comes before a call."""
    reasons = refusals(kernel, bench.device)
    if reasons:
        bench.report(Row("all", "skipped", "; ".join(reasons), {}, 0.0))
        return
    import torch._inductor.config  # seconds, and the other parts' processes import this file too

    # One process compiles: its workers would outlive a part that is ended.
    with torch._inductor.config.patch(compile_threads=1):
        for case in CASES:
            bench.check(f"{case.name}, exact", partial(exact, bench, kernel, case))
            bench.check(f"{case.name}, one call", partial(one_call, bench, kernel, case))
        bench.check("tried before a call", partial(trial, bench.device, KERNELS[kernel]))


def exact(bench: Bench, kernel: str, case: Case) -> Found:
    """Gradients through out and lse, on an odd number of tokens."""
    n = 67 if bench.smoke else 1003
    given = random_tensors(Given(case.name, lambda n: ringcp.Full()), n, torch.bfloat16, bench.device)
    mask, slopes = case.mask(n, bench.device), case.slopes(Q_HEADS)
    written = dense(case, mask, n, Q_HEADS, bench.device)
    start = time.monotonic()
    got = graded(
        given,
        lambda q, k, v: in_process(
            q, k, v, world_size=RANKS, mode="ring", mask=mask, alibi_slopes=slopes, kernel=kernel, return_lse=True
        ),  # type: ignore[arg-type,return-value]
    )
    bench.synchronize()
    seconds = time.monotonic() - start
    want = graded(given, lambda q, k, v: reference_attention(q, k, v, mask=written.allowed, alibi_slopes=slopes))
    one = graded(given, partial(rounded, seen=written.allowed, bias=written.bias))
    for name in NAMES:
        assert_close(got[name], want[name], baseline=one[name], name=name)
    error = (got["lse"].double() - want["lse"]).abs().max().item()
    assert error <= 1e-4, f"lse: error {error:.3e} is above 1e-4"
    ratios = {name: _norm(got, want, name) / _norm(one, want, name) for name in NAMES}
    worst = max(ratios, key=lambda name: ratios[name])
    return Found({"first call s": seconds}, f"error at most {ratios[worst]:.2f} x one call's ({worst})")


class _Work:
    """Forward and backward of anything, for the clock."""

    def __init__(self, given: Tensors, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self._leaves = [x.detach().requires_grad_() for x in given[:3]]
        self._dout, self._attend = given.dout, attend

    def forward(self) -> tuple[Tensor]:
        return (self._attend(*self._leaves),)

    def backward(self, out: Tensor) -> None:
        torch.autograd.grad(out, self._leaves, self._dout)


def one_call(bench: Bench, kernel: str, case: Case) -> Found:
    """All heads have keys of their own, as the efficient kernel of SDPA wants it."""
    n = 64 if bench.smoke else 8192
    clock, heads = Clock(bench.device), KV_HEADS
    given = random_tensors(Given(case.name, lambda n: ringcp.Full(), 128, 128), n, torch.bfloat16, bench.device)
    given = given._replace(q=given.q[:, :heads], dout=given.dout[:, :heads])
    mask, slopes = case.mask(n, bench.device), case.slopes(heads)
    written = dense(case, mask, n, heads, bench.device)
    attn_mask = written.allowed
    if written.bias is not None:
        attn_mask = written.bias.masked_fill(~written.allowed, -torch.inf).to(given.q.dtype).expand(BATCH, -1, -1, -1)

    def by(name: str) -> Callable[[Tensor, Tensor, Tensor], Any]:
        return partial(in_process, world_size=1, mask=mask, alibi_slopes=slopes, kernel=name)

    ways = {kernel: by(kernel), "reference": by("reference")}
    ways["SDPA, written out"] = partial(F.scaled_dot_product_attention, attn_mask=attn_mask)
    works = [_Work(given, attend) for attend in ways.values()]
    start = time.monotonic()
    for work in works:
        timed(clock, work)
    warm = time.monotonic() - start
    times = rounds(clock, works, 0.1 if bench.smoke else 2.0, 9, bench.left)
    both = dict(zip(ways, (_median(of) for of in times), strict=True))
    values: dict[str, float | int | str] = {f"{name} ms": 1e3 * seconds for name, seconds in both.items()}
    values |= {"fwd ms": 1e3 * median(t.forward for t in times[0]), "first calls s": warm}
    return Found(values, f"{n} tokens, {BATCH} x {heads} heads of 128", "info")


def trial(device: torch.device, kernel: Kernel) -> Found:
    """Seconds that a function costs before its first call and before the next one; and which ones are refused."""
    if not kernel.caps.functions:
        return Found({}, "compiles nothing", "info")
    limits = torch.arange(300, device=device)
    x = limits.new_zeros(BATCH, KV_HEADS, 1, 64, dtype=torch.bfloat16)
    problem = problem_of(x, x, x, 0.125, None, False, False, False, True)
    odd = {
        "a branch": lambda b, h, q, k: q >= k if limits[1] > 0 else q <= k,
        ".item()": lambda b, h, q, k: k <= limits[9].item(),
        "a reduction": lambda b, h, q, k: (q >= k) & (k <= limits.max()),
    }

    def seconds(mask: ringcp.mask.Mask, grad: bool = False) -> float:
        start = time.monotonic()
        try_functions(kernel, replace(problem, needs_grad=grad), mask, BATCH, KV_HEADS, len(limits), len(limits))
        return time.monotonic() - start

    mask = ringcp.Predicate(_of_types)
    values: dict[str, float | int | str] = {"first s": seconds(mask, True), "again s": seconds(mask, True)}
    for name, fn in odd.items():
        try:
            seconds(ringcp.Predicate(fn, name="odd"))
            values[name] = "compiled"
        except UnsupportedError:
            values[name] = "refused"
    assert values["a branch"] == "refused", "a function that branches on what a tensor holds was taken"
    return Found(values)


def _median(times: Sequence[Times]) -> float:
    return median(t.both for t in times)


def _norm(got: dict[str, Tensor], want: dict[str, Tensor], name: str) -> float:
    return max((got[name].double() - want[name]).norm().item(), 1e-30)
