"""Calls whose ranks copy messages from each other's memory: that they do, and what becomes of peers that fail."""

import gc
import os
import time
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from calls import attend, check_exact, make_call, new_mesh
from test_channels import on_pages
from test_faults import fail_at

import ringcp
from ringcp import executor, page, runs
from ringcp.groups import GroupState, group_of, state_of
from ringcp.peer_memory import PeerMemory
from ringcp.testing.pool import RankLost
from ringcp.transport import P2P


def train(mesh, **options):
    call, *_ = make_call(mesh, 13, requires_grad=True)
    attend({**call, **options}).sum().backward()


def nothing_by_gloo(mesh):
    def refused(*_):
        raise AssertionError("a message went by gloo")

    check_exact(mesh, 13)
    x = torch.ones(3)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(P2P, "post", refused)
        for mode in ("ring", "gather", "ulysses"):
            train(mesh, mode=mode)
        ringcp.all_gather(x, mesh, dim=0)
        patched.setattr(GroupState, "reads", lambda state, device: False)
        with pytest.raises(AssertionError, match="by gloo"):
            train(new_mesh())
    return True


def test_nothing_goes_by_gloo_where_memory_can_be_read(worlds):
    assert worlds(2, reads=True).run(nothing_by_gloo) == [True, True]


def backward_in_another_group(mesh):
    """Of the same name, as after the process group was destroyed and made anew."""
    group = new_mesh()
    call, *_ = make_call(group, 13, requires_grad=True)
    loss = attend(call).sum()
    state = state_of(group_of(group))
    channel, state.channel = state.channel, None
    try:
        with pytest.raises(ringcp.PeerError, match="expected the group that forward was called on"):
            loss.backward()
    finally:
        state.channel = channel
    assert not state.broken
    check_exact(group, 13)
    return True


def test_a_backward_after_its_group_is_told_so(worlds):
    assert worlds(2, reads=True).run(backward_in_another_group) == [True, True]


@pytest.mark.parametrize("reads", [True, False])
def test_the_log_says_how_messages_go(reads, monkeypatch, caplog):
    monkeypatch.setattr(page, "_can_read", lambda peer: reads)
    with caplog.at_level("DEBUG", "ringcp.page"):
        on_pages(2, lambda rank, channel: channel.exchange(b"", 0, 10))
    how = "are copied from memory to memory" if reads else "go by gloo: not all may be read"
    assert sorted(caplog.messages) == [f"rank {rank} of 2: messages on CPUs {how}" for rank in range(2)]


def backward_as_forward(mesh):
    """A call without a vote, before the ranks have met on a page, and its backward after that."""
    group = new_mesh()
    posts, ways = {transport: transport.post for transport in (P2P, PeerMemory)}, []

    def noting(transport):
        def post(*args):
            ways.append(transport.__name__)
            return posts[transport](*args)

        return post

    call, *_ = make_call(group, 13, requires_grad=True)
    with pytest.MonkeyPatch.context() as patched:
        for transport in posts:
            patched.setattr(transport, "post", noting(transport))
        out = attend({**call, "agree": "context", "seq_len": 13})
        first, ways[:] = set(ways), []
        attend(call)
        voted, ways[:] = set(ways), []
        out.sum().backward()
    return first, voted, set(ways)


def test_backward_goes_as_forward_went(worlds):
    assert worlds(2, reads=True).run(backward_as_forward) == [({"P2P"}, {"PeerMemory"}, {"P2P"})] * 2


def breaks_in_a_kernel(mesh, how):
    group = new_mesh()
    check_exact(group, 13)
    started = time.perf_counter()
    if mesh.get_local_rank() == 1:

        def fail():
            if how == "dies":
                os._exit(3)
            raise ValueError("in a kernel")

        with fail_at("forward", 0, "kernel", fail), pytest.raises(ValueError, match="in a kernel"):
            train(group, timeout=100)
        time.sleep(2)  # what it had shown is its own again
        return None
    with pytest.raises(ringcp.PeerError, match=r"ward step 0: (receiving from|sending to) rank 1: "):
        train(group, timeout=100)
    return time.perf_counter() - started


@pytest.mark.parametrize("how", ["dies", "raises"])
def test_a_peer_that_fails_after_it_has_posted_is_not_waited_for(worlds, how):
    found, other = worlds(2, reads=True).run(breaks_in_a_kernel, how, return_exceptions=True)
    assert isinstance(other, RankLost) or other is None
    assert isinstance(found, float), found
    assert found < 20


def freed_with_its_group(mesh):
    group = new_mesh()
    check_exact(group, 13)
    shared = weakref.ref(state_of(group_of(group)).page)
    dist.destroy_process_group(group.get_group())
    del group
    gc.collect()
    return shared() is None


def test_a_page_goes_with_its_group(worlds):
    assert worlds(2, reads=True).run(freed_with_its_group) == [True, True]


def fork(mesh, options):
    """A fork of a rank is told so, and does not harm the rank."""
    check_exact(mesh, 13)
    with warnings.catch_warnings(action="ignore"):
        child = os.fork()
    if child == 0:
        try:
            with pytest.raises(ringcp.PeerError, match=f"its fork {os.getpid()}; fork before"):
                train(mesh, **options)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    check_exact(mesh, 13)
    return status


@pytest.mark.parametrize("options", [{}, {"agree": "context", "seq_len": 13}], ids=["votes", "does not vote"])
def test_a_fork_of_a_rank_is_told_so(worlds, options):
    assert worlds(2, reads=True).run(fork, options) == [0, 0]


def uneven(mesh, mode, slow):
    """Two parts of heads, and ranks that are late at the end of the first."""
    layout = ringcp.HeadTail(32, mesh.size())
    q, k, v = (torch.randn(1, 8, 8, 8, requires_grad=True) for _ in range(3))
    launched, calls = executor.forward, []

    def late(*args):
        results = yield from launched(*args)
        calls.append(None)
        if len(calls) == 1 and mesh.get_local_rank() in slow:
            time.sleep(0.3)
        return results

    degree = {"ulysses_degree": 2} if mode == "usp" else {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runs, "_MANY_BYTES", 0)
        patched.setattr(executor, "forward", late)
        ringcp.attention(q, k, v, mesh=mesh, layout=layout, mode=mode, timeout=5, **degree).sum().backward()
    return len(calls)


@pytest.mark.parametrize("mode", ["usp", "ulysses"])
def test_ranks_of_uneven_pace_do_not_block_each_other(worlds, mode):
    assert worlds(4, reads=True).run(uneven, mode, (0, 3)) == [2] * 4
