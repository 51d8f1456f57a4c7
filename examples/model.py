"""A small byte-level decoder: RoPE, grouped-query attention, RMSNorm. Nothing in it knows of ranks or of ringcp."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 256  # bytes


class Attention(nn.Module):
    """Causal self-attention in which `num_heads // num_kv_heads` query heads share a head of keys and values."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.heads = num_heads, num_kv_heads, num_kv_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, sum(self.heads) * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """x (B, S, dim), rope (B, 1, S, head_dim / 2) complex; like x."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split(self.heads, dim=1)
        y = F.scaled_dot_product_attention(rotate(q, rope), rotate(k, rope), v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(dim, num_heads, num_kv_heads), MLP(dim, 2 * dim)
        self.norms = nn.ModuleList([nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)])

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), rope)
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """Next-byte prediction.

    Args:
        dim, num_layers, num_heads, num_kv_heads: the usual.
        rope_base: the longest wavelength of RoPE is about 2 pi times this many tokens.
    """

    def __init__(
        self,
        dim: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        rope_base: float = 10_000.0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads, num_kv_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.num_kv_heads, self.head_dim = num_kv_heads, dim // num_heads
        half = self.head_dim // 2
        self.register_buffer("frequencies", rope_base ** -(torch.arange(half) / half), persistent=False)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits (B, S, 256) for ids (B, S) at `positions` (B, S), which are those in the whole sequence."""
        angles = positions[:, None, :, None] * self.frequencies
        rope = torch.polar(torch.ones_like(angles), angles)
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, rope)
        return self.head(self.norm(x))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """RoPE: each pair of neighbouring features of x (B, H, S, D) turns by the angle of its position."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rope).flatten(-2).type_as(x)
