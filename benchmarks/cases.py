"""What is computed: one attention problem, by name, and its tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

import ringcp

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
_CHECKED_LEN = 256
_CHECKED_LEN_MAX = 2048


def parse_mask(text: str) -> ringcp.Mask:
    """`causal`, `full`, `window:N` or `documents:N,N,...`.

    A window is causal, of N tokens, the query's own among them; documents are causal, packed, of these lengths.

    Raises:
        ValueError: for anything else.
    """
    if text == "causal":
        return ringcp.Causal()
    if text == "full":
        return ringcp.Full()
    kind, _, tokens = text.partition(":")
    if kind == "window" and tokens.isdecimal() and int(tokens) > 0:
        return ringcp.Window(int(tokens) - 1)
    lengths = document_lengths(text)
    if lengths:
        return ringcp.Documents(lengths) & ringcp.Causal()
    raise ValueError(
        f"mask: expected causal, full, window:N or documents:N,N,... with N >= 1, got {text!r}; for example window:1024"
    )


def document_lengths(text: str) -> list[int]:
    """The lengths in `documents:N,N,...`; none for another mask."""
    kind, _, lengths = text.partition(":")
    words = lengths.split(",")
    return [int(n) for n in words] if kind == "documents" and all(n.isdecimal() and int(n) for n in words) else []


@dataclass(frozen=True)
class Case:
    """One attention problem over a whole sequence.

    Raises:
        ValueError: heads that do not divide, an unknown dtype or mask.
    """

    seq_len: int
    dtype: str = "fp32"
    mask: str = "causal"
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64

    def __post_init__(self) -> None:
        parse_mask(self.mask)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name in ("seq_len", "batch", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        lengths = document_lengths(self.mask)
        if lengths and sum(lengths) != self.seq_len:
            raise ValueError(f"seq_len: expected the {sum(lengths)} tokens of the documents, got {self.seq_len}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads = {self.heads}, got {self.kv_heads}")

    @property
    def name(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        lengths = document_lengths(self.mask)
        mask = f"{len(lengths)} documents" if lengths else self.mask
        return f"{mask} {self.dtype} B{self.batch} H{heads} D{self.head_dim} S{self.seq_len}"

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it attends to, of one head and batch row."""
        kind, _, numbers = self.mask.partition(":")
        if kind == "full":
            return self.seq_len**2
        window = min(int(numbers), self.seq_len) if kind == "window" else self.seq_len
        lengths = document_lengths(self.mask) or [self.seq_len]
        return sum(min(n, window) * (min(n, window) + 1) // 2 + max(0, n - window) * window for n in lengths)

    @property
    def flops(self) -> int:
        """Of the products of matrices in forward (2) and backward (5)."""
        return 14 * self.pairs * self.batch * self.heads * self.head_dim

    def shrunk(self, divisor: int) -> Case:
        """The same kind of problem with so many times fewer tokens, in a window and each document too."""
        kind, _, numbers = self.mask.partition(":")
        shorter = [max(1, int(n) // divisor) for n in numbers.split(",")] if numbers else []
        mask = f"{kind}:{','.join(map(str, shorter))}" if shorter else self.mask
        return replace(self, mask=mask, seq_len=sum(shorter) if kind == "documents" else self.seq_len // divisor)

    def small(self) -> Case:
        """The same problem, short enough for the fp64 reference, long enough for a window to cut something."""
        kind, _, numbers = self.mask.partition(":")
        window = int(numbers) if kind == "window" else 0
        length = min(self.seq_len, max(_CHECKED_LEN, min(2 * window, _CHECKED_LEN_MAX)))
        if kind != "documents":
            return replace(self, seq_len=length)
        # What divides every document still does, up to 8: some libraries cut each of them among the ranks.
        step = gcd(8, *document_lengths(self.mask))
        shorter = [max(1, n * length // self.seq_len // step) * step for n in document_lengths(self.mask)]
        return replace(self, seq_len=sum(shorter), mask=f"documents:{','.join(map(str, shorter))}")

    def tensors(self, device: str) -> list[Tensor]:
        """q, k, v and the upstream gradient of the whole sequence, (B, H, S, D), the same on every rank."""
        generator = torch.Generator().manual_seed(self.seq_len)
        return [
            torch.randn(self.batch, heads, self.seq_len, self.head_dim, generator=generator).to(
                device, DTYPES[self.dtype]
            )
            for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        ]
