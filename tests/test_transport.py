"""Transports: what they post, in which order, and how they wait. Real messages are tested with the attention."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ringcp.executor import drive_all
from ringcp.transport import P2P, InProcess, Parcel, _Works, by_distance, warm_up


def parcel(peer, what="keys and values", tag=7):
    return Parcel(torch.zeros(4), peer, tag, what)


class Work:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait(self, *timeout):
        self.log.append((self.name, *timeout))


def _post_order(mesh):
    group, log, posted = mesh.get_group(), [], []

    def batch(ops):
        posted.extend((op.op.__name__, op.group_peer, op.tag) for op in ops)
        return [Work(log, i) for i in range(len(ops))]

    original, dist.batch_isend_irecv = dist.batch_isend_irecv, batch
    try:
        P2P(group, 2.0).post([parcel(1), parcel(0)], [parcel(1)], "forward step 1").wait()
    finally:
        dist.batch_isend_irecv = original
    return posted, log


@pytest.mark.report("1.72")
def test_sends_are_posted_before_receives_in_one_batch(worlds):
    for posted, log in worlds(2).run(_post_order):
        assert posted == [("isend", 1, 7), ("isend", 0, 7), ("irecv", 1, 7)]
        assert [entry[0] for entry in log] == [2, 1, 0], "the receive is waited for first"
        assert all(0 < entry[1].total_seconds() <= 2 for entry in log)


@pytest.mark.parametrize("num_works", [1, 3])
def test_on_cuda_the_stream_waits_alone(num_works):
    log, on_gpu = [], SimpleNamespace(is_cuda=True)
    parcels = [Parcel(on_gpu, peer, 7, "keys and values") for peer in (0, 1, 1)]
    works = [Work(log, i) for i in range(num_works)]
    _Works(SimpleNamespace(_timeout=2.0), works, parcels[:2], parcels[2:], "forward step 1").wait()
    assert log == [(i,) for i in range(num_works)], "as NCCL gives them: no timeout, since the watchdog decides"


def test_on_a_cpu_each_transfer_has_its_work():
    parcels = [parcel(0), parcel(1)]
    with pytest.raises(ValueError, match="zip"):
        _Works(SimpleNamespace(_timeout=2.0), [Work([], 0)], parcels, [], "forward step 1").wait()


def _warm(mesh):
    warm_up(mesh.get_group(), torch.device("cpu"))
    return True


def test_warm_up_is_an_operation_of_all_ranks(worlds):
    assert worlds(2).run(_warm) == [True, True]


def test_in_process_messages_match_by_sender_receiver_and_tag():
    office = InProcess()
    a, b = office.endpoint(0), office.endpoint(1)
    sent, got = torch.arange(4.0), torch.empty(4)
    first = a.post([Parcel(sent, 1, 1, "kv")], [], "step 0")
    assert not first.ready()
    other = b.post([], [Parcel(torch.empty(4), 0, 2, "kv")], "step 0")
    assert not other.ready(), "another tag"
    second = b.post([], [Parcel(got, 0, 1, "kv")], "step 0")
    assert second.ready()
    assert first.ready()
    assert torch.equal(got, sent)


def test_in_process_transfers_cannot_be_waited_for():
    pending = InProcess().endpoint(0).post([], [parcel(1)], "forward step 3")
    with pytest.raises(RuntimeError, match=r"rank 0, forward step 3: .* use drive_all"):
        pending.wait()


def test_a_message_of_another_length_is_caught():
    office = InProcess()
    office.endpoint(0).post([Parcel(torch.zeros(4), 1, 1, "kv")], [], "step 0")
    pending = office.endpoint(1).post([], [Parcel(torch.zeros(3), 0, 1, "kv")], "step 0")
    with pytest.raises(AssertionError, match="of another length"):
        pending.ready()


def test_ranks_that_wait_for_each_other_for_ever_are_named():
    office = InProcess()

    def run(rank):
        yield office.endpoint(rank).post([], [parcel(1 - rank)], f"step {rank}")

    with pytest.raises(RuntimeError, match=r"no rank can go on.*step 0.*step 1"):
        drive_all([run(0), run(1)])


@pytest.mark.parametrize("world_size", [2, 3, 64, 65, 96, 129, 200])
def test_on_nccl_no_batch_is_too_long_and_both_ends_are_in_the_same_one(world_size):
    """Of an exchange or gather among all ranks, whose steps have two messages each way for every peer."""
    peers = {r: [p for p in range(world_size) if p != r for _ in range(4)] for r in range(world_size)}
    found = {r: by_distance(peers[r], peers[r], r, world_size) for r in range(world_size)}
    for rank, batches in found.items():
        assert sum(map(len, batches)) == len(peers[rank])
        assert max(map(len, batches)) <= 256
        assert world_size > 64 or len(batches) == 1
        for i, batch in enumerate(batches):
            assert all(rank in found[peer][i] for peer in batch)
