"""Fixtures of the suite. Hypothesis is deterministic, so that a red run can be repeated."""

import signal
from collections.abc import Iterator
from typing import Protocol

import hypothesis
import pytest
import torch
from calls import messages_by_gloo, readable

from benchmarks.parity.reports import reports
from ringcp.testing.pool import World

MAX_LIVE_POOLS = 3

hypothesis.settings.register_profile("ringcp", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ringcp")


class Worlds(Protocol):
    """The type of the fixture `worlds`."""

    def __call__(self, size: int, *, threads: int = 1, reads: bool | None = None) -> World: ...


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """``worlds(n)``: a pool of n ranks that outlives the test. Warnings are errors in its ranks.

    A pool in which a rank died or raised is restarted before it is handed out again, so no test sees a process group
    that another one broke. Within one test it goes on after an exception, as a program would. An error that every rank
    is to raise is cheapest caught on the ranks, with `pytest.raises` in the function that is run: no restart follows.

    reads: whether ranks copy messages from each other's memory; else gloo carries all of them. By default, so that both
    are tested, ranks of an even number do, and others do not.
    """
    pools: dict[tuple[int, int, bool], World] = {}

    def get(size: int, *, threads: int = 1, reads: bool | None = None) -> World:
        key = size, threads, size % 2 == 0 if reads is None else reads
        pool = pools.pop(key, None)
        fresh = pool is None or pool.failed or not pool.alive
        if pool is None:
            while len(pools) >= MAX_LIVE_POOLS:
                pools.pop(next(iter(pools))).close()  # the one that was used longest ago
            pool = World(
                size, threads=threads, warnings_as_errors=True, preload=("pytest", "hypothesis", "torch._dynamo")
            )
        elif fresh:
            pool.restart()
        if fresh:
            pool.run(readable if key[-1] else messages_by_gloo)
        pools[key] = pool
        return pool

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A shell's background job ignores SIGINT, and so would all that a test starts and interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One intra-op thread in this process, as the ranks of a pool have."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Files of `make matrix`, so that the core suite stays under ten minutes.
MATRIX = (
    "test_modes_",
    "test_support",
    "test_gather",
    "test_predicate",
    "test_flex",
    "test_bench_suite",
    "test_gpu_check",
    "test_parity",
    "test_reports",
    "test_training_benchmark",
)


REPORTS = {report.id for report in reports()}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name.startswith(MATRIX):
            item.add_marker(pytest.mark.matrix)
        for mark in item.iter_markers("report"):
            (number,) = mark.args
            if number not in REPORTS:
                raise pytest.UsageError(
                    f"{item.nodeid}: expected a report of benchmarks/parity/reports.csv, got {number!r}"
                )
            item.user_properties.append(("report raises" if mark.kwargs.get("raises") else "report", number))
