"""Buffers of `context_parallel`: shards inside, untouched outside, and refusals before the first one is touched."""

import itertools
import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from buffers_cases import (
    DTYPES,
    MISMATCHES,
    attend,
    check_works,
    close,
    facts,
    numbered,
    random,
    refusals,
    same,
    sharded,
)
from cases import LAYOUTS
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel

import ringcp
from ringcp import inplace, leaves
from ringcp.context_buffers import checked_buffers, numbers_text
from ringcp.layout import Layout, layout_named
from ringcp.testing import reference_attention

QUICK_S = 3.0  # promised is 1 s, against the group's timeout of 30 s; the rest is for a busy machine
LENGTHS = (1, 2, 5, 8, 13)


def check_shards(mesh):
    """Every layout, length, dtype and dim: the right rows in the body, and nothing changed after it."""
    rank = mesh.get_local_rank()
    for name, seq_len in itertools.product(LAYOUTS, LENGTHS):
        layout = layout_named(name, seq_len, mesh.size())
        rows = layout.positions(rank)
        dims = [i % 6 - 3 for i in range(len(DTYPES))]
        buffers = [numbered(seq_len, dim, dtype) for dim, dtype in zip(dims, DTYPES, strict=True)]
        before = [facts(x) for x in buffers]
        with sharded(mesh, tuple(buffers), iter(dims), layout=layout if seq_len % 2 else name) as context:
            for x, dim, dtype in zip(buffers, dims, DTYPES, strict=True):
                cut = numbered(seq_len, dim, torch.float64).index_select(dim, rows)
                if dtype == torch.bool or dtype.is_complex:
                    cut = numbered(seq_len, dim, dtype).index_select(dim, rows)
                assert same(x, cut.to(dtype)), (name, seq_len, dim, dtype)
            assert context.layout == layout
            assert torch.equal(context.positions, rows)
        assert [facts(x) for x in buffers] == before, (name, seq_len)
    ids = torch.arange(13)
    with sharded(mesh, [ids], [0]):
        assert torch.equal(ids, ringcp.HeadTail(13, mesh.size()).positions(rank))  # by default


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.report("1.60")
@pytest.mark.report("7.12")
@pytest.mark.report("7.14")
@pytest.mark.report("7.18")
def test_shards_and_restoration(worlds, world_size):
    worlds(world_size).run(check_shards)


def check_as_torch(mesh):
    for seq_len in (2 * mesh.size(), 6 * mesh.size()):
        ids, table = torch.arange(2 * seq_len).view(2, seq_len), random(seq_len, 3)
        with torch_context_parallel(mesh, buffers=[ids, table], buffer_seq_dims=[1, 0]):
            theirs = ids.clone(), table.clone()
        with sharded(mesh, [ids, table], [1, 0]):
            assert same(ids, theirs[0])
            assert same(table, theirs[1])


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_shards_are_those_of_torch(worlds, world_size):
    worlds(world_size).run(check_as_torch)


def check_kinds(mesh):
    """Views, strides and kinds of tensors; what others see of the same memory stays whole, also in the body."""
    rows = ringcp.HeadTail(9, mesh.size()).positions(mesh.get_local_rank())
    tokens, wide = torch.arange(20).view(2, 10), torch.arange(2 * 18 * 3.0).view(2, 18, 3)
    base = random(9, 4)
    view, alias = base[2:, :1], base.detach()
    module = torch.nn.Module()
    module.register_buffer("table", random(9, 3, seed=1))
    module.weight = torch.nn.Parameter(random(9, 2, seed=2))
    kinds = {
        "ids, which overlap with the labels": (tokens[:, :-1], 1),
        "labels": (tokens[:, 1:], 1),
        "every other": (wide[:, ::2, 1:], -2),
        "transposed": (random(3, 9, 2).mT, 2),
        "expanded": (torch.arange(9).expand(3, 9), 1),
        "conjugated": (random(9, 2, dtype=torch.complex128).conj(), 0),
        "with views of its own": (base, 0),
        "with an alias": (alias, 0),
        "a registered buffer": (module.table, 0),
        "a parameter": (module.weight, 0),
        "a parameter without gradients": (torch.nn.Parameter(random(9), requires_grad=False), 0),
        "nothing beside": (torch.empty(9, 0), 0),
    }
    buffers, dims = [list(each) for each in zip(*kinds.values(), strict=True)]
    before, whole = [facts(x) for x in buffers], [x.detach().clone() for x in buffers]
    others = [tokens, wide, view]
    seen = [facts(x) for x in others]
    with sharded(mesh, (x for x in buffers), dims):
        for name, x, was, dim in zip(kinds, buffers, whole, dims, strict=True):
            assert same(x, was.index_select(dim, rows)), name
        assert [{**facts(x), "version": 0} for x in others] == [{**was, "version": 0} for was in seen]
        assert module.table is buffers[8]
        assert dict(module.named_parameters())["weight"] is buffers[9]
    for name, x, was in zip(kinds, buffers, before, strict=True):
        assert facts(x) == was, name
    assert [facts(x) for x in others] == seen
    base[2, 0] = 7  # still one memory
    assert view[0, 0] == alias[2, 0] == 7


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.report("7.3")
@pytest.mark.report("7.16")
@pytest.mark.report("7.17")
def test_views_strides_and_parameters(worlds, world_size):
    worlds(world_size).run(check_kinds)


def check_inference(mesh):
    """Tensors of inference mode as buffers outside of it, and all kinds inside it."""
    rows = ringcp.HeadTail(9, mesh.size()).positions(mesh.get_local_rank())
    with torch.inference_mode():
        ids = torch.arange(9)
    plain, leaf = torch.arange(9), torch.arange(9.0, requires_grad=True)
    buffers = [ids, plain, leaf]
    before = [facts(x) for x in buffers]
    with sharded(mesh, buffers, [0, 0, 0]):
        assert all(torch.equal(x.long(), rows) for x in buffers)
    assert [facts(x) for x in buffers] == before
    with torch.inference_mode(), sharded(mesh, buffers, [0, 0, 0]):
        assert all(torch.equal(x.long(), rows) for x in buffers)
    assert [facts(x) for x in buffers] == before
    plain.add_(1)
    (leaf * plain).sum().backward()  # usable with autograd as before
    assert torch.equal(leaf.grad, torch.arange(1.0, 10.0))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.report("7.19")
def test_inference_tensors(worlds, world_size):
    worlds(world_size).run(check_inference)


def check_none(mesh):
    """No buffers: nothing to shard, and attention is that over the whole sequence all the same."""
    whole, rank = random(2, 9, 3), mesh.get_local_rank()
    want = ringcp.HeadTail(9, mesh.size()).shard(attend(whole), rank, 1)
    for options in ({}, {"buffers": [], "buffer_seq_dims": []}, {"layout": ringcp.HeadTail(9, mesh.size())}):
        x = ringcp.shard(whole, mesh, dim=1)
        with ringcp.context_parallel(mesh, **options):
            assert close(attend(x), want)


@pytest.mark.report("7.9")
def test_no_buffers(worlds):
    worlds(2).run(check_none)


def check_no_restore(mesh):
    rows = ringcp.HeadTail(9, mesh.size()).positions(mesh.get_local_rank())
    for collect in (set, list, tuple, iter):
        ids, labels, leaf = torch.arange(9), torch.arange(9), torch.arange(9.0, requires_grad=True)
        before = facts(labels)
        with pytest.raises(KeyError), sharded(mesh, [ids, labels], [0, 0], no_restore_buffers=collect([ids])):
            raise KeyError
        assert torch.equal(ids, torch.arange(9))
        with sharded(mesh, [ids, labels, leaf], [0, 0, -1], no_restore_buffers=collect([ids, leaf])):
            loss = (leaf * ids).sum()
        assert torch.equal(ids, rows)
        assert torch.equal(leaf, rows.float())
        assert facts(labels) == before
        loss.backward()
        assert torch.equal(leaf.grad, rows.float())


@pytest.mark.parametrize("world_size", [1, 3])
def test_no_restore_buffers_stay_shards(worlds, world_size):
    worlds(world_size).run(check_no_restore)


def fail(*_: object) -> None:
    raise torch.OutOfMemoryError("no memory left")


def fail_after_backward(leaf: torch.Tensor) -> None:
    leaf.sum().backward()
    fail()


def check_failures(mesh, where):
    """Out of memory at any buffer, or in the body: as if the context had never been."""
    made, calls = (
        {"shard": (Layout, "shard"), "enter": (inplace, "_shift_version"), "leaf": (leaves, "_exchange")},
        iter(()),
    )
    tokens = torch.arange(20).view(2, 10)
    two = [random(9, 2).requires_grad_() for _ in range(2)]
    two[0].grad = random(9, 2)
    buffers = [tokens[:, :-1], two[0], tokens[:, 1:], two[1]]
    before = [facts(x) for x in buffers]
    for failing in range({"body": 1, "leaf": 2}.get(where, 4)):
        with pytest.MonkeyPatch.context() as patch:
            if where != "body":
                owner, name = made[where]
                real = getattr(owner, name)
                calls = iter(i == failing for i in range(100))
                patch.setattr(
                    owner, name, lambda *given, real=real, calls=calls: (fail if next(calls) else real)(*given)
                )
            with pytest.raises(torch.OutOfMemoryError), sharded(mesh, buffers, [1, 0, 1, 0]):
                fail_after_backward(buffers[1])
        assert [facts(x) for x in buffers] == before, failing
        assert ringcp.current_context() is None
    check_works(mesh)


@pytest.mark.parametrize("where", ["shard", "enter", "leaf", "body"])
@pytest.mark.report("7.8")
def test_a_failure_leaves_every_buffer_as_it_was(worlds, where):
    worlds(2).run(check_failures, where)


def check_refusals(mesh, odd):
    """Refused on all ranks, or (`odd`) on one only: all raise at once, nothing is touched, and the next call works."""
    ids, rope, rank = torch.arange(18).view(2, 9), random(9, 4), mesh.get_local_rank()
    before = facts(ids), facts(rope)
    for error, words, wrong in refusals(mesh):
        right = {"buffers": [ids, rope], "buffer_seq_dims": [1, 0]}
        given = wrong["buffers"] if isinstance(wrong.get("buffers"), list) else []
        given = [x for x in given if type(x) is torch.Tensor and x.layout == torch.strided]
        was = [facts(x) for x in given]
        call = right if odd not in (None, rank) else {**right, **wrong}
        if call is right:
            error, words = ringcp.AgreementError, f"rank {odd} refused its arguments \\({words.lstrip('^')}"
        started = time.perf_counter()
        with pytest.raises(error, match=words), ringcp.context_parallel(mesh, **call):
            raise AssertionError("entered")
        assert time.perf_counter() - started < QUICK_S, words
        assert [facts(x) for x in given] == was, words
        check_works(mesh)
    assert (facts(ids), facts(rope)) == before


@pytest.mark.parametrize("world_size, odd", [(1, None), (3, None), (2, 0), (3, 2)])
@pytest.mark.report("1.67", raises=True)
@pytest.mark.report("1.68", raises=True)
@pytest.mark.report("7.13", raises=True)
@pytest.mark.report("7.15", raises=True)
@pytest.mark.report("7.33", raises=True)
def test_refusals(worlds, world_size, odd):
    worlds(world_size).run(check_refusals, odd)


def check_mismatch(mesh, what, odd):
    ids, rope = torch.arange(18).view(2, 9), random(9, 4)
    change, words = MISMATCHES[what]
    call = {"buffers": [ids, rope], "buffer_seq_dims": [1, 0], "timeout": QUICK_S}
    if mesh.get_local_rank() == odd:
        call |= change(ids, rope)
    before, started = (facts(ids), facts(rope)), time.perf_counter()
    text = f"rank {odd} made a different call than rank {0 if odd else 1}: .*{words}"
    with pytest.raises(ringcp.AgreementError, match=text), ringcp.context_parallel(mesh, **call):
        raise AssertionError("entered")
    assert time.perf_counter() - started < QUICK_S
    assert (facts(ids), facts(rope)) == before
    check_works(mesh)


@pytest.mark.report("1.43", raises=True)
@pytest.mark.parametrize("what", MISMATCHES)
def test_ranks_that_disagree(worlds, what):
    for odd in (0, 2):
        worlds(3).run(check_mismatch, what, odd)


INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@pytest.mark.parametrize("name", INTEGERS)
def test_the_numbers_of_every_kind_of_integer_are_compared(name):
    one, other, same = (
        numbers_text(checked_buffers([torch.tensor([1, n, 3]).to(getattr(torch, name))], [0], [])) for n in (2, 4, 2)
    )
    assert one == same != other
    assert len(one) == 1


def check_many_disagree(mesh):
    buffers = [torch.zeros(9, 7, 8) for _ in range(70)]
    other = {"layout": "striped"} if mesh.get_local_rank() == 1 else {}
    with pytest.raises(ringcp.AgreementError, match="layout=Striped"), sharded(mesh, buffers, [0] * 70, **other):
        raise AssertionError("entered")


def test_the_difference_is_named_however_many_buffers_there_are(worlds):
    worlds(2).run(check_many_disagree)


def check_nested_tensor(mesh):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it a prototype
        ragged = torch.nested.nested_tensor([torch.ones(9, 2), torch.ones(8, 2)])
    error = ringcp.UnsupportedError if mesh.get_local_rank() else ringcp.AgreementError
    x = ragged if mesh.get_local_rank() else torch.ones(2, 9, 2)
    with pytest.raises(error, match=r"buffers\[0\]: expected a plain dense"), sharded(mesh, [x], [1], timeout=QUICK_S):
        raise AssertionError("entered")


def test_a_nested_tensor_is_refused_on_every_rank(worlds):
    worlds(2).run(check_nested_tensor)


def check_enclosing(mesh, buffers):
    """The last of the buffers is a shard already."""
    words = rf"^buffers\[{len(buffers) - 1}\]: expected a tensor with the whole .*an enclosing context_parallel"
    with pytest.raises(ringcp.ArgumentError, match=words), sharded(mesh, buffers, [0] * len(buffers)):
        raise AssertionError("entered")


def check_enclosed(mesh):
    """Buffers of an enclosing context are shards already; others nest, and each context restores its own."""
    ids, labels, rank = torch.arange(9), torch.arange(11), mesh.get_local_rank()
    before = facts(ids), facts(labels)
    outer, inner = ringcp.HeadTail(9, mesh.size()).positions(rank), ringcp.Striped(11, mesh.size()).positions(rank)
    with sharded(mesh, [ids], [0]):
        check_enclosing(mesh, [labels, ids])
        with sharded(mesh, [labels], [0], layout="striped"):
            assert torch.equal(ids, outer)
            assert torch.equal(labels, inner)
            check_enclosing(mesh, [ids])
        assert torch.equal(ids, outer)
        assert facts(labels) == before[1]
    assert (facts(ids), facts(labels)) == before


@pytest.mark.parametrize("world_size", [1, 2])
def test_nested_contexts(worlds, world_size):
    worlds(world_size).run(check_enclosed)


def check_another_mask(mesh, seq_len):
    """A context without buffers in one with: some layers' own mask, on the same shards."""
    window, (q, k, v) = ringcp.Window(3), (random(2, 2, seq_len, 4, seed=i) for i in range(3))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, _ = reference_attention(*whole, mask=window)
    upstream = random(*expected.shape, seed=3)
    expected.backward(upstream)
    documents = ringcp.Documents([seq_len // 3, seq_len - seq_len // 3]) & ringcp.Causal()
    balanced = ringcp.Balanced(seq_len, mesh.size(), documents)
    for options in ({}, {"layout": balanced}, {"layout": "striped"}, {"layout": "contiguous"}):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        with ringcp.context_parallel(mesh, buffers=leaves, buffer_seq_dims=[2] * 3, **options) as outer:
            with ringcp.context_parallel(mesh, mask=window) as inner:
                assert inner.layout == outer.layout
                out = F.scaled_dot_product_attention(*leaves)
            F.scaled_dot_product_attention(*leaves)  # under the outer one again
            rows = outer.positions
        assert close(out, expected[:, :, rows]), options
        out.backward(upstream[:, :, rows])
        assert all(close(x.grad, y.grad) for x, y in zip(leaves, whole, strict=True)), options


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_context_without_buffers_has_the_layout_of_the_one_around_it(worlds, world_size):
    for seq_len in (12, 13):
        worlds(world_size).run(check_another_mask, seq_len)


def check_meshes(mesh):
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    with pytest.raises(
        ringcp.LayoutError, match=r"^mesh: expected a mesh of 1 dim, or of .*, got one of 2.*mesh\[\"cp\"\]"
    ):
        check_works(whole)
    with pytest.raises(ringcp.LayoutError, match=r"^mesh: expected a 1-D or 2-D DeviceMesh, got ProcessGroup"):
        check_works(mesh.get_group())
    for name, other in (("cp", "dp"), ("dp", "cp")):
        check_works(whole[name], 8 + whole.get_local_rank(other))


@pytest.mark.report("7.21")
def test_meshes(worlds):
    worlds(4).run(check_meshes)


def check_unshard(mesh):
    rank, whole, found = mesh.get_local_rank(), random(2, 9, 3), []
    weights = random(mesh.size(), 2, 9, 3, seed=1)
    for name in LAYOUTS:
        x = whole.clone().requires_grad_()
        with sharded(mesh, [x], [1], layout=name):
            (back,) = ringcp.context_parallel_unshard(mesh, [x.square()], [1])
            (weights[rank] * back).sum().backward()
            part = x.detach().clone()
        assert torch.equal(back, whole.square())
        # Each rank's loss weighs every row, and the gradient is that of their sum.
        assert close(x.grad, 2 * whole * weights.sum(0)), name
        back = ringcp.context_parallel_unshard(mesh, (part, part[0]), (-2, 0), layout=name)
        assert torch.equal(back[0], whole)
        assert torch.equal(back[1], whole[0])
        if name == "head_tail":
            found += [*ringcp.context_parallel_unshard(mesh, [part], [1]), ringcp.unshard(part, mesh, dim=1)]
        else:
            with pytest.raises(ringcp.LayoutError, match=f'^layout: .* not head_tail, got None; pass layout="{name}"'):
                ringcp.context_parallel_unshard(mesh, [part], [1])
            with pytest.raises(ringcp.LayoutError, match=f"not head_tail, got 'auto'; pass layout=\"{name}\" for"):
                ringcp.unshard(part, mesh, dim=1)
    other = DeviceMesh.from_group(mesh.get_group(), "cpu")
    with sharded(mesh, None, None, layout="contiguous"):  # of no length
        part = ringcp.shard(whole, other, dim=1, layout="contiguous")
        found += ringcp.context_parallel_unshard(other, [part], [1])
    assert all(torch.equal(x, whole) for x in found)
    assert ringcp.context_parallel_unshard(mesh, [], [], layout="striped") == []
    check_works(mesh)  # head-tail again


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.report("7.34")
def test_unshard(worlds, world_size):
    worlds(world_size).run(check_unshard)


def check_unshard_refusals(mesh, odd):
    """As for the context: all ranks raise at once, also if one is wrong only."""
    local = ringcp.shard(random(9, 3), mesh, dim=0)
    for error, words, buffers, dims in (
        (ringcp.ArgumentError, "^seq_dims: expected one for each of the 1 buffers, got 2", [local], [0, 0]),
        (ringcp.ArgumentError, "^buffers: expected a list of tensors, got a tensor", local[None], [0]),
        (ringcp.LayoutError, "^dim: expected a dim of x with 2 dims, got 2", [local], [2]),
    ):
        if odd not in (None, mesh.get_local_rank()):
            error, words, buffers, dims = ringcp.AgreementError, f"rank {odd} refused its arguments", [local], [0]
        started = time.perf_counter()
        with pytest.raises(error, match=words):
            ringcp.context_parallel_unshard(mesh, buffers, dims, layout="auto")
        assert time.perf_counter() - started < QUICK_S
        check_works(mesh)


@pytest.mark.parametrize("odd", [None, 1])
def test_unshard_refuses(worlds, odd):
    worlds(2).run(check_unshard_refusals, odd)


def check_layout_of_a_context(mesh):
    """In a body, `shard` and `unshard` mean its layout; a call that names another one is refused."""
    mask, x = ringcp.Documents([20, 13]) & ringcp.Causal(), random(1, 2, 33, 4)
    for options in ({"mask": mask}, {"layout": "striped"}, {"layout": "contiguous"}, {}):
        with ringcp.context_parallel(mesh, buffers=[x], buffer_seq_dims=[2], **options) as context:
            positions = ringcp.shard(torch.arange(33), mesh, dim=0)
            assert torch.equal(positions, context.positions)
            assert torch.equal(ringcp.unshard(positions, mesh, dim=0), torch.arange(33))
            ringcp.attention(x, x, x, mesh=mesh, layout=context.layout)
            other = "contiguous" if options.get("layout") == "striped" else "striped"
            with pytest.raises(ringcp.RingcpError, match=f"got {other}.*current_context"):
                ringcp.attention(x, x, x, mesh=mesh, layout=other)
    assert torch.equal(
        ringcp.shard(torch.arange(33), mesh, dim=0), ringcp.HeadTail(33, mesh.size()).positions(mesh.get_local_rank())
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_context_says_what_auto_means_inside(worlds, world_size):
    worlds(world_size).run(check_layout_of_a_context)
