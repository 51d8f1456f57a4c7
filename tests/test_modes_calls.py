"""Every mode under what wraps a call: compile, autocast, checkpoints, backward in odd places, contexts, packed rows."""

from itertools import pairwise

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from calls import attend, check_exact, make_call, ways
from contexts import in_thread
from functorch.compile import make_boxed_func
from test_compile import CHECKPOINTS, quiet, run_both
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import ringcp
from ringcp.testing import assert_close, reference_attention

SOME = ["ring", "gather", "ulysses"]
ALL = [*SOME, "gather by heads", "usp", "usp on a grid", "gather on a grid"]
NAMES = ("out", "dq", "dk", "dv")


def subject(mesh, seq_len=13, requires_grad=True):
    """A call, its upstream gradient, and what must come out on this rank: out, dq, dk, dv."""
    call, whole, layout = make_call(mesh, seq_len, requires_grad=requires_grad)
    leaves = [x.detach().requires_grad_() for x in whole]
    expected, _ = reference_attention(*leaves, mask=ringcp.Causal())
    upstream = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(5))
    grads = torch.autograd.grad(expected, leaves, upstream)
    rank = dist.get_rank()
    return call, layout.shard(upstream, rank, 2), [layout.shard(x.detach(), rank, 2) for x in (expected, *grads)]


def check_all(got, expected, what):
    for name, x, want in zip(NAMES, got, expected, strict=False):
        assert_close(x, want, name=f"{name} of {what}")


def exact(mesh, way):
    """Also where nothing is agreed in the call, and by the mesh's other names for the same ranks."""
    call, upstream, expected = subject(mesh)
    inputs = [call[name] for name in "qkv"]
    layout = ringcp.HeadTail(13, mesh.size())
    for options in ({}, {"agree": "context", "layout": layout}, {"seq_len": 13, "agree": "context"}, {"timeout": 20}):
        out = attend({**call, **ways(mesh)[way], **options})
        check_all([out, *torch.autograd.grad(out, inputs, upstream)], expected, (way, options))


@pytest.mark.parametrize("way", [*ALL, "auto"])
def test_exact_with_and_without_a_vote(worlds, way):
    worlds(4).run(exact, way)


def gradients_on_some_ranks(mesh, way, through):
    """One rank's loss uses the lse, or out, or nothing, where those of others use both."""
    call, whole, layout = make_call(mesh, 13, requires_grad=True)
    leaves = [x.detach().requires_grad_() for x in whole]
    whole_out, whole_lse = reference_attention(*leaves, mask=ringcp.Causal())
    uses = [("out", "lse")] * (mesh.size() - 1) + [through]
    of_rank = [(layout.shard(whole_out, r, 2), layout.shard(whole_lse, r, 2)) for r in range(mesh.size())]

    def loss_of(out, lse, names):
        return sum((x.square().sum() for name, x in (("out", out), ("lse", lse)) if name in names), out.new_zeros(()))

    wanted = torch.autograd.grad(sum(loss_of(*x, names) for x, names in zip(of_rank, uses, strict=True)), leaves)
    rank = dist.get_rank()
    out, lse = attend({**call, **ways(mesh)[way], "return_lse": True})
    loss = loss_of(out, lse, uses[rank]) + (0 * out.sum() if not through else 0)  # every rank runs backward
    got = torch.autograd.grad(loss, [call[name] for name in "qkv"])
    for name, x, want in zip(NAMES[1:], got, wanted, strict=True):
        assert_close(x, layout.shard(want, rank, 2), name=f"{name} of {way}, {through or 'nothing'}")


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("through", [("out",), ("lse",), ()])
def test_which_results_have_a_gradient_may_differ_from_rank_to_rank(worlds, world_size, through):
    for way in ["ring", "gather", "ulysses"] if world_size < 4 else ALL:
        worlds(world_size).run(gradients_on_some_ranks, way, through)


def odd_backwards(mesh, way):
    """Twice, on another thread, after other calls: each is this call's."""
    call, upstream, expected = subject(mesh)
    inputs = [call[name] for name in "qkv"]
    call |= ways(mesh)[way]
    out = attend(call)
    check_exact(mesh, 9)
    first = torch.autograd.grad(out, inputs, upstream, retain_graph=True)
    second = in_thread(lambda: torch.autograd.grad(out, inputs, upstream))
    check_all([out, *first], expected, way)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    in_another = in_thread(lambda: attend(call))
    assert torch.equal(in_another, out)
    with pytest.raises(ringcp.UnsupportedError, match="double backward"):
        torch.autograd.grad(attend(call), inputs, upstream, create_graph=True)[0].sum().backward()
    with torch.inference_mode():
        assert torch.equal(attend(call), out)


@pytest.mark.parametrize("way", ["ring", "gather by heads", "ulysses", "usp on a grid"])
def test_backward_twice_and_elsewhere(worlds, way):
    worlds(4).run(odd_backwards, way)


def checkpoint_all_ways(mesh, way):
    call, upstream, expected = subject(mesh)
    inputs = [call[name] for name in "qkv"]
    weight = torch.eye(8, dtype=torch.float64, requires_grad=True)
    call |= ways(mesh)[way]

    def block(q, k, v):
        return attend({**call, "q": q @ weight, "k": k @ weight, "v": v})

    runs = {}
    for name, options in CHECKPOINTS.items():
        for x in inputs:
            x.grad = None
        with ringcp.record() as recorder:
            out = block(*inputs) if options is None else checkpoint(block, *inputs, **options)
            out.backward(upstream)
        check_all([out, *(x.grad for x in inputs)], expected, (way, name))
        steps = [(s.direction, s.bytes_sent) for s in recorder.steps]
        runs[name] = [step for step in steps if step[0].startswith("forward")]
        of_way = ["forward", "backward"] + ["forward exchange", "backward exchange"] * (way not in ("ring", "gather"))
        assert {direction for direction, _ in steps} == set(of_way)
        gathers = {s.direction for s in recorder.steps if s.source is None}
        assert gathers == ({"forward", "backward"} if way == "gather" else set())
    assert runs["none"] == runs["selective"]
    assert runs["reentrant"] == runs["not reentrant"] == runs["none"] * 2
    assert recorder.bytes_sent > 0
    return recorder.table()


@pytest.mark.parametrize("way", ["ring", "gather", "ulysses", "usp on a grid"])
def test_checkpoints_and_their_records(worlds, way):
    for table in worlds(4).run(checkpoint_all_ways, way):
        assert ("forward exchange" in table) == (way not in ("ring", "gather"))


def under_autocast(mesh, way):
    call, *_ = make_call(mesh, 13, dtype=torch.float32, requires_grad=True)
    inputs = [call[name] for name in "qkv"]
    call |= ways(mesh)[way]
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(call)
    cast = attend({**call, **{name: call[name].bfloat16() for name in "qkv"}})
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, cast)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    got, want = (torch.autograd.grad(x, inputs, upstream) for x in (out, cast))
    assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("way", ["ring", "gather", "ulysses", "usp on a grid"])
def test_autocast(worlds, way):
    worlds(4).run(under_autocast, way)


LAYOUTS = [ringcp.HeadTail, ringcp.Striped, ringcp.Contiguous]
MASKS = [ringcp.Causal(), ringcp.Window(3), ringcp.Documents([5, 20]) & ringcp.Causal()]


def local(shapes, layouts, rank):
    """Shards of random tensors (2, heads, S, 8)."""

    def normal(seed, *shape):
        return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    return [
        layout.shard(normal(i, 2, heads, layout.seq_len, 8), rank, 2)
        .requires_grad_()
        for i, (heads, layout) in enumerate(zip(shapes, layouts, strict=True))
    ]  # fmt: skip


@quiet
def compile_way(mesh, way, kind):
    """Equal to eager in every bit, and compiled once for all masks, layouts and numbers of replicated tokens."""
    options, rank, world_size = ways(mesh)[way], mesh.get_local_rank(), mesh.size()

    def step(q, k, v, mask, layout, kv_layout):
        return ringcp.attention(q * 2, k, v, mask=mask, layout=layout, kv_layout=kv_layout, return_lse=True, **options)

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    frames = []
    for i, (mask, make) in enumerate([*zip(MASKS, LAYOUTS, strict=True), (MASKS[0], LAYOUTS[0])]):
        layout, kv_layout = make(33, world_size), None
        if kind == "joint":
            layout = ringcp.Joint(replicated=3 + 2 * i, rest=layout)
        elif kind == "cross":
            kv_layout, mask = LAYOUTS[i % 3 - 1](21, world_size), None if i % 2 else ringcp.Causal()
        elif kind == "memory":
            kv_layout = ringcp.Joint(replicated=5 + i, rest=ringcp.Contiguous(0, world_size))
            mask = None
        inputs = local((4, 2, 2), [layout, *[kv_layout or layout] * 2], rank)
        eager, other = run_both((step, compiled), inputs, mask, layout, kv_layout)
        for a, b in zip(eager, other, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
        frames.append(counter.frame_count)
    return frames


COMPILED = [(2, way, "self") for way in SOME] + [(4, "usp on a grid", "self")]
COMPILED += [(2, "ulysses", "joint"), (2, "gather", "cross"), (2, "ring", "memory")]


@pytest.mark.parametrize(("world_size", "way", "kind"), COMPILED)
def test_compiled_equals_eager(worlds, world_size, way, kind):
    for frames in worlds(world_size).run(compile_way, way, kind):
        # The first other local length is compiled once more, with symbolic shapes; without a mask, once more again.
        assert frames[1] <= 2
        assert frames[-1] == frames[-2] <= 2 + (kind in ("cross", "memory"))


@quiet
def order_in_graphs(mesh, num_q, num_k):
    """For forward and backward, the ops that talk, and whether each depends on the one before."""
    rest = ringcp.HeadTail(13, mesh.size())
    layout, kv_layout = (ringcp.Joint(replicated=n, rest=rest) for n in (num_q, num_k))
    inputs, graphs = local((4, 2, 2), [layout, kv_layout, kv_layout], mesh.get_local_rank()), []

    def keep(graph, _):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    def step(q, k, v):
        return ringcp.attention(q, k, v, mesh=mesh, layout=layout, kv_layout=kv_layout)

    compiled = torch.compile(step, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    compiled(*inputs).sum().backward()
    found = []
    for graph in graphs:
        before = {}
        for node in graph.nodes:
            before[node] = set(node.all_input_nodes).union(*(before[x] for x in node.all_input_nodes))
        # Of this group, not of this rank alone; and splitting sends in backward only.
        of_group = [x for x in before if mesh.get_group().group_name in x.args]
        talk = [x for x in of_group if "split_copies.default" not in str(x.target)]
        waits = [True, *(x in before[y] for x, y in pairwise(talk))]
        found.append([(str(x.target).split(".")[1], waiting) for x, waiting in zip(talk, waits, strict=True)])
    return found


@pytest.mark.parametrize(("num_q", "num_k"), [(3, 3), (0, 3), (3, 0)])
def test_in_compiled_code_one_message_waits_for_another(worlds, num_q, num_k):
    """Inductor may reorder what does not depend on each other, and not on every rank alike: that would hang."""
    for forward, backward in worlds(2).run(order_in_graphs, num_q, num_k):
        meeting = [("of_all_ranks", True)] if num_q else []
        assert forward == [("attention", True), *meeting]
        meeting = [("of_all_ranks_backward", True)] if num_q else []
        assert backward == [*meeting, ("attention_backward", True), ("split_copies_backward", True)]


def packed(mesh, way):
    cu_seqlens, rank = [0, 5, 6, 13], mesh.get_local_rank()
    layout = ringcp.HeadTail(13, mesh.size())
    whole = [
        torch.randn(13, heads, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i)).requires_grad_()
        for i, heads in enumerate((4, 2, 2))
    ]
    documents = torch.bucketize(torch.arange(13), torch.tensor(cu_seqlens[1:]), right=True)
    mask = (documents[:, None] == documents) & torch.ones(13, 13).tril().bool()
    expected, lse = reference_attention(*(x.transpose(0, 1)[None] for x in whole), mask=mask)
    expected = expected[0].transpose(0, 1)
    upstream = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    grads = torch.autograd.grad(expected, whole, upstream)
    rows = [layout.shard(x.detach(), rank, 0).requires_grad_() for x in whole]
    out, got_lse = ringcp.attention_varlen(
        *rows, cu_seqlens=cu_seqlens, mask=ringcp.Causal(), layout=layout, return_lse=True, **ways(mesh)[way]
    )
    got = torch.autograd.grad(out, rows, layout.shard(upstream, rank, 0))
    check_all([out, *got], [layout.shard(x, rank, 0) for x in (expected, *grads)], way)
    assert_close(got_lse, layout.shard(lse[0].transpose(0, 1), rank, 0), name="lse")


@pytest.mark.parametrize("way", ALL)
def test_packed_documents(worlds, way):
    worlds(4).run(packed, way)
