"""What the ops are given and what a call gives back, by name: between `ops`, which torch sees, and `call`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Arguments(NamedTuple):
    """Those of `ringcp::attention`, by name: see there.

    votes: whether the ranks vote on the call; the same on every rank (see `Options.votes`).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    layout_spec: Tensor
    kv_layout_spec: Tensor | None
    mask_spec: Tensor
    alibi_slopes: Tensor | None
    attn_mask: Tensor | None
    dropout_seed: Tensor | None
    group_name: str
    mode: str
    ulysses_degree: int | None
    gather_memory: int | None
    kernel: str
    scale: float | None
    softcap: float | None
    dropout_p: float
    seq_len: int | None
    agree_when: str
    votes: bool
    timeout: float | None
    needs_grad: bool
    needs_lse_grad: bool
    save: str
    keep: bool
    also: str
    refused: str


class BackwardArguments(NamedTuple):
    """Those of `ringcp::attention_backward`, by name: see there."""

    dout: Tensor
    dlse: Tensor | None
    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    out: Tensor | None
    lse: Tensor | None
    kept: Tensor
    layout_spec: Tensor
    kv_layout_spec: Tensor | None
    mask_spec: Tensor
    alibi_slopes: Tensor | None
    attn_mask: Tensor | None
    facts: Tensor
    kv_heads: int
    kv_rows: int
    head_dim: int
    group_name: str
    gather_memory: int | None
    scale: float | None
    softcap: float | None
    dropout_p: float
    timeout: float | None

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v; where they are not saved, stand-ins of their shapes and dtypes."""
        if self.q is not None and self.k is not None and self.v is not None:
            return self.q, self.k, self.v
        batch, q_heads, rows, value_dim = self.dout.shape
        of_kv = batch, self.kv_heads, self.kv_rows
        shapes = (batch, q_heads, rows, self.head_dim), (*of_kv, self.head_dim), (*of_kv, value_dim)
        q, k, v = (self.dout.new_empty(()).expand(shape) for shape in shapes)
        return q, k, v


FACTS_WORDS = 16
"""More than there are: inductor keeps compiled code on disk, and that of a ringcp with fewer should still fit."""


class Facts(NamedTuple):
    """What backward has to know of a call.

    kernel, mode, reading: codes, the last of how attn_mask is read. seed: of dropout, the one that rank 0 drew.
    keeps: whether an exchange has kept what it brought. by_memory: whether messages are copied from memory.
    lse_grad: whether the lse may have a gradient, on any rank.
    """

    seq_len: int
    kv_len: int
    call: int
    kernel: int
    fingerprint: int
    mode: int
    degree: int
    seed: int
    keeps: bool
    reading: int
    by_memory: bool
    lse_grad: bool

    def encoded(self) -> list[int]:
        return [*map(int, self), *[0] * (FACTS_WORDS - len(self))]

    @classmethod
    def decoded(cls, words: list[int]) -> Facts:
        return cls._make(words[: len(cls._fields)])


class Result(NamedTuple):
    """out in any floating dtype and lse, of the local rows; and what an exchange keeps. None if there is nothing."""

    out: Tensor
    lse: Tensor
    kept: Tensor | None
