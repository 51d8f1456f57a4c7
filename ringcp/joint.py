"""Joint attention: some tokens on every rank (text), the rest sharded (video), in queries, in keys, or in both.

Made of calls on parts, which meet through the log-sum-exp. The sharded part runs in any mode; what it has to do with
the replicated keys is local, and each rank computes the replicated queries on its own rows alone: their partial results
of all ranks are gathered, n rows each, and every rank merges them in rank order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringcp.layout import Layout
from ringcp.opcall import call_op
from ringcp.options import Options, seconds_of
from ringcp.replicas import of_all_ranks, split_copies
from ringcp.sinks import fold_sinks


class _Part(NamedTuple):
    """What attention to some of the keys gave: out (B, H, S, D) and lse (B, H, S)."""

    out: Tensor
    lse: Tensor


def joint_attention(q: Tensor, k: Tensor, v: Tensor, options: Options, group_name: str) -> _Part:
    """out and lse of the local rows."""
    kv_layout = options.layout if options.kv_layout is None else options.kv_layout
    num_q, num_k = _replicated(options.layout), _replicated(kv_layout)
    where = group_name, seconds_of(options.timeout)
    q_copy, q_rest, k_copy, k_rest, v_copy, v_rest = split_copies(q, k, v, num_q, num_k, *where)
    here = Options(
        layout="contiguous",
        kv_layout="contiguous",
        scale=options.scale,
        softcap=options.softcap,
        kernel=options.kernel,
        agree="call",
    )

    q_copies, q_others, k_copies, k_others = slice(num_q), slice(num_q, None), slice(num_k), slice(num_k, None)
    # First the call that votes. A joint layout means its rest there.
    voting = _masked(options, q_others, k_others)
    of_rest = _Part(*call_op(q_rest, k_rest, v_rest, voting, group_name, needs_lse=True))
    here = here._replace(attn_mask=options.attn_mask)
    parts = [of_rest]
    if num_k:
        alone = _masked(here, q_others, k_copies)
        parts.append(_Part(*call_op(q_rest, k_copy, v_copy, alone, "", needs_lse=True)))
    result = _with_sinks(_merged(parts), options.sinks)
    if num_q:
        partial = call_op(q_copy, k_rest, v_rest, _masked(here, q_copies, k_others), "", needs_lse=True)
        assert isinstance(options.layout, Layout), "a name has no replicated tokens"
        partials = of_all_ranks(*partial, of_rest.lse, options.layout.world_size, *where)
        parts = [_Part(*pair) for pair in zip(*partials, strict=True)]
        if num_k:
            alone = _masked(here, q_copies, k_copies)
            parts.insert(0, _Part(*call_op(q_copy, k_copy, v_copy, alone, "", needs_lse=True)))
        # Not after they are put in front of the others: torch rounds by where in a tensor an element lies, and ranks
        # differ in how many follow.
        of_copies = _with_sinks(_merged(parts), options.sinks)
        result = _Part(*(torch.cat(pair, 2) for pair in zip(of_copies, result, strict=True)))
    return result


def _masked(options: Options, rows: slice, keys: slice) -> Options:
    """With the part of attn_mask that is of these rows, if it has more than one, and keys."""
    mask = options.attn_mask
    if mask is None:
        return options
    return options._replace(attn_mask=mask[:, :, rows if mask.shape[2] > 1 else slice(None), keys])


def _with_sinks(part: _Part, sinks: Tensor | None) -> _Part:
    return part if sinks is None else _Part(*fold_sinks(*part, sinks))


def _replicated(layout: Layout | str) -> int:
    return layout.replicated if isinstance(layout, Layout) else 0


def _merged(parts: Sequence[_Part]) -> _Part:
    """Attention to all keys from that to disjoint parts of them. Differentiable.

    ``lse = logsumexp(lse_i)``, ``out = sum exp(lse_i - lse) out_i``. A row without keys has lse -inf and out 0.
    """
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([part.lse for part in parts])
    # A finite stand-in for -inf: (-inf) - (-inf) has no value, and its gradient none either.
    finite = lses.clamp_min(torch.finfo(lses.dtype).min / 2)
    lse = finite.logsumexp(0)
    weights = (finite - lse).exp().unsqueeze(-1)
    out = sum(weight * part.out for weight, part in zip(weights, parts, strict=True))
    assert isinstance(out, Tensor), "there are parts"
    return _Part(out.to(parts[0].out.dtype), lse.masked_fill((lses == -torch.inf).all(0), -torch.inf))
