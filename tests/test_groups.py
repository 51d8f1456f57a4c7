"""Channels, call numbers and the state of groups: what is voted on when, over what, and what is kept."""

import gc
import time
import weakref
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from calls import attend, check_exact, make_call, new_mesh
from test_agreement import refused_everywhere, seq_len_of
from test_channels import in_threads
from torch.distributed.device_mesh import DeviceMesh

import ringcp
from ringcp import groups
from ringcp.channels import GlooChannel, StoreChannel
from ringcp.groups import group_of, state_of
from ringcp.testing import assert_close, reference_attention


class Counting:
    """A channel that counts its exchanges."""

    def __init__(self, channel):
        self.channel = channel
        self.count = 0

    def exchange(self, *args):
        self.count += 1
        return self.channel.exchange(*args)


def count_votes(mesh, options, requires_grad):
    call, _, sized = make_call(mesh, seq_len_of(mesh.size()), requires_grad=requires_grad)
    call |= options
    if call.get("layout") == "instance":
        call["layout"] = sized
    attend(call)
    state = state_of(group_of(mesh))
    state.channel = counting = Counting(state.channel)
    try:
        out = attend(call)
        if requires_grad:
            out.sum().backward()
    finally:
        state.channel = counting.channel
    return counting.count


@pytest.mark.parametrize(
    ("options", "votes"),
    [
        ({}, 1),
        ({"layout": "instance"}, 1),
        ({"agree": "call", "layout": "instance", "seq_len": 9}, 1),
        ({"agree": "context"}, 1),  # nothing else says how long the sequence is
        ({"agree": "context", "layout": "instance"}, 0),
        ({"agree": "context", "seq_len": 9}, 0),
    ],
)
def test_a_call_votes_unless_the_context_has(worlds, options, votes):
    assert worlds(2).run(count_votes, options, False) == [votes] * 2
    assert worlds(2).run(count_votes, options, True) == [votes] * 2  # backward does not vote


def count_bad_votes(mesh):
    call, *_ = make_call(mesh, 9)
    state = state_of(group_of(mesh))
    state.channel = counting = Counting(state.channel)
    refused_everywhere(mesh, {**call, "mode": ["ring", "auto"][mesh.get_local_rank()]})
    state.channel = counting.channel
    return counting.count - 1  # the valid call before


def test_words_are_exchanged_only_after_a_bad_vote(worlds):
    assert worlds(2).run(count_bad_votes) == [2, 2]


def wrong_length_in_a_context(mesh, known):
    """Every rank has a wrong length: each finds out by itself, before anything is posted."""
    call, _, sized = make_call(mesh, seq_len_of(mesh.size()))
    call |= {"agree": "context", **({"layout": sized} if known == "layout" else {"seq_len": sized.seq_len})}
    call |= {name: call[name][:, :, 1:] for name in "qkv"}
    error = refused_everywhere(mesh, call)
    assert isinstance(error, ringcp.LayoutError)
    rank, length = mesh.get_local_rank(), call["q"].shape[2]
    assert f"got {length} on rank {rank} instead of {length + 1}; " in str(error)
    check_exact(mesh, 9)


@pytest.mark.parametrize("known", ["layout", "seq_len"])
@pytest.mark.parametrize("size", [2, 3])
def test_without_a_vote_the_local_length_is_still_checked(worlds, size, known):
    worlds(size).run(wrong_length_in_a_context, known)


def drift(mesh, odd):
    check_exact(mesh, 9)
    state = state_of(group_of(mesh))
    if mesh.get_local_rank() == odd:
        state.next_call()
        state.next_call()
    call, *_ = make_call(mesh, 9)
    with pytest.raises(ringcp.AgreementError) as info:
        attend(call)
    assert "its call number" in str(info.value)
    for _ in range(3):
        check_exact(mesh, 9)
    return state.calls


@pytest.mark.parametrize("size", [2, 3])
def test_call_numbers_that_drifted_apart_come_together_again(worlds, size):
    for odd in (0, size - 1):
        numbers = worlds(size).run(drift, odd)
        assert len(set(numbers)) == 1


def states(mesh):
    state = state_of(group_of(mesh))
    assert state is state_of(group_of(DeviceMesh.from_group(group_of(mesh), "cpu")))
    other = new_mesh()
    assert state_of(group_of(other)) is not state
    calls = state.calls
    check_exact(other, 9)
    assert (state.calls, state_of(group_of(other)).calls) == (calls, 1)
    group = group_of(other)
    ended = [weakref.ref(group), weakref.ref(state_of(group))]
    dist.destroy_process_group(group)
    return ended


def states_end_with_their_group(mesh):
    ended = states(mesh)
    gc.collect()
    assert [ref() for ref in ended] == [None, None]


def test_state_is_kept_by_group_and_ends_with_it(worlds):
    worlds(2).run(states_end_with_their_group)


def world_of_one(mesh):
    assert state_of(group_of(mesh)).channel is None
    call, *_ = make_call(mesh, 9)
    with pytest.raises(ringcp.UnsupportedError, match="mode"):
        attend({**call, "mode": "rings"})
    check_exact(mesh, 9)


@pytest.mark.report("1.73")
def test_a_world_of_one_has_nobody_to_ask(worlds):
    worlds(1).run(world_of_one)


def vote_through_the_groups_store(mesh):
    group = group_of(mesh)
    state = state_of(group)
    assert isinstance(groups._far_channel(group, state.rank, state.world_size), GlooChannel)
    on_gpus = SimpleNamespace(_device_types=[torch.device("cuda")], get_group_store=group.get_group_store)
    before, state.channel = state.channel, groups._far_channel(on_gpus, state.rank, state.world_size)
    assert isinstance(state.channel, StoreChannel)
    try:
        call, *_ = make_call(mesh, 9)
        check_exact(mesh, 9)
        error = refused_everywhere(mesh, {**call, "scale": [1.0, 2.0][mesh.get_local_rank()]})
        assert "scale=2.0, not scale=1.0" in str(error)
        check_exact(mesh, 10)
    finally:
        state.channel = before


def test_a_group_without_a_cpu_back_end_votes_through_its_store(worlds):
    worlds(2).run(vote_through_the_groups_store)


def attend_in_threads(mesh, same):
    """Two threads on one group. Which calls meet is left to chance: they are exact, or differ and say so."""
    cases = []
    for seq_len in (13, 13 if same else 15):
        call, whole, sized = make_call(mesh, seq_len)
        expected, _ = reference_attention(*whole, mask=ringcp.Causal())
        cases.append(({**call, "layout": sized}, sized.shard(expected, mesh.get_local_rank(), 2)))
    check_exact(mesh, 13)

    def run(i):
        call, expected = cases[i]
        exact = 0
        for _ in range(20):
            try:
                out = attend(call)
            except ringcp.AgreementError:
                continue
            assert_close(out, expected)
            exact += 1
        return exact

    started = time.perf_counter()
    exact = in_threads(2, run)
    assert time.perf_counter() - started < 20
    check_exact(mesh, 13)
    return exact


@pytest.mark.parametrize("same", [True, False])
def test_two_threads_on_one_group_take_turns(worlds, same):
    for exact in worlds(2).run(attend_in_threads, same):
        assert all(isinstance(n, int) for n in exact), exact
        if same:
            assert exact == [20, 20]


def refused_in_a_context(mesh):
    """One rank refuses in a call without a vote: it says so at once, and its peers find out by the timeout."""
    mesh = new_mesh(timeout=timedelta(seconds=2))
    check_exact(mesh, 9)
    call, _, sized = make_call(mesh, 9)
    call |= {"agree": "context", "layout": sized, "timeout": 1}
    started = time.perf_counter()
    if mesh.get_local_rank() == 0:
        with pytest.raises(ringcp.UnsupportedError, match="flash9"):
            attend(call | {"kernel": "flash9"})
        assert time.perf_counter() - started < 1
    else:
        with pytest.raises(ringcp.PeerError, match=r"forward step 0: .* did not go through within 1 s"):
            attend(call)
    with pytest.raises(ringcp.PeerError, match=r"did not go through|broken by an earlier failure"):
        attend(call)
    assert time.perf_counter() - started < 20


def test_a_refusal_without_a_vote_is_not_lost(worlds):
    worlds(2).run(refused_in_a_context)
    worlds(2).run(check_exact, 9)
