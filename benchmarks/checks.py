"""Is it right? Held against fp64 attention: in all rows of a small case, and in some rows of a case of any length.

In the long case the upstream gradient is zero except in the sampled rows. So out and dq are known there from those
queries alone, and so is what they give to dk and dv, of which the rows of the same positions are compared: all of it
costs rows x length, not length squared, and takes the code through the calls that are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import ringcp
from benchmarks.cases import DTYPES, Case, document_lengths, parse_mask
from ringcp.testing import assert_close, reference_attention

_NAMES = ("out", "dq", "dk", "dv")
_DRAWN_ROWS = 40
_CUTS = 8


class Rows(NamedTuple):
    """Some rows of out, dq, dk and dv, by their positions in the sequence."""

    positions: Tensor
    results: list[Tensor]


def sampled(case: Case) -> Tensor:
    """Positions to look at: both sides of where layouts cut and documents end, and some drawn ones. Ascending."""
    generator = torch.Generator().manual_seed(case.seq_len)
    ends = [i * case.seq_len // _CUTS for i in range(_CUTS + 1)]
    ends += torch.tensor(document_lengths(case.mask), dtype=torch.int64).cumsum(0).tolist()
    beside = torch.tensor([at for end in ends for at in (end - 1, end) if 0 <= at < case.seq_len])
    drawn = torch.randint(case.seq_len, (_DRAWN_ROWS,), generator=generator)
    return torch.cat([beside, drawn]).unique()


def compute(attention: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv."""
    q, k, v, grad = tensors
    out = attention(q, k, v)
    return [out, *torch.autograd.grad(out, (q, k, v), grad.to(out.dtype))]


def results_at(
    rows: Tensor | None,
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    tensors: Sequence[Tensor],
    layout: ringcp.Layout | None,
    rank: int,
) -> Rows:
    """One call's results on this rank: in those of the rows that it has, or in all (None)."""
    *inputs, grad = tensors
    mine = torch.arange(grad.shape[2]) if layout is None else layout.positions(rank)
    chosen = torch.ones(len(mine), dtype=torch.bool) if rows is None else torch.isin(mine, rows)
    grad = grad * chosen[:, None].to(grad)
    return Rows(mine[chosen], [x.detach().cpu()[:, :, chosen] for x in compute(attention, [*inputs, grad])])


def compare(case: Case, rows: Tensor | None, parts: Sequence[Rows], device: str) -> str:
    """What is wrong with the ranks' results, the error of one SDPA call in the same dtype being the bar; empty if
    nothing is.
    """
    positions = torch.cat([part.positions for part in parts])
    wanted = torch.arange(case.seq_len) if rows is None else rows
    if not torch.equal(positions.sort().values, wanted):
        return f"layout: expected every position on one rank, got {len(positions)} of {len(wanted)} rows"
    order = positions.argsort()
    for i, (name, *expected) in enumerate(zip(_NAMES, *_expected(case, rows is None, device), strict=True)):
        actual = torch.cat([part.results[i] for part in parts], 2)[:, :, order]
        try:
            if actual.dtype != DTYPES[case.dtype]:
                return f"{name}: expected {DTYPES[case.dtype]}, got {actual.dtype}"
            assert_close(actual, expected[0], baseline=expected[1], name=name)
        except AssertionError as error:
            return str(error)
    return ""


@lru_cache(maxsize=2)
def _expected(case: Case, whole: bool, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """out, dq, dk and dv in the rows that are compared, in fp64 and by SDPA in the dtype of the case."""
    every = torch.arange(case.seq_len)
    rows = every if whole else sampled(case)
    allowed = parse_mask(case.mask).dense(rows, every)

    def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference_attention(q, k, v, mask=allowed)[0]

    def one_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = allowed.to(device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=case.heads != case.kv_heads)

    def of(attention: Callable[[Tensor, Tensor, Tensor], Tensor], where: str, dtype: torch.dtype) -> list[Tensor]:
        q, k, v, grad = (x.to(dtype) for x in case.tensors(where))
        inputs = [x.detach().requires_grad_() for x in (q[:, :, rows], k, v)]
        out, dq, dk, dv = compute(attention, [*inputs, grad[:, :, rows]])
        return [x.detach().cpu() for x in (out, dq, dk[:, :, rows], dv[:, :, rows])]

    return of(exact, "cpu", torch.float64), of(one_kernel, device, DTYPES[case.dtype])
