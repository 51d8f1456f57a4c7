"""`ringcp.record()`: what each call computed, sent and waited for; the labels for profilers; and that nothing leaks."""

import threading
import time

import pytest
import torch
from calls import attend, make_call
from torch.profiler import profile

import ringcp
from ringcp.ambient import ambience, ambient
from ringcp.peer_memory import PeerMemory
from ringcp.record import CallLog
from ringcp.testing import in_process
from ringcp.transport import P2P

COLUMNS = ["call", "direction", "step", "block of", "tiles", "sent MB", "received MB", "compute ms", "wait ms"]


class Posts:
    """What transports were handed while in the ``with`` block: (where, bytes sent, bytes received)."""

    def __enter__(self):
        self.seen, self.posts = [], {transport: transport.post for transport in (P2P, PeerMemory)}
        for transport, post in self.posts.items():
            transport.post = self.noting(post)
        return self.seen

    def noting(self, post):
        def noted(transport, sends, recvs, where):
            self.seen.append((where, *(sum(p.tensor.nbytes for p in parcels) for parcels in (sends, recvs))))
            return post(transport, sends, recvs, where)

        return noted

    def __exit__(self, *_):
        for transport, post in self.posts.items():
            transport.post = post


def record_training(mesh, mask, layout):
    call, whole, sized = make_call(mesh, 4 * mesh.size() + 1, requires_grad=True)
    call |= {"mask": mask, "layout": sized}
    if layout == "contiguous":
        sized = ringcp.Contiguous(sized.seq_len, mesh.size())
        shards = [sized.shard(x, mesh.get_local_rank(), 2).requires_grad_() for x in whole]
        call |= {**dict(zip("qkv", shards, strict=True)), "layout": sized}
    with Posts() as posts, ringcp.record() as recorder:
        attend(call)
        attend(call).sum().backward()
    recorded = [
        (f"call {s.call}, {s.direction} step {s.step}", s.bytes_sent, s.bytes_received)
        for s in recorder.steps
        if s.bytes_sent or s.bytes_received
    ]
    assert recorded == posts  # step by step, not only in total
    assert len(posts) > 0
    assert recorder.bytes_sent == sum(sent for _, sent, _ in posts) > 0
    assert recorder.bytes_received == sum(received for *_, received in posts) > 0
    for step in recorder.steps:
        assert step.compute_s > 0
        assert step.wait_s >= 0
    assert recorder.compute_s == sum(step.compute_s for step in recorder.steps)
    assert recorder.wait_s == sum(step.wait_s for step in recorder.steps)
    own = [(s.step, s.source) for s in recorder.steps if s.step == 0]
    assert own == [(0, mesh.get_local_rank())] * 3
    first, second = sorted({s.call for s in recorder.steps})
    assert second == first + 1
    assert {s.direction for s in recorder.steps if s.call == first} == {"forward"}
    assert {s.direction for s in recorder.steps if s.call == second} == {"forward", "backward"}
    return recorder.bytes_sent, recorder.bytes_received


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("mask", "layout"),
    [(ringcp.Causal(), "head_tail"), (ringcp.Full(), "head_tail"), (ringcp.Window(2), "contiguous")],
)
def test_bytes_are_those_that_the_transport_was_handed(worlds, size, mask, layout):
    totals = worlds(size).run(record_training, mask, layout)
    assert sum(sent for sent, _ in totals) == sum(received for _, received in totals)


def ring_bytes(mesh):
    """A ring of even blocks: KV goes round once a direction, and the sums of dK and dV once more and home."""
    world_size, kv_heads, rows, dims = mesh.size(), 2, 4, 16
    call, *_ = make_call(mesh, rows * world_size, requires_grad=True)
    with ringcp.record() as recorder:
        attend(call).sum().backward()
    block = 2 * kv_heads * rows * dims * 8
    sent = {way: sum(s.bytes_sent for s in recorder.steps if s.direction == way) for way in ("forward", "backward")}
    assert sent["forward"] == (world_size - 1) * block
    assert sent["backward"] == 2 * (world_size - 1) * block


@pytest.mark.report("1.66")
def test_bytes_of_a_ring_are_those_of_the_formula(worlds):
    """Keys and values keep their heads on the wire: 2 of them, whatever the number of query heads."""
    worlds(3).run(ring_bytes)
    worlds(4).run(ring_bytes)


def tabulate(mesh):
    call, *_ = make_call(mesh, 9)
    with ringcp.record() as recorder:
        attend(call)
    return recorder.table(), [(s.tiles, s.bytes_sent) for s in recorder.steps]


def test_the_table(worlds):
    for rank, (table, steps) in enumerate(worlds(2).run(tabulate)):
        head, *rows, total = table.split("\n")
        at = [head.index(column) for column in COLUMNS]
        assert at == sorted(at)
        assert len(rows) == len(steps) == 2
        assert f"rank {rank}" in rows[0]
        assert f"rank {1 - rank}" in rows[1]
        assert all("forward" in row for row in rows)
        cells = total.split()
        assert cells[0] == "total"
        assert cells[1] == str(sum(tiles for tiles, _ in steps))
        assert cells[2] == f"{sum(sent for _, sent in steps) / 1e6:.3f}"
        assert len(cells) == 6
        assert len({len(line) for line in (head, *rows, total)}) == 1


def test_an_empty_table():
    with ringcp.record() as recorder:
        pass
    assert recorder.steps == []
    assert recorder.table().split("\n")[-1].split() == ["total", "0", "0.000", "0.000", "0.000", "0.000"]


def leave_and_nest(mesh):
    call, *_ = make_call(mesh, 9, requires_grad=True)
    with ringcp.record() as outer:
        out = attend(call)
        before = len(outer.steps)
        with ringcp.record() as inner:
            attend(call)
        assert len(outer.steps) == before  # the innermost records
        assert len(inner.steps) == before
        attend(call)
    assert len(outer.steps) == 2 * before
    attend(call)
    out.sum().backward()  # off again: neither its calls nor its backward passes
    assert len(outer.steps) == 2 * before
    assert len(inner.steps) == before
    assert ambient("record") is None

    with pytest.raises(ringcp.UnsupportedError), ringcp.record() as failed:
        (attend(call), attend({**call, "mode": "rings"}))
    attend(call)
    assert len(failed.steps) == before
    assert ambient("record") is None

    out = attend(call)
    with ringcp.record() as recorder:
        out.sum().backward()
    assert {s.direction for s in recorder.steps} == {"backward"}


def test_nothing_is_recorded_after_the_block(worlds):
    worlds(2).run(leave_and_nest)


def test_off_nothing_is_kept():
    log = CallLog(1, "forward", torch.device("cpu"))
    log.step(0, 0, 1, 10, 10)
    log.mark()
    assert vars(log)["_recorder"] is None
    assert not hasattr(log, "_current")


class DeepInBackward(torch.autograd.Function):
    """Runs another backward pass from within its own, `depth` deep: from 60 on, autograd takes another thread."""

    @staticmethod
    def forward(ctx, x, depth, innermost):
        ctx.depth, ctx.innermost = depth, innermost
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth == 0:
            ctx.innermost()
        else:
            with torch.enable_grad():
                x = torch.ones(1, requires_grad=True)
                DeepInBackward.apply(x, ctx.depth - 1, ctx.innermost).sum().backward()
        return grad, None, None


def backward_elsewhere(mesh):
    call, *_ = make_call(mesh, 9, requires_grad=True)
    threads = []

    def innermost():
        threads.append(threading.get_ident())
        loss.backward()

    x = torch.ones(1, requires_grad=True)
    loss = attend(call).sum()
    with ringcp.record() as recorder:
        DeepInBackward.apply(x, 80, innermost).sum().backward()
    assert threads != [threading.get_ident()]
    assert {s.direction for s in recorder.steps} == {"backward"}
    assert recorder.bytes_sent > 0


def test_backward_on_autograds_own_threads_is_recorded(worlds):
    worlds(2).run(backward_elsewhere)


def record_in_two_threads(mesh):
    """A recorder is its thread's: what another thread does is not in it, but in that thread's own."""
    call, *_ = make_call(mesh, 9, requires_grad=True)
    seen = []

    def elsewhere():
        with ringcp.record() as recorder:
            attend(call).sum().backward()
        seen.append(recorder)

    with ringcp.record() as here:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert here.steps == []
    assert {s.direction for s in seen[0].steps} == {"forward", "backward"}


def test_each_thread_records_its_own(worlds):
    worlds(2).run(record_in_two_threads)


def test_all_ranks_of_one_process_are_recorded():
    q, k, v = (torch.randn(1, 2, 13, 8, requires_grad=True) for _ in range(3))
    with ringcp.record() as recorder:
        in_process(q, k, v, world_size=3, mask=ringcp.Full()).sum().backward()
    assert len([s for s in recorder.steps if s.direction == "forward"]) == 3 * 3
    assert len([s for s in recorder.steps if s.direction == "backward" and s.step == 0]) == 3
    assert recorder.bytes_sent == recorder.bytes_received > 0
    assert "backward" in recorder.table()


def label_steps(mesh):
    call, *_ = make_call(mesh, 9, requires_grad=True)
    attend(call).sum().backward()
    with profile() as profiler:
        attend(call).sum().backward()
    return {event.key for event in profiler.key_averages() if event.key.startswith("ringcp::")}


def test_steps_are_labelled_in_a_profile(worlds):
    for rank, labels in enumerate(worlds(2).run(label_steps)):
        peer = 1 - rank
        assert labels >= {f"ringcp::fwd step 0 <- rank {rank}", f"ringcp::fwd step 1 <- rank {peer}"}
        assert labels >= {f"ringcp::bwd step 0 <- rank {rank}", f"ringcp::bwd step 1 <- rank {peer}"}
        assert labels >= {"ringcp::fwd step 0 wait", "ringcp::bwd step 0 wait"}


def test_ambience_is_restored():
    assert ambient("test") is None
    with ambience("test", 1):
        with pytest.raises(KeyError, match="2 None"), ambience("test", 2):
            raise KeyError(f"{ambient('test')} {ambient('another')}")
        assert ambient("test") == 1
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(ambient("test")))
        thread.start()
        thread.join()
        assert elsewhere == [None]
    assert ambient("test") is None


def starts(mesh):
    call, *_ = make_call(mesh, 9, requires_grad=True)
    began = time.perf_counter()
    with ringcp.record() as recorder:
        attend(call).sum().backward()
    return [(s.start_s, s.start_s + s.compute_s + s.wait_s) for s in recorder.steps], time.perf_counter() - began


def test_steps_say_when_they_began(worlds):
    """Since the recording did: one after the other, and not longer than all of it took."""
    for steps, took in worlds(2).run(starts):
        times = [at for step in steps for at in step]
        assert times[0] > 0
        assert times == sorted(times)
        assert times[-1] < took
