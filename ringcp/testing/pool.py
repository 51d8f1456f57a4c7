"""A pool of gloo ranks on this machine: real processes, a real process group, no ports, nothing left behind.

    with ringcp.testing.world(4) as w:
        results = w.run(fn, *args, **kwargs)     # fn(mesh, *args, **kwargs) on each rank; results by rank

A pool keeps its ranks, so that a call costs a pickle and a pipe. Ranks are forked from a server that has imported torch
and ringcp once: the first pool of a program takes a few seconds, a further one or a `World.restart` a few tenths.
Everything crosses by value: torch's shared-memory pickling, whose file descriptors leak, is not used.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing as mp
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self, TypeVar

from ringcp.testing.rank import STOP, Options, call_message, rank_main, read_stack

_START_TIMEOUT = 120.0
_STOP_TIMEOUT = 5.0
_Error = TypeVar("_Error", bound=BaseException)


class RankError(Exception):
    """Some ranks raised, died, or did not return in time.

    ``errors`` maps each such rank to its exception. One that does not pickle arrives as a `RuntimeError` with its text;
    a rank that died or was late has a `RankLost`. The message, and a note on each exception, show the rank's traceback.
    """

    def __init__(self, errors: Mapping[int, BaseException], size: int, doing: str):
        super().__init__(errors, size, doing)
        self.errors = dict(errors)
        self.size = size
        self.doing = doing

    def __str__(self) -> str:
        reports = [f"--- rank {rank}: {_report(error)}" for rank, error in sorted(self.errors.items())]
        return "\n".join([f"{len(self.errors)} of {self.size} ranks failed in {self.doing}", *reports])


class RankLost(Exception):
    """A rank died, or was killed because it did not return in time: no exception of its own came back."""


class World:
    """A pool of `size` gloo ranks, usable in a ``with`` statement. Not for use from several threads at once.

    Args:
        size: the number of ranks.
        threads: intra-op threads of each rank (`torch.set_num_threads`).
        timeout: seconds a `run` may take; ranks that take longer are killed, with the rest of the pool.
        group_timeout: seconds that the process group lets a collective wait.
        warnings_as_errors: whether a warning inside a run is raised.
        preload: modules that the server imports beside torch and ringcp, so that the ranks need not, one by one. Only
            the first pool of a program can say, since it starts the server.

    ``alive`` says whether the ranks still run; ``failed`` whether any rank raised since they were started, after which
    the process group may hold half a collective. `restart` gives fresh ranks and a fresh group in either case.
    """

    def __init__(
        self,
        size: int,
        *,
        threads: int = 1,
        timeout: float = 60.0,
        group_timeout: float = 30.0,
        warnings_as_errors: bool = False,
        preload: Sequence[str] = (),
    ):
        if size < 1:
            raise ValueError(f"size: expected at least one rank, got {size}")
        self.size = size
        self.threads = threads
        self.timeout = timeout
        self.group_timeout = group_timeout
        self.warnings_as_errors = warnings_as_errors
        self.preload = tuple(preload)
        self.alive = False
        self.failed = False
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._options: list[Options] = []
        self.restart()

    def __repr__(self) -> str:
        return f"World({self.size}, {'alive' if self.alive else 'dead'})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        timeout: float | None = None,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs ``fn(mesh, *args, **kwargs)`` on every rank and returns the results by rank.

        Args:
            fn: a module-level function. Its `mesh` is the 1-D CPU `DeviceMesh` of all ranks, with the axis "cp".
                An argument of its own called `timeout` or `return_exceptions` goes by position.
            timeout: seconds, in place of the pool's.
            return_exceptions: put the exceptions of ranks into the list instead of raising a `RankError`.

        A rank that died or is late ends the pool, once the others have answered or the timeout is over: all ranks are
        killed, and ``alive`` turns False.

        Raises:
            RankError: some ranks raised, died or were late.
            RuntimeError: the pool is dead.
            TypeError: `fn` or an argument does not pickle.
        """
        return self._run(fn, [args] * self.size, kwargs, timeout, return_exceptions)

    def run_each(
        self,
        fn: Callable[..., Any],
        args_by_rank: Sequence[Sequence[Any]],
        /,
        *,
        timeout: float | None = None,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """As `run`, with positional arguments by rank: ``fn(mesh, *args_by_rank[rank], **kwargs)``."""
        if len(args_by_rank) != self.size:
            raise ValueError(
                f"args_by_rank: expected one sequence for each of {self.size} ranks, got {len(args_by_rank)}"
            )
        return self._run(fn, args_by_rank, kwargs, timeout, return_exceptions)

    def restart(self) -> None:
        """Ends the ranks, if there are any, and starts fresh ones with a fresh process group."""
        self.close()
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", __name__, *self.preload])  # no effect on a server that runs
        directory = tempfile.mkdtemp(prefix="ringcp-world-")
        # Registered after multiprocessing's own hook, so it runs before that one, which joins all children.
        atexit.register(self.close)
        try:
            for rank in range(self.size):
                options = Options(rank, self.size, directory, self.threads, self.group_timeout, self.warnings_as_errors)
                here, there = context.Pipe()
                process = context.Process(
                    target=rank_main, args=(there, options), name=f"ringcp rank {rank} of {self.size}"
                )
                self._options.append(options)
                process.start()
                self._ranks.append((process, here))
                there.close()
            self.alive, self.failed = True, False
            self._results("the start of the pool", _START_TIMEOUT, return_exceptions=False)
        except BaseException:
            self._kill()
            self.close()
            raise

    def close(self) -> None:
        """Ends the ranks, politely unless something failed, and removes what they left on disk. May be called again."""
        atexit.unregister(self.close)
        if self.alive and not self.failed:
            for _, connection in self._ranks:
                with contextlib.suppress(OSError):
                    connection.send_bytes(STOP)
            deadline = time.monotonic() + _STOP_TIMEOUT
            for process, _ in self._ranks:
                process.join(max(0.0, deadline - time.monotonic()))
        self._kill()
        for process, connection in self._ranks:
            connection.close()
            process.close()
        self._ranks.clear()
        if self._options:
            shutil.rmtree(self._options[0].directory, ignore_errors=True)
        self._options.clear()

    def _kill(self) -> None:
        self.alive = False
        for process, _ in self._ranks:
            process.kill()
        for process, _ in self._ranks:
            process.join()

    def _run(
        self,
        fn: Callable[..., Any],
        args_by_rank: Sequence[Sequence[Any]],
        kwargs: dict[str, Any],
        timeout: float | None,
        return_exceptions: bool,
    ) -> list[Any]:
        if not self.alive:
            raise RuntimeError(f"{self!r}: expected a living pool; call restart() first")
        name = getattr(fn, "__qualname__", repr(fn))
        try:
            if all(args is args_by_rank[0] for args in args_by_rank):
                messages = [call_message(fn, args_by_rank[0], kwargs)] * self.size
            else:
                messages = [call_message(fn, args, kwargs) for args in args_by_rank]
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"run: expected a module-level function and arguments that pickle, got {name}: {error}"
            ) from error
        try:
            for (_, connection), message in zip(self._ranks, messages, strict=True):
                with contextlib.suppress(OSError):  # a rank that died since the last run is reported below
                    connection.send_bytes(message)
            return self._results(name, self.timeout if timeout is None else timeout, return_exceptions)
        except RankError:
            raise
        except BaseException:  # an interrupt, or the time limit of a test: replies would come out of step from here on
            self._kill()
            raise

    def _results(self, doing: str, timeout: float, return_exceptions: bool) -> list[Any]:
        """One reply of every rank; kills the pool when a rank died or is late."""
        started = time.monotonic()
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        pending = dict(enumerate(self._ranks))
        while pending and (left := started + timeout - time.monotonic()) > 0:
            # The sentinel as well as the pipe: a child of the rank's own may hold the pipe open after it died.
            ready = wait([end for rank in pending.values() for end in (rank[0].sentinel, rank[1])], left)
            for rank, (process, connection) in list(pending.items()):
                if connection not in ready and process.sentinel not in ready:
                    continue
                del pending[rank]
                try:
                    if not connection.poll():  # it is dead, and this was not its last reply
                        raise EOFError
                    ok, value = _parse_reply(connection.recv_bytes())
                except (EOFError, OSError):
                    ok, value = False, self._death(rank, doing, time.monotonic() - started)
                (results if ok else errors)[rank] = value
        if pending:
            errors |= self._late(sorted(pending), doing, timeout)
        self.failed = self.failed or bool(errors)
        if any(isinstance(error, RankLost) for error in errors.values()):
            self._kill()
        if errors and not return_exceptions:
            raise RankError(errors, self.size, doing)
        return [errors[rank] if rank in errors else results[rank] for rank in range(self.size)]

    def _death(self, rank: int, doing: str, seconds: float) -> RankLost:
        process = self._ranks[rank][0]
        process.join(_STOP_TIMEOUT)
        code = process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        error = RankLost(f"rank {rank} died ({how}) after {seconds:.1f} s in {doing}")
        return _with_note(error, read_stack(self._options[rank].stack_file))

    def _late(self, ranks: list[int], doing: str, timeout: float) -> dict[int, BaseException]:
        for rank in ranks:
            with contextlib.suppress(OSError):
                os.kill(self._ranks[rank][0].pid or 0, signal.SIGUSR1)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and not all(read_stack(self._options[rank].stack_file) for rank in ranks):
            time.sleep(0.02)
        time.sleep(0.02)  # the stack is written line by line
        others = f"ranks {ranks} did not return" if len(ranks) > 1 else "all others answered"
        return {
            rank: _with_note(
                RankLost(f"rank {rank} was killed: {doing} had not returned after {timeout:g} s; {others}"),
                read_stack(self._options[rank].stack_file),
            )
            for rank in ranks
        }


world = World


def _with_note(error: _Error, text: str) -> _Error:
    if text:
        error.add_note(text.rstrip())
    return error


def _report(error: BaseException) -> str:
    notes: list[str] = getattr(error, "__notes__", [])
    if isinstance(error, RankLost):
        return "\n".join([str(error), *notes])
    return notes[-1] if notes else repr(error)  # the last note is the whole traceback


def _parse_reply(reply: bytes) -> tuple[bool, Any]:
    """(True, the result) or (False, the exception, its traceback in a note)."""
    ok, payload, summary, text = pickle.loads(reply)
    try:
        value = pickle.loads(payload)
    except Exception as error:
        if ok:
            return False, _with_note(error, "raised in the parent, when it unpickled the result")
        value = RuntimeError(summary)
    return ok, value if ok else _with_note(value, text)
