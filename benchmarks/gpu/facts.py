"""What is believed of CUDA kernels from their sources, asked on the GPU: each row is a question and says the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.exactness import refusals
from benchmarks.gpu.one_rank import Attention, Shape
from benchmarks.gpu.part import Bench, Found, deterministic
from ringcp.kernels.base import Form, Kernel
from ringcp.kernels.registry import KERNELS
from ringcp.kernels.sdpa_cudnn import SdpaCudnn
from ringcp.kernels.sdpa_efficient import SdpaEfficient
from ringcp.kernels.sdpa_flash import SdpaFlash
from ringcp.merge import merge_

NAMES = ("out", "lse", "dq", "dk", "dv")


def facts(bench: Bench) -> None:
    """Of each kernel that runs here, but the reference and what would be compiled; and of the ops themselves."""
    for name in KERNELS:
        if name in ("reference", "flex") or refusals(name, bench.device):
            continue
        kernel = KERNELS[name]
        with deterministic():
            if not refusals(name, bench.device):
                bench.check(f"{name}: some heads alone, bits", partial(_heads_alone, bench, kernel))
                bench.check(f"{name}: some rows alone, bits", partial(_rows_alone, bench, kernel))
        bench.check(f"{name}: +inf in backward", partial(_dead_rows, bench, kernel, torch.inf))
        bench.check(f"{name}: -inf in backward", partial(_dead_rows, bench, kernel, -torch.inf))
    for name, convention in CONVENTIONS.items():
        if not refusals(name, bench.device):
            bench.check(f"{name}: {convention.__doc__}", partial(convention, KERNELS[name], bench.device))
    bench.check("merge of one block", partial(_merge, bench))


def _given(bench: Bench, tokens: int) -> Attention:
    return Attention.random(Shape(tokens, 1, 8, 4, 64, torch.bfloat16), bench.device)


def _run(kernel: Kernel, given: Attention, form: Form) -> dict[str, Tensor]:
    q, k, v, dout = given
    scale = q.shape[-1] ** -0.5
    out, lse = kernel.forward(q, k, v, form=form, scale=scale)
    grads = kernel.backward(dout, q, k, v, out, lse, None, form=form, scale=scale)
    return dict(zip(NAMES, (out, lse, *grads), strict=True))


def _lengths(bench: Bench) -> tuple[int, ...]:
    return (67, 128) if bench.smoke else (1003, 1024, 4096)


def _heads_alone(bench: Bench, kernel: Kernel) -> Found:
    """Ulysses promises the bits of one process if this holds."""
    other: dict[str, str] = {}
    for tokens in _lengths(bench):
        for form in (Form(), Form(lo=0)):
            given = _given(bench, tokens)
            every = _run(kernel, given, form)
            half = [x[:, x.shape[1] // 2 :] for x in given]
            alone = _run(kernel, Attention(*half), form)
            for name, x in alone.items():
                if not torch.equal(x, every[name][:, -x.shape[1] :]):
                    other[name] = f"{name} at {tokens}"
    return Found({}, f"other bits: {', '.join(other.values())}" if other else "the same bits", "info")


def _rows_alone(bench: Bench, kernel: Kernel) -> Found:
    """Gather promises the bits of one process if this holds."""
    other: dict[str, str] = {}
    for tokens in _lengths(bench):
        given = _given(bench, tokens)
        every = _run(kernel, given, Form())
        rows = slice(tokens // 4, tokens // 2)
        alone = _run(kernel, given._replace(q=given.q[:, :, rows], dout=given.dout[:, :, rows]), Form())
        for name in ("out", "lse", "dq"):
            if not torch.equal(alone[name], every[name][:, :, rows]):
                other[name] = f"{name} at {tokens}"
    return Found({}, f"other bits: {', '.join(other.values())}" if other else "the same bits", "info")


def _dead_rows(bench: Bench, kernel: Kernel, lse_of_dead: float) -> Found:
    """+inf, as ringcp passes it, must give exact zeros in dq; -inf is expected to give NaN."""
    q, k, v, dout = _given(bench, 256)
    scale = q.shape[-1] ** -0.5
    out, lse = kernel.forward(q, k, v, form=Form(), scale=scale)
    dead = slice(64, 128)
    lse = lse.clone()
    lse[:, :, dead] = lse_of_dead
    dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, None, form=Form(), scale=scale)
    finite = all(bool(x.isfinite().all()) for x in (dq, dk, dv))
    zero = _zero(dq[:, :, dead])
    said = f"dq of dead rows {zero}, gradients {'finite' if finite else 'not finite'}"
    assert lse_of_dead < 0 or (zero == "zero" and finite), said
    return Found({}, said, "info" if lse_of_dead < 0 else "ok")


def _lse_of_blind_rows(kernel: SdpaFlash, device: torch.device) -> Found:
    """lse of rows that see nothing"""
    q, k, v = torch.randn(3, 1, 96, 2, 64, device=device, dtype=torch.bfloat16)
    k, v = k[:, :32].contiguous(), v[:, :32].contiguous()
    out, lse, *_ = kernel.forward_op(q, k, v, None, None, 96, 32, 0.0, True, False, scale=0.125)
    # Causality counts from the last row: the first 64 rows see no key.
    return Found({}, f"lse {sorted(set(lse[0, :, :64].flatten().tolist()))}, out {_zero(out[:, :64])}", "info")


def _lse_shape(kernel: SdpaCudnn | SdpaEfficient, device: torch.device) -> Found:
    """shape of the lse of 67 rows"""
    q = torch.randn(1, 2, 67, 64, device=device, dtype=torch.bfloat16)
    _, lse, *_ = kernel.forward_op(q, q, q, None, True, 0.0, False, scale=0.125)
    return Found({}, f"{tuple(lse.shape)} {lse.dtype}", "info")


def _zero(x: Tensor) -> str:
    return "not zero" if x.any().item() else "zero"


CONVENTIONS: Mapping[str, Callable[[Any, torch.device], Found]] = {
    "sdpa_flash": _lse_of_blind_rows,
    "sdpa_cudnn": _lse_shape,
    "sdpa_efficient": _lse_shape,
}


def _merge(bench: Bench) -> Found:
    """The time of one merge of all rows of a rank, and the bytes that it moves at least."""
    tokens = 64 if bench.smoke else 8192
    clock = Clock(bench.device)
    block = torch.randn(1, tokens, 32, 128, device=bench.device, dtype=torch.bfloat16).transpose(1, 2)
    out, lse, block_lse = block.float(), *torch.randn(2, 1, 32, tokens, device=bench.device)
    seconds = []
    for _ in range(2 if bench.smoke else 12):
        clock.settle()
        start = clock.mark()
        merge_(out, lse, block, block_lse)
        seconds.append(clock.between(start, clock.mark()))
    moved = block.numel() * (2 + 4 + 4) + lse.numel() * 12
    best = median(seconds[1:])
    return Found({"ms": 1e3 * best, "GB/s": moved / best / 1e9}, f"{tokens} tokens, 32 heads of 128", "info")
