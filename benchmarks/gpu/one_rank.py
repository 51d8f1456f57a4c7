"""What one rank of many computes, without its peers: every message is there at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

import ringcp
from ringcp.executor import drive
from ringcp.kernels.base import Form, Kernel
from ringcp.layout import Layout
from ringcp.modes import Choice, Mode
from ringcp.runs import Run, make_run, sizes_of
from ringcp.schedule import Heads
from ringcp.transport import Parcel

CAUSAL = Form(lo=0)


class NoWires:
    """A transport that moves nothing: receive buffers keep what the allocator gave. fill: random numbers instead, so
    that buffers which are used again hold such too (a GPU is faster on zeros).
    """

    fill = False

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], where: str) -> Self:
        for parcel in recvs if self.fill else ():
            x = parcel.tensor
            (x.view(torch.bfloat16) if x.dtype == torch.uint8 else x).normal_()
        return self

    def go_on(self) -> None:
        pass

    def wait(self) -> None:
        pass


class Shape(NamedTuple):
    """The attention of one layer over a whole sequence of `tokens` a rank."""

    tokens: int
    world_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def seq_len(self) -> int:
        return self.tokens * self.world_size

    def rank_flops(self, causal: bool = True) -> float:
        """Of forward, the mean over ranks; backward has 2.5 times as many."""
        return 4.0 * self.tokens * self.seq_len * self.q_heads * self.head_dim / (2 if causal else 1)

    def share(self) -> Shape:
        """The whole sequence with one rank's part of the heads: as many FLOPs as a rank has."""
        heads = self.q_heads // self.world_size, self.kv_heads // self.world_size
        return Shape(self.seq_len, 1, *heads, self.head_dim, self.dtype)


class Attention(NamedTuple):
    """q, k, v and the upstream gradient of `tokens` tokens, stored as (B, S, H, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def random(cls, shape: Shape, device: torch.device) -> Attention:
        def make(heads: int) -> Tensor:
            x = torch.randn(1, shape.tokens, heads, shape.head_dim, device=device, dtype=shape.dtype)
            return x.transpose(1, 2)

        return cls(make(shape.q_heads), make(shape.kv_heads), make(shape.kv_heads), make(shape.q_heads))


@dataclass
class OneCall:
    """Causal attention by one call of a kernel."""

    kernel: Kernel
    given: Attention
    form: Form = CAUSAL

    def forward(self) -> tuple[Tensor, Tensor]:
        q, k, v, _ = self.given
        return self.kernel.forward(q, k, v, form=self.form, scale=q.shape[-1] ** -0.5)

    def backward(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, dout = self.given
        return self.kernel.backward(dout, q, k, v, out, lse, None, form=self.form, scale=q.shape[-1] ** -0.5)


class OneRank:
    """One rank's part in causal attention over all ranks, as the op runs it."""

    def __init__(self, mode: Mode, shape: Shape, rank: int, kernel: Kernel, given: Attention) -> None:
        self._shape, self._rank = shape, rank
        self._mode = Choice(mode, shape.world_size if mode == "ulysses" else 1, "")
        self._layout: Layout = ringcp.HeadTail(shape.seq_len, shape.world_size)
        self.kernel = kernel
        self.given = given
        self.wires = NoWires()

    def forward(self) -> tuple[Tensor, Tensor, Tensor | None]:
        out, lse, kept = drive(self._run().forward(*self.given[:3], keep=True))
        return out.to(self._shape.dtype), lse, kept

    def backward(self, out: Tensor, lse: Tensor, kept: Tensor | None) -> tuple[Tensor, ...]:
        grads = drive(self._run().backward(self.given.dout, None, *self.given[:3], out, lse, kept))
        return tuple(grad.to(self._shape.dtype) for grad in grads)

    def _run(self) -> Run:
        shape = self._shape
        sizes = sizes_of(self.given.k, self.given.v, shape.seq_len, None)
        heads = Heads(shape.q_heads, shape.kv_heads)
        scale = shape.head_dim**-0.5
        return make_run(
            self._mode, self._layout, None, ringcp.Causal(), heads, self._rank, self.kernel, scale, self.wires, sizes
        )
