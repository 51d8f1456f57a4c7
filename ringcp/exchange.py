"""The exchange of Ulysses: tokens against heads among the ranks of one exchange, before and after a run.

Each rank brings its rows of all heads and leaves with all rows of its ring rank for its share of the heads; what it
computes for them goes back the same way. Query heads are shared out as evenly as they go, and a KV head goes to every
rank that has query heads of it: the gradients of one that went to several are summed where its rows came from, in the
order of the ranks and in the accumulator's dtype. Backward exchanges the inputs once more, since only local rows are
saved: so it is right wherever activations are recomputed, offloaded or saved by a policy.

Tensors are (B, H, rows, D), or (B, H, rows) as the lse. What one rank sends to another travels as one message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ringcp import executor
from ringcp.band import Range
from ringcp.executor import Job, num_bytes, tag_of, waited
from ringcp.grouped import Placed
from ringcp.merge import accumulator_dtype
from ringcp.modes import Share, replicates
from ringcp.record import CallLog
from ringcp.schedule import Heads
from ringcp.transport import Parcel, Pending, Transport


class Placements(NamedTuple):
    """By place, where each rank's rows lie in those of the ring rank: of queries, and of keys and values."""

    q: tuple[tuple[Placed, ...], ...]
    kv: tuple[tuple[Placed, ...], ...]


@dataclass(frozen=True)
class Exchange:
    """One rank's part in an exchange.

    place: of this rank.
    shares: by place, each rank's share of the heads.
    rows: where each rank's rows lie.
    transport: whose peers are places.
    """

    place: int
    shares: tuple[Share, ...]
    rows: Placements
    transport: Transport

    @property
    def others(self) -> list[int]:
        return [place for place in range(len(self.shares)) if place != self.place]


class _Field(NamedTuple):
    """A tensor to exchange, whose heads and rows it has, and the dtype in which it travels and arrives.

    rows_first: it travels and arrives as (B, rows, H, D) in memory, as kernels give their results and projections want
        them, not as (B, H, rows, D), which kernels prefer to read.
    """

    x: Tensor
    of: Literal["q", "kv"]
    dtype: torch.dtype
    rows_first: bool = False

    def heads(self, exchange: Exchange, place: int) -> Range:
        """Those that a rank computes."""
        return exchange.shares[place].q if self.of == "q" else exchange.shares[place].kv

    def rows(self, exchange: Exchange, place: int) -> tuple[Placed, ...]:
        """Where the rows of a rank lie."""
        return (exchange.rows.q if self.of == "q" else exchange.rows.kv)[place]

    def num_rows(self, exchange: Exchange, place: int) -> int:
        rows = self.rows(exchange, place)
        return rows[-1].rows[1] if rows else 0

    def shape(self, heads: int, num_rows: int) -> tuple[int, ...]:
        """In memory."""
        sizes = (num_rows, heads) if self.rows_first else (heads, num_rows)
        return self.x.shape[0], *sizes, *self.x.shape[3:]

    def view(self, stored: Tensor) -> Tensor:
        """(B, H, rows, ...), of what has that shape in memory."""
        return stored.transpose(1, 2) if self.rows_first else stored

    def empty(self, heads: int, num_rows: int) -> Tensor:
        return self.view(self.x.new_empty(self.shape(heads, num_rows), dtype=self.dtype))


def forward(
    job: Job, exchange: Exchange, q: Tensor, k: Tensor, v: Tensor
) -> Generator[Pending, None, tuple[Tensor, Tensor]]:
    """`executor.forward` on the ring rank's rows of this rank's heads; out and lse of the local rows of all heads."""
    fields = _Field(q, "q", q.dtype), _Field(k, "kv", k.dtype), _Field(v, "kv", v.dtype)
    q_heads, k_heads, v_heads = yield from _to_heads(job, exchange, "forward", fields)
    if q_heads.shape[1]:
        out, lse = yield from executor.forward(job, q_heads, k_heads, v_heads)
    else:  # more ranks than heads
        out, lse = q_heads.new_empty(*q_heads.shape[:3], v.shape[3]), q_heads.new_empty(q_heads.shape[:3])
    del q_heads, k_heads, v_heads
    results = _Field(out, "q", q.dtype, True), _Field(lse, "q", accumulator_dtype(q.dtype), True)
    out, lse = yield from _to_rows(job, exchange, "forward", results, Heads(q.shape[1], k.shape[1]))
    return out, lse


def backward(
    job: Job,
    exchange: Exchange,
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> Generator[Pending, None, tuple[Tensor, Tensor, Tensor]]:
    """`executor.backward` on the ring rank's rows of this rank's heads; dq, dk, dv of the local rows of all heads."""
    with_lse = [lse] if dlse is None else [lse, dlse]
    fields = [_Field(x, "q", x.dtype) for x in (dout, q, out, *with_lse)]
    fields += [_Field(x, "kv", x.dtype) for x in (k, v)]
    dout, q_heads, out, lse, *more, k_heads, v_heads = yield from _to_heads(job, exchange, "backward", fields)
    if q_heads.shape[1]:
        dlse = more[0] if more else None
        grads = yield from executor.backward(job, dout, dlse, q_heads, k_heads, v_heads, out, lse)
    else:
        grads = q_heads, k_heads, v_heads
    del dout, q_heads, out, lse, more, dlse, k_heads, v_heads
    wide = accumulator_dtype(k.dtype) if replicates(exchange.shares) else k.dtype
    dq, dk, dv = grads
    results = _Field(dq, "q", q.dtype, True), _Field(dk, "kv", wide, True), _Field(dv, "kv", wide, True)
    dq, dk, dv = yield from _to_rows(job, exchange, "backward", results, Heads(q.shape[1], k.shape[1]))
    return dq, dk, dv


def _to_heads(
    job: Job, exchange: Exchange, direction: str, fields: Sequence[_Field]
) -> Generator[Pending, None, list[Tensor]]:
    """All rows of the ring rank for this rank's heads, from the local rows of all heads."""
    me = exchange.place
    leaving = {place: _box(exchange, fields, heads_of=place, rows_of=me) for place in exchange.others}
    for place, box in leaving.items():
        for field, part in zip(fields, box.parts, strict=True):
            part.copy_(_heads(field.x, field.heads(exchange, place)))
    coming = {place: _box(exchange, fields, heads_of=me, rows_of=place) for place in exchange.others}
    whole = []
    for field in fields:
        num_rows = sum(field.num_rows(exchange, place) for place in range(len(exchange.shares)))
        whole.append(field.empty(_length(field.heads(exchange, me)), num_rows))

    def put(place: int, parts: Sequence[Tensor]) -> None:
        for x, field, part in zip(whole, fields, parts, strict=True):
            for placed in field.rows(exchange, place):
                x[:, :, placed.block_rows].copy_(part[:, :, placed.local_rows])

    def put_own() -> None:
        put(me, [_heads(field.x, field.heads(exchange, me)) for field in fields])

    yield from _swapped(job, exchange, fields[0].x.device, direction, 0, leaving, coming, put_own)
    for place, box in coming.items():
        put(place, box.parts)
    return whole


def _to_rows(
    job: Job, exchange: Exchange, direction: str, fields: Sequence[_Field], num_heads: Heads
) -> Generator[Pending, None, list[Tensor]]:
    """The local rows of all heads, from all rows of the ring rank for this rank's heads."""
    me = exchange.place

    def take(part: Tensor, field: _Field, place: int) -> None:
        for placed in field.rows(exchange, place):
            part[:, :, placed.local_rows].copy_(field.x[:, :, placed.block_rows])

    leaving = {place: _box(exchange, fields, heads_of=me, rows_of=place) for place in exchange.others}
    for place, box in leaving.items():
        for field, part in zip(fields, box.parts, strict=True):
            take(part, field, place)
    coming = {place: _box(exchange, fields, heads_of=place, rows_of=me) for place in exchange.others}
    local = [field.empty(getattr(num_heads, field.of), field.num_rows(exchange, me)) for field in fields]
    # Nothing is added to what one rank alone computes: its own part goes where it belongs.
    summed = [field.of == "kv" and replicates(exchange.shares) for field in fields]
    own = [
        field.empty(_length(field.heads(exchange, me)), field.num_rows(exchange, me))
        if adds
        else _heads(x, field.heads(exchange, me))
        for x, field, adds in zip(local, fields, summed, strict=True)
    ]

    def take_own() -> None:
        for part, field in zip(own, fields, strict=True):
            take(part, field, me)

    yield from _swapped(job, exchange, fields[0].x.device, direction, 1, leaving, coming, take_own)
    for x, field, adds, mine, *parts in zip(
        local, fields, summed, own, *(box.parts for box in coming.values()), strict=True
    ):
        if adds:
            x.zero_()
        by_place = dict(zip(coming, parts, strict=True))
        for place in range(len(exchange.shares)):
            target = _heads(x, field.heads(exchange, place))
            if adds:
                target.add_(by_place.get(place, mine))
            elif place != me:
                target.copy_(by_place[place])
    return local


def _swapped(
    job: Job,
    exchange: Exchange,
    device: torch.device,
    direction: str,
    step: int,
    leaving: Mapping[int, _Box],
    coming: Mapping[int, _Box],
    meanwhile: Callable[[], None],
) -> Generator[Pending, None, None]:
    """Send and receive all boxes, and do something meanwhile."""

    def parcels(boxes: Mapping[int, _Box]) -> list[Parcel]:
        tag = tag_of(job, direction, step, "kv")
        return [Parcel(b.buffer, place, tag, "rows of heads") for place, b in boxes.items() if b.buffer.numel()]

    log = CallLog(job.call, f"{direction} exchange", device)
    sends, recvs = parcels(leaving), parcels(coming)
    where = f"call {job.call}, {direction} exchange {step}"
    pending = exchange.transport.post(sends, recvs, where) if sends or recvs else None
    log.step(step, exchange.place, 0, num_bytes(sends), num_bytes(recvs))
    meanwhile()
    log.mark()
    yield from waited(pending, f"ringcp::{direction} exchange {step} wait")
    log.mark()


class _Box(NamedTuple):
    """What one rank sends to another: a message, and the parts of it that the fields are."""

    buffer: Tensor
    parts: list[Tensor]


def _box(exchange: Exchange, fields: Sequence[_Field], heads_of: int, rows_of: int) -> _Box:
    """An empty one for the heads that one rank computes and the rows that another has."""
    shapes = [f.shape(_length(f.heads(exchange, heads_of)), f.num_rows(exchange, rows_of)) for f in fields]
    sizes = [math.prod(shape) * f.dtype.itemsize for f, shape in zip(fields, shapes, strict=True)]
    buffer = fields[0].x.new_empty(sum(sizes), dtype=torch.uint8)
    parts, at = {}, 0
    for i in sorted(range(len(fields)), key=lambda i: -fields[i].dtype.itemsize):  # the widest first: all are aligned
        parts[i] = buffer[at : at + sizes[i]].view(fields[i].dtype).view(shapes[i])
        at += sizes[i]
    return _Box(buffer, [field.view(parts[i]) for i, field in enumerate(fields)])


def _heads(x: Tensor, heads: Range) -> Tensor:
    return x[:, heads[0] : heads[1]]


def _length(x: Range) -> int:
    return x[1] - x[0]
