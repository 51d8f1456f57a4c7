"""What a call says of pairs beside its form, as a bias that is written out: for kernels that add one to the scores.

A bias of many rows is made for some rows at a time: heads times rows times keys would soon fill the memory.

Shapes: B batch, H heads, M query rows, N keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringcp.band import crop
from ringcp.kernels.base import Form
from ringcp.kernels.operands import additive_mask, attending
from ringcp.kernels.pairwise import Alibi, AttnMask
from ringcp.kernels.windows import band_of, form_of


class Extras(NamedTuple):
    """What a call says of pairs beside its form: the keywords of a kernel."""

    allowed: Tensor | None = None
    alibi: Alibi | None = None
    attn_mask: AttnMask | None = None

    @property
    def empty(self) -> bool:
        return self.allowed is None and not self.biases

    @property
    def biases(self) -> tuple[Alibi | AttnMask, ...]:
        return tuple(bias for bias in (self.alibi, self.attn_mask) if bias is not None)

    def has_one_row(self, form: Form) -> bool:
        """Whether all rows of a full or causal call have one bias: then the op spreads it."""
        if self.attn_mask is None or self.alibi is not None or self.allowed is not None:
            return False
        return self.attn_mask.values.shape[2] == 1 and form in (Form(), Form(lo=0))

    def part(self, rows: slice, keys: slice, m: int, n: int) -> dict[str, Any]:
        """Those of some rows and keys of m and n, by keyword."""
        of_part = Extras(
            None if self.allowed is None else self.allowed.expand(*self.allowed.shape[:2], m, n)[:, :, rows, keys],
            None if self.alibi is None else self.alibi.part(rows, keys),
            None if self.attn_mask is None else self.attn_mask.part(rows, keys),
        )
        return {name: value for name, value in of_part._asdict().items() if value is not None}


class Strip(NamedTuple):
    """Some rows of a call and the keys that they see, their form, and what of the extras is theirs, by keyword."""

    rows: slice
    keys: slice
    form: Form
    extras: dict[str, Any]


def strips(m: int, n: int, form: Form, extras: Extras, most: int) -> list[Strip]:
    """A call in strips, each with a bias of at most `most` elements (or of one row); none if one launch will do."""
    if not extras.biases or extras.has_one_row(form):
        return []
    num_rows = max(1, most // (max(bias.planes for bias in extras.biases) * n))
    if num_rows >= m:
        return []
    whole = band_of(m, n, form)
    parts = (crop(whole, (start, min(start + num_rows, m)), whole.k) for start in range(0, m, num_rows))
    bands = [(slice(*band.q), slice(*band.k), form_of(band)) for band in parts if band is not None]
    return [Strip(rows, keys, of_band, extras.part(rows, keys, m, n)) for rows, keys, of_band in bands]


def forward(
    run: Callable[..., tuple[Tensor, Tensor]], parts: Sequence[Strip], q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """out and lse of a kernel's forward, strip by strip."""
    each = [run(q[:, :, rows], k[:, :, keys], v[:, :, keys], form=form, **extras) for rows, keys, form, extras in parts]
    out, lse = (torch.cat(results, 2) for results in zip(*each, strict=True))
    return out, lse


def backward(
    run: Callable[..., tuple[Tensor, Tensor, Tensor]],
    parts: Sequence[Strip],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of a kernel's backward, strip by strip; sums in fp32 (fp64 for fp64 inputs)."""
    wide = torch.promote_types(k.dtype, torch.float32)
    dk, dv = (torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (k, v))
    dqs = []
    for rows, keys, form, extras in parts:
        dout_part, q_part, out_part, lse_part = (x[:, :, rows] for x in (dout, q, out, lse))
        dlse_part = None if dlse is None else dlse[:, :, rows]
        of_kv = k[:, :, keys], v[:, :, keys]
        dq, dk_part, dv_part = run(dout_part, q_part, *of_kv, out_part, lse_part, dlse_part, form=form, **extras)
        dqs.append(dq)
        dk[:, :, keys] += dk_part
        dv[:, :, keys] += dv_part
    return torch.cat(dqs, 2), dk.to(k.dtype), dv.to(v.dtype)


def bias_of(m: int, n: int, form: Form, extras: Extras, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(B | 1, H | 1, M | 1, N): the sum of the biases, -inf where a pair does not attend; one row, if the extras have
    one for the form, which is then not in it.
    """
    biases = [bias.bias(dtype) for bias in extras.biases]
    bias_BHMN = biases[0] if len(biases) == 1 else biases[0] + biases[1]
    if extras.has_one_row(form):
        return bias_BHMN
    if extras.allowed is not None:
        return torch.where(attending(m, n, form, extras.allowed), bias_BHMN, -torch.inf)
    return bias_BHMN if form == Form() else bias_BHMN + additive_mask(m, n, form, dtype=dtype, device=device)


def dead_rows(bias_BHMN: Tensor, is_causal: bool, m: int) -> Tensor:
    """(B | 1, H | 1, M | 1): which rows attend to nothing, if the bias, of one row where causal, says it all."""
    masked = bias_BHMN == -torch.inf
    if not is_causal:
        return masked.all(-1)
    # Row i sees keys 0 to i of the one row there is; rows beyond the keys see all.
    masked_before = masked[..., 0, :].to(torch.uint8).cummin(-1).values.bool()
    return masked_before[..., torch.arange(m, device=masked.device).clamp_max(masked.shape[-1] - 1)]
