"""Buffers of the exchange and of a gather: what one rank holds at most, to the byte, against formulas in its rows."""

import gc
import itertools
from typing import NamedTuple

import pytest
import torch
from test_memory import Allocations, AtOnce

import ringcp
from ringcp.executor import drive
from ringcp.kernels.registry import KERNELS
from ringcp.merge import accumulator_dtype
from ringcp.modes import Choice, head_shares, replicates
from ringcp.runs import Sizes, make_run, sizes_of
from ringcp.schedule import Heads

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, BATCH, DIM = 32, 2, 8


class Seen(NamedTuple):
    forward: int
    backward: int


def peaks(
    way: Choice,
    world_size: int,
    heads: Heads,
    dtype: torch.dtype,
    rank: int,
    memory: int | None = None,
    keep: bool = False,
) -> Seen:
    """The most bytes of buffers that are alive at once in a full attention, beside inputs and what kernels make.

    In backward without what has been kept: that is there before.
    """
    q, k, v = (torch.ones(BATCH, n, ROWS, DIM, dtype=dtype) for n in (heads.q, heads.kv, heads.kv))
    out, lse = torch.ones_like(q), torch.ones(q.shape[:3], dtype=accumulator_dtype(dtype))
    layout, sizes = ringcp.HeadTail(ROWS * world_size, world_size), sizes_of(k, v, ROWS * world_size, memory)
    how = way, layout, None, ringcp.Full(), heads, rank, KERNELS["reference"], 1.0, AtOnce(), sizes
    run = make_run(*how)
    gc.collect()
    with Allocations("new_empty") as ahead:
        *_, kept = drive(run.forward(q, k, v, keep))
    with Allocations("new_empty") as back:
        drive(run.backward(out, None, q, k, v, out, lse, kept))
    return Seen(ahead.peak, back.peak)


class Share(NamedTuple):
    """Heads of one rank of an exchange, and of its peers, those that several peers have counted as often."""

    q: int
    kv: int
    peers_q: int
    peers_kv: int

    def there(self, degree: int, per_q: int, per_kv: int) -> int:
        """Own rows that go, others' rows that come, and all rows put together."""
        own = self.q * per_q + self.kv * per_kv
        return self.peers_q * per_q + self.peers_kv * per_kv + (2 * degree - 1) * own

    def back(self, degree: int, heads: Heads, per_q: int, per_kv: int, last: int) -> int:
        """Own rows that come, and with them first others' rows that go and own parts, in the end what is put together
        and the own part of the last tensor.
        """
        coming, own = (n_q * per_q + n_kv * per_kv for n_q, n_kv in ((self.peers_q, self.peers_kv), (self.q, self.kv)))
        return coming + max((degree - 1) * own + own, heads.q * per_q + heads.kv * per_kv + last)


def exchanged(degree: int, heads: Heads, dtype: torch.dtype, place: int, rings: bool) -> Seen:
    """The formula. Between the two, the ring has two blocks of all rows, and in backward three sums over such a block
    and dq.
    """
    e, acc, shares = dtype.itemsize, accumulator_dtype(dtype).itemsize, head_shares(heads.q, heads.kv, degree)
    q, kv = ([s[i][1] - s[i][0] for s in shares] for i in (0, 1))
    share = Share(q[place], kv[place], heads.q - q[place], sum(kv) - kv[place])
    summed, block = replicates(shares), rings * degree * share.kv * 2 * DIM
    ahead = (
        share.there(degree, DIM * e, 2 * DIM * e),
        degree * (share.q * DIM * e + share.kv * 2 * DIM * e) + 2 * block * e,
        share.back(degree, heads, DIM * e + acc, 0, share.q * acc),
    )
    per_q, grad = 3 * DIM * e + acc, acc if summed else e
    several = rings and share.q > 1  # of one head, dq and the own sum are results of the one call on the own block
    back = (
        share.there(degree, per_q, 2 * DIM * e),
        degree * (share.q * (per_q + several * DIM * acc) + share.kv * 2 * DIM * e)
        + block * (2 * e + (2 + several) * acc),
        share.back(degree, heads, DIM * e, 2 * DIM * grad, share.kv * DIM * grad),
    )
    return Seen(*(BATCH * ROWS * max(phases) for phases in (ahead, back)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_exchange_holds_rows_and_heads_once_more(dtype):
    for heads, (world_size, degree) in itertools.product(
        (Heads(8, 8), Heads(8, 2), Heads(7, 1), Heads(3, 3)), ((2, 2), (4, 4), (6, 2))
    ):
        mode = "ulysses" if world_size == degree else "usp"
        for place in (0, degree - 1) if dtype == torch.float32 else (0,):
            seen = peaks(Choice(mode, degree, ""), world_size, heads, dtype, world_size - degree + place)
            expected = exchanged(degree, heads, dtype, place, rings=mode == "usp")
            assert seen == expected, (heads, world_size, degree, place)


def test_an_exchange_takes_no_more_in_parts(monkeypatch):
    """The rows of a part come and go while another is computed, but then there are fewer of them."""
    for heads, (world_size, degree) in itertools.product((Heads(8, 8), Heads(8, 2)), ((2, 2), (4, 4), (6, 2))):
        how = Choice("ulysses" if world_size == degree else "usp", degree, ""), world_size, heads, torch.float32, 1
        monkeypatch.setattr(Sizes, "parts", lambda *_: 1)
        whole = peaks(*how)
        monkeypatch.setattr(Sizes, "parts", lambda *_: 2)
        seen = peaks(*how)
        assert seen.forward <= whole.forward, (heads, world_size, degree)
        assert seen.backward <= whole.backward, (heads, world_size, degree)


def test_an_exchange_takes_no_more_with_more_ranks():
    """Heads that fit: rows that go, come and are put together are at most three times the local ones."""
    heads, row = Heads(16, 16), BATCH * ROWS * 16 * 4
    for world_size in (2, 4, 16):
        seen = peaks(Choice("ulysses", world_size, ""), world_size, heads, torch.float32, 1)
        assert 2 * 3 * DIM * row <= seen.forward < 3 * 3 * DIM * row  # q, k, v
        assert 2 * (5 * DIM + 1) * row <= seen.backward < 3 * (5 * DIM + 1) * row  # and out, dout, lse


def test_what_an_exchange_keeps_takes_the_place_of_rows_put_together():
    """Heads that fit: in forward results as computed come on top, and all stays; backward puts dout alone together."""
    heads, row = Heads(16, 16), BATCH * ROWS * 16 * 4
    for world_size in (2, 4, 16):
        seen = peaks(Choice("ulysses", world_size, ""), world_size, heads, torch.float32, 1, keep=True)
        kept, of_peers = (4 * DIM + 1) * row, row * (world_size - 1) // world_size
        assert seen.forward == kept + max(2 * 3 * DIM * of_peers, 2 * (DIM + 1) * of_peers + (DIM + 1) * row)
        # In the end the own part of the last of dq, dk and dv, what comes of all, and all put together.
        assert seen.backward == DIM * (row - of_peers + 3 * of_peers + 3 * row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gather_memory_bounds_the_keys_in_hand(dtype):
    """Full attention: the block in hand, the rows that come and those that go; as many heads as there is memory for."""
    world_size, heads, e, acc = 4, Heads(8, 4), dtype.itemsize, accumulator_dtype(dtype).itemsize
    one_head = BATCH * world_size * ROWS * 2 * DIM * e
    results = BATCH * heads.q * ROWS * (DIM + 1) * acc  # out and lse, unless one call is all
    for memory, at_a_time in ((1, 1), (one_head, 1), (2 * one_head - 1, 1), (3 * one_head, 3), (9 * one_head, 4)):
        seen = peaks(Choice("gather", 1, ""), world_size, heads, dtype, 2, memory)
        in_hand = at_a_time * one_head
        assert in_hand <= max(memory, one_head)
        assert seen.forward == 2 * in_hand + results * (at_a_time < heads.kv), memory
    assert peaks(Choice("gather", 1, ""), world_size, heads, dtype, 2).forward == 2 * 2 * one_head + results
