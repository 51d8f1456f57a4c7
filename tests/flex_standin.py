"""FlexAttention on the CPU as its compiled kernels compute it: torch's signature, in plain torch, for any dtype.

Read in torch 2.13: nn/attention/flex_attention.py, and _inductor/kernel/flex with its templates. Unlike torch's eager
code it has gradients on the CPU and reads the blocks of a mask as the kernels do: its mask_mod counts in partial blocks
alone, in full ones all attend, what is not listed nobody sees; keys find their rows by lists of their own. It shows
nothing about a GPU.
"""

from __future__ import annotations

import torch
from kernel_standins import INF, _repeat, _wide
from torch.nn.attention.flex_attention import AuxOutput

CALLS: list[dict] = []
"""What was called: sizes, and how many blocks were computed of how many there are."""


def flex_attention(
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False,
    kernel_options=None, *, return_aux=None,
):  # fmt: skip
    _check(query, key, value, scale, enable_gqa)
    assert kernel_options is None
    assert not return_lse, "deprecated"
    (b, heads, m, _), n = query.shape, key.shape[2]
    at = [
        torch.arange(size).view([-1 if dim == at else 1 for at in range(4)])
        for dim, size in enumerate((b, heads, m, n))
    ]
    q, k, v = _wide(query, key, value)
    scores = q @ _repeat(k, heads).mT * scale
    if score_mod is not None:
        scores = score_mod(scores, *at)
    mask, blocks = torch.ones(b, heads, m, n, dtype=torch.bool), None
    if block_mask is not None:
        mask, blocks = _mask(block_mask, at, b, heads, m, n)
    CALLS.append({"m": m, "n": n, "blocks": blocks, "grad": torch.is_grad_enabled(), "bias": score_mod is not None})
    dead = ~mask.any(-1)
    scores = scores.masked_fill(~mask, -INF).masked_fill(dead[..., None], 0.0)
    lse = scores.logsumexp(-1).masked_fill(dead, -INF)
    out = (scores.softmax(-1) @ _repeat(v, heads)).masked_fill(dead[..., None], 0.0)
    return out.to(query.dtype), AuxOutput(lse=lse if return_aux.lse else None)


def _check(q, k, v, scale, enable_gqa):
    for x in (q, k, v):
        assert x.ndim == 4
        assert x.dtype == q.dtype
        assert x.shape[-1] >= 16, "NYI: embedding dimension of the query, key, and value must be at least 16"
        assert min(x.shape) > 0, "length must be greater than 0"
        assert x.stride(-1) == 1
        assert all(stride > 0 or size == 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    assert q.shape[0] == k.shape[0] == v.shape[0]
    assert q.shape[-1] == k.shape[-1]
    assert k.shape[:-1] == v.shape[:-1]
    assert enable_gqa or q.shape[1] == k.shape[1]
    assert q.shape[1] % k.shape[1] == 0
    assert isinstance(scale, float), "a number that varies cannot be traced"


def _mask(block_mask, at, b, heads, m, n):
    assert block_mask.seq_lengths == (m, n)
    assert block_mask.kv_num_blocks.shape[0] in (1, b)
    assert block_mask.kv_num_blocks.shape[1] in (1, heads)
    sizes = block_mask.BLOCK_SIZE
    num = [-(-length // size) for length, size in zip((m, n), sizes, strict=True)]
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, num[1])
    full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, num[1])
    assert not (partial & full).any(), "a block that is computed twice"
    assert torch.equal(partial.mT, _listed(block_mask.q_num_blocks, block_mask.q_indices, num[0]))
    assert torch.equal(full.mT, _listed(block_mask.full_q_num_blocks, block_mask.full_q_indices, num[0]))
    said = block_mask.mask_mod(*at)
    assert said.dtype == torch.bool
    partial, full = (_pairs(blocks, sizes, m, n) for blocks in (partial, full))
    computed = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, num[1]).sum().item()
    computed += _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, num[1]).sum().item()
    return (full | (partial & said)).expand(b, heads, m, n), (computed, num[0] * num[1])


def _listed(num_blocks, indices, num):
    """(B, H, rows, columns) of bool: the blocks of the lists."""
    found = torch.zeros(*indices.shape[:3], num, dtype=torch.bool)
    for place in torch.cartesian_prod(*map(torch.arange, num_blocks.shape)).tolist():
        for column in indices[tuple(place)][: num_blocks[tuple(place)]].tolist():
            found[(*place, column)] = True
    return found


def _pairs(blocks, sizes, m, n):
    return blocks.repeat_interleave(sizes[0], 2)[:, :, :m].repeat_interleave(sizes[1], 3)[..., :n]
