"""Sequences of any lengths in one launch: what a kernel with `varlen` among its caps is told of them.

Shapes: T query rows and U keys of all N sequences, H heads, D head dim of q and k, E of v.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from ringcp.kernels.base import Kernel
from ringcp.kernels.windows import Window


class Packed(NamedTuple):
    """Where the sequences are, one after the other, and what attends in each: at least one pair of each row and key.

    cu_q, cu_k: (N + 1,) of int32 on the operands' device: where the rows and keys of each start, and where all end.
    max_q, max_k: the lengths of the longest.
    window: counted from the last row and the last key of each sequence.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    window: Window

    @property
    def arguments(self) -> Mapping[str, Tensor | int]:
        """All but the window, by the names that the packages give them."""
        return {
            "cu_seqlens_q": self.cu_q,
            "cu_seqlens_k": self.cu_k,
            "max_seqlen_q": self.max_q,
            "max_seqlen_k": self.max_k,
        }


class Packing(Kernel, Protocol):
    """A kernel whose caps say `varlen`. As `Kernel`, but for the shapes."""

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, *, packed: Packed, scale: float, softcap: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """out (T, H, E) and lse (H, T), from q (T, H, D), k (U, Hkv, D) and v (U, Hkv, E)."""
        ...

    def backward_packed(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
        *,
        packed: Packed,
        scale: float,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in the shapes of q, k, v; lse and dlse are (H, T)."""
        ...
