"""The one loop: runs a plan's steps on one rank, forward and backward.

In each step the next step's transfers are posted, this step's calls are computed and merged, and then the transfers are
waited for. A run is a generator that yields where it waits: `drive` runs one rank over a transport, `drive_all` runs
all ranks in one process in turn.

Shapes: q (B, Hq, S, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv), out (B, Hq, S, Dv), lse (B, Hq, S), with the local S.

Memory of a rank beside inputs and results, in elements (Nk rows in the largest block, R = B * Hkv * (D + Dv) a row):
forward 2 Nk R for keys and values in the inputs' dtype, whatever the number of ranks, and B Hq S (Dv + 1) in the
accumulator's dtype for out and lse; backward 2 Nk R for keys and values, 2 Nk R for travelling sums and Nk R for the
own dK/dV in the accumulator's dtype, and B Hq S D for dq. A direct plan has one more block in which rows are packed.

A gather plan holds Ng rows (all that the rank needs, at most the whole sequence) of the g KV heads of a group, with
G = B * g * (D + Dv) a row: forward (Ng + Nin + Nout) G, for the block in hand, the Nin rows of it that come and the
Nout own rows that go, where those that go to several ranks count once; backward the same again and (Ng + Nin + Nback) G
in the accumulator's dtype, for the sum over the block, its parts that go and the Nback rows that come, one for each row
and rank that has needed it, beside N R for the N own rows and dq. With a full mask Nback = Nin = Ng - N and Nout = N.

A mask that functions say costs a bool for each row and key of one call, for each head and batch row if they differ,
unless "flex" compiles it in; the bias of ALiBi, and of an attn_mask of rows, is made for some rows at a time, but in
"reference". Of an attn_mask of keys each rank holds that of all keys, of one of rows in an exchange the rows of its
ring rank.
Calls that share a launch are packed: their rows of q, k and v once more, in backward also of dout, out and lse.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ringcp import packing
from ringcp.buffers import Blocks, Rows, Sums, part
from ringcp.gathered import GatheredBlocks, GatheredSums
from ringcp.kernels.base import Kernel
from ringcp.lower import Call, Launch, Plan, PlanStep
from ringcp.merge import merge_
from ringcp.record import CallLog, label
from ringcp.schedule import Message
from ringcp.steps import Kind, Step, owner_words
from ringcp.transport import Delivery, Parcel, Pending, Transport
from ringcp.written import Written, WrittenStep

Driven = Generator[Pending, None, Any]


class _Stores(NamedTuple):
    """What holds the blocks of a plan, and the sums over them."""

    blocks: type[Blocks | GatheredBlocks] = Blocks
    sums: type[Sums | GatheredSums] = Sums


_PASSED = _Stores()
_STORES: Mapping[Kind, _Stores] = MappingProxyType(
    {"local": _PASSED, "ring": _PASSED, "direct": _PASSED, "gather": _Stores(GatheredBlocks, GatheredSums)}
)

_WORDS = {"kv": "keys and values", "dkv": "gradients of keys and values"}


class Job(NamedTuple):
    """One call on one rank: what is the same in forward and backward.

    call: its number in the group. fingerprint: a hash of all on which the ranks must agree. written: what the plan does
    not say of pairs, if there is any.
    """

    plan: Plan
    kernel: Kernel
    scale: float
    transport: Transport
    call: int = 0
    fingerprint: int = 0
    softcap: float | None = None
    written: Written | None = None


def drive(run: Driven) -> Any:
    """Run one rank, waiting for its transfers."""
    try:
        while True:
            next(run).wait()
    except StopIteration as stop:
        return stop.value


def drive_all(runs: Sequence[Driven]) -> list[Any]:
    """Run all ranks of one process in turn: each goes on when its messages have come.

    Raises:
        RuntimeError: if no rank can go on.
    """
    results: list[Any] = [None] * len(runs)
    waiting: dict[int, Delivery | None] = dict.fromkeys(range(len(runs)))
    while waiting:
        progress = False
        for rank, pending in list(waiting.items()):
            if pending is not None and not pending.ready():
                continue
            progress = True
            try:
                waiting[rank] = next(runs[rank])  # type: ignore[assignment]
            except StopIteration as stop:
                results[rank] = stop.value
                del waiting[rank]
        if not progress:
            stuck = {rank: pending.where for rank, pending in waiting.items() if pending is not None}
            raise RuntimeError(f"no rank can go on; each waits in {stuck}")
    return results


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor) -> Generator[Pending, None, tuple[Tensor, Tensor]]:
    """out in q's dtype and lse in the accumulator's, of the local queries against all keys."""
    steps, unstarted = job.plan.forward.steps, job.plan.forward.unstarted
    log = CallLog(job.call, "forward", q.device)
    blocks = _STORES[job.plan.schedule.kind].blocks(steps, k, v)
    out, lse = Rows(q, v.shape[-1]), Rows(q, None)
    out.start_with(0.0, unstarted)
    lse.start_with(-torch.inf, unstarted)
    for i, step in enumerate(steps):
        pending = _post(job, log, "forward", i, step, {"kv": blocks})
        k_block, v_block = blocks.in_hand(i)
        with label(f"ringcp::fwd step {i} <- {owner_words(step.source)}"):
            written = _written(job, job.plan.schedule.forward[i], q)
            for launch in step.launches:
                for call, out_c, lse_c in _forward(job, launch, written, q, k_block, v_block):
                    if call.fresh:
                        out.write(call, out_c)
                        lse.write(call, lse_c)
                    else:
                        merge_(out.part(call), lse.part(call), out_c, lse_c)
                del out_c, lse_c  # else they are there while the next call computes
                if pending is not None:
                    pending.go_on()
        log.mark()
        yield from waited(pending, f"ringcp::fwd step {i} wait")
        log.mark()
        blocks.settle(i)
    return out.result().to(q.dtype), lse.result()


def backward(
    job: Job, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Generator[Pending, None, tuple[Tensor, Tensor, Tensor]]:
    """dq, dk, dv of the local rows, from the forward's out and lse. They are in the accumulator's dtype, or in the
    kernel's where one call gave all of it.
    """
    steps, unstarted = job.plan.backward.steps, job.plan.backward.unstarted
    log = CallLog(job.call, "backward", q.device)
    stores = _STORES[job.plan.schedule.kind]
    blocks, sums = stores.blocks(steps, k, v), stores.sums(steps, k, v)
    # With +inf the probabilities of rows that attend to nothing are exactly zero.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    dq = Rows(q, q.shape[-1])
    dq.start_with(0.0, unstarted)
    for i, step in enumerate(steps):
        pending = _post(job, log, "backward", i, step, {"kv": blocks, "dkv": sums})
        k_block, v_block = blocks.in_hand(i)
        with label(f"ringcp::bwd step {i} <- {owner_words(step.source)}"):
            written = _written(job, job.plan.schedule.backward[i], q)
            for launch in step.launches:
                dqs, dkvs = _backward(job, launch, written, dout, q, k_block, v_block, out, lse, dlse)
                for call, dq_c in dqs:
                    if call.fresh:
                        dq.write(call, dq_c)
                    else:
                        dq.part(call).add_(dq_c)
                for call, dk_c, dv_c in dkvs:
                    sums.hold(call, dk_c, dv_c)
                del dqs, dkvs, dq_c, dk_c, dv_c  # else they are there while the next call computes
                if pending is not None:
                    pending.go_on()
        log.mark()
        yield from waited(pending, f"ringcp::bwd step {i} wait")
        log.mark()
        blocks.settle(i)
        sums.settle(i)
    return dq.result(), *sums.result()


def _forward(
    job: Job, launch: Launch, written: WrittenStep | None, q: Tensor, k: Tensor, v: Tensor
) -> list[tuple[Call, Tensor, Tensor]]:
    """out and lse of the query rows of each of these calls."""
    call, *more = launch.calls
    if more:
        assert written is None, "kernels that take sequences take no written masks"
        return packing.forward(job.kernel, launch, q, k, v, job.scale, job.softcap)
    out, lse = job.kernel.forward(
        part(q, call.batch, call.q_heads, call.q),
        part(k, call.batch, call.kv_heads, call.k),
        part(v, call.batch, call.kv_heads, call.k),
        form=call.form,
        scale=job.scale,
        softcap=job.softcap,
        **({} if written is None else written.keywords(call, job.kernel.caps.functions)),
    )
    return [(call, out, lse)]


def _backward(
    job: Job,
    launch: Launch,
    written: WrittenStep | None,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
) -> tuple[list[tuple[Call, Tensor]], list[tuple[Call, Tensor, Tensor]]]:
    """dq of the query rows, and dk and dv of the keys, of each of these calls."""
    call, *more = launch.calls
    if more:
        assert written is None, "kernels that take sequences take no written masks"
        return packing.backward(job.kernel, launch, dout, q, k, v, out, lse, dlse, job.scale, job.softcap)
    on_q, on_k = (call.batch, call.q_heads, call.q), (call.batch, call.kv_heads, call.k)
    dq, dk, dv = job.kernel.backward(
        part(dout, *on_q),
        part(q, *on_q),
        part(k, *on_k),
        part(v, *on_k),
        part(out, *on_q),
        part(lse, *on_q),
        None if dlse is None else part(dlse, *on_q),
        form=call.form,
        scale=job.scale,
        softcap=job.softcap,
        **({} if written is None else written.keywords(call, job.kernel.caps.functions)),
    )
    return [(call, dq)], [(call, dk, dv)]


def _written(job: Job, step: Step, q: Tensor) -> WrittenStep | None:
    return None if job.written is None or not step.tiles else job.written.of_step(step, q)


class _Store(Protocol):
    def outgoing(self, i: int, message: Message) -> Tensor: ...

    def incoming(self, i: int, message: Message) -> Tensor: ...


def _post(
    job: Job, log: CallLog, direction: str, i: int, step: PlanStep, stores: Mapping[str, _Store]
) -> Pending | None:
    """Post a step's transfers, in the plan's order."""

    def parcel(tensor: Tensor, message: Message) -> Parcel:
        return Parcel(tensor, message.peer, tag_of(job, direction, i, message.what), _WORDS[message.what])

    sends = [parcel(stores[m.what].outgoing(i, m), m) for m in step.sends]
    recvs = [parcel(stores[m.what].incoming(i, m), m) for m in step.recvs]
    pending = job.transport.post(sends, recvs, f"call {job.call}, {direction} step {i}") if sends or recvs else None
    log.step(i, step.source, len(step.launches), num_bytes(sends), num_bytes(recvs))
    return pending


def tag_of(job: Job, direction: str, step: int, what: str) -> int:
    """The tag of a message of a job."""
    return tag_of_call(job.call, job.fingerprint, direction, step, what)


def tag_of_call(call: int, fingerprint: int, direction: str, step: int, what: str) -> int:
    """The tag of a message. Those of calls that differ in any way never match: gloo would abort, or leave a stale tail.

    Bits: 29 to keep away from a user's own tags, 12 to 28 the call, 2 to 11 the step, direction, what.
    """
    of_call = (fingerprint + call * 40503) % (1 << 17)
    return 1 << 29 | of_call << 12 | step % 1024 << 2 | (direction == "backward") << 1 | (what == "dkv")


def num_bytes(parcels: Sequence[Parcel]) -> int:
    """What they move."""
    return sum(p.tensor.numel() * p.tensor.element_size() for p in parcels)


def waited(pending: Pending | None, text: str) -> Generator[Pending, None, None]:
    """Wait, under a label for the profiler."""
    if pending is not None:
        with label(text):
            yield pending
