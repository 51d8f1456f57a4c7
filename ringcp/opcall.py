"""One call of the registered op, from options."""

from __future__ import annotations

import torch
from torch import Tensor

from ringcp.layout import Layout, unsized_spec
from ringcp.mask import Full
from ringcp.ops import attention_op
from ringcp.options import Options, draw_seed, seconds_of

_FULL = Full()


def call_op(
    q: Tensor, k: Tensor, v: Tensor, options: Options, group_name: str, needs_lse: bool, refused: str = ""
) -> tuple[Tensor, Tensor]:
    """out and lse of `ringcp::attention`, without the sinks.

    needs_lse: whether a gradient may come through the lse. refused: why this rank cannot make the call.
    """
    assert options.agree is not None, "callers say when"
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    sinks, kv_layout = options.sinks, options.kv_layout
    dropout_seed = draw_seed() if options.dropout_p > 0 else None
    out, lse, *_ = attention_op(
        q,
        k,
        v,
        _spec(options.layout),
        None if kv_layout is None else _spec(kv_layout),
        (_FULL if options.mask is None else options.mask).spec,
        options.alibi_slopes,
        options.attn_mask,
        dropout_seed,
        group_name,
        options.mode,
        options.ulysses_degree,
        options.gather_memory,
        options.kernel,
        options.scale,
        options.softcap,
        float(options.dropout_p),
        options.seq_len,
        options.agree,
        options.votes,
        seconds_of(options.timeout),
        needs_grad,
        needs_grad and needs_lse,
        options.save,
        needs_grad and _keeps(options),
        f"sinks={None if sinks is None else sinks.dtype}",
        refused,
    )
    return out, lse


def _keeps(options: Options) -> bool:
    """Whether what an exchange brings may be kept; if the caller leaves that open, only with the others' consent."""
    if options.save != "auto":
        return options.save == "exchanged"
    if options.mode in ("ulysses", "usp"):
        return True
    # Traced before the mode is known, both it and the local rows would be saved. A rank whose code falls back to eager
    # finds out in the vote.
    return options.votes and not torch.compiler.is_compiling()


def _spec(layout: Layout | str) -> Tensor:
    return unsized_spec(layout) if isinstance(layout, str) else layout.spec
