"""Kernel "reference": attention by plain matmul and softmax. The oracle of every other kernel, and the last resort.

Shapes: B batch, Hq Hkv heads, G = Hq / Hkv query heads per KV head, M query rows, N keys, D head dim, Dv of v.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringcp.cutting import Caps
from ringcp.kernels.base import Form, Problem
from ringcp.kernels.operands import allowed as in_form
from ringcp.kernels.operands import attending
from ringcp.kernels.pairwise import Alibi, AttnMask, Dropout
from ringcp.kernels.refusals import word


@dataclass(frozen=True)
class Reference:
    """Any device, floating dtype, head dims and band; memory for the whole score matrix.

    Computes in fp32 (fp64 for fp64 inputs). Not differentiable: backward is a function of its own.
    """

    name = "reference"
    caps = Caps(causal="top_left", band="any")
    switch = "math"

    def refusals(self, problem: Problem) -> list[str]:
        known = torch.float16, torch.bfloat16, torch.float32, torch.float64
        return [] if problem.dtype in known else [f"dtype {word(problem.dtype)} is not {' or '.join(map(word, known))}"]

    @torch.no_grad()
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        form: Form,
        scale: float,
        softcap: float | None = None,
        allowed: Tensor | None = None,
        alibi: Alibi | None = None,
        attn_mask: AttnMask | None = None,
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, Tensor]:
        q_BHRD, k_BHND, v_BHNE = _grouped(q, k.shape[1]), _wide(k), _wide(v)
        scores_BHRN, _ = _scores(q_BHRD, k_BHND, q.shape[2], form, scale, softcap, allowed, alibi, attn_mask)
        lse_BHR = scores_BHRN.logsumexp(-1)
        # Of a row that attends to nothing, (-inf) - (-inf) has no value.
        all_attend = allowed is None and attn_mask is None
        finite_BHR = lse_BHR if all_attend else lse_BHR.masked_fill(lse_BHR == -torch.inf, 0.0)
        probs_BHRN = (scores_BHRN - finite_BHR.unsqueeze(-1)).exp()
        if dropout is not None:
            probs_BHRN *= _factors(dropout, probs_BHRN)
        out_BHRE = probs_BHRN @ v_BHNE
        return _ungrouped(out_BHRE, q).to(q.dtype), lse_BHR.reshape(q.shape[:3])

    @torch.no_grad()
    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
        *,
        form: Form,
        scale: float,
        softcap: float | None = None,
        allowed: Tensor | None = None,
        alibi: Alibi | None = None,
        attn_mask: AttnMask | None = None,
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_BHRD, k_BHND, v_BHNE = _grouped(q, k.shape[1]), _wide(k), _wide(v)
        dout_BHRE, out_BHRE = _grouped(dout, k.shape[1]), _grouped(out, k.shape[1])
        scores_BHRN, slope_BHRN = _scores(q_BHRD, k_BHND, q.shape[2], form, scale, softcap, allowed, alibi, attn_mask)
        probs_BHRN = (scores_BHRN - lse.reshape(scores_BHRN.shape[:-1]).unsqueeze(-1)).exp()
        delta_BHR = (dout_BHRE * out_BHRE).sum(-1)
        if dlse is not None:
            delta_BHR = delta_BHR - dlse.reshape(delta_BHR.shape)
        dprobs_BHRN = dout_BHRE @ v_BHNE.mT
        kept_BHRN = probs_BHRN
        if dropout is not None:
            factors_BHRN = _factors(dropout, probs_BHRN)
            dprobs_BHRN *= factors_BHRN
            kept_BHRN = probs_BHRN * factors_BHRN
        dscores_BHRN = probs_BHRN * (dprobs_BHRN - delta_BHR.unsqueeze(-1)) * scale
        if slope_BHRN is not None:
            dscores_BHRN *= slope_BHRN
        dq_BHRD = dscores_BHRN @ k_BHND
        dk_BHND = dscores_BHRN.mT @ q_BHRD
        dv_BHNE = kept_BHRN.mT @ dout_BHRE
        return _ungrouped(dq_BHRD, q).to(q.dtype), dk_BHND.to(k.dtype), dv_BHNE.to(v.dtype)


def _scores(
    q_BHRD: Tensor,
    k_BHND: Tensor,
    m: int,
    form: Form,
    scale: float,
    softcap: float | None,
    allowed: Tensor | None,
    alibi: Alibi | None,
    attn_mask: AttnMask | None,
) -> tuple[Tensor, Tensor | None]:
    """The scores, -inf where nothing attends; and with a softcap how much of a change of theirs it lets through."""
    scores_BHRN, slope_BHRN = q_BHRD @ k_BHND.mT * scale, None
    if softcap is not None:
        tanh_BHRN = (scores_BHRN / softcap).tanh_()
        # Before masking: at -inf it would be 1 - inf.
        scores_BHRN, slope_BHRN = tanh_BHRN * softcap, 1 - tanh_BHRN.square()
    for biased in (alibi, attn_mask):
        if biased is not None:
            scores_BHRN.view(scores_BHRN.shape[0], -1, m, k_BHND.shape[2]).add_(biased.bias(scores_BHRN.dtype))
    if allowed is not None:
        pairs_BHMN = attending(m, k_BHND.shape[2], form, allowed)
        heads = (1, 1) if pairs_BHMN.shape[1] == 1 else (k_BHND.shape[1], -1)
        scores_BHRN.unflatten(2, (-1, m)).masked_fill_(~pairs_BHMN.unflatten(1, heads), float("-inf"))
    elif form != Form():
        mask_MN = in_form(m, k_BHND.shape[2], form, q_BHRD.device)
        scores_BHRN.unflatten(2, (-1, m)).masked_fill_(~mask_MN, float("-inf"))
    return scores_BHRN, slope_BHRN


def _factors(dropout: Dropout, probs_BHRN: Tensor) -> Tensor:
    return dropout.factors(probs_BHRN.dtype).view(probs_BHRN.shape)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _grouped(x_BHMD: Tensor, kv_heads: int) -> Tensor:
    """(B, Hkv, G * M, D): the query heads of one KV head as rows of one matrix, so that keys are never repeated."""
    return _wide(x_BHMD).unflatten(1, (kv_heads, -1)).flatten(2, 3)


def _ungrouped(x_BHRD: Tensor, q_BHMD: Tensor) -> Tensor:
    return x_BHRD.reshape(*q_BHMD.shape[:3], x_BHRD.shape[-1])
