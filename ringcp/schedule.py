"""Schedules: who computes what in which step, and what is sent to whom. Pure: integers in, dataclasses out.

Three kinds of plan move keys and values:

- **ring**: whole blocks pass from neighbour to neighbour, P - 1 hops. In backward the sum of a block's dK/dV travels
  one step behind the block, in the same batch of transfers as the next block, and ends at the owner.
- **direct**: each rank fetches from each owner exactly the rows that its queries attend to; each partial dK/dV
  returns to the owner in one hop, and the owner adds them in the order of the hops.
- **gather**: each rank fetches all of these rows at once, for a group of KV heads after the other; see
  `gather_schedule`. Only where a call asks for it.

The rule between the first two: where some rank attends to every key, all blocks have to reach it and the links of a
ring carry them anyway: ring. Otherwise (windows, documents) direct moves less: direct. Between two ranks both are wired
alike, and direct still leaves out what the other rank does not need: direct. A plan knows masks by their pieces only.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ringcp.errors import ArgumentError, LayoutError
from ringcp.gather_schedule import gather_steps
from ringcp.mask import Pieces
from ringcp.needs import Pairs, Placing, needs, whole
from ringcp.steps import Heads, Kind, Message, Schedule, Step, Tile, for_heads, length, message
from ringcp.topology import Topology

__all__ = ["Heads", "Message", "Schedule", "Step", "Tile", "build"]

_Steps = tuple[tuple[Step, ...], tuple[Step, ...]]


@lru_cache(maxsize=64)
def build(
    layout: Placing,
    mask: Pieces,
    topology: Topology,
    rank: int,
    heads: Heads | None = None,
    *,
    gather: int | None = None,
    kv_layout: Placing | None = None,
) -> Schedule:
    """The schedule of `rank` for one call of attention.

    layout, kv_layout: where the ranks have the queries and the keys; None for keys that lie as the queries do. The
        positions of each count from 0.
    heads: if given, backward keeps half the heads of the own block for the last step, so that the way home of the last
        dK/dV is hidden too.
    gather: a gather plan, with so many KV heads in a group; it needs `heads`.

    Raises:
        LayoutError: if layouts and topology differ in the number of ranks.
        ArgumentError: if a group has no KV head.
    """
    pairs = Pairs(layout, layout if kv_layout is None else kv_layout, mask)
    for name, given in (("layout", pairs.q), ("kv_layout", pairs.k)):
        if given.world_size != topology.world_size:
            raise LayoutError(f"{name}: expected one for {topology.world_size} ranks, got {given!r}")
    kind: Kind
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    if topology.world_size == 1:
        own = _own(pairs, rank)
        kind, forward, backward = "local", (own,), (own,)
    elif gather is not None:
        assert heads is not None, "groups of KV heads are made from the heads"
        if gather < 1:
            raise ArgumentError(f"gather: expected at least one KV head in a group, got {gather}; give 1 or more")
        kind = "gather"
        forward, backward = gather_steps(pairs, topology, rank, heads, gather)
    else:
        own, needed = _own(pairs, rank), needs(pairs)
        if topology.world_size > 2 and any(
            0 < need == pairs.k.seq_len - pairs.k.local_len(r) for r, need in enumerate(needed.num_rows)
        ):
            kind = "ring"
            forward, backward = _ring(pairs, topology, rank, own)
        else:
            kind = "direct"
            forward, backward = _direct(pairs, topology, rank, own, needed.hops(topology))
    if heads is not None and kind != "gather":
        backward = _by_heads(backward, heads, split=len(backward) > len(forward))
        forward = _by_heads(forward, heads, split=False)
    return Schedule(kind, rank, topology.world_size, pairs.q.local_len(rank), forward, backward)


def _own(pairs: Pairs, rank: int) -> Step:
    return Step(rank, whole(pairs.k, rank), pairs.tiles(rank, rank))


def _ring(pairs: Pairs, topology: Topology, rank: int, own: Step) -> _Steps:
    world_size = topology.world_size
    before, after = topology.upstream(rank, 1), topology.downstream(rank, 1)
    rows = [pairs.k.local_len(topology.upstream(rank, hop)) for hop in range(world_size)]
    forward, backward = [], []
    for hop in range(world_size):
        source = topology.upstream(rank, hop)
        tiles = own.tiles if hop == 0 else pairs.tiles(rank, source)
        more = hop + 1 < world_size
        sends = message("kv", after, rows[hop]) if more else ()
        recvs = message("kv", before, rows[hop + 1]) if more else ()
        forward.append(Step(source, whole(pairs.k, source), tiles, sends, recvs))
        if hop >= 2:  # the sum over a block starts at hop 1 and is passed on from hop 2
            sends += message("dkv", after, rows[hop - 1])
            recvs += message("dkv", before, rows[hop])
        backward.append(Step(source, whole(pairs.k, source), tiles, sends, recvs))
    # The last sum goes to its owner, who is the neighbour; the own one comes home.
    home = Step(rank, (), (), message("dkv", after, rows[-1]), message("dkv", before, rows[0], own.rows))
    return tuple(forward), (*backward, home)


def _direct(pairs: Pairs, topology: Topology, rank: int, own: Step, hops: tuple[int, ...]) -> _Steps:
    owners, takers = ([way(rank, hop) for hop in hops] for way in (topology.upstream, topology.downstream))
    fetched = [Step(owner, *pairs.fetched(rank, owner)) for owner in owners]
    lent = [pairs.needed_rows(taker, rank) for taker in takers]
    blocks = [own, *fetched]
    forward, backward = [], []
    for i, block in enumerate(blocks):
        sends: tuple[Message, ...] = ()
        recvs: tuple[Message, ...] = ()
        if i < len(hops):
            sends = message("kv", takers[i], length(lent[i]), lent[i])
            recvs = message("kv", owners[i], fetched[i].num_rows)
        forward.append(Step(block.source, block.rows, block.tiles, sends, recvs))
        if i >= 2:
            sends += message("dkv", owners[i - 2], fetched[i - 2].num_rows)
            recvs += message("dkv", takers[i - 2], length(lent[i - 2]), lent[i - 2])
        backward.append(Step(block.source, block.rows, block.tiles, sends, recvs))
    if hops:
        home_sends = message("dkv", owners[-1], fetched[-1].num_rows)
        home_recvs = message("dkv", takers[-1], length(lent[-1]), lent[-1])
        backward.append(Step(rank, (), (), home_sends, home_recvs))
    return tuple(forward), tuple(backward)


def _by_heads(steps: tuple[Step, ...], heads: Heads, *, split: bool) -> tuple[Step, ...]:
    """Tiles that kernels take; `split`: the last step does half the heads of the own block."""
    if len(heads.runs) == 1:
        done = steps
    else:
        done = tuple(replace(step, tiles=for_heads(step.tiles, heads, (0, heads.kv))) for step in steps)
    if not split or heads.q < 2:
        return done
    kv_cut = heads.kv // 2
    if kv_cut:  # each half has key heads of its own
        early, late = (for_heads(steps[0].tiles, heads, kv) for kv in ((0, kv_cut), (kv_cut, heads.kv)))
    else:
        halves = (0, heads.q // 2), (heads.q // 2, heads.q)
        early, late = (tuple(tile._replace(q_heads=q) for tile in steps[0].tiles) for q in halves)
    return replace(done[0], tiles=early), *done[1:-1], replace(done[-1], tiles=late, rows=steps[0].rows)
