"""One rank of a pool: what runs in the child process, and the messages it exchanges with `pool`.

A message to the rank is a pickled call, a reply the pickled result or exception, both by plain pickle. A pool that gets
no reply asks for the rank's stack with SIGUSR1, which faulthandler answers even while the rank waits in C.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

STOP = b""


@dataclass(frozen=True)
class Options:
    """What a rank is told when it starts."""

    rank: int
    size: int
    directory: str
    threads: int
    group_timeout: float
    warnings_as_errors: bool

    @property
    def stack_file(self) -> Path:
        """Where the rank's Python stack is written on a fatal signal, or on SIGUSR1."""
        return Path(self.directory, f"stack-{self.rank}")


def call_message(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
    """What the parent sends for ``fn(mesh, *args, **kwargs)``."""
    # The path goes first: pytest lengthens it as it collects, and the rank must find the module of `fn`.
    return pickle.dumps((sys.path, pickle.dumps((fn, tuple(args), kwargs))))


class _Rank:
    """The life of a rank: one reply when the group stands, then one a message, until it is told to stop."""

    def __init__(self, options: Options):
        self.options = options

    def serve(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError, BrokenPipeError):
            connection.send_bytes(self.reply(self.join))
            while (message := connection.recv_bytes()) != STOP:
                connection.send_bytes(self.reply(self.call, message))
        if dist.is_initialized():
            dist.destroy_process_group()

    def join(self) -> None:
        options = self.options
        torch.set_num_threads(options.threads)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(f"{options.directory}/store", options.size),
            rank=options.rank,
            world_size=options.size,
            timeout=timedelta(seconds=options.group_timeout),
        )
        self.mesh = init_device_mesh("cpu", (options.size,), mesh_dim_names=("cp",))

    def call(self, message: bytes) -> Any:
        path, payload = pickle.loads(message)
        sys.path[:] = path
        fn, args, kwargs = pickle.loads(payload)
        return fn(self.mesh, *args, **kwargs)

    def reply(self, fn: Callable[..., Any], *args: Any) -> bytes:
        """(ok, the pickled result or exception, its summary, its traceback)."""
        with warnings.catch_warnings():
            if self.options.warnings_as_errors:
                warnings.simplefilter("error")
            try:
                return pickle.dumps((True, pickle.dumps(fn(*args)), "", ""))
            except BaseException as error:  # an exit or a skip as well: the parent decides
                summary = "".join(traceback.format_exception_only(error)).strip()
                try:
                    payload = pickle.dumps(error)
                except Exception:
                    payload = b""  # does not parse, so that the parent makes do with the summary
                return pickle.dumps((False, payload, summary, _traceback(error)))


def rank_main(connection: Connection, options: Options) -> None:
    """The main function of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=exit_with_parent, daemon=True).start()
    with options.stack_file.open("w") as stack:
        faulthandler.enable(stack)
        faulthandler.register(signal.SIGUSR1, stack)
        _Rank(options).serve(connection)
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()


def exit_with_parent() -> None:
    """Ends this rank when the parent is gone, even if it was killed, and even while the rank waits in a collective."""
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _traceback(error: BaseException) -> str:
    """The traceback from the first frame that is not of this file."""
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename == __file__:
        inner = inner.tb_next
    return "".join(traceback.format_exception(type(error), error, inner or error.__traceback__))


def read_stack(path: Path) -> str:
    """What faulthandler wrote, without the thread that watches the parent and without the frames below a run."""
    text = path.read_text() if path.exists() else ""
    threads = [thread for thread in text.strip().split("\n\n") if exit_with_parent.__name__ not in thread]
    return "\n\n".join(thread.split(f'\n  File "{__file__}"')[0] for thread in threads)
