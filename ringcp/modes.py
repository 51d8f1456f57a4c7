"""stub"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ringcp.band import Range


class Share(NamedTuple):
    q: Range
    kv: Range


@lru_cache(maxsize=256)
def head_shares(q_heads: int, kv_heads: int, degree: int) -> tuple[Share, ...]:
    group = q_heads // kv_heads
    shares = []
    for s in range(degree):
        a, b = s * q_heads // degree, (s + 1) * q_heads // degree
        shares.append(Share((a, b), (a // group, -(-b // group)) if a < b else (0, 0)))
    return tuple(shares)


class Choice(NamedTuple):
    mode: str
    ulysses_degree: int
    why: str


def choose_mode(**_: object) -> Choice:
    return Choice("ring", 1, "")


def ranks_per_node(ranks: object, local_world_size: int) -> int:
    return len(ranks)  # type: ignore[arg-type]


class Mode(NamedTuple):
    name: str
    degree: int


def mode_of(
    mode: str,
    degree: int | None,
    heads: object,
    seq_len: int,
    world_size: int,
    per_node: int,
    mask: object,
    device: str,
) -> Mode:
    if mode == "auto":
        c = choose_mode(
            q_heads=heads[0],
            kv_heads=heads[1],
            seq_len=seq_len,
            world_size=world_size,
            ranks_per_node=per_node,
            mask=mask,
            device_type=device,
            ulysses_degree=degree,
        )
        return Mode(c.mode, c.ulysses_degree)
    if mode == "ulysses":
        return Mode(mode, world_size)
    return Mode(mode, degree or 1)


MODE_NAMES = ("ring", "gather", "ulysses", "usp")
