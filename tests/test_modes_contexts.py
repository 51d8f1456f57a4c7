"""Every mode in `context_parallel` and on a 2-D mesh: buffers, whole gradients, nested contexts, sharding."""

import functools

import pytest
import torch
import torch.nn.functional as F
from calls import grid, ways

import ringcp
from ringcp.testing import assert_close, reference_attention

ALL = ["ring", "gather", "ulysses", "gather by heads", "usp", "usp on a grid", "gather on a grid"]


def whole_sequences(seq_len):
    qkv = [
        torch.randn(2, heads, seq_len, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        for i, heads in enumerate((4, 2, 2))
    ]
    upstream = torch.randn(2, 4, seq_len, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    leaves = [x.clone().requires_grad_() for x in qkv]
    out, _ = reference_attention(*leaves, mask=ringcp.Causal())
    return qkv, upstream, out.detach(), torch.autograd.grad(out, leaves, upstream)


def check_context(mesh, way, inside, nested):
    """Buffers are sharded and restored, gradients whole; another context around it, or inside it, does not disturb."""
    options, rank = dict(ways(mesh)[way]), mesh.get_local_rank()
    own = options.pop("mesh")
    qkv, upstream, expected, grads = whole_sequences(13)
    buffers = [x.clone().requires_grad_() for x in qkv]
    layout = ringcp.HeadTail(13, mesh.size())
    run = functools.partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    with ringcp.context_parallel(own, buffers=buffers, buffer_seq_dims=[2] * 3, **options) as context:
        assert (context.mode, context.layout) == (options["mode"], layout)
        assert context.options.ulysses_degree == (2 if way in ("usp", "usp on a grid", "gather on a grid") else None)
        assert torch.equal(buffers[0], layout.shard(qkv[0], rank, 2))
        assert torch.equal(context.positions, layout.positions(rank))
        if nested:
            others = [x.clone() for x in qkv]
            with ringcp.context_parallel(mesh, buffers=others, buffer_seq_dims=[2] * 3, layout="striped", mode="ring"):
                inner = run(*others)
            striped = ringcp.Striped(13, mesh.size())
            assert_close(inner, striped.shard(expected, rank, 2), name="inner out")
            with ringcp.local_attention():
                assert_close(run(*qkv), expected, name="local out")
        out = run(*buffers)
        by_attention = ringcp.attention(*buffers, mask=ringcp.Causal(), layout=layout, **ways(mesh)[way])
        assert torch.equal(by_attention, out)
        mine = layout.shard(upstream, rank, 2)
        assert torch.equal(ringcp.shard(upstream, own, dim=2), mine)
        assert_close(ringcp.unshard(out, own, dim=2), expected, name="whole out")
        if inside:
            out.backward(mine)
    if not inside:
        out.backward(mine)
    assert_close(out, layout.shard(expected, rank, 2), name="out")
    for x, was, grad in zip(buffers, qkv, grads, strict=True):
        assert torch.equal(x, was)
        assert_close(x.grad, grad, name="whole gradient")


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("way", ALL)
@pytest.mark.report("1.I6")
@pytest.mark.report("7.31")
def test_contexts(worlds, way, inside):
    worlds(4).run(check_context, way, inside, inside)


def sharding_on_a_grid(mesh):
    """Ranks of a grid count along its last dim first, as those of the 1-D mesh of all do."""
    both, rank, found = grid(), mesh.get_local_rank(), []
    x = torch.arange(13.0, dtype=torch.float64).requires_grad_()
    weights = torch.arange(13.0, dtype=torch.float64) + 1
    for layout in (
        ringcp.HeadTail(13, 4),
        ringcp.Striped(13, 4),
        ringcp.Joint(replicated=2, rest=ringcp.Contiguous(11, 4)),
    ):
        rows = ringcp.shard(x, both, dim=0, layout=layout)
        found += [torch.equal(rows, x[layout.positions(rank)])]
        (grad,) = torch.autograd.grad(rows, x, torch.ones_like(rows))
        copies = torch.ones(13, dtype=torch.float64)
        copies[: layout.replicated] = 4
        found += [torch.equal(grad, copies)]
        mine = rows.detach().requires_grad_()
        whole = ringcp.unshard(mine, both, dim=0, layout=layout)
        found += [torch.equal(whole, x)]
        (grad,) = torch.autograd.grad(whole, mine, weights)
        share = weights.clone()
        share[: layout.replicated] /= 4
        found += [torch.equal(grad, 4 * share[layout.positions(rank)])]
        gathered = ringcp.all_gather(mine, both, dim=0)
        found += [torch.equal(gathered, x[torch.cat([layout.positions(r) for r in range(4)])])]
    made = ringcp.make_layout(ringcp.Causal(), 13, both)
    return [*found, made == ringcp.make_layout(ringcp.Causal(), 13, mesh) == ringcp.HeadTail(13, 4)]


def test_sharding_on_a_2d_mesh(worlds):
    assert all(ok for found in worlds(4).run(sharding_on_a_grid) for ok in found)
