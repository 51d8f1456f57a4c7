"""Merging partial softmax results through their log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which out, lse, dq, dk and dv are summed: fp32, or wider for wider inputs."""
    return torch.promote_types(dtype, torch.float32)


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge the result of further keys into `out` (..., S, D) and `lse` (..., S), in place.

    ``lse' = log(exp(lse) + exp(block_lse))`` and ``out' = out + exp(block_lse - lse') (block_out - out)``
    (online softmax, Milakov and Gimelshein 2018). An lse of -inf stands for "no key so far", on either side or both.
    """
    # exp(block_lse - lse') without the rounding of lse'. (-inf) - (-inf): neither side has a key, and nothing changes.
    weight = torch.sigmoid(block_lse - lse).nan_to_num_(nan=0.0)
    out.lerp_(block_out.to(out.dtype), weight.unsqueeze(-1))
    torch.logaddexp(lse, block_lse, out=lse)
