"""`Joint` as a layout: cutting, gathering and specs; and in `context_parallel`, with buffers of both lengths."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import LAYOUTS
from torch.utils.checkpoint import checkpoint

import ringcp
from ringcp.layout import decode_layout, layout_named
from ringcp.testing import assert_close, reference_attention

SIZES = ((0, 7), (3, 8), (5, 2), (4, 0), (2, 13))


def joint(num, seq_len, world_size, rest="head_tail"):
    return ringcp.Joint(replicated=num, rest=layout_named(rest, seq_len, world_size))


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("rest", LAYOUTS)
@pytest.mark.parametrize(("num", "seq_len"), SIZES)
def test_positions_specs_and_texts(rest, num, seq_len):
    layout = joint(num, seq_len, 3, rest)
    assert (layout.seq_len, layout.world_size, layout.replicated) == (num + seq_len, 3, num)
    assert layout.rest == layout_named(rest, seq_len, 3)
    for rank in range(3):
        expected = [*range(num), *(num + p for p in layout.rest.positions(rank).tolist())]
        assert layout.positions(rank).tolist() == expected
        assert layout.local_len(rank) == len(expected)
        assert [p for span in layout.spans(rank) for p in range(*span)] == expected
    decoded = decode_layout(*layout.spec.tolist())
    assert decoded == layout
    assert hash(decoded) == hash(layout)
    assert (decoded.replicated, decoded.rest) == (num, layout.rest)
    assert repr(decoded) == repr(layout) == f"Joint({num}, {layout.rest!r})"
    others = [joint(num + 1, seq_len, 3, rest), joint(num, seq_len + 1, 3, rest), layout.rest]
    assert all(other != layout and repr(other) != repr(layout) for other in others)
    x = seeded(2, num + seq_len)
    assert torch.equal(layout.unshard([layout.shard(x, rank, 1) for rank in range(3)], -1), x)
    assert f"rank 2: {layout.local_len(2)} token" in str(layout)


def test_a_balanced_rest():
    rest = ringcp.Balanced(600, 2, ringcp.Documents([200, 400]) & ringcp.Causal())
    layout = ringcp.Joint(replicated=5, rest=rest)
    assert decode_layout(*layout.spec.tolist()) == layout
    assert decode_layout(*layout.spec.tolist()).rest.owners == rest.owners
    assert repr(layout) == f"Joint(5, {rest!r})"


def test_a_joint_layout_is_refused_in_words():
    rest = ringcp.HeadTail(8, 2)
    for options, words in (
        (
            {"replicated": -1, "rest": rest},
            "replicated: expected a number of tokens of at least 0, got -1; give an int",
        ),
        ({"replicated": True, "rest": rest}, "replicated: expected a number of tokens of at least 0, got True;"),
        ({"replicated": 2, "rest": "head_tail"}, "rest: expected the layout of the tokens that are not on every rank"),
        ({"replicated": 2, "rest": joint(1, 8, 2)}, "rest: expected the layout of the tokens that are not on every"),
    ):
        with pytest.raises(ringcp.LayoutError, match="^" + re.escape(words)):
            ringcp.Joint(**options)


def test_unshard_gives_copies_equal_shares():
    layout = joint(2, 5, 3)
    parts = [seeded(layout.local_len(rank), seed=rank).requires_grad_() for rank in range(3)]
    with torch.no_grad():
        parts[0][0] = -torch.inf  # an lse has such rows
    whole, upstream = layout.unshard(parts, 0), seeded(7, seed=9)
    assert torch.equal(whole[:2], parts[0][:2])  # the first rank's, to the bit
    for rank, grad in enumerate(torch.autograd.grad(whole, parts, upstream)):
        assert torch.equal(grad[:2], upstream[:2] / 3)
        assert torch.equal(grad[2:], upstream[layout.positions(rank)[2:]])


def check_sharding(mesh):
    """Values, and the gradients of the sum over ranks of each rank's loss."""
    rank, world_size = mesh.get_local_rank(), mesh.size()
    for num, seq_len in SIZES:
        layout, total = joint(num, seq_len, world_size, "striped"), num + seq_len
        x = seeded(2, total, 3).requires_grad_()
        by_rank = [seeded(2, layout.local_len(r), 3, seed=r + 1) for r in range(world_size)]
        local = ringcp.shard(x, mesh, dim=1, layout=layout)
        assert torch.equal(local, x[:, layout.positions(rank)])
        (grad,) = torch.autograd.grad(local, x, by_rank[rank])
        expected = torch.zeros(2, total, 3, dtype=torch.float64)
        for r, part in enumerate(by_rank):
            expected[:, layout.positions(r)] += part
        assert_close(grad, expected, name="gradient of shard")
        rows = local.detach().requires_grad_()
        whole = ringcp.unshard(rows, mesh, dim=-2, layout=layout)
        assert torch.equal(whole, x)
        losses = [seeded(2, total, 3, seed=10 + r) for r in range(world_size)]
        (grad,) = torch.autograd.grad(whole, rows, losses[rank])
        expected = sum(losses)[:, layout.positions(rank)]
        expected[:, :num] /= world_size
        assert_close(grad, expected, name="gradient of unshard")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shard_and_unshard(worlds, world_size):
    worlds(world_size).run(check_sharding)


NUM, SEQ_LEN = 3, 11


def expected_of(x, weight, upstream):
    """out, and the gradients of x and weight, of a layer in one process: text first, then causal video."""
    x, weight = (y.detach().requires_grad_() for y in (x, weight))
    mask = torch.ones(len(x[0]), len(x[0])).tril().bool()
    mask[:NUM] = True
    qkv = (x @ weight).unflatten(-1, (3, 2, 4)).movedim(2, 0).transpose(2, 3)
    out, _ = reference_attention(*qkv, mask=mask)
    return out.detach(), *torch.autograd.grad(out, (x, weight), upstream)


def check_context(mesh, where, checkpointed, mode):
    """Leaves of both lengths: attention is joint, and their gradients are whole on every rank."""
    rank, layout = mesh.get_local_rank(), joint(NUM, SEQ_LEN, mesh.size())
    text, video = seeded(2, NUM, 6, seed=1), seeded(2, SEQ_LEN, 6, seed=2)
    weight, upstream = seeded(6, 24, seed=3).requires_grad_(), seeded(2, 2, NUM + SEQ_LEN, 4, seed=4)
    tokens = torch.cat([text, video], 1).requires_grad_()  # of the whole length
    table = seeded(SEQ_LEN, 6, seed=5).requires_grad_()  # of the video alone
    ids, video_ids = torch.arange(NUM + SEQ_LEN), torch.arange(SEQ_LEN)
    restarted = torch.cat([torch.arange(NUM), video_ids])  # no packed documents
    added = torch.cat([torch.zeros(NUM, 6), table.detach()])
    expected, dx, dweight = expected_of(tokens.detach() + added, weight, upstream)
    mine = layout.shard(upstream, rank, 2)
    mine[:, :, :NUM] *= rank == 0

    def layer(tokens, table, weight):
        x = torch.cat([tokens[:, :NUM], tokens[:, NUM:] + table], 1)
        qkv = (x @ weight).unflatten(-1, (3, 2, 4)).movedim(2, 0).transpose(2, 3)
        return F.scaled_dot_product_attention(*qkv, is_causal=True)

    options = {"layout": layout, "mode": mode, "buffers": [tokens, table, ids, video_ids, restarted]}
    with ringcp.context_parallel(mesh, buffer_seq_dims=[1, 0, 0, 0, 0], **options) as context:
        assert torch.equal(ids, layout.positions(rank))
        assert torch.equal(context.positions, ids)
        assert torch.equal(ringcp.current_context().positions, ids)
        assert torch.equal(video_ids, layout.rest.positions(rank))
        assert torch.equal(video_ids, context.layout.rest.positions(rank))
        assert torch.equal(restarted[NUM:], video_ids)
        run = (lambda *args: checkpoint(layer, *args, use_reentrant=False)) if checkpointed else layer
        out = run(tokens, table, weight)
        whole = ringcp.unshard(out.detach(), mesh, dim=2)  # "auto": the layout of the context
        if where == "inside":
            out.backward(mine)
    if where == "outside":
        out.backward(mine)
    assert_close(out, layout.shard(expected, rank, 2), name="out")
    assert_close(whole, expected, name="whole out")
    assert torch.equal(ringcp.context_parallel_unshard(mesh, [out.detach()], [2], layout=layout)[0], whole)
    assert_close(tokens.grad, dx, name="gradient of the whole buffer")
    assert_close(table.grad, dx[:, NUM:].sum(0), name="gradient of the buffer of the rest")
    dist.all_reduce(weight.grad, group=mesh.get_group())
    assert_close(weight.grad, dweight, name="gradient of the weight")
    assert torch.equal(ids, torch.arange(NUM + SEQ_LEN))
    assert torch.equal(video_ids, torch.arange(SEQ_LEN))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize(("checkpointed", "mode"), [(False, "auto"), (True, "ring"), (False, "gather")])
def test_in_a_context(worlds, world_size, where, checkpointed, mode):
    worlds(world_size).run(check_context, where, checkpointed, mode)


def refused_buffers(mesh):
    layout = joint(NUM, SEQ_LEN, mesh.size())
    packed = torch.cat([torch.arange(NUM), torch.arange(SEQ_LEN) % 7])
    for x, error, words in (
        (
            torch.zeros(NUM),
            ringcp.LayoutError,
            "buffers[0]: expected 14 tokens, or the 11 that are not on every rank, in",
        ),
        (torch.zeros(SEQ_LEN + 1), ringcp.LayoutError, "like Joint(3, HeadTail(11, 2)), got 12; cut"),
        (
            packed,
            ringcp.ArgumentError,
            "looks like the position ids of packed documents",
        ),
    ):
        before = x.clone()
        with (
            pytest.raises(error, match=re.escape(words)),
            ringcp.context_parallel(mesh, buffers=[x], buffer_seq_dims=[0], layout=layout),
        ):
            pass
        assert torch.equal(x, before)
    with ringcp.context_parallel(mesh, layout=layout):
        x = torch.zeros(1, 1, layout.rest.local_len(mesh.get_local_rank()), 4)
        with pytest.raises(ringcp.LayoutError, match="expected this rank's tokens of Joint"):
            F.scaled_dot_product_attention(x, x, x)


def test_buffers_of_other_lengths_are_refused(worlds):
    worlds(2).run(refused_buffers)
