"""What a part is given: where it runs, how long it may, and how it says what it has found.

A part runs in processes of its own, since an error inside a CUDA kernel leaves a process without a GPU.
"""

from __future__ import annotations

import math
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

Value = float | int | str
_GRACE_S = 5


class Row(NamedTuple):
    """One thing found out.

    status: "ok"; "wrong" (a result is not what it must be); "missed" (a target of speed or memory); "error" (an
        exception, its traceback is the detail); "skipped" (cannot be done here, the detail says why); "no time"; "info"
        (measured or seen, with nothing to hold it against).
    """

    name: str
    status: str
    detail: str
    values: Mapping[str, Value]
    seconds: float


class Found(NamedTuple):
    """What a check returns when nothing is wrong."""

    values: Mapping[str, Value]
    detail: str = ""
    status: str = "ok"


class Skipped(Exception):
    """Raised by a check that cannot be made here; its text says why."""


class DeviceLost(Exception):
    """The GPU no longer answers in this process."""


class Orders(NamedTuple):
    """What the process of a part is told.

    deadline, ends: of `time.monotonic`: when the part is to end by itself, and when it is ended.
    scratch: a folder that the ranks of the part share.
    """

    device: str
    smoke: bool
    rank: int
    deadline: float
    ends: float
    scratch: str


class Bench:
    """The side of a part: `check` for each thing to find out."""

    def __init__(self, orders: Orders, send: Callable[[tuple[str, Any]], None]) -> None:
        self.device = torch.device(orders.device)
        self.smoke = orders.smoke
        self.rank = orders.rank
        self.scratch = orders.scratch
        self._deadline = orders.deadline
        self._send = send

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def left(self) -> float:
        """Seconds that the part still has."""
        return self._deadline - time.monotonic()

    def check(self, name: str, function: Callable[[], Found]) -> Any:
        """Make one check and report it, whatever comes; what it found, or None.

        An `AssertionError` means a wrong result, `Skipped` that it cannot be had, anything else is an error.
        """
        if self.left() <= 0:
            self.report(Row(name, "no time", "", {}, 0.0))
            return None
        self._send(("begin", name))
        start = time.monotonic()
        found, status, detail = None, "", ""
        try:
            found = function()
            self.synchronize()
            status, detail = found.status, found.detail
        except AssertionError as error:
            status, detail = "wrong", str(error) or traceback.format_exc()
        except Skipped as error:
            status, detail = "skipped", str(error)
        except Exception:
            status, detail = "error", traceback.format_exc()
        self.report(Row(name, status, detail, found.values if found else {}, time.monotonic() - start))
        if status == "error":
            self.survive()
        return found

    def report(self, row: Row) -> None:
        # Ranks find the same; of the others only what went wrong is news.
        if self.rank == 0:
            self._send(("row", row))
        elif row.status in ("wrong", "error", "no time"):
            self._send(("row", row._replace(name=f"rank {self.rank}: {row.name}")))

    def synchronize(self) -> None:
        """Wait for the GPU, so that what fails fails in its own check."""
        if self.on_cuda:
            torch.cuda.synchronize()

    def survive(self) -> None:
        """Free what an error has left, and see whether the GPU is still there.

        Raises:
            DeviceLost: it is not; in this process nothing more can be found out.
        """
        if not self.on_cuda:
            return
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as error:
            raise DeviceLost(
                f"the GPU no longer answers after an error, and the rest was left out ({error})"
            ) from error


def serve(connection: Connection, orders: Orders, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Run one rank of a part in this process."""
    # What cuBLAS needs to be deterministic when torch is told to; read when CUDA starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Should nobody be left to end it: the signal, which has no handler, ends a process that hangs in C as well.
    signal.alarm(max(1, math.ceil(orders.ends - time.monotonic()) + _GRACE_S))
    if orders.smoke:
        torch.set_num_threads(1)
    torch.manual_seed(0)
    bench = Bench(orders, connection.send)
    try:
        if bench.on_cuda:
            torch.cuda.set_device(0)
        function(bench, *args)
        connection.send(("end", ""))
    except BaseException as error:
        text = str(error) if isinstance(error, DeviceLost) else traceback.format_exc()
        connection.send(("row", Row("the part itself", "error", text, {}, 0.0)))
        connection.send(("end", ""))
    finally:
        connection.close()


@contextmanager
def deterministic() -> Iterator[None]:
    """torch told to fail rather than to run what is not deterministic."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
