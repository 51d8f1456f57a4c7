"""Modes: which way keys and queries meet, how many bytes each way sends, and the rule by which "auto" chooses. Pure.

With W ranks and u of them in an exchange, rank ``r = c * u + s`` is number s of exchange c, and number c of the ring of
all ranks with its s. An exchange of all ranks is "ulysses", of one rank each "ring", anything between "usp".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import gcd
from typing import Literal, NamedTuple, cast, get_args

from ringcp.band import Range, length_of
from ringcp.errors import ArgumentError
from ringcp.mask import Mask

Mode = Literal["ring", "gather", "ulysses", "usp"]
MODES: tuple[Mode, ...] = get_args(Mode)

# An uneven exchange is taken if its busiest rank has at most 9/8 of the mean number of query heads. In published
# figures a ring is 7 to 30 % slower than an exchange: those of yunchang on 8 A100, and of MagiAttention on 8 H100.
_MOST_UNEVEN = 9, 8


class Share(NamedTuple):
    """The heads of one rank of an exchange: query heads, and the key heads that these need."""

    q: Range
    kv: Range


@lru_cache(maxsize=256)
def head_shares(q_heads: int, kv_heads: int, degree: int) -> tuple[Share, ...]:
    """For each rank of an exchange its heads: query heads from ``floor(s * Hq / degree)`` on.

    A key head goes to every rank that has query heads of its group; a rank without query heads gets none.
    """
    group = q_heads // kv_heads
    edges = [s * q_heads // degree for s in range(degree + 1)]
    return tuple(Share((a, b), (a // group, -(-b // group) if a < b else a // group)) for a, b in pairwise(edges))


def replicates(shares: Sequence[Share]) -> bool:
    """Whether some key head goes to more than one rank."""
    return any(a.kv[1] > b.kv[0] for a, b in pairwise(shares))


def in_parts(shares: Sequence[Share], group: int, parts: int) -> list[tuple[Share, ...]]:
    """At most so many parts, each with some of every rank's KV heads and the query heads of these; those of some ranks
    may be empty. group: query heads of a KV head.
    """
    num = max(1, min(parts, *(length_of(kv) for _, kv in shares))) if shares else 1
    return [tuple(_part(share, group, i, num) for share in shares) for i in range(num)]


def _part(share: Share, group: int, i: int, num: int) -> Share:
    (q0, q1), (kv0, kv1) = share
    a, b = (kv0 + j * (kv1 - kv0) // num for j in (i, i + 1))
    return Share((max(q0, a * group), max(q0, min(q1, b * group))), (a, b))


@dataclass(frozen=True)
class Weight:
    """What makes the bytes of a token. v_head_dim: None if it is `head_dim`."""

    q_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    batch: int = 1
    v_head_dim: int | None = None

    @property
    def v_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def sum_itemsize(self) -> int:
        """Bytes of an element of the lse and of sums: fp32, or fp64 for fp64."""
        return max(4, self.itemsize)


@dataclass(frozen=True)
class Traffic:
    """Bytes that are sent in forward and in backward."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.forward + other.forward, self.backward + other.backward)


def most(per_rank: Sequence[Traffic]) -> Traffic:
    """What the rank that sends most sends, in either direction."""
    return Traffic(max(t.forward for t in per_rank), max(t.backward for t in per_rank))


class Rows(NamedTuple):
    """Rows that one rank sends: of keys and values, in forward and again in backward, and of their gradients."""

    kv: int
    dkv: int


def whole_blocks(lengths: Sequence[int]) -> tuple[Rows, ...]:
    """The rows of a ring that passes whole blocks, as for full and causal attention.

    lengths: of each rank's block. A rank passes on all blocks but that of the rank after it, and the sums of all but
    its own.
    """
    whole = sum(lengths)
    after = [*lengths[1:], lengths[0]]
    return tuple(Rows(whole - after[r], whole - length) for r, length in enumerate(lengths))


def gathered(needed: Sequence[Sequence[int]]) -> tuple[Rows, ...]:
    """The rows of a gather: a rank sends its own to all who need them, and the gradients of what it fetched.

    needed: for each rank, how many rows of each other one its queries attend to; its own do not count.
    """
    ranks = range(len(needed))
    return tuple(
        Rows(sum(needed[peer][r] for peer in ranks if peer != r), sum(needed[r][peer] for peer in ranks if peer != r))
        for r in ranks
    )


def rows_bytes(rows: Sequence[Rows], weight: Weight) -> tuple[Traffic, ...]:
    """What each rank of a ring or of a gather sends. Gradients travel as sums."""
    row = weight.batch * weight.kv_heads * (weight.head_dim + weight.v_dim)
    return tuple(
        Traffic(n.kv * row * weight.itemsize, n.kv * row * weight.itemsize + n.dkv * row * weight.sum_itemsize)
        for n in rows
    )


def exchange_bytes(
    lengths: Sequence[int], degree: int, weight: Weight, save: Literal["exchanged", "local"] = "exchanged"
) -> tuple[Traffic, ...]:
    """What each rank sends in the exchanges of heads against tokens, groups of `degree` ranks each.

    Forward: q, k, v there, out and lse back. Backward: dout there, and if local rows are saved also q, k, v, out and
    lse; dq, dk and dv back, the latter two as sums where the shares replicate a key head.

    lengths: tokens of each rank, of the whole group.
    """
    shares = head_shares(weight.q_heads, weight.kv_heads, degree)
    d, v, e, wide = weight.head_dim, weight.v_dim, weight.itemsize, weight.sum_itemsize
    grad = wide if replicates(shares) else e
    result = []
    for rank, length in enumerate(lengths):
        first, own = rank - rank % degree, shares[rank % degree]
        others = sum(lengths[first : first + degree]) - length
        # Heads of the peers, which get this rank's tokens; heads of this rank, which has had the peers' tokens.
        q_there, kv_there = (sum(length_of(s[i]) for s in shares) - length_of(own[i]) for i in (0, 1))
        q_back, kv_back = length_of(own.q), length_of(own.kv)
        forward = length * (q_there * d + kv_there * (d + v)) * e
        forward += others * q_back * (v * e + wide)
        backward = length * q_there * v * e
        if save == "local":
            backward += length * (q_there * ((d + v) * e + wide) + kv_there * (d + v) * e)
        backward += others * (q_back * d * e + kv_back * (d + v) * grad)
        result.append(Traffic(weight.batch * forward, weight.batch * backward))
    return tuple(result)


def usp_bytes(
    lengths: Sequence[int],
    degree: int,
    rows: Sequence[Rows],
    weight: Weight,
    save: Literal["exchanged", "local"] = "exchanged",
) -> tuple[Traffic, ...]:
    """What each rank sends in the exchanges, and in the ring with its share of the key heads.

    rows: those of the ring, for each of its ranks; `whole_blocks` for full and causal attention.
    """
    shares = head_shares(weight.q_heads, weight.kv_heads, degree)
    one_head = rows_bytes(rows, replace(weight, q_heads=1, kv_heads=1))
    result = []
    for rank, exchanged in enumerate(exchange_bytes(lengths, degree, weight, save)):
        ring, num = one_head[rank // degree], length_of(shares[rank % degree].kv)
        result.append(exchanged + Traffic(num * ring.forward, num * ring.backward))
    return tuple(result)


def ring_lengths(lengths: Sequence[int], degree: int) -> list[int]:
    """Tokens of each rank of the ring: those of its exchange together."""
    return [sum(lengths[at : at + degree]) for at in range(0, len(lengths), degree)]


@dataclass(frozen=True)
class Choice:
    """A mode, and why.

    ulysses_degree: ranks in an exchange: all in "ulysses", 1 in "ring" and "gather".
    not_taken: the other modes, each with the reason against it.
    """

    mode: Mode
    ulysses_degree: int
    why: str
    not_taken: tuple[tuple[Mode, str], ...] = ()


def resolve_mode(
    mode: str,
    ulysses_degree: int | None,
    q_heads: int,
    kv_heads: int,
    seq_len: int,
    world_size: int,
    ranks_per_node: int,
    mask: Mask | None,
    device_type: str,
) -> Choice:
    """What a checked `mode` and `ulysses_degree` mean for a call."""
    if mode == "auto":
        return choose_mode(
            q_heads=q_heads,
            kv_heads=kv_heads,
            seq_len=seq_len,
            world_size=world_size,
            ranks_per_node=ranks_per_node,
            mask=mask,
            device_type=device_type,
            ulysses_degree=ulysses_degree,
        )
    degree = world_size if mode == "ulysses" else ulysses_degree or 1
    return Choice(cast(Mode, mode), degree, "asked for")


def choose_mode(
    *,
    q_heads: int,
    kv_heads: int,
    seq_len: int,
    world_size: int,
    ranks_per_node: int,
    mask: Mask | None,
    device_type: str,
    ulysses_degree: int | None = None,
) -> Choice:
    """The mode that ``mode="auto"`` means. The same on every rank; remembered.

    The first that holds:

    1. One rank: ring, which moves nothing.
    2. `ulysses_degree` is given (or the mesh has two axes): 1 is ring, all ranks ulysses, anything between usp.
    3. The mask reaches less far than a rank's share of the tokens, ``seq_len // world_size``: ring, since only the
       rows that are needed move. Over contiguous ranks a causal window moves no more rows than it reaches, where even
       an exchange of as many key as query heads moves about two shares.
    4. One node and heads that fit an exchange of all ranks: ulysses. Each rank computes whole heads in full-size
       calls, and merges nothing.
    5. One node on CUDA, at least 2 key heads: gather, which fetches those of one call during another.
       Read off MagiAttention's charts (8 H100, causal, forward / backward, TFLOP/s): ulysses 602 / 583, gather
       602 / 516, ring 422 / 432. Hence also the order of 4 and 5.
    6. One node: ring. On 2 gloo ranks torch's head-tail ring had 95 / 99 % of the ideal speed, its gather 91 / 91 %.
    7. Several nodes: usp with the largest exchange of more than one rank that lies inside the nodes (it divides
       `ranks_per_node` and the number of ranks) and that the heads fit; the ring goes across.
    8. Otherwise ring.

    Heads fit an exchange if its ranks divide both numbers. Otherwise, if the busiest rank has at most 1/8 more query
    heads than the mean, and each rank sends (forward and backward, bf16, head dim 128, the same number of tokens on
    every rank) at most half as many bytes as in a ring of all ranks.

    `mask` is asked for its reach only, and the layout not at all: a striped one makes a window touch every rank.
    """
    if ulysses_degree is not None and (ulysses_degree < 1 or world_size % ulysses_degree):
        raise ArgumentError(
            f"ulysses_degree: expected a divisor of the {world_size} ranks, got {ulysses_degree}; "
            f"choose one of {', '.join(map(str, divisors(world_size)))}"
        )
    share = seq_len // world_size
    reach = None if mask is None else mask.reach
    # What the rule does not look at does not fill its memory: lengths change with every batch.
    near = (reach, share) if reach is not None and reach < share else None
    return _choose(q_heads, kv_heads, world_size, min(ranks_per_node, world_size), near, device_type, ulysses_degree)


@lru_cache(maxsize=1024)
def _choose(
    q_heads: int,
    kv_heads: int,
    world_size: int,
    ranks_per_node: int,
    near: tuple[int, int] | None,
    device_type: str,
    degree: int | None,
) -> Choice:
    if world_size == 1:
        return _choice("ring", 1, "one rank, and nothing moves", {})
    if degree is not None:
        mode: Mode = "ring" if degree == 1 else "ulysses" if degree == world_size else "usp"
        return _choice(mode, degree, f"exchanges of {degree} of the {world_size} ranks are asked for", {})
    if near is not None:
        why = f"the mask reaches {near[0]} tokens, less than a rank's {near[1]}, and only the rows that are needed move"
        every = "would move every row, needed or not"
        same = "moves the same rows as the ring's plan, and keeps those of several ranks at once"
        return _choice("ring", 1, why, {"gather": same, "ulysses": every, "usp": every})
    if ranks_per_node == world_size:
        return _on_one_node(q_heads, kv_heads, world_size, device_type)
    against: dict[Mode, str] = {
        "gather": "every rank would fetch all keys across nodes",
        "ulysses": "its exchange would cross nodes",
    }
    for degree in reversed(divisors(gcd(ranks_per_node, world_size))):
        fit = _fit(q_heads, kv_heads, degree, world_size)
        if degree > 1 and fit.fits:
            across = world_size // degree
            why = f"{fit.why}; exchanges of {degree} stay inside the nodes, a ring of {across} goes across"
            against["ring"] = f"would pass {world_size} blocks with all key heads on, where usp passes {across}"
            return _choice("usp", degree, why, against)
        against.setdefault("usp", fit.why)
    if ranks_per_node == 1:
        against["usp"] = "no two ranks share a node"
    return _choice("ring", 1, f"several nodes, and no exchange inside them: {against['usp']}", against)


def _on_one_node(q_heads: int, kv_heads: int, world_size: int, device_type: str) -> Choice:
    fit = _fit(q_heads, kv_heads, world_size, world_size)
    against: dict[Mode, str] = {"usp": "all ranks are on one node, so no link is slower than others"}
    if fit.fits:
        against["ring"] = "computes in steps and merges their results, where ulysses has whole heads in full-size calls"
        against["gather"] = "fetches all keys and adds up their gradients, and was slower backward in published figures"
        return _choice("ulysses", world_size, f"one node, and {fit.why}", against)
    against["ulysses"] = fit.why
    if device_type == "cuda" and kv_heads > 1:
        against["ring"] = "computes in steps and merges their results, and was slower on GPUs in published figures"
        return _choice("gather", 1, f"CUDA on one node, where heads do not fit ulysses: {fit.why}", against)
    against["gather"] = (
        "one key head leaves nothing to compute while keys are fetched"
        if device_type == "cuda"
        else "all keys at once take more memory, and was slower than a ring on CPUs"
    )
    return _choice("ring", 1, f"one node, and heads do not fit ulysses: {fit.why}", against)


def _choice(mode: Mode, degree: int, why: str, against: dict[Mode, str]) -> Choice:
    return Choice(mode, degree, why, tuple((other, against.get(other, why)) for other in MODES if other != mode))


class _Fit(NamedTuple):
    fits: bool
    why: str


def _fit(q_heads: int, kv_heads: int, degree: int, world_size: int) -> _Fit:
    """Whether heads fit exchanges of `degree` of the ranks, as `choose_mode` has it."""
    heads = f"{q_heads} query and {kv_heads} key heads"
    if q_heads % degree == 0 and kv_heads % degree == 0:
        return _Fit(True, f"{degree} ranks divide {heads}")
    busiest = -(-q_heads // degree)
    over, under = _MOST_UNEVEN
    if busiest * degree * under > q_heads * over:
        return _Fit(
            False, f"of {heads}, {degree} ranks would have up to {busiest} query heads, {q_heads / degree:g} even"
        )
    weight = Weight(q_heads, kv_heads, head_dim=128, itemsize=2)
    lengths = [1] * world_size
    ring = most(rows_bytes(whole_blocks(lengths), weight)).total
    usp = most(usp_bytes(lengths, degree, whole_blocks(ring_lengths(lengths, degree)), weight)).total
    words = f"{heads} over {degree} ranks send {usp / ring:.3f} times the bytes of a ring"
    return _Fit(True, words) if 2 * usp <= ring else _Fit(False, f"{words}, more than half")


def divisors(n: int) -> list[int]:
    """In rising order."""
    return [d for d in range(1, n + 1) if n % d == 0]


def ranks_per_node(ranks: Sequence[int], local_world_size: int) -> int:
    """How many neighbours of a group share a node: the most such that all runs of so many ranks do.

    All of them if the group is on one node; 1 if neighbours are on different ones.

    Args:
        ranks: global ranks of the group, in its order.
        local_world_size: ranks of a node; node i holds those from ``i * local_world_size`` on, as torchrun numbers.
    """
    nodes = [rank // local_world_size for rank in ranks]

    def together(n: int) -> bool:
        return all(len(set(nodes[at : at + n])) == 1 for at in range(0, len(nodes), n))

    return next(n for n in reversed(divisors(len(nodes))) if together(n))
