"""Tensor masks of whole sequences by name, their shards in each form, and attention under them in one process."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from cases import Case, allowed, differences, layout_of, mask_of, rank_in, whole
from torch import Tensor

import ringcp
from ringcp.layout import Layout

# Of keys: (B, S), one for all queries, sharded but for one; of rows: (B | 1, H | 1, S, S).
ON_EVERY_RANK = "all keys"
OF_KEYS = ("keys", "bias of keys", "padding", "least padding", ON_EVERY_RANK)
OF_ROWS = ("rows", "bias of rows", "rows of heads")
DEAD = 3  # a row of "rows" that attends to nothing


def made(name: str, batch: int, heads: int, q_len: int, k_len: int) -> Tensor:
    """The mask of the whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(len(name))
    shape = (batch, k_len) if name in OF_KEYS else (batch, heads if "heads" in name else 1, q_len, k_len)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    if name in ("padding", "least padding"):  # as HF pads: one row of the batch on the right, one on the left
        valid = torch.ones(shape, dtype=torch.bool)
        valid[0, k_len - k_len // 3 :] = False
        valid[1:, : k_len // 4] = False
        least = torch.finfo(torch.float32).min
        return valid if name == "padding" else torch.zeros(shape, dtype=torch.float32).masked_fill(~valid, least)
    if "bias" in name:
        return numbers.masked_fill(numbers > 0.7, -torch.inf)
    attends = numbers < 0.3
    if name == "rows" and q_len > DEAD:
        attends[:, :, DEAD] = False
    return attends


def spread(mask: Tensor) -> Tensor:
    """As `F.scaled_dot_product_attention` takes it."""
    return mask[:, None, None, :] if mask.ndim == 2 else mask


def sharded(mask: Tensor, layout: Layout, kv_layout: Layout, rank: int, name: str = "") -> Tensor:
    """This rank's part: of its keys, or of its rows; or all of it."""
    if name == ON_EVERY_RANK:
        return spread(mask)
    return spread(kv_layout.shard(mask, rank, 1) if mask.ndim == 2 else layout.shard(mask, rank, 2))


def by_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, attends: Tensor | None = None) -> Tensor:
    """Full attention under the mask, and under that of a context: -inf where either masks, as torch defines it.

    float32's least number counts as -inf: where a row sees nothing else, torch's flash kernel has wrong gradients.
    """
    bias = spread(mask)
    if bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape, dtype=torch.float64).masked_fill(~bias, -torch.inf)
    bias = bias.double().masked_fill(bias <= torch.finfo(torch.float32).min, -torch.inf)
    if attends is not None:
        bias = torch.where(attends, bias, -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)


def step(attend: Callable[..., Tensor], tensors: list[Tensor], upstream: Tensor) -> dict[str, Tensor]:
    """out, dq, dk and dv."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = attend(*leaves)
    grads = torch.autograd.grad(out, leaves, upstream.to(out.dtype))
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


def check_case(mesh, case: Case, name: str, **options) -> list[str]:
    """What is off on this rank in a context with the case's mask and mode."""
    rank, layout = rank_in(mesh), layout_of(case, mesh.size())
    q, k, v, upstream, _ = whole(case, mesh.size())
    mask = made(name, q.shape[0], q.shape[1], case.seq_len, case.seq_len)
    attends = None if case.mask == "full" else allowed(case.mask, case.seq_len, q.shape[0])
    want = step(lambda q, k, v: by_torch(q, k, v, mask, attends), [q, k, v], upstream)
    mine = sharded(mask, layout, layout, rank, name)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with ringcp.context_parallel(
            mesh, layout=layout, mask=mask_of(case), kernel=case.kernel, **case.way, **options
        ):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mine, enable_gqa=True)

    got = step(attend, [layout.shard(x, rank, 2) for x in (q, k, v)], layout.shard(upstream, rank, 2))
    want = {key: layout.shard(x, rank, 2) for key, x in want.items()}
    return differences(f"rank {rank} of {mesh.size()}, {name}, {case}", got, want)


def tensors(seq_len, *, keys=None, batch=2, heads=4, dtype=torch.float64):
    """q, k, v and an upstream gradient of whole sequences, the same on every rank."""
    generator = torch.Generator().manual_seed(seq_len)
    shapes = (heads, seq_len, 6), (2, keys or seq_len, 6), (2, keys or seq_len, 5), (heads, seq_len, 5)
    return [torch.randn(batch, *s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
