"""Gather plans: all keys that a rank's queries attend to are brought together, a group of KV heads at a time. Pure.

While one group is computed the next one is gathered: after a first step that only waits there is one step a group. In
backward the keys come in the same way, and the gradients of a group are sent to their owners a step behind it.

The rows of a gathered block lie in the order of positions, so that what one run of queries attends to is one band: a
causal head-tail rank has two calls a group, and a full mask one. Strided queries have no bands over neighbouring keys:
there the rows lie owner by owner, except where every query attends to every key.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Literal, NamedTuple

from ringcp.band import Range, count, full, length_of, union
from ringcp.layout import Span, joined
from ringcp.needs import Pairs, Placing, placed, positions_of, within
from ringcp.steps import Heads, Message, Step, Tile, for_heads, length, message
from ringcp.topology import Topology


class _Block(NamedTuple):
    """What one rank gathers for each group of heads.

    positions: of the keys, in the order of the block.
    rows: for each rank, the rows of its own block that are needed.
    places: for each rank, the rows of the gathered block where these lie, in the same order.
    tiles: for all heads.
    """

    positions: tuple[Span, ...]
    rows: tuple[tuple[Range, ...], ...]
    places: tuple[tuple[Span, ...], ...]
    tiles: tuple[Tile, ...]


class _Moves(NamedTuple):
    sends: tuple[Message, ...] = ()
    recvs: tuple[Message, ...] = ()
    kept: tuple[Message, ...] = ()


def gather_steps(
    pairs: Pairs, topology: Topology, rank: int, heads: Heads, num_kv: int
) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Forward and backward of one rank, with `num_kv` KV heads in a group; what is left over is a smaller one."""
    groups = [(start, min(start + num_kv, heads.kv)) for start in range(0, heads.kv, num_kv)]
    hops = range(1, topology.world_size)
    takers, owners = ([way(rank, hop) for hop in hops] for way in (topology.downstream, topology.upstream))
    lent = {taker: pairs.needed_rows(taker, rank) for taker in takers}
    block = _block(pairs, rank)

    def moves(what: Literal["kv", "dkv"], group: Range) -> _Moves:
        # Each rank starts with its neighbours: so no rank is everyone's first.
        of_own = [message(what, to, length(lent[to]), lent[to], kv_heads=group) for to in takers]
        of_block = [
            message(what, owner, length(block.rows[owner]), block_rows=block.places[owner], kv_heads=group)
            for owner in owners
        ]
        kept = message(what, rank, length(block.rows[rank]), block.rows[rank], block.places[rank], group)
        out, back = (tuple(m for found in of for m in found) for of in (of_own, of_block))
        return _Moves(out, back, kept) if what == "kv" else _Moves(back, out, kept)

    def step(i: int, *posted: _Moves) -> Step:
        """Step i computes group i - 1."""
        sends, recvs, kept = (tuple(m for of in way for m in of) for way in zip(_Moves(), *posted, strict=True))
        if not 0 < i <= len(groups):
            return Step(None, sends=sends, recvs=recvs, kept=kept)
        group = groups[i - 1]
        tiles = for_heads(block.tiles, heads, group, group[0])
        return Step(None, (), tiles, sends, recvs, block.positions, group, kept)

    kv, dkv = ([moves(what, group) for group in groups] for what in ("kv", "dkv"))
    forward = [step(i, *kv[i : i + 1]) for i in range(len(groups) + 1)]
    backward = [step(i, *kv[i : i + 1], *dkv[max(i - 2, 0) : max(i - 1, 0)]) for i in range(len(groups) + 2)]
    return tuple(forward), tuple(backward)


def _block(pairs: Pairs, rank: int) -> _Block:
    if all(span.step == 1 for span in pairs.q.spans(rank)):
        return _by_position(pairs, _over_sequence(pairs, rank))
    by_owner = _by_owner(pairs, rank)
    num_q, num_k = pairs.q.local_len(rank), pairs.k.seq_len
    everything = full((0, num_q), (0, num_k)) if num_q and num_k else None
    batches = [batch for _, batch in pairs.batch_rows]
    if everything is None or sum(count(t.band) for t in by_owner.tiles) < num_q * num_k * len(batches):
        return by_owner
    return _by_position(pairs, tuple(Tile(everything, batch) for batch in batches))


def _over_sequence(pairs: Pairs, rank: int) -> tuple[Tile, ...]:
    """The work of a rank's queries, with keys counted by their positions."""
    sequence = Span(0, pairs.k.seq_len)
    return tuple(
        Tile(band.shift(at), batch)
        for row, batch in pairs.batch_rows
        for at, span in placed(pairs.q, rank)
        for band in pairs.mask.pieces(span, sequence, row)
    )


def _by_position(pairs: Pairs, tiles: tuple[Tile, ...]) -> _Block:
    """A block in the order of positions, by which the tiles count their keys."""
    needed = union(tile.band.k for tile in tiles)
    found = [_found(pairs.k, owner, needed) for owner in range(pairs.k.world_size)]
    positions = tuple(Span(*part) for part in needed)
    return _Block(positions, tuple(rows for rows, _ in found), tuple(at for _, at in found), within(tiles, needed))


def _found(layout: Placing, owner: int, needed: tuple[Range, ...]) -> tuple[tuple[Range, ...], tuple[Span, ...]]:
    """The rows of `owner` with positions in `needed`, and where these lie among all that are needed."""
    rows, places = [], []
    before = list(accumulate(map(length_of, needed), initial=0))
    stops = [stop for _, stop in needed]
    for at, (first, last, step) in placed(layout, owner):
        for n in range(bisect_right(stops, first), len(needed)):
            start, stop = needed[n]
            if start >= last:
                break
            a, b = (len(range(first, min(max(edge, first), last), step)) for edge in (start, stop))
            if a < b:
                rows.append((at + a, at + b))
                place = before[n] + first + a * step - start
                places.append(Span(place, place + (b - a - 1) * step + 1, step))
    return union(rows), joined(places)


def _by_owner(pairs: Pairs, rank: int) -> _Block:
    """A block in the order of ranks."""
    rows, tiles, places, positions, at = [], [], [], [], 0
    for owner in range(pairs.k.world_size):
        needed, on_them = pairs.fetched(rank, owner)
        num_rows = length(needed)
        rows.append(needed)
        places.append((Span(at, at + num_rows),) if num_rows else ())
        positions += positions_of(pairs.k, owner, needed)
        tiles += [tile._replace(band=tile.band.shift(k=at)) for tile in on_them]
        at += num_rows
    tiles.sort(key=lambda tile: tile.batch or (0, 0))  # those of a batch row side by side, to be joined
    return _Block(tuple(positions), tuple(rows), tuple(places), tuple(tiles))
