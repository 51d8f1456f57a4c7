"""Messages that are copied from the sender's memory. That results are exact is tested with the attention."""

import ctypes
import os
import threading
import time

import pytest
import torch
from test_channels import in_threads, on_pages

import ringcp
from ringcp import page, peer_memory
from ringcp.peer_memory import PeerMemory
from ringcp.transport import Parcel


def parcel(x, peer, tag=7):
    return Parcel(x, peer, tag, "keys and values")


class Done:
    """Keeps a rank in its group until the others have done what they do."""

    def __init__(self, others):
        self.barrier = threading.Barrier(others + 1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.barrier.wait(20)


def with_memory(size, fn, timeout=10.0):
    """``fn(rank, transport, page)`` of every rank, in threads."""

    def run(rank, channel):
        channel.exchange(b"", 0, 10)
        assert channel.page.reads
        return fn(rank, PeerMemory(channel.page, timeout), channel.page)

    return on_pages(size, run)


SIZES = [0, 1, 3, 1000, 300_001]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_messages_of_all_to_all(size, dtype):
    def message(sender, receiver, i):
        generator = torch.Generator().manual_seed(size * (size * i + sender) + receiver)
        return torch.randint(0, 100, (SIZES[i % len(SIZES)],), generator=generator).to(dtype)

    def run(rank, transport, _):
        peers = [peer for peer in range(size) if peer != rank]
        wrong = []
        for i in range(4 * len(SIZES)):
            got = {peer: torch.full_like(message(peer, rank, i), 101) for peer in peers}
            sends = [parcel(message(rank, peer, i), peer, i) for peer in peers]
            transport.post(sends, [parcel(x, peer, i) for peer, x in got.items()], f"step {i}").wait()
            wrong += [(i, peer) for peer in peers if not torch.equal(got[peer], message(peer, rank, i))]
        return wrong

    assert with_memory(size, run) == [[]] * size


def test_messages_match_by_tag():
    def run(rank, transport, _):
        if rank == 0:
            pending = [transport.post([parcel(torch.full((4,), tag), 1, tag)], [], "step") for tag in (1, 2, 3)]
            for each in reversed(pending):
                each.wait()
            return None
        got = {}
        for tag in (3, 1, 2):
            got[tag] = torch.zeros(4, dtype=torch.int64)
            transport.post([], [parcel(got[tag], 0, tag)], "step").wait()
        return {tag: x.tolist() for tag, x in got.items()}

    assert with_memory(2, run)[1] == {tag: [tag] * 4 for tag in (1, 2, 3)}


def test_a_message_is_not_taken_before_it_is_sent():
    def run(rank, transport, _):
        x = torch.zeros(3)
        if rank == 0:
            time.sleep(0.1)  # past what a rank waits eagerly and patiently
            transport.post([parcel(x + 5, 1)], [], "step").wait()
        else:
            transport.post([], [parcel(x, 0)], "step").wait()
        return x.tolist()

    assert with_memory(2, run) == [[0] * 3, [5] * 3]


def test_more_messages_than_entries_wait_for_their_turn():
    many = 3 * page._ENTRIES

    def run(rank, transport, _):
        if rank == 0:
            time.sleep(0.05)
            return [float(receive(transport, tag)) for tag in range(many)]
        pending = [transport.post([parcel(torch.full((1,), float(tag)), 0, tag)], [], "step") for tag in range(many)]
        for each in pending:
            each.wait()
        return None

    def receive(transport, tag):
        x = torch.zeros(1)
        transport.post([], [parcel(x, 1, tag)], "step").wait()
        return x

    assert with_memory(2, run)[0] == list(range(many))


def test_more_messages_than_entries_both_ways():
    many = 3 * page._ENTRIES

    def run(rank, transport, _):
        got = [torch.zeros(1) for _ in range(many)]
        sends = [parcel(torch.full((1,), float(tag)), 1 - rank, tag) for tag in range(many)]
        transport.post(sends, [parcel(x, 1 - rank, tag) for tag, x in enumerate(got)], "step").wait()
        return [float(x) for x in got]

    assert with_memory(2, run) == [list(range(many))] * 2


def test_more_messages_than_entries_that_nobody_takes():
    done = Done(1)

    def run(rank, transport, _):
        with done:
            if rank == 1:
                for tag in range(page._ENTRIES):
                    transport.post([parcel(torch.zeros(1), 0, tag)], [], "step")
                transport.post([parcel(torch.zeros(1), 0, tag + 1)], [], "forward step 9")

    error = with_memory(2, run, timeout=0.2)[1]
    assert isinstance(error, ringcp.PeerError)
    assert "rank 1, forward step 9: sending to rank 0: keys and values of 4 bytes did not go through" in str(error)
    assert f"it has not taken {page._ENTRIES} before it" in str(error)


@pytest.mark.parametrize("verb", ["sending to", "receiving from"])
def test_who_does_not_come_in_time_is_named(verb):
    done = Done(2)

    def run(rank, transport, _):
        with done:
            if rank == 1:
                return
            there, missed = parcel(torch.zeros(2), 2 - rank), parcel(torch.zeros(6), 1, 8)
            sends, recvs = ([there, missed], []) if verb == "sending to" else ([there], [missed])
            transport.post(sends, [parcel(torch.zeros(2), 2 - rank), *recvs], "forward step 3").wait()

    errors = with_memory(3, run, timeout=1)
    for rank in (0, 2):
        assert isinstance(errors[rank], ringcp.PeerError)
        said = f"rank {rank}, forward step 3: {verb} rank 1: keys and values of 24 bytes did not go through within 1 s"
        assert said in str(errors[rank])
        assert (page.LATE if verb == "receiving from" else "it has not taken it") in str(errors[rank])


@pytest.mark.parametrize("sender_leaves", [True, False])
def test_of_who_has_gone_nothing_is_taken(sender_leaves):
    left, done = threading.Event(), Done(1)

    def run(rank, transport, shared):
        if rank == 0:
            with done:
                if sender_leaves:
                    transport.post([parcel(torch.ones(4), 1)], [], "step")
                shared.leave()
                left.set()
            return None
        with done:
            assert left.wait(10)
            return refused(transport)

    def refused(transport):
        started = time.perf_counter()
        sends, recvs = ([], [parcel(torch.zeros(4), 0)]) if sender_leaves else ([parcel(torch.zeros(4), 0)], [])
        with pytest.raises(ringcp.PeerError, match=f"{'receiving from' if sender_leaves else 'sending to'} rank 0"):
            transport.post(sends, recvs, "step").wait()
        return time.perf_counter() - started

    seconds = with_memory(2, run)[1]
    assert isinstance(seconds, float), seconds
    assert seconds < 5


def test_a_message_of_another_length_is_refused():
    def run(rank, transport, _):
        sends, recvs = ([parcel(torch.ones(4), 1)], []) if rank == 0 else ([], [parcel(torch.zeros(3), 0)])
        transport.post(sends, recvs, "forward step 2").wait()

    error = with_memory(2, run, timeout=0.5)[1]
    assert isinstance(error, ringcp.PeerError)
    said = "rank 1, forward step 2: expected keys and values of 12 bytes from rank 0, got 16; make the same calls"
    assert said in str(error)


def test_memory_that_can_be_read_no_more(monkeypatch):
    def forbidden(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(peer_memory, "read_memory", forbidden)

    def run(rank, transport, _):
        sends, recvs = ([parcel(torch.ones(4), 1)], []) if rank == 0 else ([], [parcel(torch.zeros(4), 0)])
        transport.post(sends, recvs, "step").wait()

    error = with_memory(2, run, timeout=0.5)[1]
    assert isinstance(error, ringcp.PeerError)
    assert "Operation not permitted" in str(error)


def test_a_long_message_is_read_in_parts(monkeypatch):
    read = page._process_vm_readv()

    def at_most_100(process, here, one, there, another, flags):
        words = torch.frombuffer((ctypes.c_uint64 * 4).from_address(here), dtype=torch.int64)
        words[1] = words[3] = min(100, int(words[1]))
        return read(process, here, one, there, another, flags)

    monkeypatch.setattr(page, "_process_vm_readv", lambda: at_most_100)
    source, target = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
    page.read_memory(os.getpid(), source.data_ptr(), target.data_ptr(), 8000)
    assert torch.equal(source, target)


def test_memory_that_is_not_there():
    target = torch.zeros(4)
    with pytest.raises(OSError, match="Bad address"):
        page.read_memory(os.getpid(), 8, target.data_ptr(), 16)
    with pytest.raises(OSError, match="No such process"):
        page.read_memory(2**22 - 1, target.data_ptr(), target.data_ptr(), 16)


@pytest.mark.parametrize("cannot", ["read", "find"])
def test_one_rank_that_cannot_read_decides_for_all(cannot, monkeypatch):
    can_read = page._can_read

    def refusing(peer):
        if threading.current_thread().name == "odd":
            if cannot == "read":
                return False
            peer = peer._replace(secret=bytes(16))
        return can_read(peer)

    monkeypatch.setattr(page, "_can_read", refusing)

    def run(rank, channel):
        if rank == 1:
            threading.current_thread().name = "odd"
        assert channel.exchange(bytes([rank]), 0, 10) == [b"\0", b"\1", b"\2"]
        return channel.page is not None, channel.page.reads

    assert on_pages(3, run) == [(True, False)] * 3


def test_what_is_shown_is_held_until_the_rank_has_left():
    def run(rank, transport, shared):
        if rank == 1:
            return None
        x = torch.ones(4)
        transport.post([parcel(x, 1)], [], "step")  # its pending goes, as in an exception
        held = [shown.data_ptr() for shown in shared.shown.values()] == [x.data_ptr()]
        shared.leave()
        return held, len(shared.shown)

    assert with_memory(2, run)[0] == (True, 0)


def test_threads_of_a_rank_take_entries_of_their_own():
    def run(rank, transport, _):
        def thread(n):
            wrong = []
            for i in range(50):
                x, got = torch.full((100,), float(1000 * n + i + rank)), torch.zeros(100)
                transport.post([parcel(x, 1 - rank, n)], [parcel(got, 1 - rank, n)], "step").wait()
                wrong += [] if bool((got == 1000 * n + i + 1 - rank).all()) else [(n, i)]
            return wrong

        return in_threads(4, thread)

    assert with_memory(2, run, timeout=30.0) == [[[]] * 4] * 2


def test_a_message_has_gone_though_a_later_one_has_its_entry():
    first_done = threading.Event()

    def run(rank, transport, shared):
        if rank == 1:
            for tag in (1, 2):
                transport.post([], [parcel(torch.zeros(1), 0, tag)], "step").wait()
                assert first_done.wait(5)
            return None
        first = transport.post([parcel(torch.ones(1), 1, 1)], [], "step")
        shared.wait(lambda: [1] if any(shared.words[at] for at in shared.entries(0, 1)) else [], 5)
        second = transport.post([parcel(torch.ones(1), 1, 2)], [], "step")
        first.wait()
        first_done.set()
        second.wait()
        return len(shared.shown)

    assert with_memory(2, run) == [0, None]


def test_whoever_posts_first_waits_for_the_others_post_not_for_their_wait():
    first_done = threading.Event()

    def run(rank, transport, shared):
        if rank == 1:
            shared.wait(lambda: () if any(shared.words[at] for at in shared.entries(0, 1)) else [0], 10)
        x = torch.full((1,), float(rank))
        pending = transport.post([parcel(x, 1 - rank)], [parcel(got := x.clone(), 1 - rank)], "step")
        if rank == 1:
            assert first_done.wait(5)
        pending.wait()
        first_done.set()
        return float(got)

    assert with_memory(2, run) == [1.0, 0.0]


def test_a_rank_that_computes_takes_what_has_come_between_its_kernels():
    first_done = threading.Event()

    def run(rank, transport, shared):
        x = torch.full((1,), float(rank))
        pending = transport.post([parcel(x, 1 - rank)], [parcel(got := x.clone(), 1 - rank)], "step")
        if rank == 1:
            shared.wait(lambda: () if any(shared.words[at] for at in shared.entries(0, 1)) else [0], 10)
            pending.go_on()
            assert first_done.wait(5)
        pending.wait()
        if rank == 0:
            first_done.set()
        return float(got)

    assert with_memory(2, run) == [1.0, 0.0]


def test_threads_that_wait_at_once():
    def run(rank, transport, _):
        def thread(n):
            if rank == 1:
                time.sleep(0.2)
            x = torch.full((1,), float(rank))
            transport.post([parcel(x, 1 - rank, n)], [parcel(x.clone(), 1 - rank, n)], "step").wait()
            return n

        return in_threads(3, thread)

    assert with_memory(2, run) == [[0, 1, 2]] * 2


def test_each_of_two_receives_gets_its_own_of_two_messages_with_one_tag():
    def run(rank, transport, _):
        def receive(_):
            x = torch.zeros(300_000)
            transport.post([], [parcel(x, 1)], "step").wait()
            return int(x[0])

        if rank == 0:
            return sorted(in_threads(2, receive))
        for pending in [transport.post([parcel(torch.full((300_000,), i), 0)], [], "step") for i in (1.0, 2.0)]:
            pending.wait()
        return None

    for _ in range(5):
        assert with_memory(2, run)[0] == [1, 2]
