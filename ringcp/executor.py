"""The one loop: runs a plan's steps on one rank, forward and backward.

In each step the next step's transfers are posted, this step's calls are computed and merged, and then the transfers are
waited for. A run is a generator that yields where it waits: `drive` runs one rank over a transport, `drive_all` runs
all ranks in one process in turn.

Shapes: q (B, Hq, S, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv), out (B, Hq, S, Dv), lse (B, Hq, S), with the local S.

Memory of a rank beside inputs and results, in elements (Nk rows in the largest block, R = B * Hkv * (D + Dv) a row):
forward 2 Nk R for keys and values in the inputs' dtype, whatever the number of ranks, and B Hq S (Dv + 1) in the
accumulator's dtype for out and lse; backward 2 Nk R for keys and values, 2 Nk R for travelling sums and Nk R for the own
dK/dV in the accumulator's dtype, and B Hq S D for dq. A direct plan has one more block in which rows are packed.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringcp.band import Range
from ringcp.kernels.base import Kernel
from ringcp.lower import Call, Plan, PlanStep
from ringcp.merge import accumulator_dtype, merge_
from ringcp.record import CallLog, label
from ringcp.transport import Delivery, Parcel, Pending, Transport

Run = Generator[Pending, None, Any]


class Job(NamedTuple):
    """One call on one rank: what is the same in forward and backward."""

    plan: Plan
    kernel: Kernel
    scale: float
    transport: Transport
    call: int


def drive(run: Run) -> Any:
    """Run one rank, waiting for its transfers."""
    try:
        while True:
            next(run).wait()
    except StopIteration as stop:
        return stop.value


def drive_all(runs: Sequence[Run]) -> list[Any]:
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
    steps = job.plan.forward
    log = CallLog(job.call, "forward", q.device)
    blocks = _Blocks(steps, k, v)
    out, lse = _Rows(q, v.shape[-1]), _Rows(q, None)
    if job.plan.unstarted:
        out.start_with(0.0), lse.start_with(-torch.inf)
    for i, step in enumerate(steps):
        pending = _post(job, log, "forward", i, step, blocks, None)
        k_block, v_block = blocks.in_hand(i)
        with label(f"ringcp::fwd step {i} <- rank {step.source}"):
            for call in step.calls:
                out_c, lse_c = job.kernel.forward(
                    _part(q, call.batch, call.q_heads, call.q),
                    _part(k_block, call.batch, call.kv_heads, call.k),
                    _part(v_block, call.batch, call.kv_heads, call.k),
                    form=call.form,
                    scale=job.scale,
                )
                if call.fresh:
                    out.write(call, out_c), lse.write(call, lse_c)
                else:
                    merge_(out.part(call), lse.part(call), out_c, lse_c)
        log.mark()
        yield from _waited(pending, f"ringcp::fwd step {i} wait")
        log.mark()
    return out.total.to(q.dtype), lse.total


def backward(
    job: Job, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> Generator[Pending, None, tuple[Tensor, Tensor, Tensor]]:
    """dq, dk, dv of the local rows in the accumulator's dtype, from the forward's out and lse."""
    steps = job.plan.backward
    log = CallLog(job.call, "backward", q.device)
    blocks, sums = _Blocks(steps, k, v), _Sums(steps, k, v)
    # With +inf the probabilities of rows that attend to nothing are exactly zero.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    dq = _Rows(q, q.shape[-1])
    if job.plan.unstarted:
        dq.start_with(0.0)
    for i, step in enumerate(steps):
        pending = _post(job, log, "backward", i, step, blocks, sums)
        k_block, v_block = blocks.in_hand(i)
        with label(f"ringcp::bwd step {i} <- rank {step.source}"):
            for call in step.calls:
                on_q, on_k = (call.batch, call.q_heads, call.q), (call.batch, call.kv_heads, call.k)
                dq_c, dk_c, dv_c = job.kernel.backward(
                    _part(dout, *on_q),
                    _part(q, *on_q),
                    _part(k_block, *on_k),
                    _part(v_block, *on_k),
                    _part(out, *on_q),
                    _part(lse, *on_q),
                    None if dlse is None else _part(dlse, *on_q),
                    form=call.form,
                    scale=job.scale,
                )
                dq.write(call, dq_c) if call.fresh else dq.part(call).add_(dq_c)
                sums.hold(call, dk_c, dv_c)
        log.mark()
        yield from _waited(pending, f"ringcp::bwd step {i} wait")
        log.mark()
        sums.settle(step, own=i == 0)
    return dq.total, *sums.own


def _post(
    job: Job, log: CallLog, direction: str, i: int, step: PlanStep, blocks: _Blocks, sums: _Sums | None
) -> Pending | None:
    """Post a step's transfers, in the plan's order."""
    where = f"call {job.call}, {direction} step {i}"

    def parcel(tensor: Tensor, what: str, peer: int) -> Parcel:
        # Messages of different calls, directions and steps never match by accident: on gloo they would be cut short.
        tag = (((job.call % 4096) * 2 + (direction == "backward")) * 32768 + i) * 2 + (what == "dkv")
        return Parcel(tensor, peer, tag, {"kv": "keys and values", "dkv": "their gradients"}[what])

    sends, recvs = [], []
    for message in step.sends:
        tensor = blocks.outgoing(i, message.num_rows, message.own_rows) if message.what == "kv" else sums.outgoing(message.num_rows)  # type: ignore[union-attr]  # fmt: skip
        sends.append(parcel(tensor, message.what, message.peer))
    for message in step.recvs:
        tensor = blocks.incoming(i, message.num_rows) if message.what == "kv" else sums.incoming(message.num_rows)  # type: ignore[union-attr]  # fmt: skip
        recvs.append(parcel(tensor, message.what, message.peer))
    pending = job.transport.post(sends, recvs, where) if sends or recvs else None
    log.step(i, step.source, len(step.calls), _num_bytes(sends), _num_bytes(recvs))
    return pending


def _num_bytes(parcels: list[Parcel]) -> int:
    return sum(p.tensor.numel() * p.tensor.element_size() for p in parcels)


def _waited(pending: Pending | None, text: str) -> Generator[Pending, None, None]:
    if pending is not None:
        with label(text):
            yield pending


def _part(x: Tensor, batch: Range | None, heads: Range | None, rows: Range) -> Tensor:
    """The batch rows, heads and sequence rows of a tensor (B, H, S, ...), as a view."""
    for dim, taken in ((0, batch), (1, heads), (2, rows)):
        if taken is not None and taken != (0, x.shape[dim]):
            x = x.narrow(dim, taken[0], taken[1] - taken[0])
    return x


class _Rows:
    """A sum over calls for each local query row: (B, Hq, S, last), or (B, Hq, S) for last None.

    It becomes a tensor with the first call, and is that call's own result where that covers everything.
    """

    def __init__(self, q: Tensor, last: int | None) -> None:
        self._q = q
        self._last = last
        self._total: Tensor | None = None

    @property
    def total(self) -> Tensor:
        if self._total is None:
            batch, heads, rows, _ = self._q.shape
            dtype = accumulator_dtype(self._q.dtype)
            if self._last is None:
                self._total = self._q.new_empty((batch, heads, rows), dtype=dtype)
            else:  # (B, S, H, D) in memory, as a projection wants it next
                self._total = self._q.new_empty((batch, rows, heads, self._last), dtype=dtype).transpose(1, 2)
        return self._total

    def start_with(self, value: float) -> None:
        self.total.fill_(value)

    def part(self, call: Call) -> Tensor:
        return _part(self.total, call.batch, call.q_heads, call.q)

    def write(self, call: Call, value: Tensor) -> None:
        if self._total is None and value.shape[:3] == self._q.shape[:3]:
            self._total = value.to(accumulator_dtype(self._q.dtype))
        else:
            self.part(call).copy_(value)


class _Blocks:
    """The keys and values in hand: two buffers that take turns, and one to pack rows of the own block in.

    A block is one contiguous run of elements: K as (B, rows, Hkv, D), then V as (B, rows, Hkv, Dv).
    """

    def __init__(self, steps: Sequence[PlanStep], k: Tensor, v: Tensor) -> None:
        self._k, self._v = k, v
        self._rows = [step.num_rows for step in steps]
        sends = [m for step in steps for m in step.sends if m.what == "kv"]
        recvs = [(i % 2, m) for i, step in enumerate(steps) for m in step.recvs if m.what == "kv"]
        relayed = [m.num_rows for m in sends if m.own_rows is None]
        # In a ring the own block starts in the second buffer, which is free again when it has been sent.
        used = {slot for slot, _ in recvs} | ({1} if relayed else set())
        in_turn = max([*relayed, *(m.num_rows for _, m in recvs)], default=0)
        self._slots = [self._new(in_turn if slot in used else 0) for slot in range(2)]
        self._packed = self._new(max([m.num_rows for m in sends if m.own_rows is not None], default=0))
        if relayed and self._rows[0]:
            self._pack(self._slots[1], ((0, self._rows[0]),))

    def _new(self, num_rows: int) -> Tensor:
        return self._k.new_empty(_block_size(self._k, self._v, num_rows))

    def _pack(self, buffer: Tensor, rows: tuple[Range, ...]) -> Tensor:
        num_rows = sum(stop - start for start, stop in rows)
        k, v = _block_views(buffer, self._k, self._v, num_rows)
        at = 0
        for start, stop in rows:
            k[:, :, at : at + stop - start].copy_(self._k[:, :, start:stop])
            v[:, :, at : at + stop - start].copy_(self._v[:, :, start:stop])
            at += stop - start
        return buffer[: _block_size(self._k, self._v, num_rows)]

    def in_hand(self, i: int) -> tuple[Tensor, Tensor]:
        """k and v of step i."""
        if i == 0:
            return self._k, self._v
        return _block_views(self._slots[(i - 1) % 2], self._k, self._v, self._rows[i])

    def outgoing(self, i: int, num_rows: int, own_rows: tuple[Range, ...] | None) -> Tensor:
        if own_rows is not None:
            return self._pack(self._packed, own_rows)
        return self._slots[(i - 1) % 2][: _block_size(self._k, self._v, num_rows)]

    def incoming(self, i: int, num_rows: int) -> Tensor:
        return self._slots[i % 2][: _block_size(self._k, self._v, num_rows)]


class _Sums:
    """dK and dV: of the own block, of the block in hand, and of the one before, which is on its way."""

    def __init__(self, steps: Sequence[PlanStep], k: Tensor, v: Tensor) -> None:
        self._k, self._v = k, v
        self._dtype = accumulator_dtype(k.dtype)
        messages = [m for step in steps for m in (*step.sends, *step.recvs) if m.what == "dkv"]
        size = _block_size(k, v, max([m.num_rows for m in messages], default=0))
        self._sum, self._spare = k.new_empty(size, dtype=self._dtype), k.new_empty(size, dtype=self._dtype)
        self._held: list[tuple[Call, Tensor, Tensor]] = []
        self.own: tuple[Tensor, Tensor]

    def outgoing(self, num_rows: int) -> Tensor:
        return self._sum[: _block_size(self._k, self._v, num_rows)]

    def incoming(self, num_rows: int) -> Tensor:
        return self._spare[: _block_size(self._k, self._v, num_rows)]

    def hold(self, call: Call, dk: Tensor, dv: Tensor) -> None:
        """Keep a call's result until the transfers of the step are done and the buffers are free."""
        self._held.append((call, dk, dv))

    def settle(self, step: PlanStep, own: bool) -> None:
        """Add what the step computed and received to where it belongs."""
        if own:
            self.own = self._settled_own()
            return
        received = [m for m in step.recvs if m.what == "dkv"]
        for message in received:
            if message.own_rows is not None:
                self._add_to_own(message.own_rows, message.num_rows)
        if step.num_rows:
            passing = any(message.own_rows is None for message in received)
            if passing:
                self._sum, self._spare = self._spare, self._sum
            dk, dv = _block_views(self._sum, self._k, self._v, step.num_rows)
            self._add_held(dk, dv, start=not passing)

    def _settled_own(self) -> tuple[Tensor, Tensor]:
        if len(self._held) == 1 and self._held[0][1].shape == self._k.shape:
            _, dk, dv = self._held.pop()
            return dk.to(self._dtype), dv.to(self._dtype)
        dk, dv = _empty_rows(self._k, self._dtype), _empty_rows(self._v, self._dtype)
        self._add_held(dk, dv, start=True)
        return dk, dv

    def _add_held(self, dk: Tensor, dv: Tensor, start: bool) -> None:
        whole = len(self._held) == 1 and self._held[0][1].shape == dk.shape
        if start and not whole:
            dk.zero_(), dv.zero_()
        for call, dk_c, dv_c in self._held:
            for total, value in ((dk, dk_c), (dv, dv_c)):
                part = _part(total, call.batch, call.kv_heads, call.k)
                part.copy_(value) if start and whole else part.add_(value)
        self._held.clear()

    def _add_to_own(self, rows: tuple[Range, ...], num_rows: int) -> None:
        received = _block_views(self._spare, self._k, self._v, num_rows)
        for total, value in zip(self.own, received, strict=True):
            at = 0
            for start, stop in rows:
                total[:, :, start:stop].add_(value[:, :, at : at + stop - start])
                at += stop - start


def _empty_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Like `x` (B, H, S, D), stored as (B, S, H, D)."""
    batch, heads, rows, last = x.shape
    return x.new_empty((batch, rows, heads, last), dtype=dtype).transpose(1, 2)


def _block_size(k: Tensor, v: Tensor, num_rows: int) -> int:
    batch, heads, _, head_dim = k.shape
    return batch * heads * num_rows * (head_dim + v.shape[-1])


def _block_views(buffer: Tensor, k: Tensor, v: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The keys (B, Hkv, rows, D) and values (B, Hkv, rows, Dv) of a block."""
    batch, heads, _, head_dim = k.shape
    split = batch * heads * num_rows * head_dim
    k_rows = buffer[:split].view(batch, num_rows, heads, head_dim)
    v_rows = buffer[split : _block_size(k, v, num_rows)].view(batch, num_rows, heads, v.shape[-1])
    return k_rows.transpose(1, 2), v_rows.transpose(1, 2)
