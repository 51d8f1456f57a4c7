"""The executor's loop with a transport and a kernel that only write down what happens, and when."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringcp
from ringcp.cutting import Caps
from ringcp.executor import Job, backward, drive, drive_all, forward
from ringcp.kernels.registry import KERNELS
from ringcp.lower import Plan, plan
from ringcp.schedule import Heads
from ringcp.topology import ring
from ringcp.transport import P2P, InProcess, Parcel

HEADS = Heads(4, 2)
SEQ_LEN = 24
PLANS = {
    "ring": (ringcp.HeadTail, ringcp.Causal()),
    "full": (ringcp.Contiguous, ringcp.Full()),
    "direct": (ringcp.Contiguous, ringcp.Window(7, 3)),
}
# KV heads in a group of a gather plan; other plans have none.
GATHER = {"gather": 1, "gather_window": 1}
PLANS |= {"gather": PLANS["ring"], "gather_window": PLANS["direct"]}
PLAN_WORLDS = [(kind, world_size) for kind in PLANS for world_size in (2, 4, 5)]


class Event(NamedTuple):
    """post and wait: with what was handed over; kernel: with the keys it read."""

    what: str
    sends: tuple[Parcel, ...] = ()
    recvs: tuple[Parcel, ...] = ()
    keys: Tensor | None = None


class FakeTransport:
    """Nothing is sent. What should have been received is zeros."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events

    def post(self, sends, recvs, where):
        self.events.append(posted := Event("post", tuple(sends), tuple(recvs)))
        events = self.events

        class Pending:
            def go_on(self) -> None:
                pass

            def wait(self) -> None:
                for parcel in recvs:
                    parcel.tensor.zero_()
                events.append(posted._replace(what="wait"))

        return Pending()


class FakeKernel:
    """Right shapes, all zeros."""

    name, switch = "fake", None
    caps: Caps = KERNELS["reference"].caps

    def __init__(self, events: list[Event]) -> None:
        self.events = events

    def refusals(self, problem):
        return []

    def forward(self, q, k, v, *, form, scale, softcap=None, allowed=None):
        self.events.append(Event("kernel", keys=k))
        return q.new_zeros(*q.shape[:3], v.shape[3]), q.new_zeros(q.shape[:3], dtype=torch.float32)

    def backward(self, dout, q, k, v, out, lse, dlse, *, form, scale, softcap=None, allowed=None):
        self.events.append(Event("kernel", keys=k))
        return tuple(torch.zeros_like(x) for x in (q, k, v))


def plan_of(kind: str, world_size: int, rank: int) -> Plan:
    make, mask = PLANS[kind]
    layout, gather = make(SEQ_LEN, world_size), GATHER.get(kind)
    return plan(layout, mask, ring(world_size), rank, HEADS, FakeKernel.caps, gather=gather)


def local(rows: int, dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(1, heads, rows, 8).to(dtype) for heads in (HEADS.q, HEADS.kv, HEADS.kv))


def run(kind: str, world_size: int, rank: int, direction: str, call: int = 0, fingerprint: int = 0):
    """One rank alone: the plan's steps of this direction, and what happened."""
    events: list[Event] = []
    whole = plan_of(kind, world_size, rank)
    job = Job(whole, FakeKernel(events), 1.0, FakeTransport(events), call, fingerprint)
    q, k, v = local(PLANS[kind][0](SEQ_LEN, world_size).local_len(rank))
    if direction == "forward":
        drive(forward(job, q, k, v))
        return whole.forward.steps, events
    lse = torch.zeros(q.shape[:3])
    drive(backward(job, torch.zeros_like(q), None, q, k, v, torch.zeros_like(q), lse))
    return whole.backward.steps, events


def shares(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie on common bytes, both being runs of memory up to their strides."""

    def span(x: Tensor) -> tuple[int, int]:
        last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()

    return span(a)[0] < span(b)[1] and span(b)[0] < span(a)[1]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("kind", "world_size"), PLAN_WORLDS)
def test_a_steps_calls_run_while_its_transfers_are_under_way(kind, world_size, direction):
    for rank in range(world_size):
        steps, events = run(kind, world_size, rank, direction)
        expected = []
        for step in steps:
            moves = bool(step.sends or step.recvs)
            expected += ["post"] * moves + ["kernel"] * len(step.calls) + ["wait"] * moves
        assert [event.what for event in events] == expected
        bare = [i for i, step in enumerate(steps) if (step.sends or step.recvs) and not step.calls]
        if kind in GATHER:  # all but the first keys and the last gradients
            assert bare == ([0] if direction == "forward" else [0, len(steps) - 1])
        elif kind != "direct":  # every transfer of a ring has work to hide behind
            assert not bare
        assert len(bare) < sum(bool(step.sends or step.recvs) for step in steps)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("kind", "world_size"), PLAN_WORLDS)
def test_the_next_block_comes_while_this_one_is_read(kind, world_size, direction):
    for rank in range(world_size):
        _, events = run(kind, world_size, rank, direction)
        under_way: tuple[Parcel, ...] = ()
        came: list[Parcel] = []
        read_after_coming = 0
        for event in events:
            if event.what == "post":
                under_way = event.recvs
                assert not any(shares(s.tensor, r.tensor) for s in event.sends for r in event.recvs)
            elif event.what == "wait":
                came, under_way = [p for p in event.recvs if p.what == "keys and values"], ()
            else:
                assert not any(shares(event.keys, parcel.tensor) for parcel in under_way)
                read_after_coming += any(shares(event.keys, parcel.tensor) for parcel in came)
        copied = kind in GATHER  # to where it lies beside what else comes
        assert read_after_coming > 0 or copied or not any(p.what == "keys and values" for e in events for p in e.recvs)


def test_sends_are_posted_before_receives(monkeypatch):
    """NCCL matches by order alone."""
    batches = []
    monkeypatch.setattr(dist, "P2POp", lambda op, tensor, group, group_peer, tag: (op, group_peer, tag))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda batch: batches.append(batch) or [])
    parcels = [Parcel(torch.zeros(1), peer, tag, "it") for peer, tag in ((1, 10), (2, 20), (1, 30), (3, 40))]
    P2P(None).post(parcels[:2], parcels[2:], "here")
    assert batches == [[(dist.isend, 1, 10), (dist.isend, 2, 20), (dist.irecv, 1, 30), (dist.irecv, 3, 40)]]


def tags(call: int, fingerprint: int) -> dict[tuple[int, str, str], int]:
    """The tag of each (step, direction, what) of one call, of which all messages have the same."""
    found: dict[tuple[int, str, str], set[int]] = {}
    for direction in ("forward", "backward"):
        steps, events = run("full", 5, 2, direction, call, fingerprint)
        posts = iter([event for event in events if event.what == "post"])
        for i, step in enumerate(steps):
            if step.sends or step.recvs:
                event = next(posts)
                for parcel in (*event.sends, *event.recvs):
                    found.setdefault((i, direction, parcel.what), set()).add(parcel.tag)
    assert all(len(of_one) == 1 for of_one in found.values())
    return {key: of_one.pop() for key, of_one in found.items()}


def test_tags():
    first = tags(0, 0)
    assert {what for *_, what in first} == {"keys and values", "gradients of keys and values"}
    seen: set[int] = set()
    for call, fingerprint in ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (0, 99_991), (10**9, 0), (1, 2**63 - 1)):
        these = tags(call, fingerprint)
        assert these.keys() == first.keys()
        assert len(set(these.values())) == len(these)
        assert seen.isdisjoint(these.values()), (call, fingerprint)
        assert all(2**29 <= tag < 2**30 for tag in these.values())
        seen |= set(these.values())


def test_both_ends_of_a_message_have_its_tag():
    transport = InProcess()
    runs = []
    for rank in range(4):
        rows = ringcp.HeadTail(SEQ_LEN, 4).local_len(rank)
        job = Job(plan_of("ring", 4, rank), FakeKernel([]), 1.0, transport.endpoint(rank), 3, 12_345)
        runs.append(forward(job, *local(rows)))
    drive_all(runs)
    assert transport._boxes
    assert not any(transport._boxes.values())


@pytest.mark.parametrize("large", [0, 1, -1])
@pytest.mark.parametrize("world_size", [4, 8])
@pytest.mark.report("1.8")
def test_gradients_are_summed_in_more_than_bf16(world_size, large):
    """1, then steps of 2**-9 that a bf16 sum would lose, one after the other: on the rank itself and on the way.

    `large`: how many ranks after the owner of a block is the one that adds the 1 to its dk and dv.
    """
    transport = InProcess()
    layout, small = ringcp.Contiguous(SEQ_LEN, world_size), 2.0**-9
    assert (torch.ones((), dtype=torch.bfloat16) + small).item() == 1.0
    runs = []
    for rank in range(world_size):
        q, k, v = local(layout.local_len(rank), torch.bfloat16)
        job = Job(
            plan_of("full", world_size, rank),
            Scaled(rank, (rank - large) % world_size, small),
            1.0,
            transport.endpoint(rank),
        )
        lse = torch.zeros(q.shape[:3])
        runs.append(backward(job, torch.zeros_like(q), None, q, k.fill_(rank), v, torch.zeros_like(q), lse))
    for grads in drive_all(runs):
        for grad in grads:
            assert grad.dtype == torch.float32
            assert torch.equal(grad, torch.full_like(grad, 1.0 + (world_size - 1) * small))


class Scaled(FakeKernel):
    """Gradients of `small`, but of 1 where a sum starts: dq from the rank's own block, dk and dv for block `large`.

    Blocks are filled with their numbers.
    """

    def __init__(self, own: int, large: int, small: float) -> None:
        super().__init__([])
        self.own = own
        self.large = large
        self.small = small

    def backward(self, dout, q, k, v, out, lse, dlse, *, form, scale, softcap=None, allowed=None):
        block = k.flatten()[0].item()
        dq, dkv = (1.0 if block == first else self.small for first in (self.own, self.large))
        return torch.full_like(q, dq), torch.full_like(k, dkv), torch.full_like(v, dkv)


@pytest.mark.parametrize("world_size", [3, 5])
def test_gathered_gradients_are_summed_in_the_order_of_ranks(world_size):
    """In fp32, the own part at its place: on rank 2, 1 is lost beside 1e8 unless the sum starts with its own."""
    layout, transport = ringcp.Contiguous(SEQ_LEN, world_size), InProcess()
    parts = [1e8, 1.0, -1e8, 1.0, 2.0][:world_size]
    runs = []
    for rank, value in enumerate(parts):
        q, k, v = local(layout.local_len(rank))
        whole = plan(layout, ringcp.Full(), ring(world_size), rank, HEADS, FakeKernel.caps, gather=1)
        job = Job(whole, Constant(value), 1.0, transport.endpoint(rank))
        runs.append(backward(job, torch.zeros_like(q), None, q, k, v, torch.zeros_like(q), torch.zeros(q.shape[:3])))
    in_order, own_first = (
        sum((torch.tensor(parts[r]) for r in (*head, *range(3, world_size))), torch.zeros(()))
        for head in ((0, 1, 2), (2, 0, 1))
    )
    assert in_order != own_first
    for _, dk, dv in drive_all(runs):
        assert torch.equal(dk, in_order.expand_as(dk))
        assert torch.equal(dv, in_order.expand_as(dv))


class Constant(FakeKernel):
    """Every gradient is one number."""

    def __init__(self, value: float) -> None:
        super().__init__([])
        self.value = value

    def backward(self, dout, q, k, v, out, lse, dlse, *, form, scale, softcap=None, allowed=None):
        return tuple(torch.full_like(x, self.value) for x in (q, k, v))
