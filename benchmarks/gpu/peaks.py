"""Part (c): the peak memory of a rank, against the formula of `benchmarks/memory.py`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.exactness import refusals
from benchmarks.gpu.one_rank import Attention, OneCall, OneRank, Shape
from benchmarks.gpu.part import Bench, Found
from benchmarks.memory import Layer
from benchmarks.peak_memory import peak_memory
from ringcp.kernels.registry import KERNELS

# A peak may be this much above the formula and what one call of the kernel takes.
BAR = 1.1
_MIB = 1 << 20


def peaks(bench: Bench) -> None:
    """Forward and backward of a ring on 2, 4 and 8 ranks."""
    kernel = next(name for name in KERNELS if not refusals(name, bench.device, dim=128))
    tokens, heads, dim = (64, (4, 2), 16) if bench.smoke else (8192, (32, 8), 128)
    for world_size in (2, 4) if bench.smoke else (2, 4, 8):
        shape = Shape(tokens, world_size, *heads, dim, torch.bfloat16)
        for direction in ("forward", "backward"):
            bench.check(
                f"ring {direction}, {tokens} tokens x {world_size}", partial(_peak, bench, kernel, shape, direction)
            )


def _peak(bench: Bench, kernel: str, shape: Shape, direction: str) -> Found:
    given = Attention.random(shape, bench.device)
    rank = OneRank("ring", shape, 1, KERNELS[kernel], given)
    call = OneCall(KERNELS[kernel], given)  # of the own block: no other one is larger
    measured, of_call = (_run(bench, work, direction) for work in (rank, call))
    layer = Layer(shape.seq_len, shape.q_heads, shape.kv_heads, shape.head_dim)
    formula = getattr(layer, f"{direction}_buffers")(shape.world_size)
    ratio = measured / (formula + of_call)
    values = {
        "MiB": measured / _MIB,
        "formula MiB": formula / _MIB,
        "one call MiB": of_call / _MIB,
        "ratio": ratio,
    }
    # Of a few rows, what is small counts too, and the ratio says nothing.
    status = "info" if bench.smoke else "ok" if ratio <= BAR else "missed"
    return Found(values, f"beside inputs; target: at most {BAR} x (formula + one call of the kernel)", status)


def _run(bench: Bench, work: Any, direction: str) -> int:
    """Bytes at most, beside the inputs."""
    if direction == "forward":
        work.forward()  # what is made once is made before
        return _allocated(bench, work.forward)
    return _allocated(bench, partial(work.backward, *work.forward()))


def _allocated(bench: Bench, function: Callable[[], Any]) -> int:
    gc.collect()
    if bench.on_cuda:
        torch.cuda.synchronize()
    with peak_memory(bench.device.type) as peak:
        function()
        if bench.on_cuda:
            torch.cuda.synchronize()
    return peak.num_bytes
