"""Votes through a store, and on a page that the ranks of a node share."""

import gc
import os
import struct
import threading
import time

import pytest
import torch.distributed as dist
from calls import check_exact, new_mesh

import ringcp
from ringcp import board, page
from ringcp.agreement import Told, agree
from ringcp.board import NodeChannel
from ringcp.channels import StoreChannel
from ringcp.groups import GroupState, group_of, state_of
from ringcp.testing.pool import RankLost


def in_threads(size, fn):
    """``fn(rank)`` of every rank, each in a thread; results or exceptions by rank."""
    results = [None] * size

    def run(rank):
        try:
            results[rank] = fn(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def make_store(kind, tmp_path):
    return dist.HashStore() if kind == "hash" else dist.FileStore(str(tmp_path / "store"), -1)


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_messages_through_a_store_and_the_old_ones_deleted(kind, tmp_path):
    store = make_store(kind, tmp_path)

    def exchange(rank):
        channel = StoreChannel(store, rank, 3)
        return [channel.exchange(bytes([rank, i]), 0, 10) for i in range(8)]

    expected = [[bytes([rank, i]) for rank in range(3)] for i in range(8)]
    assert in_threads(3, exchange) == [expected] * 3
    kept = store.num_keys() - (kind == "file")  # a FileStore keeps a key of its own
    assert kept <= 3 + 2 * 3  # the count of lives of each rank, and two rounds
    assert all(store.check([f"ringcp/1/8/{rank}"]) and not store.check([f"ringcp/1/6/{rank}"]) for rank in range(3))


def test_votes_of_an_earlier_group_in_the_same_store_are_not_read():
    store = dist.HashStore()

    def exchange(rank):
        said = []
        for life in range(3):
            channel = StoreChannel(store, rank, 2)
            said.append(channel.exchange(bytes([10 * life + rank]), 0, 10))
        return said

    assert in_threads(2, exchange) == [[[b"\0", b"\1"], [b"\n", b"\x0b"], [b"\x14", b"\x15"]]] * 2


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_ranks_missing_in_a_store_are_named(kind, tmp_path):
    store = make_store(kind, tmp_path)

    def exchange(rank):
        if rank in (1, 3):
            return None
        return StoreChannel(store, rank, 4).exchange(bytes(4), 0, 0.2)

    errors = in_threads(4, exchange)
    for rank in (0, 2):
        assert isinstance(errors[rank], ringcp.PeerError)
        assert f"rank {rank}, vote before step 0: waited for the vote of rank 1, 3, " in str(errors[rank])
        assert "within 0.2 s" in str(errors[rank])


def test_votes_through_a_store():
    store = dist.HashStore()

    def vote(rank):
        state = GroupState(rank, 3, StoreChannel(store, rank, 3), 3)
        said = []
        for words in (["a=1"] * 3, ["a=1", "a=2", "a=1"], ["a=1"] * 3, ["a=1", None, "a=1"], ["a=1"] * 3):
            call = state.next_call()
            refusal = ringcp.ArgumentError("a: got b") if words[rank] is None else None
            try:
                said.append(
                    agree(
                        state,
                        call,
                        words[rank] or "",
                        Told(10 + rank, 20 - rank, 30 + rank, rank == 1, *((5, 6) if rank == 1 else ())),
                        refusal,
                        10,
                    )
                )
            except ringcp.RingcpError as error:
                said.append(f"{type(error).__name__}: {error}")
        return said

    told = [(10, 20, 30, False, -1, -1), (11, 19, 31, True, 5, 6), (12, 18, 32, False, -1, -1)]
    for rank, said in enumerate(in_threads(3, vote)):
        odd = f"AgreementError: rank {rank}: rank 1 made a different call than rank 0: a=2, not a=1. Nothing was sent."
        refused = f"AgreementError: rank {rank}: rank 1 refused its arguments (a: got b). Nothing was sent."
        assert said == [told, odd, told, "ArgumentError: a: got b" if rank == 1 else refused, told]


def on_pages(size, fn):
    """``fn(rank, channel)`` of every rank, in threads that meet through a store."""
    store = dist.HashStore()

    def run(rank):
        return fn(rank, NodeChannel(StoreChannel(store, rank, size), rank, size, lambda: 20.0))

    return in_threads(size, run)


PLACE = page._PLACE


def pages():
    return [name for name in os.listdir(PLACE) if name.startswith("ringcp-")]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_messages_on_a_page(size):
    before = pages()
    lengths = [0, 1, 72, board._ROOM, board._ROOM + 1, 5000, 8]  # the longer ones go through the store

    def exchange(rank, channel):
        said = [channel.exchange(bytes([rank]) * length, i, 10) for i, length in enumerate(lengths)]
        assert channel._board is not None
        return said

    expected = [[bytes([rank]) * length for rank in range(size)] for length in lengths]
    assert on_pages(size, exchange) == [expected] * size
    assert pages() == before  # no file stays


def test_thousands_of_rounds_in_step():
    def exchange(rank, channel):
        for i in range(3000):
            assert channel.exchange(struct.pack("2q", rank, i), 0, 10) == [struct.pack("2q", r, i) for r in range(3)]
            if i % 500 == rank:
                time.sleep(0.05)  # past what a rank waits eagerly and patiently
        return "done"

    assert on_pages(3, exchange) == ["done"] * 3


@pytest.mark.parametrize("cannot", ["make", "fill", "open", "watch", "see"])
def test_ranks_that_share_no_page_use_the_other_channel(cannot, monkeypatch):
    """All of them, if one cannot."""
    opened, introduced = page._opened, page._introduction

    def open_page(name, rank, processes, own_timeout):
        if cannot == "watch":
            processes = [process if i == 0 else 2**22 - 1 for i, process in enumerate(processes)]
        return None if cannot == "open" and rank == 1 else opened(name, rank, processes, own_timeout)

    names = iter(range(100))

    def introduce(secret):
        process, namespace, *rest = page._MEETING.unpack(introduced(secret))
        return page._MEETING.pack(process, next(names) if cannot == "see" else namespace, *rest)

    monkeypatch.setattr(page, "_opened", open_page)
    monkeypatch.setattr(page, "_introduction", introduce)
    if cannot == "make":
        monkeypatch.setattr(page, "_PLACE", "/nowhere")
    if cannot == "fill":

        def full(world_size):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(page, "_page_size", full)

    def exchange(rank, channel):
        said = [channel.exchange(bytes([rank, i]), 0, 10) for i in range(3)]
        assert channel._board is None
        return said

    before = pages()
    assert on_pages(3, exchange) == [[[bytes([rank, i]) for rank in range(3)] for i in range(3)]] * 3
    assert pages() == before


def test_what_is_half_written_is_not_read():
    def exchange(rank, channel):
        started = time.perf_counter()
        channel.exchange(bytes([rank]), 0, 10)
        mine, memory = channel._board, channel.page.memory
        if rank == 0:
            mine._round += 1
            head, start = (mine._round, 7, 5), mine._slot(0)
            half = board._HEADER.pack(*head, board._checksum(*head, b"whole")) + b"whol_"
            memory[start : start + len(half)] = half
            time.sleep(0.2)
            memory[start + len(half) - 1] = ord("e")
            return None
        assert channel.exchange(b"other", 7, 10) == [b"whole", b"other"]
        return time.perf_counter() - started

    assert on_pages(2, exchange)[1] > 0.15


def test_ranks_missing_on_a_page_are_named():
    def exchange(rank, channel):
        channel.exchange(b"x", 0, 10)
        if rank == 1:
            time.sleep(1)  # it stays in the group
            return None
        return channel.exchange(b"y", 0, 0.2)

    errors = on_pages(3, exchange)
    for rank in (0, 2):
        assert isinstance(errors[rank], ringcp.PeerError)
        assert f"rank {rank}, vote before step 0: waited for the vote of rank 1, which " in str(errors[rank])
        assert "within 0.2 s" in str(errors[rank])


def leaves(rank, channel):
    """Rank 1 says one thing more than rank 0 has heard, and goes."""
    channel.exchange(b"x", 0, 10)
    if rank == 1:
        channel._board._round += 1
        channel._board._write(b"y", 0)
        return None
    time.sleep(0.5)
    assert channel.exchange(b"y", 0, 10) == [b"y", b"y"]
    started = time.perf_counter()
    with pytest.raises(ringcp.PeerError, match=r"vote of rank 1, .*it failed, has ended, or has destroyed"):
        channel.exchange(b"z", 0, 10)
    return time.perf_counter() - started


def fails(rank, channel):
    """Rank 1 waits in vain for rank 0, which comes late, and must not count on it."""
    channel.exchange(b"x", 0, 10)
    if rank == 1:
        with pytest.raises(ringcp.PeerError, match="vote of rank 0"):
            channel.exchange(b"y", 0, 0.1)
        channel.leave()
        time.sleep(1)  # its channel is there
        return None
    time.sleep(0.5)
    started = time.perf_counter()
    with pytest.raises(ringcp.PeerError, match=r"vote of rank 1, .*it failed, has ended, or has destroyed"):
        channel.exchange(b"y", 0, 10)
    return time.perf_counter() - started


def dies_of_three(mesh):
    """What the dead has voted is heard, and the late one is waited for without a busy loop."""
    state = state_of(group_of(mesh))
    check_exact(mesh, 13)
    rank, channel = mesh.get_local_rank(), state.channel
    if rank == 2:
        channel._board._round += 1
        channel._board._write(b"last", 0)
        os._exit(0)
    if rank == 1:
        time.sleep(1)
    before = time.process_time()
    said = channel.exchange(b"here", 0, 30)
    return said, time.process_time() - before


def test_a_rank_that_votes_and_dies(worlds):
    *found, lost = worlds(3).run(dies_of_three, return_exceptions=True)
    assert isinstance(lost, RankLost)
    for said, seconds in found:
        assert said == [b"here", b"here", b"last"]
        assert seconds < 0.5


@pytest.mark.parametrize("how", [leaves, fails])
def test_a_rank_that_has_gone_is_named_at_once(how):
    seconds = on_pages(2, how)[0]
    assert isinstance(seconds, float), seconds
    assert seconds < 5


def test_a_rank_in_another_exchange_is_named():
    def exchange(rank, channel):
        channel.exchange(b"x", 0, 10)
        return channel.exchange(b"y", rank, 10)

    for rank, error in enumerate(on_pages(2, exchange)):
        assert isinstance(error, ringcp.PeerError)
        said = f"rank {rank}: expected rank {1 - rank} in the same exchange, of tag {rank}, got it in one of tag"
        assert f"{said} {1 - rank}; make the same calls" in str(error)


def votes_on_a_page(mesh):
    group = new_mesh()
    check_exact(group, 13)
    state = state_of(group_of(group))
    assert isinstance(state.channel, NodeChannel)
    assert state.channel._board is not None
    watches = list(state.page._watches.values())
    del state
    dist.destroy_process_group(group_of(group))
    del group
    gc.collect()
    for watch in watches:  # nothing of a destroyed group stays open
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(watch)


def test_ranks_of_one_node_vote_on_a_page(worlds):
    worlds(2).run(votes_on_a_page)
    worlds(3).run(votes_on_a_page)
