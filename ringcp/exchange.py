"""The exchange of Ulysses: tokens against heads among the ranks of one exchange, before and after a run.

Each rank brings its rows of all heads and leaves with all rows of its ring rank for its share of the heads; what it
computes for them goes back the same way. Query heads are shared out as evenly as they go, and a KV head goes to every
rank that has query heads of it: the gradients of one that went to several are summed where its rows came from, in the
order of the ranks and in the accumulator's dtype. What forward has exchanged may be kept for backward, which exchanges
gradients alone then, and otherwise the local rows once more.

A rank's heads may go in several parts, each with a KV head or more of every rank. Then one part is computed while the
next one comes and the one before goes home.

Tensors are (B, H, rows, D), or (B, H, rows) as the lse. What one rank sends to another travels as one message.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ringcp import boxes, executor
from ringcp.band import Range, length_of
from ringcp.executor import num_bytes, tag_of, waited
from ringcp.grouped import Placed
from ringcp.merge import accumulator_dtype
from ringcp.parts import Exchange, Kept, Part, num_rows_of
from ringcp.record import CallLog
from ringcp.schedule import Heads
from ringcp.transport import Parcel, Pending


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
        return num_rows_of(self.rows(exchange, place))

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
    parts: Sequence[Part], q: Tensor, k: Tensor, v: Tensor, kept: Sequence[Kept] | None = None
) -> Generator[Pending, None, tuple[Tensor, Tensor]]:
    """`executor.forward` on the ring rank's rows of this rank's heads; out and lse of the local rows of all heads.

    kept: where to leave what backward needs, for each part.
    """
    fields = _Field(q, "q", q.dtype), _Field(k, "kv", k.dtype), _Field(v, "kv", v.dtype)

    def compute(i: int, q: Tensor, k: Tensor, v: Tensor) -> Generator[Pending, None, tuple[Tensor, Tensor]]:
        if not q.shape[1]:
            return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3])  # more ranks than heads
        out, lse = yield from executor.forward(parts[i].job, q, k, v)
        if kept is not None:
            kept[i].out.copy_(out)
            kept[i].lse.copy_(lse)
        return out, lse

    def results(out: Tensor, lse: Tensor) -> tuple[_Field, ...]:
        return _Field(out, "q", q.dtype, True), _Field(lse, "q", accumulator_dtype(q.dtype), True)

    into = None if kept is None else [part[:3] for part in kept]
    out, lse = yield from _around(parts, "forward", fields, compute, results, Heads(q.shape[1], k.shape[1]), into)
    return out, lse


def backward(
    parts: Sequence[Part],
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor | None,
    kept: Sequence[Kept] | None = None,
) -> Generator[Pending, None, tuple[Tensor, Tensor, Tensor]]:
    """`executor.backward` on the ring rank's rows of this rank's heads; dq, dk, dv of the local rows of all heads.

    kept: what forward left of each part. Then q, k and v say shapes and dtypes alone, and out and lse may be None.
    """
    grads = [_Field(x, "q", x.dtype) for x in (dout, dlse) if x is not None]
    fields = [*grads]
    if kept is None:
        fields += [_Field(x, "q", x.dtype) for x in (q, out, lse) if x is not None]
        fields += [_Field(x, "kv", x.dtype) for x in (k, v)]
    wide = accumulator_dtype(k.dtype) if parts[0].exchange.sums else k.dtype

    def compute(i: int, dout: Tensor, *more: Tensor) -> Generator[Pending, None, tuple[Tensor, ...]]:
        dlse, more = (more[0], more[1:]) if len(grads) == 2 else (None, more)
        if kept is None:
            q, out, lse, k, v = more
        else:
            q, k, v, out, lse = kept[i]
        if q.shape[1]:
            return (yield from executor.backward(parts[i].job, dout, dlse, q, k, v, out, lse))
        return q, k, v

    def results(dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[_Field, ...]:
        return _Field(dq, "q", q.dtype, True), _Field(dk, "kv", wide, True), _Field(dv, "kv", wide, True)

    dq, dk, dv = yield from _around(parts, "backward", fields, compute, results, Heads(q.shape[1], k.shape[1]))
    return dq, dk, dv


def _around(
    parts: Sequence[Part],
    direction: str,
    fields: Sequence[_Field],
    compute: Callable[..., Generator[Pending, None, tuple[Tensor, ...]]],
    results: Callable[..., tuple[_Field, ...]],
    num_heads: Heads,
    into: Sequence[Sequence[Tensor]] | None = None,
) -> Generator[Pending, None, list[Tensor]]:
    """Exchange, compute, exchange back, part by part; meanwhile the next one comes, and the one before goes home.

    into: for each part, where to put together what comes; None for new memory.
    """

    def start(i: int) -> _Arrival:
        return _to_heads(parts[i], direction, 2 * i, fields, None if into is None else into[i])

    local: list[Tensor] = []
    coming: _Arrival | None = start(0)
    going: _Arrival | None = None
    for i, part in enumerate(parts):
        assert coming is not None, "posted while the part before was computed"
        whole = yield from coming()
        coming = start(i + 1) if i + 1 < len(parts) else None
        computed = [*results(*(yield from compute(i, *whole)))]
        del whole
        leaving, own = _packed(part, computed)
        if going is not None:
            yield from going()
            going = None  # and what it has brought
        going = _to_rows(part, direction, 2 * i + 1, leaving, own, local, num_heads)
        del leaving
    assert going is not None, "a run has a part"
    yield from going()
    return local


# Of an exchange that is under way: waits for it, and gives what has come.
_Arrival = Callable[[], Generator[Pending, None, list[Tensor]]]


def _to_heads(
    part: Part, direction: str, step: int, fields: Sequence[_Field], into: Sequence[Tensor] | None
) -> _Arrival:
    """All rows of the ring rank for this rank's heads, from the local rows of all heads."""
    exchange = part.exchange
    me = exchange.place
    leaving = {place: _box(exchange, fields, heads_of=place, rows_of=me) for place in exchange.others}
    for place, box in leaving.items():
        for field, packed in zip(fields, box.parts, strict=True):
            packed.copy_(_heads(field.x, field.heads(exchange, place)))
    coming = {place: _box(exchange, fields, heads_of=me, rows_of=place) for place in exchange.others}
    whole = [*into] if into is not None else [field.empty(*exchange.whole(field.of)) for field in fields]

    def put(place: int, boxed: Sequence[Tensor]) -> None:
        for x, field, packed in zip(whole, fields, boxed, strict=True):
            for placed in field.rows(exchange, place):
                x[:, :, placed.block_rows].copy_(packed[:, :, placed.local_rows])

    def put_own() -> None:
        put(me, [_heads(field.x, field.heads(exchange, me)) for field in fields])

    arrived = _swap(part, fields[0].x.device, direction, step, leaving, coming, put_own)

    def arrival() -> Generator[Pending, None, list[Tensor]]:
        yield from arrived()
        for place, box in coming.items():
            put(place, box.parts)
        return whole

    return arrival


def _packed(part: Part, fields: list[_Field]) -> tuple[dict[int, _Box], list[_Field]]:
    """What goes to each peer, its rows of this rank's heads; and the own rows of them.

    `fields` is emptied, so that nothing is there twice for longer than it takes.
    """
    exchange, num = part.exchange, len(fields)
    me = exchange.place
    leaving = {place: _box(exchange, fields, heads_of=me, rows_of=place) for place in exchange.others}
    own: list[_Field] = []
    for i in range(num):
        field = fields.pop(0)
        mine = field.empty(length_of(field.heads(exchange, me)), field.num_rows(exchange, me))
        for place, target in ((me, mine), *((place, box.parts[i]) for place, box in leaving.items())):
            for placed in field.rows(exchange, place):
                target[:, :, placed.local_rows].copy_(field.x[:, :, placed.block_rows])
        own.append(field._replace(x=mine))
    return leaving, own


def _to_rows(
    part: Part,
    direction: str,
    step: int,
    leaving: Mapping[int, _Box],
    own: list[_Field],
    local: list[Tensor],
    num_heads: Heads,
) -> _Arrival:
    """Into `local`, which the first part fills: the local rows of all heads, from what the ranks have `_packed`."""
    exchange = part.exchange
    me = exchange.place
    coming = {place: _box(exchange, own, heads_of=place, rows_of=me) for place in exchange.others}
    arrived = _swap(part, own[0].x.device, direction, step, leaving, coming, lambda: None)

    def arrival() -> Generator[Pending, None, list[Tensor]]:
        yield from arrived()
        for i in range(len(own)):
            field = own.pop(0)
            if part.first:
                local.append(field.empty(getattr(num_heads, field.of), field.num_rows(exchange, me)))
            _put_together(local[i], part, field, {place: box.parts[i] for place, box in coming.items()})
        return list(local)

    return arrival


def _put_together(x: Tensor, part: Part, own: _Field, coming: Mapping[int, Tensor]) -> None:
    """Into the local rows of all heads: those of each rank's heads; sums, where a head is of several ranks."""
    exchange = part.exchange
    sums = own.of == "kv" and exchange.sums
    if sums and part.first:
        x.zero_()
    for place in range(len(exchange.shares)):
        target = _heads(x, own.heads(exchange, place))
        if sums:
            target.add_(coming.get(place, own.x))
        else:
            target.copy_(coming.get(place, own.x))


def _swap(
    part: Part,
    device: torch.device,
    direction: str,
    step: int,
    leaving: Mapping[int, _Box],
    coming: Mapping[int, _Box],
    meanwhile: Callable[[], None],
) -> Callable[[], Generator[Pending, None, None]]:
    """Start to send and receive all boxes, and do something meanwhile; what it returns waits for them."""
    job, exchange = part.job, part.exchange

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

    def arrived() -> Generator[Pending, None, None]:
        nonlocal pending
        log.mark()
        yield from waited(pending, f"ringcp::{direction} exchange {step} wait")
        log.mark()
        pending = None  # what has left is free now

    return arrived


class _Box(NamedTuple):
    """What one rank sends to another: a message, and the parts of it that the fields are."""

    buffer: Tensor
    parts: list[Tensor]


def _box(exchange: Exchange, fields: Sequence[_Field], heads_of: int, rows_of: int) -> _Box:
    """An empty one for the heads that one rank computes and the rows that another has."""
    specs = [(f.shape(length_of(f.heads(exchange, heads_of)), f.num_rows(exchange, rows_of)), f.dtype) for f in fields]
    buffer = fields[0].x.new_empty(boxes.num_bytes(specs), dtype=torch.uint8)
    views = boxes.views(buffer, specs)
    return _Box(buffer, [field.view(x) for field, x in zip(fields, views, strict=True)])


def _heads(x: Tensor, heads: Range) -> Tensor:
    return x[:, heads[0] : heads[1]]
