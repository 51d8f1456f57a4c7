"""Runs one part in processes of its own, and ends it when its time is over."""

from __future__ import annotations

import multiprocessing as mp
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from benchmarks.gpu.part import Orders, Row, serve

# Of its time a part has this much for itself; the rest is for its last check to end in.
_OWN = 0.8
# A rank whose peer has died may be waiting for it: how many seconds it still gets.
_ALONE_S = 5.0
# Imported once, before the processes are forked. Nothing here may ask for CUDA: a fork could not use it any more.
PRELOAD = ("torch", "ringcp.testing")


@dataclass(frozen=True)
class Part:
    """A named part. seconds: its share of the time; it gets more where earlier parts took less."""

    name: str
    function: Callable[..., None]
    seconds: float
    args: tuple[Any, ...] = ()
    ranks: int = 1


@dataclass
class Result:
    """What came of a part. allowed: the seconds after which it was, or would have been, ended."""

    name: str
    allowed: float
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)


class _Rank:
    """The process of one rank, and the check that it is making."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self.process = process
        self.connection = connection
        self.doing = "its start"
        self.done = False


def run_part(part: Part, device: str, smoke: bool, allowed: float, show: Callable[[Row], None]) -> Result:
    """Run a part for at most `allowed` seconds. show: takes each row as it comes."""
    start = time.monotonic()
    result = Result(part.name, allowed)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))

    def add(row: Row) -> None:
        result.rows.append(row)
        show(row)

    with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
        ranks: list[_Rank] = []
        try:
            for rank in range(part.ranks):
                ours, theirs = context.Pipe(duplex=False)
                orders = Orders(device, smoke, rank, start + _OWN * allowed, start + allowed, scratch)
                process = context.Process(target=serve, args=(theirs, orders, part.function, part.args))
                process.start()
                theirs.close()
                ranks.append(_Rank(process, ours))
            _listen(ranks, start + allowed, add)
        finally:
            for each in ranks:
                each.process.kill()
                each.process.join(_ALONE_S)  # a process that hangs in the driver cannot be killed
                each.connection.close()
    result.seconds = time.monotonic() - start
    return result


def _listen(ranks: list[_Rank], until: float, add: Callable[[Row], None]) -> None:
    """Take what the ranks report until all are done, or their time is over."""
    while running := [rank for rank in ranks if not rank.done]:
        ready = wait([rank.connection for rank in running], max(0.0, until - time.monotonic()))
        if not ready:
            for i, rank in enumerate(ranks):
                if not rank.done:
                    add(Row(rank.doing, "no time", f"rank {i} was ended in it", {}, 0.0))
            return
        for rank in running:
            if rank.connection not in ready:
                continue
            try:
                kind, content = rank.connection.recv()
            except EOFError:
                rank.done = True
                rank.process.join(_ALONE_S)
                code = rank.process.exitcode
                add(Row(rank.doing, "error", f"rank {ranks.index(rank)} died in it with exit code {code}", {}, 0.0))
                until = min(until, time.monotonic() + _ALONE_S)
                continue
            if kind == "row":
                add(content)
            elif kind == "begin":
                rank.doing = content
            else:
                rank.done = True
