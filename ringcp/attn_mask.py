"""`attn_mask` of `F.scaled_dot_product_attention` where the sequence lies on several ranks: what its shape can mean.

A mask is (B | 1, Hq | 1, rows, keys) here. Its rows and keys are counted once all ranks have told theirs, so that every
rank reads the masks of a call in the same way or refuses it; what other ranks hold of it is fetched then, and again in
backward, since only local tensors are saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from ringcp.agreement import Told
from ringcp.checks import shown
from ringcp.errors import AgreementError, ArgumentError, LayoutError, RingcpError, UnsupportedError
from ringcp.executor import num_bytes, tag_of_call
from ringcp.grouped import Grid, grouped
from ringcp.layout import Layout
from ringcp.needs import placed
from ringcp.record import CallLog
from ringcp.transport import Among, Parcel, Transport

_FORMS = (
    "one row for this rank's keys (a key mask, mask[:, None, None, :] of a sharded buffer), or all keys of the whole "
    "sequence, in their order, for one row or for this rank's rows"
)
_FIX = (
    "give one of these, or pass mask= a ringcp mask (ringcp.Predicate says any), or wrap what is to stay local in "
    "`with ringcp.local_attention():`"
)


class Reading(IntEnum):
    """What the last two dims of the masks of a call are.

    ALONE: what torch says, for a rank alone. KEYS: one row, and each rank's own keys. ONE_ROW: one row, and all keys.
    ROWS: each rank's own rows, and all keys.
    """

    ALONE = 0
    KEYS = 1
    ONE_ROW = 2
    ROWS = 3


def mask_refusal(attn_mask: object, q: Tensor, is_causal: object) -> tuple[type[RingcpError], str] | None:
    """Why an `attn_mask` is none for queries (..., S, D), as far as one rank can tell before the vote."""
    if not isinstance(attn_mask, Tensor) or isinstance(attn_mask, CausalBias) or hasattr(attn_mask, "to_local"):
        fix = "pass is_causal=True" if isinstance(attn_mask, CausalBias) else "pass a local tensor"
        return UnsupportedError, (
            f"attn_mask: expected a tensor or None, got {type(attn_mask).__name__}; {fix}, or mask= a ringcp mask"
        )
    if is_causal:
        return ArgumentError, (
            f"attn_mask: expected None with is_causal=True, as torch documents it, got {shown(attn_mask)}; give the "
            "context mask=ringcp.Causal(), which attn_mask is intersected with, and leave is_causal out"
        )
    if attn_mask.is_nested or attn_mask.layout != torch.strided or attn_mask.device != q.device:
        return ArgumentError, (
            f"attn_mask: expected a dense tensor on {q.device}, as query, got {shown(attn_mask)}, layout "
            f"{attn_mask.layout}, on {attn_mask.device}; convert or move it"
        )
    if attn_mask.dtype not in (torch.bool, torch.float32, q.dtype):
        return ArgumentError, (
            f"attn_mask: expected bool, torch.float32 or the {q.dtype} of query, got {attn_mask.dtype}; convert it"
        )
    if attn_mask.requires_grad and torch.is_grad_enabled():
        return UnsupportedError, (
            "attn_mask: expected one that needs no gradient, for ringcp computes none, got one that requires it (a "
            "learned bias?); pass attn_mask.detach(), or wrap the call in `with ringcp.local_attention():`"
        )
    leading = tuple(attn_mask.shape[:-2])
    wanted = tuple(q.shape[:-2])
    fits = 2 <= attn_mask.ndim <= q.ndim
    if not fits or any(n not in (1, size) for n, size in zip(reversed(leading), reversed(wanted), strict=False)):
        return ArgumentError, (
            f"attn_mask: expected 2 to {q.ndim} dims, those before the last two 1 or {wanted}, as of query, got "
            f"{shown(attn_mask)}; add or take away dims"
        )
    return None


def as_BHMN(attn_mask: Tensor, q: Tensor) -> Tensor:
    """(B | 1, Hq | 1, rows, keys), for queries (..., S, D) that become (B, Hq, S, D)."""
    mask = attn_mask
    while mask.ndim < 4:
        mask = mask.unsqueeze(0)
    return mask if q.ndim <= 4 else mask.expand(*q.shape[:-3], *mask.shape[-3:]).flatten(0, -4)


def mask_text(mask: Tensor | None) -> str:
    """What of a mask is the same on every rank, as words of a vote."""
    return "None" if mask is None else f"{(*mask.shape[:2], 'rows', 'keys')} {mask.dtype}"


def reading_of(told: Sequence[Told], layout: Layout, kv_layout: Layout) -> Reading:
    """How the masks of all ranks are to be read.

    Raises:
        AgreementError: masks of which each has a meaning, but not the same one.
        UnsupportedError: masks of local rows and local keys, of which nobody knows what holds for other pairs.
        LayoutError: masks of other sizes.
    """
    num_keys = kv_layout.seq_len
    if len(told) == 1:
        own = told[0]
        if own.mask_rows in (1, own.q) and own.mask_keys in (1, own.kv):
            return Reading.ALONE
        raise LayoutError(
            f"attn_mask: expected {own.q} rows or 1, and {own.kv} keys or 1, in the last two dims, got "
            f"{(own.mask_rows, own.mask_keys)}; cut it as query and key"
        )
    fitting = [_fitting(each, num_keys) for each in told]
    common = set.intersection(*fitting)
    # A rank's only query: one row for all of them, or its own of as many as there are ranks.
    both = num_keys > 0 and Reading.KEYS in common and all(each.q == 1 for each in told)
    if common and not both:
        return max(common)
    got = ", ".join(f"{(each.mask_rows, each.mask_keys)} on rank {rank}" for rank, each in enumerate(told))
    if all(fitting) and not common:
        raise AgreementError(f"attn_mask: expected the same of these on every rank, {_FORMS}, got (..., {got}); {_FIX}")
    local = all((each.mask_rows, each.mask_keys) == (each.q, each.kv) for each in told)
    sizes = ", ".join(
        f"{layout.local_len(rank)} rows and {kv_layout.local_len(rank)} keys on rank {rank}"
        for rank in range(layout.world_size)
    )
    raise (UnsupportedError if local else LayoutError)(
        f"attn_mask: expected {_FORMS}, in the last two dims (there are {num_keys} keys; {sizes}), got {got}"
        f"{', the local rows and keys, which leaves out what holds between ranks' * local}; {_FIX}"
    )


def _fitting(own: Told, num_keys: int) -> set[Reading]:
    """What one rank's mask can be, by itself."""
    found = set()
    if (own.mask_rows, own.mask_keys) == (1, own.kv):
        found.add(Reading.KEYS)
    if (own.mask_rows, own.mask_keys) == (1, num_keys):
        found.add(Reading.ONE_ROW)
    if (own.mask_rows, own.mask_keys) == (own.q, num_keys):
        found.add(Reading.ROWS)
    return found


class Fetching(NamedTuple):
    """How one rank fetches what others hold of the masks of a call.

    degree: how many neighbouring ranks exchange rows for heads. call, fingerprint: see `executor.tag_of_call`.
    """

    rank: int
    degree: int
    transport: Transport
    call: int
    fingerprint: int
    direction: str


def whole_mask(mask: Tensor, reading: Reading, layout: Layout, kv_layout: Layout, how: Fetching) -> Tensor:
    """(B | 1, Hq | 1, rows | 1, S): all keys in the order of positions, for the rows that this rank computes, in their
    order: its own, or those of the exchange.
    """
    if reading is Reading.ALONE:
        return mask.expand(*mask.shape[:3], kv_layout.seq_len)
    if reading is Reading.KEYS:
        shapes = {rank: (*mask.shape[:3], kv_layout.local_len(rank)) for rank in range(kv_layout.world_size)}
        whole = mask.new_empty((*mask.shape[:3], kv_layout.seq_len))
        for rank, part in _of_ranks(mask, shapes, how).items():
            for at, span in placed(kv_layout, rank):
                whole[..., slice(*span)] = part[..., at : at + span.length]
        return whole
    if reading is Reading.ONE_ROW or how.degree == 1:
        return mask
    rows, grid = grouped(layout, how.degree), Grid(layout.world_size, how.degree)
    ring_rank, ranks = grid.ring_rank(how.rank), grid.exchange(how.rank)
    shapes = {place: (*mask.shape[:2], layout.local_len(rank), mask.shape[3]) for place, rank in enumerate(ranks)}
    among = how._replace(rank=grid.place(how.rank), transport=Among(how.transport, ranks))
    whole = mask.new_empty((*mask.shape[:2], rows.local_len(ring_rank), mask.shape[3]))
    for place, part in _of_ranks(mask, shapes, among).items():
        for run in rows.placements(ring_rank)[place]:
            whole[:, :, run.block_rows] = part[:, :, run.local_rows]
    return whole


def _of_ranks(mine: Tensor, shapes: Mapping[int, tuple[int, ...]], how: Fetching) -> dict[int, Tensor]:
    """The tensors of all ranks, by rank."""
    others = [rank for rank in shapes if rank != how.rank]
    sent = mine.clone(memory_format=torch.contiguous_format)
    parts = {rank: sent if rank == how.rank else mine.new_empty(shape) for rank, shape in shapes.items()}
    tag = tag_of_call(how.call, how.fingerprint, how.direction, step=-1, what="kv")

    def parcels(tensors: Mapping[int, Tensor]) -> list[Parcel]:
        boxes = [(rank, tensors[rank].view(-1).view(torch.uint8)) for rank in others if tensors[rank].numel()]
        return [Parcel(box, rank, tag, "attn_mask") for rank, box in boxes]

    sends, recvs = parcels(dict.fromkeys(others, sent)), parcels(parts)
    log = CallLog(how.call, f"{how.direction} attn_mask", mine.device)
    if sends or recvs:
        pending = how.transport.post(sends, recvs, f"call {how.call}, {how.direction} attn_mask")
        log.step(0, how.rank, 0, num_bytes(sends), num_bytes(recvs))
        log.mark()
        pending.wait()
        log.mark()
    return parts
