"""Gather plans run by the one executor: exact for every mask and layout, and where one process has the same bits."""

import itertools

import pytest
import torch
from cases import (
    HEADS,
    INPUTS,
    LAYOUTS,
    MASKS,
    MASKS_OF,
    STRIDES,
    UPSTREAMS,
    Case,
    Tensors,
    assert_none,
    differences,
    expected,
    mask_of,
    restride,
    whole,
)
from executed import in_order

import ringcp
from ringcp.kernels.registry import KERNELS
from ringcp.layout import layout_named
from ringcp.lower import Form, plan
from ringcp.schedule import Heads
from ringcp.topology import ring

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = 8  # KV heads in a group: at least as many as any case has


def cases(world_size):
    """Every layout, mask and group size; the rest drawn."""
    kinds = itertools.cycle(itertools.product(UPSTREAMS, ("sdpa_flash_cpu", "reference"), HEADS, INPUTS, STRIDES))
    drawn = itertools.islice(kinds, 0, None, 7)
    for (layout, mask, size), seq_len in zip(
        itertools.product(LAYOUTS, MASKS, (1, 2, ALL)), itertools.cycle((33, 1, world_size + 1, 24)), strict=False
    ):
        upstream, kernel, heads, inputs, strides = next(drawn)
        yield Case(seq_len, mask, layout, heads, inputs, strides, upstream, kernel), size
    for layout, mask, size in itertools.product(LAYOUTS, MASKS_OF, (1, 2, ALL)):
        upstream, kernel, _, inputs, strides = next(drawn)
        yield Case(33, mask, layout, "gqa", inputs, strides, upstream, kernel), size


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_exact(world_size):
    found = []
    for case, size in cases(world_size):
        tensors = whole(case, world_size)
        given = Tensors(*(restride(x, case.strides) for x in tensors))
        layout, kernel = layout_named(case.layout, case.seq_len, world_size), KERNELS[case.kernel]
        heads, mask = Heads(given.q.shape[1], given.k.shape[1]), mask_of(case)
        mask = ringcp.Full() if mask is None else mask

        def plan_of(rank, layout=layout, mask=mask, heads=heads, kernel=kernel, size=size):
            return plan(layout, mask, ring(world_size), rank, heads, kernel.caps, gather=size)

        got = in_order(plan_of, kernel, layout, given, case.upstream)
        found += differences(f"{case} by {size}", got, expected(case, tensors))
    assert_none([found])


@pytest.mark.parametrize("seq_len", [1024, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "head_tail", "striped"])
def test_out_and_dq_have_the_bits_of_one_process(layout, dtype, seq_len):
    """With a full mask each query row meets all keys in one call, in the order of the sequence."""
    kernel, heads, generator = KERNELS["sdpa_flash_cpu"], Heads(4, 2), torch.Generator().manual_seed(seq_len)
    q, k, v, dout = (
        torch.randn(1, n, seq_len, 32, generator=generator).to(dtype) for n in (heads.q, heads.kv, heads.kv, heads.q)
    )
    out, lse = kernel.forward(q, k, v, form=Form(), scale=32**-0.5)
    dq, *_ = kernel.backward(dout, q, k, v, out, lse, None, form=Form(), scale=32**-0.5)
    for world_size, size in ((2, 1), (4, 2)):
        lay = layout_named(layout, seq_len, world_size)

        def plan_of(rank, lay=lay, world_size=world_size, size=size):
            return plan(lay, ringcp.Full(), ring(world_size), rank, heads, kernel.caps, gather=size)

        got = in_order(plan_of, kernel, lay, Tensors(q, k, v, dout, None), "out_of_both")
        assert torch.equal(got["out"], out), (world_size, size)
        assert torch.equal(got["lse"], lse), (world_size, size)
        assert torch.equal(got["dq"].to(dtype), dq), (world_size, size)
