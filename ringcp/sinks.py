"""Attention sinks: one learned logit a head that takes part in the softmax and has no value."""

from __future__ import annotations

import torch
from torch import Tensor


def fold_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with sinks, from attention without: once, after all keys have been merged. Differentiable.

    ``lse' = logaddexp(lse, sink)`` and ``out' = out * exp(lse - lse')``: the softmax with one more column, of value 0
    (Xiao et al. 2023; gpt-oss). A row that attends to nothing gets out 0 and lse' = sink.

    Args:
        out: (B, Hq, S, Dv); lse: (B, Hq, S), -inf for rows that attend to nothing.
        sinks: (Hq,), in the units of the scaled scores. -inf is no sink.
    """
    # A finite stand-in for -inf: (-inf) - (-inf) has no value, and its gradient none either.
    sink = sinks.to(lse.dtype).clamp_min(torch.finfo(lse.dtype).min / 2)[None, :, None]
    weight = torch.sigmoid(lse - sink)  # exp(lse - lse') without the rounding of lse'
    # The fill is for backward: what the gradient holds in rows that attend to nothing (padding) is not the sinks'.
    folded = (out * weight.unsqueeze(-1)).to(out.dtype).masked_fill((lse == -torch.inf).unsqueeze(-1), 0.0)
    return folded, torch.where(torch.isneginf(sinks)[None, :, None], lse, torch.logaddexp(lse, sink))
