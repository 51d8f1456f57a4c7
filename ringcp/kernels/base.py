"""What a kernel is: the contract that every adapter keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ringcp.cutting import Caps
from ringcp.kernels.pairwise import Allowed
from ringcp.lower import Form


def _must_be_deterministic() -> bool:
    """Whether torch has been told to fail rather than to run a nondeterministic algorithm."""
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


@dataclass(frozen=True)
class Problem:
    """What is known before anything is sent, the same on every rank: a kernel accepts or refuses it.

    needs_band: whether calls may have two edges, or one that is not causal.
    needs_lse_grad: whether a gradient through the lse may come.
    explicit: whether calls come with masks of any pairs, written out or as functions.
    alibi: whether calls come with slopes of ALiBi. attn_mask: the dtype of an `attn_mask`, if they come with what it
        adds, else None. dropout: whether with dropout.
    softcap: scaled scores become ``softcap * tanh(score / softcap)`` before they are masked; None leaves them.
    deterministic: whether a kernel whose bits vary from run to run must refuse; by default, what torch was told.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    q_heads: int
    kv_heads: int
    scale: float
    needs_band: bool
    needs_grad: bool
    needs_lse_grad: bool
    softcap: float | None = None
    explicit: bool = False
    alibi: bool = False
    attn_mask: torch.dtype | None = None
    dropout: bool = False
    deterministic: bool = field(default_factory=_must_be_deterministic)


def problem_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    needs_band: bool,
    needs_grad: bool,
    needs_lse_grad: bool,
    explicit: bool = False,
    *,
    alibi: bool = False,
    attn_mask: Tensor | None = None,
    dropout: bool = False,
) -> Problem:
    """The problem that these tensors pose."""
    return Problem(
        device=q.device,
        dtype=q.dtype,
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        q_heads=q.shape[1],
        kv_heads=k.shape[1],
        scale=scale,
        needs_band=needs_band,
        needs_grad=needs_grad,
        needs_lse_grad=needs_lse_grad,
        softcap=softcap,
        explicit=explicit,
        alibi=alibi,
        attn_mask=None if attn_mask is None else attn_mask.dtype,
        dropout=dropout,
    )


class Kernel(Protocol):
    """Attention on one device. Shapes: q (B, Hq, M, D), k (B, Hkv, N, D), v (B, Hkv, N, Dv), any strides, Hkv | Hq
    (query head h uses key/value head ``h // (Hq // Hkv)``); M, N >= 1.

    A kernel that does not refuse ALiBi takes a further keyword in both directions, ``alibi: Alibi | None``: its bias is
    added to scores that are scaled and capped. Likewise ``attn_mask: AttnMask | None``, whose bias may be -inf: a row
    that attends to nothing is as one of `allowed`. One that does not refuse dropout takes ``dropout: Dropout | None``:
    weights are multiplied by its factors after the softmax, so that the lse does not see it.
    """

    name: str
    caps: Caps

    @property
    def switch(self) -> str | None:
        """The back end of `torch.nn.attention.sdpa_kernel` that turns it on and off ("flash", "cudnn", "efficient",
        "math"); None if that does not concern it.
        """

    def refusals(self, problem: Problem) -> list[str]:
        """Every reason why it cannot do `problem` (``"head_dim 264 > 256"``); empty when it can."""
        ...

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
    ) -> tuple[Tensor, Tensor]:
        """out (B, Hq, M, Dv) in q's dtype; lse (B, Hq, M), natural log, fp32 (fp64 for fp64 inputs).

        allowed: bool, broadcastable to (B, Hq, M, N): of the pairs of the form, those that attend; None for all. A row
            that attends to nothing here has out 0 and lse -inf. If the caps say `functions`, it may be an `Allowed`.
        """
        ...

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv of these pairs, in the inputs' dtype.

        `out` and `lse` are the *final* ones, merged over all calls of the rows: with S = scale q k^T, capped if need
        be, P = exp(S - lse) and delta = rowsum(dout * out) - dlse, dS = P * (dout v^T - delta). Rows that attend to
        nothing anywhere have lse = +inf here, which makes P zero. With dropout factors F, dv is of P * F, and dS is
        P * (F * (dout v^T) - delta).
        """
        ...


class TakesFunctions(Kernel, Protocol):
    """A kernel whose caps say `functions`: it compiles them."""

    def probe(self, problem: Problem, allowed: Allowed) -> None:
        """Compile the functions of `allowed` for calls of `problem`, forward and, if it has one, backward, and run that
        on these few pairs, whose keys have one head. It raises whatever a call would.
        """
        ...


__all__ = ["Form", "Kernel", "Problem", "TakesFunctions", "problem_of"]
