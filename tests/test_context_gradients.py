"""Gradients of buffers: of the sum over ranks of each rank's loss, whole on every rank, wherever backward runs."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from buffers_cases import WAYS, Batch, Counting, attend, close, facts, inside, outside, random, sharded
from cases import LAYOUTS
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import ringcp


def check_ways(mesh):
    for way, layout, present in itertools.product(WAYS, LAYOUTS, (False, True)):
        batch = Batch(9 if layout != "striped" else 2)  # 2 tokens leave a rank of three without any
        had = [random(*leaf.shape, seed=9) if present else None for leaf in batch.leaves]
        for leaf, grad in zip(batch.leaves, had, strict=True):
            leaf.grad = None if grad is None else grad.clone()
        objects, data = [leaf.grad for leaf in batch.leaves], [leaf.data_ptr() for leaf in batch.leaves]
        times = way(mesh, batch, layout=layout)
        batch.check(mesh, times, had if present else (0, 0), what=(way.__name__, layout, present))
        assert [leaf.data_ptr() for leaf in batch.leaves] == data
        if present:
            assert all(leaf.grad is grad for leaf, grad in zip(batch.leaves, objects, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.report("7.3")
@pytest.mark.report("7.4")
@pytest.mark.report("7.5")
def test_backward_anywhere(worlds, world_size):
    worlds(world_size).run(check_ways)


def check_dtypes(mesh):
    for dtype, bar in ((torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.25)):
        for way in (inside, outside):
            batch = Batch(13, dtype)
            way(mesh, batch)
            batch.check(mesh, 1, bar=bar, what=(dtype, way.__name__))
            assert all(leaf.grad.is_contiguous() for leaf in batch.leaves)


def test_dtypes(worlds):
    worlds(2).run(check_dtypes)


def check_checkpoints(mesh):
    """Buffers reach the recomputation by closure, and are what they were, though the user has written to them since."""
    for reentrant, way, overwrite in itertools.product((True, False), (inside, outside), (False, True)):
        batch = Batch()

        def hidden(x, batch=batch, reentrant=reentrant):
            return checkpoint(batch.hidden, x, use_reentrant=reentrant)

        with batch.context(mesh):
            loss = batch.loss(hidden)
            if way is inside:
                loss.backward()
        if overwrite:
            with torch.no_grad():
                for x in batch.buffers:
                    x.zero_()
        if way is outside:
            loss.backward()
        batch.check(mesh, 1, what=(reentrant, way.__name__, overwrite))
        assert not overwrite or not any(x.any() for x in batch.buffers)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.report("7.6")
def test_checkpoints(worlds, world_size):
    worlds(world_size).run(check_checkpoints)


def scaled(batch, x, rope, keep):
    return attend(torch.where(keep, x * rope, batch.hidden(x)))


def check_checkpoint_arguments(mesh):
    alone = Batch()
    alone.loss(lambda x: scaled(alone, x, alone.rope, alone.keep)).backward()
    for reentrant, way in itertools.product((True, False), (inside, outside)):
        batch = Batch()

        def hidden(x, batch=batch, reentrant=reentrant):
            return checkpoint(scaled, batch, x, batch.rope, batch.keep, use_reentrant=reentrant)

        with batch.context(mesh):
            loss = batch.loss(hidden)
            if way is inside:
                loss.backward()
        if way is outside:
            loss.backward()
        assert close(batch.rope.grad, alone.rope.grad)
        assert close(batch.bias.grad, alone.bias.grad)


@pytest.mark.report("7.6")
def test_buffers_as_arguments_of_a_checkpoint(worlds):
    worlds(2).run(check_checkpoint_arguments)


def check_compiled(mesh):
    torch._dynamo.reset()
    batch = Batch()
    compiled = torch.compile(batch.loss, backend="aot_eager")
    had = (0, 0)
    for times, backward_inside in enumerate((True, False, True, False), start=1):
        with batch.context(mesh):
            loss = compiled()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        batch.check(mesh, times, had, what=(times, backward_inside))
    torch._dynamo.reset()


@pytest.mark.parametrize("world_size", [1, 2])
def test_compiled(worlds, world_size):
    worlds(world_size).run(check_compiled)


def check_hooks(mesh):
    """The user's own hooks for saved tensors, around the context, inside it, and both."""
    makers = {"counting": Counting, "copying": lambda: Counting(torch.clone), "save_on_cpu": save_on_cpu}
    for name, way in itertools.product(makers, (inside, outside)):
        batch, around = Batch(), makers[name]()
        with around:
            way(mesh, batch)
        batch.check(mesh, 1, what=(name, "around", way.__name__))
        assert name == "save_on_cpu" or around.packed >= around.unpacked > 10
    for name, twice, way in itertools.product(makers, (False, True), (inside, outside)):
        batch, around, within = Batch(), makers[name](), makers[name]()
        with around if twice else torch.enable_grad(), batch.context(mesh):
            with within:
                loss = batch.loss()
            if way is inside:
                loss.backward()
        if way is outside:
            loss.backward()
        assert name == "save_on_cpu" or within.packed >= within.unpacked > 10
        batch.check(mesh, 1, what=(name, "inside", way.__name__))


@pytest.mark.parametrize("world_size", [1, 2])
def test_hooks_for_saved_tensors(worlds, world_size):
    worlds(world_size).run(check_hooks)


def check_written(y: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="as it was in forward, got it written to in place"):
        y.sum().backward()


def check_writes_are_noticed(mesh):
    """Autograd's own check: what a node has saved was written to since."""
    ids = torch.arange(9)
    for backward_inside in (True, False):
        x = random(3, seed=1).requires_grad_()
        with sharded(mesh, [ids], [0]):
            y = x.exp()
            y.add_(1)
            if backward_inside:
                check_written(y)
        if not backward_inside:
            check_written(y)


def test_writes_to_saved_tensors_are_noticed(worlds):
    worlds(1).run(check_writes_are_noticed)


def leaf_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return random(*shape, seed=seed).requires_grad_()


def check_unused(mesh):
    """Leaves without a gradient on some ranks, or on all; as many as one vote has no room for."""
    rank, size, rows = mesh.get_local_rank(), mesh.size(), ringcp.HeadTail(9, mesh.size()).positions
    leaves = [leaf_of(9, seed=i) for i in range(70)]
    before = [facts(x) for x in leaves]
    with sharded(mesh, leaves, [0] * 70):
        # Leaf i has a gradient on rank r if bit r of i is set; every eighth has one before.
        for x in leaves[::8]:
            x.grad = None
        sum(
            ((i + 1) * x.sum() for i, x in enumerate(leaves) if i >> rank & 1), torch.zeros((), requires_grad=True)
        ).backward()
    for i, (x, was) in enumerate(zip(leaves, before, strict=True)):
        want = torch.zeros(9, dtype=torch.float64)
        for r in range(size):
            want[rows(r)] += (i + 1) * (i >> r & 1)
        if i % 2**size == 0:
            assert facts(x) == was
        else:
            assert torch.equal(x.grad, want), i


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_leaves_that_some_ranks_do_not_use(worlds, world_size):
    worlds(world_size).run(check_unused)


def check_swapped(mesh):
    """After the body, gradients of two leaves must not be taken for one another, nor may a rank wait for long."""
    a, b = leaf_of(6), leaf_of(6)
    with sharded(mesh, [a, b], [0, 0], timeout=3):
        loss = (b if mesh.get_local_rank() else a).sum()
    with pytest.raises(ringcp.RingcpError, match=r"buffers\[[01]\]"):
        loss.backward()
    assert a.grad is None
    assert b.grad is None


def test_ranks_that_differentiate_different_leaves_after_the_body(worlds):
    worlds(2).run(check_swapped)


def check_other_graphs(mesh):
    """The leaf in graphs of before the context and of after it, beside those of the body."""
    for backward_first in (True, False):
        x = leaf_of(9)
        before = (3 * x * torch.arange(9)).sum()
        with sharded(mesh, [x], [0]):
            with pytest.raises(ringcp.UnsupportedError, match=r"^buffers\[0\]: .* of a graph from before the context"):
                (2 * x.sum() + (0 * before)).backward(retain_graph=True)
            x.grad = None
            body = x.exp().sum()
        after = (x * x).sum()
        for loss in (before, body, after) if backward_first else (after, body, before):
            loss.backward()
        data = x.detach()
        assert close(x.grad, 3.0 * torch.arange(9) + data.exp() + 2 * data)
    with sharded(mesh, [x], [0]):
        body = x.exp().sum()
    with (
        sharded(mesh, [x], [0], layout="striped"),
        pytest.raises(ringcp.UnsupportedError, match=r"^buffers\[0\]: expected it whole, or in its own context"),
    ):
        body.backward()


@pytest.mark.parametrize("world_size", [2, 3])
def test_graphs_from_before_and_after(worlds, world_size):
    worlds(world_size).run(check_other_graphs)


def check_saved_before(mesh):
    """Nodes of before the context have saved the whole, and what they would unpack in the body is a shard."""
    for seq_len in (2, 9):  # of 2 tokens, a rank's one would broadcast
        weights, x = random(seq_len, seed=1), leaf_of(seq_len)
        for loss in ((x.detach().requires_grad_() * weights).sum(), x.square().sum()):
            with sharded(mesh, [weights, x], [0, 0]), pytest.raises((RuntimeError, ringcp.RingcpError)):
                loss.backward(retain_graph=True)
            loss.backward()
        assert torch.equal(x.grad, 2 * x)


def test_a_graph_from_before_does_not_see_shards_in_silence(worlds):
    worlds(2).run(check_saved_before)


def check_nested(mesh):
    """Two contexts in one another, with backward of the inner body in the outer one, and of the outer body after it."""
    rank, size = mesh.get_local_rank(), mesh.size()
    x, y = leaf_of(9), leaf_of(11)
    with sharded(mesh, [x], [0]):
        with sharded(mesh, [y], [0], layout="striped"):
            inner, outer = (x.exp().sum() + y.exp().sum()), (x.sin().sum() * y.sin().sum())
        inner.backward()
    outer.backward()
    alone_x, alone_y = leaf_of(9), leaf_of(11)
    loss = alone_x.exp().sum() + alone_y.exp().sum()
    for r in range(size):
        rows_x, rows_y = ringcp.HeadTail(9, size).positions(r), ringcp.Striped(11, size).positions(r)
        loss = loss + alone_x[rows_x].sin().sum() * alone_y[rows_y].sin().sum()
    loss.backward()
    assert close(x.grad, alone_x.grad), rank
    assert close(y.grad, alone_y.grad), rank


@pytest.mark.parametrize("world_size", [2, 3])
def test_nested_contexts(worlds, world_size):
    worlds(world_size).run(check_nested)


def check_modes(mesh):
    """Bodies without a graph, that fail after a backward, and that ask for more than the first derivative."""
    rows = ringcp.HeadTail(9, mesh.size()).positions(mesh.get_local_rank())
    x = leaf_of(9)
    x.grad = random(9, seed=1)
    before = facts(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), sharded(mesh, [x], [0]):
            assert torch.equal(x.exp(), x.detach().exp())
        with sharded(mesh, [x], [0]), mode():
            assert not x.exp().requires_grad
        assert facts(x) == before
    with pytest.raises(KeyError), sharded(mesh, [x], [0]):
        raise KeyError(x.sum().backward())
    assert facts(x) == before
    double = r"^double backward: the gradient of buffers\[0\] .*create_graph=True"
    with sharded(mesh, [x], [0]):
        loss = x.exp().sum()
        with pytest.raises(ringcp.UnsupportedError, match=double):
            loss.backward(create_graph=True)
        (mine,) = torch.autograd.grad(loss, x, retain_graph=True)  # of this rank
        assert close(mine, random(9)[rows].exp())
    with pytest.raises(ringcp.UnsupportedError, match=double):
        loss.backward(create_graph=True, retain_graph=True)
    assert facts(x) == before
    loss.backward()
    assert close(x.grad, random(9, seed=1) + random(9).exp())


@pytest.mark.parametrize("world_size", [1, 2])
def test_modes_and_failures(worlds, world_size):
    worlds(world_size).run(check_modes)


def require_grad_inside(mesh, x):
    with sharded(mesh, [x], [0]):
        x.requires_grad_()
        x.exp().sum().backward()


def check_set_inside(mesh):
    x = random(9)
    with pytest.raises(ringcp.UnsupportedError, match=r"buffers\[0\]: .* requires_grad_\(\)"):
        require_grad_inside(mesh, x)
    assert x.shape == (9,)
    assert x.grad is None


@pytest.mark.report("7.3")
def test_a_buffer_made_a_leaf_in_the_body(worlds):
    worlds(2).run(check_set_inside)


def check_tensor_hooks(mesh):
    """Hooks on the gradient see this rank's rows, and what they return counts; those after it see what ``.grad`` is."""
    n = ringcp.HeadTail(9, mesh.size()).local_len(mesh.get_local_rank())
    for way_inside in (True, False):
        x, seen = leaf_of(9), []
        x.register_hook(lambda grad, seen=seen: seen.append(grad.shape) or 2 * grad)
        x.register_post_accumulate_grad_hook(lambda x, seen=seen: seen.append(x.grad.shape))
        with sharded(mesh, [x], [0]):
            loss = x.exp().sum()
            if way_inside:
                loss.backward()
        if not way_inside:
            loss.backward()
        assert seen == [(n,), (n,) if way_inside else (9,)]
        assert close(x.grad, 2 * random(9).exp())


def test_hooks_on_a_leaf(worlds):
    worlds(2).run(check_tensor_hooks)


def fail(_: object) -> None:
    raise KeyError("of the user")


def check_failing_hook(mesh):
    x = leaf_of(9)
    x.grad = grad = random(9, seed=1)
    before = {**facts(x), "grad": None}
    with sharded(mesh, [x], [0]):
        loss = x.exp().sum()
    handle = x.register_post_accumulate_grad_hook(fail)
    with pytest.raises(KeyError):
        loss.backward(retain_graph=True)
    assert {**facts(x), "grad": None} == before
    assert x.grad is grad
    handle.remove()
    x.grad = None
    loss.backward()
    assert close(x.grad, random(9).exp())


def test_a_failing_hook_leaves_the_leaf_whole(worlds):
    worlds(2).run(check_failing_hook)


def check_zero_grad(mesh, set_to_none):
    """As in a training step written inside the context."""
    x = leaf_of(9)
    optimizer = torch.optim.SGD([x])
    for step in range(2):
        with sharded(mesh, [x], [0]):
            optimizer.zero_grad(set_to_none=set_to_none)
            x.exp().sum().backward()
        assert close(x.grad, random(9).exp()), step


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_in_the_body(worlds, set_to_none):
    worlds(2).run(check_zero_grad, set_to_none)


def check_parameters(mesh):
    """Parameters that are no buffers: nothing of theirs is replaced, as data parallelism hooks into it."""
    linear, batch, seen = torch.nn.Linear(5, 5, dtype=torch.float64), Batch(), []
    before = [facts(p) for p in linear.parameters()]
    nodes = [p.expand_as(p).grad_fn.next_functions[0][0] for p in linear.parameters()]
    for i, node in enumerate(nodes):
        node.register_hook(lambda *_, i=i: seen.append(i))
    with batch.context(mesh):
        loss = batch.loss(lambda x: batch.hidden(linear(x)))
        assert [facts(p) for p in linear.parameters()] == before
    loss.backward()
    assert sorted(seen) == [0, 1]
    assert [p.expand_as(p).grad_fn.next_functions[0][0] for p in linear.parameters()] == nodes


def test_other_parameters_are_untouched(worlds):
    worlds(2).run(check_parameters)


def in_generator(mesh, x):
    with ringcp.context_parallel(mesh, buffers=[x], buffer_seq_dims=[0]):
        yield x.exp().sum() + ringcp.attention(*(x.reshape(1, 1, -1, 1),) * 3, mesh=mesh).sum()
        yield None


def check_generators(mesh):
    """Two contexts that are left in the order in which they were entered: gradients and hooks are as ever."""
    leaves, expected = [leaf_of(9), leaf_of(9)], random(9).requires_grad_()
    (expected.exp().sum() + F.scaled_dot_product_attention(*(expected.reshape(1, 1, -1, 1),) * 3).sum()).backward()
    bodies = [in_generator(mesh, x) for x in leaves]
    losses = [next(body) for body in bodies]
    for body in bodies:
        assert list(body) == [None]
    for loss in losses:
        loss.backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert all(close(x.grad, expected.grad) for x in leaves)


def test_generators_that_end_in_the_wrong_order(worlds):
    worlds(2).run(check_generators)
