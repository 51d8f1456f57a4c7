"""What `explain` says of bits is so: the same as one process has, in every case where it says it."""

import pytest
import torch

import ringcp
from ringcp.testing import in_process

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("out", "lse", "dq", "dk", "dv")
LENGTH = 301
MASKS = {
    "full": ringcp.Full(),
    "causal": ringcp.Causal(),
    "window": ringcp.Window(40),
    "chunked": ringcp.Chunked(151),
    "documents": ringcp.Documents([66, 70, 165]) & ringcp.Causal(),
    "padding": ringcp.Padding([200]),
    # Their rows are computed by several calls, whose results are merged.
    "prefix": ringcp.Prefix(16),
    "either": ringcp.Causal() | ringcp.Documents([101, 200]),
}


def results(world_size, mode, mask, dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, heads, LENGTH, 16, generator=generator).to(dtype) for heads in (8, 4, 4, 8))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = in_process(*leaves, world_size=world_size, mask=mask, mode=mode, return_lse=True)
    return dict(zip(NAMES, (out, lse, *torch.autograd.grad(out, leaves, grad)), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", MASKS)
def test_bits_are_the_same_where_it_says_so(name, dtype):
    mask = MASKS[name]
    one = results(1, "ring", mask, dtype)
    for world_size in (2, 4, 8):
        told = ringcp.explain(
            q_heads=8, kv_heads=4, head_dim=16, seq_len=LENGTH, world_size=world_size, mask=mask, dtype=dtype
        ).same_bits
        assert told["ring"] == told["gather"] == ()
        if name in ("prefix", "either"):
            assert told["ulysses"] == ()
            continue
        assert told["ulysses"] == (NAMES if world_size < 8 else NAMES[:3])
        many = results(world_size, "ulysses", mask, dtype)
        assert [n for n in told["ulysses"] if not torch.equal(one[n], many[n])] == []


def test_short_calls_in_fp64_are_not_claimed():
    for mask in (ringcp.Full(), ringcp.Documents([63, 237])):
        length = 63 if mask == ringcp.Full() else LENGTH
        told = ringcp.explain(q_heads=8, kv_heads=8, seq_len=length, world_size=2, mask=mask, dtype=torch.float64)
        assert told.same_bits["ulysses"] == ()


def test_a_gather_of_full_attention():
    told = ringcp.explain(q_heads=8, kv_heads=8, seq_len=2048, world_size=2)
    assert told.same_bits["gather"] == ("out", "dq")
