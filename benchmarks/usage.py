"""What a call takes besides time: bytes sent, memory, and when each step ran. Measured apart from the timed rounds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ringcp
from benchmarks.peak_memory import peak_memory
from ringcp.groups import GroupState
from ringcp.record import Recorder


class Usage(NamedTuple):
    """Of one call, forward and backward, on one rank. Bytes.

    sent: to other ranks.
    peak: the most that was allocated at once beside what was there before the call: on CPU all that torch's allocator
        hands out, workspaces of kernels included.
    """

    sent: float
    peak: float


class Wire(TorchDispatchMode):
    """Counts the bytes that this rank sends through `torch.distributed` in the body. It does not see into registered
    ops, such as ringcp's.

    Of a collective among P ranks it counts what the definition moves: an all-gather sends the own part to P - 1 ranks,
    an all-to-all or reduce-scatter all but the own part, taken as 1/P where no sizes are given (which are read as those
    of a group of all ranks), an all-reduce twice that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
            if factor := _factor(func._schema.name, _group_size(named)):
                given = next(value for name, value in named.items() if name.startswith(("input", "tensor")))
                if splits := named.get("input_split_sizes"):  # torch's permute sends all of it to one rank
                    factor = 1 - splits[dist.get_rank()] / sum(splits)
                self.sent += factor * _size(given)
        return func(*args, **(kwargs or {}))


def _factor(name: str, group_size: int) -> float:
    """What one rank sends, in units of its input."""
    part = (group_size - 1) / group_size
    factors = {"send": 1.0, "gather": group_size - 1.0, "alltoall": part, "reducescatter": part, "allreduce": 2 * part}
    plain = name.partition("::")[2].replace("_", "")
    return next((factor for word, factor in factors.items() if word in plain), 0.0)


def _group_size(named: dict[str, Any]) -> int:
    for value in named.values():
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value).size()
            except RuntimeError:  # another object, such as the operation of a reduction
                continue
    return named.get("group_size") or dist.get_world_size()


def _size(x: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(x) if isinstance(t, Tensor))


def usage_of(call: Callable[[], Any], device: str) -> Usage:
    """Runs a call once, and counts: bytes by `ringcp.record()`, or, where it records none, by `Wire`."""
    gc.collect()  # what is freed in the call should be the call's
    with ringcp.record() as recorder, Wire() as wire, peak_memory(device) as peak:
        call()
    return Usage(recorder.bytes_sent or wire.sent, peak.num_bytes)


Batch = list[dist.P2POp]


@contextmanager
def batches() -> Iterator[list[Batch]]:
    """Every batch of P2P that this rank posts in the body, to be posted again: alike, with buffers of its own. Of calls
    whose ranks would copy messages from each other's memory, what they post without that.
    """
    posted: list[Batch] = []
    post = dist.batch_isend_irecv

    def noted(batch: Batch) -> list[dist.Work]:
        again = [dist.P2POp(op.op, torch.zeros_like(op.tensor), op.peer, op.group, op.tag) for op in batch]
        posted.append(again)
        return post(batch)

    by_messages = mock.patch.object(GroupState, "reads", return_value=False)
    with by_messages, mock.patch.object(dist, "batch_isend_irecv", noted):
        yield posted


class Span(NamedTuple):
    """A step of a call on one rank, in seconds from the start of the call; the wait ends at `done`. moving: it has
    transfers, under way from its start on.
    """

    direction: str
    source: int | None
    start: float
    compute: float
    wait: float
    done: float
    moving: bool


def spans(recorder: Recorder) -> list[Span]:
    """A recording's steps, for a picture."""
    return [
        Span(s.direction, s.source, s.start_s, s.compute_s, s.wait_s, s.done_s, bool(s.bytes_sent or s.bytes_received))
        for s in recorder.steps
    ]
