"""What is said of each pair of a call: its distance, for ALiBi, what an attn_mask holds of it, whether functions allow
it, and whether dropout keeps it.

Shapes: B batch, Hq query heads, M query rows, N keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringcp.band import Range

_LOW = (1 << 32) - 1
# Below 2**31, so that no product of it with 32 bits leaves an int64.
_FACTOR = 0x5BD1E995


@dataclass(frozen=True)
class Alibi:
    """A bias that grows with distance: ``-slope * |i - j|`` on the scaled (and capped) scores.

    slopes: (B | 1, Hq), fp32. rows: (M,), keys: (N,): global positions, int64.
    """

    slopes: Tensor
    rows: Tensor
    keys: Tensor

    @property
    def planes(self) -> int:
        """Batch rows times heads that differ."""
        return self.slopes.numel()

    def bias(self, dtype: torch.dtype) -> Tensor:
        """(B | 1, Hq, M, N)."""
        distance_MN = (self.rows[:, None] - self.keys).abs().to(dtype)
        return -self.slopes.to(dtype)[:, :, None, None] * distance_MN

    def part(self, rows: slice, keys: slice) -> Alibi:
        """That of some rows and keys."""
        return Alibi(self.slopes, self.rows[rows], self.keys[keys])


@dataclass(frozen=True)
class AttnMask:
    """An `attn_mask` of `F.scaled_dot_product_attention`: what it adds to the scaled (and capped) scores.

    values: (B | 1, Hq | 1, M | 1, S) of bool, True where a pair attends, or floating. keys: (N,), int64: which of them.
    """

    values: Tensor
    keys: Tensor

    @property
    def planes(self) -> int:
        """Batch rows times heads that differ."""
        return self.values.shape[0] * self.values.shape[1]

    def bias(self, dtype: torch.dtype) -> Tensor:
        """(B | 1, Hq | 1, M | 1, N); -inf for pairs that do not attend.

        So are those with a number so low that in `dtype` nothing is left of a score beside it, as padding is often
        written (float32's least one): a row that sees nothing else attends to nothing, as in a mask of bool. Its lse
        could not tell how many keys there are, and backward and merges need that.
        """
        values_BHMN = self.values.index_select(3, self.keys)
        if values_BHMN.dtype == torch.bool:
            bias_BHMN = torch.zeros_like(values_BHMN, dtype=dtype)
            return bias_BHMN.masked_fill_(~values_BHMN, -torch.inf)
        bias_BHMN = values_BHMN.to(dtype)
        return bias_BHMN.masked_fill(bias_BHMN <= -4 / torch.finfo(dtype).eps, -torch.inf)

    def of(self, batch: Range, heads: Range, rows: Range) -> AttnMask:
        """That of some batch rows, heads and rows."""
        places = zip((batch, heads, rows), self.values.shape, strict=False)
        return AttnMask(self.values[tuple(slice(*place) if n > 1 else slice(None) for place, n in places)], self.keys)

    def part(self, rows: slice, keys: slice) -> AttnMask:
        """That of some rows and keys."""
        values = self.values[:, :, rows] if self.values.shape[2] > 1 else self.values
        return AttnMask(values, self.keys[keys])


@dataclass(frozen=True)
class Allowed:
    """Which pairs attend: those that all functions allow.

    functions: mask_mods of FlexAttention, of single numbers among those of the whole call, which compute pointwise and
        look up in tensors. by_row, by_head: whether any of them depends on the batch row, and on the query head.
    batch: (B,), heads: (Hq,), rows: (M,), keys: (N,): these numbers of the call's own rows, heads and keys; int64.
    """

    functions: tuple[Callable[..., Any], ...]
    by_row: bool
    by_head: bool
    batch: Tensor
    heads: Tensor
    rows: Tensor
    keys: Tensor


@dataclass(frozen=True)
class Dropout:
    """Which weights dropout keeps: a pure function of the seed, the batch row, the query head and both positions.

    So ranks, tiles and both directions agree on every pair, whoever computes it.

    p: the probability of none, from 0 to below 1. seed: from 0 to below 2**62.
    batch: (B,), heads: (Hq,), rows: (M,), keys: (N,): numbers among those of the whole call, and positions; int64.
    """

    p: float
    seed: int
    batch: Tensor
    heads: Tensor
    rows: Tensor
    keys: Tensor

    def factors(self, dtype: torch.dtype) -> Tensor:
        """(B, Hq, M, N): what weights are multiplied by after the softmax, 0 or 1 / (1 - p)."""
        return self.kept().to(dtype).div_(1 - self.p)

    def kept(self) -> Tensor:
        """(B, Hq, M, N) of bool."""
        low, high = self.seed & _LOW, self.seed >> 32
        of_batch = _mixed(_mixed(self.batch + low & _LOW) + high & _LOW)
        of_head = _mixed(of_batch[:, None] + self.heads & _LOW)
        row_BHM1 = _mixed(of_head[:, :, None, None] + self.rows[:, None] & _LOW)
        key_N = _mixed(self.keys + high & _LOW)
        # Two rows whose bits meet at some pair of keys part again with the second addition.
        bits_BHMN = _mixed_(row_BHM1 ^ key_N)
        bits_BHMN = _mixed_(bits_BHMN.add_(row_BHM1).bitwise_and_(_LOW))
        return bits_BHMN >= round(self.p * (_LOW + 1))


def _mixed(x: Tensor) -> Tensor:
    return _mixed_(x.clone())


def _mixed_(x: Tensor) -> Tensor:
    """A bijection of 32 bits, in int64, in which each bit of `x` stirs all: shifts and products in turn."""
    for shift in (16, 15):
        x.bitwise_xor_(x >> shift).mul_(_FACTOR).bitwise_and_(_LOW)
    return x.bitwise_xor_(x >> 16)
