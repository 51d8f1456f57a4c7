"""Peers that die, raise, stay away or go another way: a `PeerError` in time on the others, and never an abort."""

import contextlib
import os
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from calls import attend, check_exact, make_call, new_mesh
from test_agreement import MISMATCHES

import ringcp
from ringcp import executor
from ringcp.kernels.sdpa_cpu import SdpaFlashCpu
from ringcp.testing.pool import RankLost

TIMEOUT_S = 2.0
LATEST_S = 20.0
EXIT_CODE = 7

VOTE = r"vote before step 0: waited for the vote of rank {peer}, which died or did not call within 2 s"
TRANSFER = (
    r"call \d+, {direction} step \d: (receiving from|sending to) rank \d: (gradients of )?keys and values of \d+ bytes"
    r" did not go through within 2 s; the peer died, or did not come"
)


class Injected(Exception):
    pass


class InjectedExit(BaseException):
    """As KeyboardInterrupt: no Exception."""


@contextlib.contextmanager
def fail_at(direction, step, when, how):
    """Call `how` before the transfers of a step are posted (when="post"), or in its first kernel (when="kernel")."""
    post, kernels = executor._post, {name: getattr(SdpaFlashCpu, name) for name in ("forward", "backward")}
    now = None

    def posting(job, log, direction_, i, *args):
        nonlocal now
        now = direction_, i
        if when == "post" and now == (direction, step):
            how()
        return post(job, log, direction_, i, *args)

    def computing(name):
        def compute(*args, **kwargs):
            if when == "kernel" and now == (direction, step):
                how()
            return kernels[name](*args, **kwargs)

        return compute

    executor._post = posting
    for name in kernels:
        setattr(SdpaFlashCpu, name, computing(name))
    try:
        yield
    finally:
        executor._post = post
        for name, kernel in kernels.items():
            setattr(SdpaFlashCpu, name, kernel)


def train(mesh, seq_len=13, timeout=TIMEOUT_S):
    call, *_ = make_call(mesh, seq_len, requires_grad=True)
    attend({**call, "timeout": timeout}).sum().backward()


def peer_error(run, mesh, pattern):
    """`run` must end in a `PeerError` like `pattern` in time, and the group be broken from then on."""
    started = time.perf_counter()
    with pytest.raises(ringcp.PeerError) as info:
        run()
    assert time.perf_counter() - started < LATEST_S
    assert re.match(f"rank {mesh.get_local_rank()}, {pattern}", str(info.value)), str(info.value)
    if mesh.size() == 2:
        named = re.search(r"(?:the vote of|receiving from|sending to) rank (\d)[:,]", str(info.value))
        assert named is not None, str(info.value)
        assert int(named[1]) == 1 - mesh.get_local_rank()
    assert_broken(mesh, str(info.value))
    return str(info.value)


def assert_broken(mesh, reason):
    started = time.perf_counter()
    with pytest.raises(ringcp.PeerError, match="was broken by an earlier failure") as info:
        train(mesh)
    assert time.perf_counter() - started < TIMEOUT_S / 2
    assert f"rank {mesh.get_local_rank()}: " in str(info.value)
    assert reason in str(info.value)


def die():
    os._exit(EXIT_CODE)


def survive(mesh, odd, place):
    check_exact(mesh, 13)
    survivors = [rank for rank in range(mesh.size()) if rank != odd]
    if mesh.get_local_rank() == odd:
        if place is None:
            die()
        with fail_at(*place, die):
            train(mesh)
    # What the dead have posted still arrives: in a ring of three, one survivor misses them only in backward.
    direction = place[0] if place and place[1] == 0 else "(forward|backward)"
    pattern = TRANSFER.format(direction=direction) if place else VOTE.format(peer=odd)
    said = peer_error(lambda: train(mesh), mesh, pattern)
    if len(survivors) > 1:
        check_exact(new_mesh(ranks=survivors, use_local_synchronization=True), 13)
    return said


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(None, id="before the vote"),
        pytest.param(("forward", 0, "post"), id="between vote and transfers"),
        pytest.param(("forward", 1, "kernel"), id="mid-ring"),
        pytest.param(("backward", 0, "post"), id="before backward"),
        pytest.param(("backward", 1, "post"), id="mid-ring backward"),
    ],
)
def test_a_peer_that_dies(worlds, size, place):
    if size == 2 and place == ("forward", 1, "kernel"):
        # The last step has no transfers left: the peer has what it needs, and misses the dead in backward.
        results = worlds(size).run(survive_until_backward, size - 1, place, return_exceptions=True)
    else:
        results = worlds(size).run(survive, size - 1, place, return_exceptions=True)
    assert isinstance(results[-1], RankLost)
    assert f"exit code {EXIT_CODE}" in str(results[-1])
    for said in results[:-1]:
        assert isinstance(said, str), said


def survive_until_backward(mesh, odd, place):
    check_exact(mesh, 13)
    if mesh.get_local_rank() == odd:
        with fail_at(*place, die):
            train(mesh)
    return peer_error(lambda: train(mesh), mesh, TRANSFER.format(direction="backward"))


def outlive(mesh, odd):
    check_exact(mesh, 13)
    if mesh.get_local_rank() == odd:
        die()
    started = time.perf_counter()
    with pytest.raises(ringcp.PeerError, match=f"waited for the vote of rank {odd}, which died"):
        train(mesh, timeout=100)
    return time.perf_counter() - started


def test_a_peer_that_has_died_is_not_waited_for(worlds):
    *survived, lost = worlds(3).run(outlive, 2, return_exceptions=True)
    assert isinstance(lost, RankLost)
    assert max(survived) < 20, survived


@contextlib.contextmanager
def breakable(mesh, **options):
    """A group of its own for the body to break. It can be destroyed and replaced by another, as the error says."""
    broken = new_mesh(**options)
    check_exact(broken, 13)
    yield broken
    dist.barrier(mesh.get_group())
    dist.destroy_process_group(broken.get_group())
    check_exact(new_mesh(**options), 13)
    check_exact(mesh, 13)


def stay_away(mesh, odd):
    with breakable(mesh) as group:
        if mesh.get_local_rank() != odd:
            peer_error(lambda: train(group), group, VOTE.format(peer=odd))


@pytest.mark.report("1.77")
@pytest.mark.parametrize("size", [2, 3])
def test_a_peer_that_never_comes_to_the_vote(worlds, size):
    worlds(size).run(stay_away, 0)
    worlds(size).run(stay_away, size - 1)


def come_late(mesh, odd):
    with breakable(mesh) as group:
        if mesh.get_local_rank() == odd:
            time.sleep(1.5 * TIMEOUT_S)
        peer_error(lambda: train(group), group, "vote before step 0: waited for the vote of rank")


def test_a_peer_that_comes_too_late_is_told_so(worlds):
    worlds(2).run(come_late, 1)
    worlds(3).run(come_late, 1)


def never_run_backward(mesh, odd):
    with breakable(mesh) as group:
        if mesh.get_local_rank() == odd:
            call, *_ = make_call(group, 13, requires_grad=True)
            attend(call)
            peer_error(lambda: train(group), group, "vote before step 0: waited for the vote of rank")
        else:
            peer_error(lambda: train(group), group, TRANSFER.format(direction="backward"))


@pytest.mark.parametrize("size", [2, 3])
def test_a_peer_that_never_runs_backward(worlds, size):
    worlds(size).run(never_run_backward, size - 1)


def fail_in_a_kernel(mesh, odd, direction, step, error):
    with breakable(mesh) as group:
        if mesh.get_local_rank() == odd:

            def fail():
                raise error("injected")

            with fail_at(direction, step, "kernel", fail), pytest.raises(error, match="injected"):
                train(group)
            assert_broken(group, "injected")
        else:
            peer_error(lambda: train(group), group, TRANSFER.format(direction="(forward|backward)"))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("direction", "step"), [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)])
def test_a_peer_that_raises_in_a_kernel(worlds, direction, step, size):
    worlds(size).run(fail_in_a_kernel, size - 1, direction, step, Injected)


@pytest.mark.parametrize("error", [InjectedExit, RuntimeError])
def test_whatever_is_raised_the_group_is_broken(worlds, error):
    worlds(2).run(fail_in_a_kernel, 0, "forward", 0, error)


def fail_without_words(mesh, error):
    with breakable(mesh) as group:
        if mesh.get_local_rank() == 0:

            def fail():
                raise error

            with fail_at("forward", 0, "kernel", fail), pytest.raises(error):
                train(group)
            assert_broken(group, error.__name__)
        else:
            peer_error(lambda: train(group), group, TRANSFER.format(direction="(forward|backward)"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_error_without_words_breaks_the_group_too(worlds, error):
    worlds(2).run(fail_without_words, error)


def disagree_in_a_context(mesh, what, odd):
    """Without a vote the ranks run into the timeout: messages of calls that differ never meet, and gloo never aborts.

    A longer message than the receiver expects would abort its process, and a shorter one leave old numbers.
    """
    with breakable(mesh) as group:
        call, _, sized = make_call(group, 13)
        call |= {"layout": sized, "agree": "context", "timeout": TIMEOUT_S}
        if mesh.get_local_rank() == odd:
            call |= MISMATCHES[what][0](call)
        return peer_error(lambda: attend(call), group, TRANSFER.format(direction="forward"))


@pytest.mark.parametrize(
    ("size", "what"), [(2, "mask"), (2, "dtype"), (2, "query heads"), (2, "kv heads"), (2, "scale"), (3, "dtype")]
)
def test_ranks_that_disagree_without_a_vote_time_out(worlds, size, what):
    pool = worlds(size)
    for said in pool.run(disagree_in_a_context, what, size - 1, return_exceptions=True):
        assert isinstance(said, str), said
    assert pool.alive
    pool.run(check_exact, 13)


def run_backward_in_another_order(mesh):
    with breakable(mesh) as group:
        outs = []
        for seq_len in (13, 23):
            call, *_ = make_call(group, seq_len, requires_grad=True)
            outs.append(attend({**call, "timeout": TIMEOUT_S}))
        order = outs if mesh.get_local_rank() == 0 else outs[::-1]
        peer_error(lambda: order[0].sum().backward(), group, TRANSFER.format(direction="backward"))


@pytest.mark.parametrize("size", [2, 3])
def test_backward_passes_in_another_order_never_mix(worlds, size):
    """Their messages have other sizes: on gloo a longer one aborts the process, a shorter one leaves old numbers."""
    worlds(size).run(run_backward_in_another_order)


def wait_for(mesh, timeout, group_timeout, words):
    with breakable(mesh, **({"timeout": group_timeout} if group_timeout else {})) as group:
        if mesh.get_local_rank() == 0:
            started = time.perf_counter()
            with pytest.raises(ringcp.PeerError, match=words):
                train(group, timeout=timeout)
            assert 0.9 < time.perf_counter() - started < LATEST_S


@pytest.mark.parametrize(
    ("timeout", "group_timeout", "words"),
    [
        (1, None, "within 1 s"),
        (1.25, None, r"within 1\.25 s"),
        (timedelta(seconds=1, milliseconds=500), None, r"within 1\.5 s"),
        (None, timedelta(seconds=1), "within the group's timeout"),
    ],
)
def test_how_long_a_peer_is_waited_for(worlds, timeout, group_timeout, words):
    worlds(2).run(wait_for, timeout, group_timeout, words)


def gathers_in_another_order(mesh, name):
    with breakable(mesh, timeout=timedelta(seconds=1)) as group:
        size = group.size()
        function = {
            "all_gather": lambda x: ringcp.all_gather(x, group, dim=0),
            "unshard": lambda x: ringcp.unshard(x, group, dim=0),
            "shard": lambda x: ringcp.shard(x, group, dim=0),
        }[name]
        leaves = [torch.zeros(2 * size, requires_grad=True) for _ in range(2)]
        losses = [function(x).sum() for x in leaves]
        order = losses if mesh.get_local_rank() == 0 else losses[::-1]
        peer_error(lambda: order[0].backward(), group, r"all-(gather|to-all): (receiving from|sending to) rank \d")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["all_gather", "unshard", "shard"])
def test_backward_of_gathers_in_another_order_never_mixes(worlds, size, name):
    """Those of two calls are of one size, and the sums of both would be of one call each on either rank."""
    worlds(size).run(gathers_in_another_order, name)
