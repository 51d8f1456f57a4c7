"""Joint attention: tokens on every rank beside a sharded sequence, exact, and alike on all ranks to the bit."""

import itertools
import random
import zlib
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from calls import check_exact, ways
from cases import HEADS, LAYOUTS, MASKS, MASKS_OF, allowed, assert_none, differences, gradients, normal

import ringcp
from ringcp import replicas
from ringcp.layout import layout_named
from ringcp.testing import assert_close, reference_attention

# Replicated tokens and others: none, more of them than others, fewer others than ranks, no others.
SIZES = ((0, 13), (1, 7), (5, 13), (9, 3), (3, 1), (4, 0), (0, 0), (7, 33))


class Case(NamedTuple):
    num: int
    seq_len: int
    mask: str = "causal"
    rest: str = "head_tail"
    heads: str = "gqa"
    upstream: str = "both"
    sinks: bool = False
    kernel: str = "auto"

    def layout(self, world_size):
        return ringcp.Joint(replicated=self.num, rest=layout_named(self.rest, self.seq_len, world_size))

    def mask_of_rest(self):
        if self.mask in MASKS_OF:
            return MASKS_OF[self.mask](self.seq_len, HEADS[self.heads].batch)
        return MASKS[self.mask]

    def allowed(self):
        """Everything but among the rest."""
        rest = allowed(self.mask, self.seq_len, HEADS[self.heads].batch)
        whole = torch.ones(*rest.shape[:-2], *(self.num + n for n in rest.shape[-2:]), dtype=torch.bool)
        whole[..., self.num :, self.num :] = rest
        return whole


def cases(world_size):
    """Every mask and size, the rest drawn."""
    draw = random.Random(world_size)
    of_rows = [mask for mask in MASKS_OF if mask != "left_padding"]  # which needs a length
    drawn = list(itertools.product(SIZES, [*MASKS, *of_rows]))
    draw.shuffle(drawn)
    for (num, seq_len), mask in drawn[::6]:
        if seq_len or mask in MASKS:
            heads = draw.choice(list(HEADS) if mask in MASKS else ["gqa", "mqa", "narrow_v"])
            rest, upstream = draw.choice(LAYOUTS), draw.choice(("both", "out", "lse"))
            kernel = draw.choice(("auto", "reference"))
            yield Case(num, seq_len, mask, rest, heads, upstream, draw.random() < 0.3, kernel)


def with_sinks(out, lse, sinks):
    """By the definition of a sink: one more key, without a value."""
    total = torch.logaddexp(lse, sinks[:, None].expand_as(lse))
    return out * (lse - total).exp()[..., None], total


def run_case(case, options):
    """What is off on this rank, and the bits of what must be alike on all: results and gradients of replicated rows."""
    mesh, shape = options["mesh"], HEADS[case.heads]
    rank, world_size = dist.get_rank(), mesh.size()
    layout, total = case.layout(world_size), case.num + case.seq_len
    whole = [
        normal(shape.batch, heads, total, dim, seed=(case, name)).requires_grad_()
        for name, heads, dim in (
            ("q", shape.q_heads, shape.head_dim),
            ("k", shape.kv_heads, shape.head_dim),
            ("v", shape.kv_heads, shape.value_dim),
        )
    ]
    sinks = normal(shape.q_heads, seed=case).requires_grad_() if case.sinks else None

    # Each rank has a loss of its own, also on the replicated rows; the gradients are those of their sum.
    local_upstream, whole_upstream = [], []
    for what, last in (("out", (shape.value_dim,)), ("lse", ())):
        by_rank = [
            normal(shape.batch, shape.q_heads, layout.local_len(r), *last, seed=(case, what, r))
            for r in range(world_size)
        ]
        used = case.upstream in ("both", what)
        local_upstream.append(by_rank[rank] if used else None)
        whole_upstream.append(layout.whole_gradient(by_rank, 2) if used else None)

    out, lse = reference_attention(*whole, mask=case.allowed())
    if sinks is not None:
        out, lse = with_sinks(out, lse, sinks)
    leaves = [*whole, *([] if sinks is None else [sinks])]
    grads = gradients((out, lse), whole_upstream, leaves)
    want = {"out": layout.shard(out, rank, 2), "lse": layout.shard(lse, rank, 2)}
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=False):
        grad = grad.clone()
        grad[:, :, : case.num] /= world_size  # the share of a copy
        want[name] = layout.shard(grad, rank, 2)

    local = [layout.shard(x.detach(), rank, 2).requires_grad_() for x in whole]
    leaves = [*local, *([] if sinks is None else [sinks])]
    result = ringcp.attention(
        *local,
        mask=case.mask_of_rest(),
        layout=layout,
        seq_len=total if case.num % 2 else None,
        kernel=case.kernel,
        sinks=sinks,
        return_lse=case.upstream != "out",
        **options,
    )
    outputs = result if isinstance(result, tuple) else (result, None)
    got_grads = gradients(outputs, local_upstream, leaves)
    got = {"out": outputs[0], **dict(zip(("dq", "dk", "dv"), got_grads, strict=False))}
    if outputs[1] is None:
        del want["lse"]
    else:
        got["lse"] = outputs[1]
    if sinks is not None:
        dsinks = got_grads[3].clone()
        dist.all_reduce(dsinks, group=ringcp.groups.group_of(mesh))
        got["dsinks"], want["dsinks"] = dsinks, grads[3]
    found = differences(f"rank {rank} of {world_size}, {case}, {options}", got, want)
    alike = [got[name][:, :, : case.num].detach().flatten() for name in sorted(want) if name != "dsinks"]
    return found, zlib.crc32(torch.cat(alike).numpy().tobytes())


def check_all(mesh, way):
    found, alike = [], []
    for case in cases(mesh.size()):
        of_case, bits = run_case(case, ways(mesh)[way])
        found += of_case
        alike.append(bits)
    return found, alike


WAYS = [(1, "ring")] + [(size, way) for size in (2, 3) for way in ("ring", "gather", "ulysses")]
WAYS += [(4, way) for way in ("ring", "gather by heads", "ulysses", "usp", "usp on a grid", "gather on a grid")]


@pytest.mark.parametrize(("world_size", "way"), WAYS)
@pytest.mark.report("1.62")
@pytest.mark.report("1.I4")
@pytest.mark.report("1.65")
def test_exact_and_replicated_rows_alike_to_the_bit(worlds, world_size, way):
    found, alike = zip(*worlds(world_size).run(check_all, way), strict=True)
    assert_none(found)
    assert all(bits == alike[0] for bits in alike)


def check_sides(mesh):
    """Replicated queries without replicated keys, and the other way round."""
    found = []
    rank, rest = mesh.get_local_rank(), ringcp.HeadTail(11, mesh.size())
    for num_q, num_k in ((4, 0), (0, 4), (2, 5)):
        q_layout, k_layout = (ringcp.Joint(replicated=n, rest=rest) for n in (num_q, num_k))
        whole = [normal(2, 4, n + 11, 6, seed=(num_q, n)).requires_grad_() for n in (num_q, num_k, num_k)]
        upstream = normal(2, 4, num_q + 11, 6, seed="upstream")
        expected, _ = reference_attention(*whole)
        grads = torch.autograd.grad(expected, whole, upstream)
        local = [
            lay.shard(x.detach(), rank, 2).requires_grad_()
            for lay, x in zip((q_layout, k_layout, k_layout), whole, strict=True)
        ]
        out = ringcp.attention(*local, mesh=mesh, layout=q_layout, kv_layout=k_layout)
        share = q_layout.shard(upstream, rank, 2)
        share[:, :, :num_q] /= mesh.size()
        got = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, local, share), strict=True))
        want = {"out": q_layout.shard(expected, rank, 2)}
        for name, grad, lay in zip(got, grads, (q_layout, k_layout, k_layout), strict=True):
            grad[:, :, : lay.replicated] /= mesh.size()
            want[name] = lay.shard(grad, rank, 2)
        found += differences(f"rank {rank}: {num_q}, {num_k}", {"out": out, **got}, want)
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_replicated_tokens_on_one_side(worlds, world_size):
    assert_none(worlds(world_size).run(check_sides))


class Block(torch.nn.Module):
    """Projections that text and video share, attention, and a residual."""

    def __init__(self, attend):
        super().__init__()
        self.weights = torch.nn.ParameterList(normal(12, 12, seed=("weight", i)) / 4 for i in range(4))
        self.attend = attend

    def forward(self, x):
        q, k, v = ((x @ w).unflatten(-1, (3, 4)).transpose(1, 2) for w in self.weights[:3])
        return x + self.attend(q, k, v).transpose(1, 2).flatten(2) @ self.weights[3]


def whole_instead_of_shares(num, world_size):
    """A `split_copies_backward` with the whole gradient on every rank."""
    original = replicas.split_copies_backward

    def backward(*args):
        grads = original(*args)
        for grad in grads:
            grad[:, :, :num] *= world_size
        return grads

    return backward


def stacked(mesh, way, seq_len, shares):
    """Two layers of one block: the error of its gradients, summed over ranks, against those of one process."""
    options = ways(mesh)[way]
    num, world_size, rank = 5, mesh.size(), mesh.get_local_rank()
    layout = ringcp.Joint(replicated=num, rest=ringcp.HeadTail(seq_len, world_size))
    x = normal(2, num + seq_len, 12, seed="x")
    causal = torch.ones(num + seq_len, num + seq_len).tril().bool()
    causal[:num] = True
    alone = Block(lambda *qkv: reference_attention(*qkv, mask=causal)[0])
    expected = alone(alone(x))
    # The loss of the video is on the ranks of its rows; that of the text is on the last rank alone.
    upstream = normal(2, num + seq_len, 12, seed="upstream")
    expected.backward(upstream)
    joint = Block(lambda *qkv: ringcp.attention(*qkv, mask=ringcp.Causal(), layout=layout, **options))
    out = joint(joint(layout.shard(x, rank, 1)))
    assert_close(out, layout.shard(expected, rank, 1), name="out")
    mine = layout.shard(upstream, rank, 1)
    mine[:, :num] *= rank == world_size - 1
    original = replicas.split_copies_backward
    if not shares:
        replicas.split_copies_backward = whole_instead_of_shares(num, world_size)
    try:
        out.backward(mine)
    finally:
        replicas.split_copies_backward = original
    errors = []
    for ours, theirs in zip(joint.weights, alone.weights, strict=True):
        dist.all_reduce(ours.grad, group=mesh.get_group())
        errors.append((ours.grad - theirs.grad).abs().max().item())
    return errors


@pytest.mark.parametrize(("world_size", "way"), [(2, "ring"), (3, "gather"), (4, "usp on a grid"), (4, "ulysses")])
def test_parameter_gradients_of_stacked_layers_sum_up(worlds, world_size, way):
    for errors in worlds(world_size).run(stacked, way, 2 * world_size + 1, True):
        assert max(errors) < 1e-10


def test_whole_gradients_on_every_copy_would_be_wrong(worlds):
    for errors in worlds(2).run(stacked, "ring", 5, False):
        assert min(errors[:3]) > 1e-2


def in_bf16(mesh, way):
    options = ways(mesh)[way]
    num, seq_len, rank, world_size = 17, 96, mesh.get_local_rank(), mesh.size()
    layout = ringcp.Joint(replicated=num, rest=ringcp.HeadTail(seq_len, world_size))
    allow = torch.ones(num + seq_len, num + seq_len).tril().bool()
    allow[:num] = True
    whole = [normal(2, heads, num + seq_len, 32, seed=i).bfloat16() for i, heads in enumerate((4, 2, 2))]
    upstream = normal(2, 4, num + seq_len, 32, seed="upstream").bfloat16()

    def run(attend, tensors, upstream):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

    expected = run(
        lambda *qkv: reference_attention(*qkv, mask=allow)[0], [x.double() for x in whole], upstream.double()
    )
    baseline = run(lambda *qkv: F.scaled_dot_product_attention(*qkv, allow, enable_gqa=True), whole, upstream)
    # All of the loss on the replicated rows of one rank.
    mine = layout.shard(upstream, rank, 2)
    mine[:, :, :num] *= rank == 0
    local = [layout.shard(x, rank, 2) for x in whole]
    got = run(lambda *qkv: ringcp.attention(*qkv, mask=ringcp.Causal(), layout=layout, **options), local, mine)
    for name, x, want, base in zip(("out", "dq", "dk", "dv"), got, expected, baseline, strict=True):
        assert x.dtype == torch.bfloat16
        for part, rows in (("copies", slice(num)), ("rest", slice(num, None))):
            parts = world_size if part == "copies" and name != "out" else 1
            held = [layout.shard(y, rank, 2)[:, :, rows] / parts for y in (want, base)]
            assert_close(x[:, :, rows], held[0], baseline=held[1], name=f"{name} of {part}")


@pytest.mark.parametrize("way", ["ring", "gather", "ulysses"])
def test_bf16(worlds, way):
    worlds(2).run(in_bf16, way)


# What one rank has otherwise: replicated tokens and rest of its layout and of its tensors, the error, and its words.
ODD = {
    "layout": ((4, 9), (4, 9), ringcp.AgreementError, "layout=Joint(4, HeadTail(9, 2)), not layout=Joint(3, HeadTail"),
    "text": ((3, 9), (4, 9), ringcp.LayoutError, "Joint(3, HeadTail(9, 2)) gives, got 8 on rank 1 instead of 7"),
    "no text": ((3, 9), (0, 9), ringcp.LayoutError, "got 4 on rank 1 instead of 7"),
    "short text, and no more": (
        (3, 0),
        (2, 0),
        ringcp.LayoutError,
        "q: expected at least the 3 tokens that every rank",
    ),
}


def one_is_odd(mesh, what):
    layout_sizes, tensor_sizes, error, words = ODD[what]
    usual = (3, layout_sizes[1])

    def sized(sizes):
        return ringcp.Joint(replicated=sizes[0], rest=ringcp.HeadTail(sizes[1], mesh.size()))

    odd = mesh.get_local_rank() == 1
    layout, rows = (sized(layout_sizes), sized(tensor_sizes)) if odd else (sized(usual),) * 2
    x = torch.randn(2, 2, rows.local_len(mesh.get_local_rank()), 4)
    with ringcp.record() as recorder, pytest.raises(ringcp.RingcpError) as info:
        ringcp.attention(x, x, x, mesh=mesh, layout=layout)
    assert recorder.steps == []
    assert words in str(info.value), str(info.value)
    assert isinstance(info.value, error) or not odd
    check_exact(mesh, 9)


@pytest.mark.parametrize("what", ODD)
def test_text_of_another_length_on_one_rank_raises_on_all(worlds, what):
    worlds(2).run(one_is_odd, what)
