"""The dependence probe: move one token, and count the positions whose results change in any bit.

Needs no weights and no tolerance. A token of one document that changes a row of another, a key outside of the window, a
later token: each would be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ringcp
from benchmarks.parity.cells import attention_on_rank, modes_of
from benchmarks.parity.errors import ATTENTION
from ringcp.balance import choose_layout
from ringcp.testing.pool import World


@dataclass(frozen=True)
class Question:
    """The token that is moved (q, k, v and upstream gradient), what is computed, and `truth`: what must hold."""

    what: str
    token: int
    mask: ringcp.Mask
    truth: ringcp.Mask


def questions(n: int) -> list[Question]:
    """For a sequence of n tokens."""
    documents, half = ringcp.Documents([n // 2, n - n // 2]), n // 2
    kept: list[tuple[str, int, ringcp.Mask]] = [
        ("token 1 of the first of two documents", 1, documents),
        ("the same, causal", 1, documents & ringcp.Causal()),
        (f"token {half}, causal", half, ringcp.Causal()),
        (f"token {half}, window of 16 before a query", half, ringcp.Window(16)),
        (f"token {half}, chunks of {n // 6}", half, ringcp.Chunked(n // 6) & ringcp.Causal()),
        ("a token of padding", n - 2, ringcp.Padding([n - n // 5]) & ringcp.Causal()),
    ]
    forgotten = Question("control: two documents, the mask forgotten", 1, ringcp.Full(), documents)
    return [*(Question(what, token, mask, mask) for what, token, mask in kept), forgotten]


@dataclass(frozen=True)
class Count:
    """Positions that may change, those of them that did, and others that did."""

    reachable: int
    changed: int
    elsewhere: int


@dataclass(frozen=True)
class Answer:
    """`counts` by the names of `ATTENTION`."""

    question: Question
    mode: str
    ranks: int
    counts: dict[str, Count]

    @property
    def leaks(self) -> bool:
        return any(count.elsewhere for count in self.counts.values())

    @property
    def is_control(self) -> bool:
        """It must leak, or the probe sees nothing."""
        return self.question.mask != self.question.truth


def answers(pool: World, seq_len: int, progress: Callable[[str], None]) -> Iterator[Answer]:
    """Every question in every mode, on the ranks of `pool`, in fp32."""
    for question in questions(seq_len):
        reach = reachable(question, seq_len)
        layout = choose_layout(question.mask, seq_len, pool.size)
        for mode in modes_of(pool.size):
            progress(f"probe: {question.what}, {mode}")
            by_rank = pool.run(changed_on_rank, question.mask, question.token, seq_len, mode)
            changed = [layout.unshard(parts, 0) for parts in zip(*by_rank, strict=True)]
            counts = {
                name: Count(int(r.sum()), int((r & c).sum()), int((c & ~r).sum()))
                for name, r, c in zip(ATTENTION, reach, changed, strict=True)
            }
            yield Answer(question, mode, pool.size, counts)


def changed_on_rank(mesh: DeviceMesh, mask: ringcp.Mask, token: int, seq_len: int, mode: str) -> list[Tensor]:
    """For out, dq, dk, dv: which of this rank's rows changed, in any head (rows,)."""
    generator = torch.Generator().manual_seed(seq_len)
    shapes = [(1, heads, seq_len, 32) for heads in (4, 2, 2, 4)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    moved = [x.index_add(2, torch.tensor([token]), torch.ones_like(x[:, :, :1])) for x in tensors]
    before, after = (attention_on_rank(mesh, mask, xs, mode) for xs in (tensors, moved))
    return [(a != b).any(3).flatten(0, 1).any(0) for a, b in zip(before, after, strict=True)]


def reachable(question: Question, seq_len: int) -> list[Tensor]:
    """By the definition of attention, for out, dq, dk, dv: the positions that the token may change (S,)."""
    at = torch.arange(seq_len)
    allowed = question.truth.dense(at, at).expand(1, 1, -1, -1)[0, 0]
    queries = allowed[:, question.token] | ((at == question.token) & allowed.any(1))
    keys = allowed[queries].any(0)
    return [queries, queries, keys, keys]
