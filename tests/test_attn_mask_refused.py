"""What an `attn_mask` in a context may not be: refused by name on every rank, nothing sent, and the next call works."""

import pytest
import torch
import torch.nn.functional as F
from attn_masks import by_torch, made, sharded, tensors
from torch.nn.attention.bias import causal_lower_right

import ringcp
from ringcp.testing import assert_close

sdpa = F.scaled_dot_product_attention


def ones(*shape, dtype=torch.bool):
    return torch.ones(shape, dtype=dtype)


# By the number of local rows and keys, of 12 in all: what is wrong, and what of it is said.
REFUSED = {
    "local rows and keys": (
        lambda n: {"attn_mask": ones(n, n)},
        ringcp.UnsupportedError,
        [
            "attn_mask: expected one row for this rank's keys (a key mask, mask[:, None, None, :] of a sharded buffer)",
            "or all keys of the whole sequence, in their order, for one row or for this rank's rows",
            "got (4, 4) on rank 0, (4, 4) on rank 1, (4, 4) on rank 2, the local rows and keys, which leaves out",
            "pass mask= a ringcp mask",
            "ringcp.local_attention()",
        ],
    ),
    "whole": (lambda n: {"attn_mask": ones(12, 12)}, ringcp.LayoutError, ["got (12, 12) on rank 0", "4 rows and 4"]),
    "one number": (lambda n: {"attn_mask": ones(1, 1)}, ringcp.LayoutError, ["there are 12 keys", "got (1, 1) on"]),
    "rows alone": (lambda n: {"attn_mask": ones(n, 1)}, ringcp.LayoutError, ["got (4, 1) on rank 0"]),
    "other keys": (lambda n: {"attn_mask": ones(2, 1, 1, 5)}, ringcp.LayoutError, ["got (1, 5) on rank 0"]),
    "one dim": (lambda n: {"attn_mask": ones(n)}, ringcp.ArgumentError, ["attn_mask: expected 2 to 4 dims", "add"]),
    "five dims": (lambda n: {"attn_mask": ones(1, 2, 1, 1, n)}, ringcp.ArgumentError, ["expected 2 to 4 dims"]),
    "batch": (
        lambda n: {"attn_mask": ones(3, 1, 1, n)},
        ringcp.ArgumentError,
        ["1 or (2, 4), as of query", "(3, 1, 1"],
    ),
    "heads": (lambda n: {"attn_mask": ones(1, 2, 1, n)}, ringcp.ArgumentError, ["1 or (2, 4)", "(1, 2, 1, 4)"]),
    "int64": (
        lambda n: {"attn_mask": ones(2, 1, 1, n, dtype=torch.int64)},
        ringcp.ArgumentError,
        ["attn_mask: expected bool, torch.float32 or the torch.float64 of query, got torch.int64; convert it"],
    ),
    "bfloat16": (
        lambda n: {"attn_mask": ones(1, n, dtype=torch.bfloat16)},
        ringcp.ArgumentError,
        ["got torch.bfloat16"],
    ),
    "is_causal": (
        lambda n: {"attn_mask": ones(1, n), "is_causal": True},
        ringcp.ArgumentError,
        ["attn_mask: expected None with is_causal=True", "context mask=ringcp.Causal()"],
    ),
    "learned": (
        lambda n: {"attn_mask": ones(1, n, dtype=torch.float64).requires_grad_()},
        ringcp.UnsupportedError,
        ["attn_mask: expected one that needs no gradient", "attn_mask.detach()"],
    ),
    "CausalBias": (
        lambda n: {"attn_mask": causal_lower_right(n, n)},
        ringcp.UnsupportedError,
        ["attn_mask: expected a tensor or None, got CausalBias; pass is_causal=True"],
    ),
    "meta": (
        lambda n: {"attn_mask": ones(1, n).to("meta")},
        ringcp.ArgumentError,
        ["a dense tensor on cpu", "on meta"],
    ),
}


def refused(mesh):
    """On every rank, if all call so or one does; nothing is sent, and the next call is right."""
    layout, rank = ringcp.HeadTail(12, mesh.size()), mesh.get_local_rank()
    q, k, v, _ = tensors(12)
    mask = made("keys", 2, 1, 12, 12)
    local, mine = [layout.shard(x, rank, 2) for x in (q, k, v)], sharded(mask, layout, layout, rank)
    want = layout.shard(by_torch(q, k, v, mask), rank, 2)
    for given in (layout, "auto"):
        with ringcp.context_parallel(mesh, layout=given, agree=None if given == "auto" else "context"):
            for name, (make, error, words) in REFUSED.items():
                for odd in ((0, 1, 2), (1,)):
                    call = make(local[0].shape[2]) if rank in odd else {"attn_mask": mine}
                    with ringcp.record() as recorder, pytest.raises(ringcp.RingcpError) as info:
                        sdpa(*local, enable_gqa=True, **call)
                    assert recorder.steps == [], name
                    if len(odd) == 3:
                        assert isinstance(info.value, error), (name, info.value)
                        assert all(word in str(info.value) for word in words), (name, str(info.value))
                    assert_close(sdpa(*local, mine, enable_gqa=True), want)


@pytest.mark.report("1.22", raises=True)
def test_other_shapes_and_kinds_are_refused(worlds):
    worlds(3).run(refused)


def differing(mesh):
    """Ranks that do not agree whether there is a mask, or of which dtype, heads or form: the odd one is named."""
    layout, rank = ringcp.HeadTail(12, mesh.size()), mesh.get_local_rank()
    local = [layout.shard(x, rank, 2) for x in tensors(12)[:3]]
    key = ones(2, 1, 1, 4)
    cases = {
        "attn_mask=None, not attn_mask=(2, 1, 'rows', 'keys') torch.bool": (None, key),
        "attn_mask=(2, 1, 'rows', 'keys') torch.float32, not": (key.float(), key),
        "attn_mask=(1, 1, 'rows', 'keys') torch.bool, not": (key[:1], key),
        "expected the same of these on every rank": (ones(4, 12), key),
        "got (..., (1, 4) on rank 0, (1, 12) on rank 1, (1, 4) on rank 2)": (ones(2, 1, 1, 12), key),
    }
    with ringcp.context_parallel(mesh, layout=layout):
        for words, (odd, usual) in cases.items():
            odd = odd[None, None].expand(2, 1, -1, -1) if odd is not None and odd.ndim == 2 else odd
            with ringcp.record() as recorder, pytest.raises(ringcp.AgreementError) as info:
                sdpa(*local, odd if rank == 1 else usual, enable_gqa=True)
            assert words in str(info.value), str(info.value)
            assert recorder.steps == []
            sdpa(*local, key, enable_gqa=True)


def test_ranks_that_differ(worlds):
    worlds(3).run(differing)


def a_token_each(mesh):
    """With one query on each rank, a mask of one number is a key mask or of local rows and keys: refused."""
    size, rank = mesh.size(), mesh.get_local_rank()
    layout = ringcp.Contiguous(size, size)
    q, k, v, _ = tensors(size)
    local = [layout.shard(x, rank, 2) for x in (q, k, v)]
    rows = made("bias of rows", 1, 1, size, size)
    with ringcp.context_parallel(mesh, layout=layout, mode="ulysses"):
        with pytest.raises(ringcp.UnsupportedError, match=r"got \(1, 1\) on rank 0.* local rows and keys"):
            sdpa(*local, ones(2, 1, 1, 1), enable_gqa=True)
        out = sdpa(*local, layout.shard(rows, rank, 2), enable_gqa=True)
    assert_close(out, layout.shard(by_torch(q, k, v, rows), rank, 2))


def test_one_token_a_rank(worlds):
    worlds(2).run(a_token_each)
