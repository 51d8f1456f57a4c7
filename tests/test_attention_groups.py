"""Which ranks talk, and how much they say: sub-groups, slices of meshes, meshes of one, and bytes on the wire."""

import contextlib
import itertools
import time

import pytest
import torch
import torch.distributed as dist
from cases import HEADS, LAYOUTS, MASKS, Case, allowed, assert_none, check_cases
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringcp
from ringcp.layout import layout_named

SOME = [
    Case(13),
    Case(24, "full", "striped"),
    Case(33, "window_8", "contiguous", "mqa"),
    Case(2, "causal", heads="wide_v"),
]
OTHERS = [Case(37, "window_3", "striped", "narrow_v"), Case(5, "full"), Case(24, "or", upstream="lse")]


@contextlib.contextmanager
def grid(rows, columns):
    """A 2-D mesh of all ranks; its groups are destroyed after the body."""
    mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("dp", "cp"))
    try:
        yield mesh
    finally:
        dist.barrier()
        for axis in ("dp", "cp"):
            if mesh.get_group(axis) is not dist.group.WORLD:  # which an axis of all ranks is
                dist.destroy_process_group(mesh.get_group(axis))


def check_columns(mesh):
    """Two groups at once with different cases, one of them late: first {0, 1} and {2, 3}, then {0, 2} and {1, 3}."""
    found = []
    with grid(2, 2) as both:
        for axis, other in (("cp", "dp"), ("dp", "cp")):
            part = both.get_local_rank(other)
            time.sleep(0.05 * part)
            found += check_cases(both[axis], (SOME, OTHERS)[part] * (1 + part))
            if part == 0:  # while the other pair still attends
                x = torch.arange(7.0) + both.get_local_rank(axis)
                gathered = ringcp.all_gather(x, both[axis], dim=0)
                found += [] if torch.equal(gathered, torch.cat([torch.arange(7.0) + r for r in (0, 1)])) else ["gather"]
        found += check_cases(mesh, [Case(13)])
    return found


def test_two_groups_do_different_things(worlds):
    assert_none(worlds(4).run(check_columns))


def check_subgroup(mesh, members):
    """Attention of some ranks, while the others have gone on."""
    group = dist.new_group(members)
    found = []
    if mesh.get_local_rank() in members:
        found = check_cases(DeviceMesh.from_group(group, "cpu"), SOME)
        dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("members", [[1, 3], [0, 2, 4], [4, 1, 2], [0, 1, 2, 3, 4]], ids=str)
@pytest.mark.report("1.72")
def test_a_group_while_the_other_ranks_idle(worlds, members):
    assert_none(worlds(5).run(check_subgroup, members))


def check_mesh_of_one(mesh):
    """Rank 0 alone attends, shards and gathers: a message to or from rank 1 would never arrive."""
    with grid(2, 1) as two:
        alone = two["cp"]
        if mesh.get_local_rank():
            return []
        with ringcp.record() as r:
            found = check_cases(alone, [*SOME, *OTHERS])
        x = torch.arange(5.0, requires_grad=True)
        for y in (
            ringcp.shard(x, alone, dim=0),
            ringcp.unshard(x, alone, dim=0),
            ringcp.all_gather(x, alone, dim=0),
        ):
            (grad,) = torch.autograd.grad(y, x, torch.arange(5.0))
            found += [] if torch.equal(y, x) and torch.equal(grad, torch.arange(5.0)) else ["a mesh of one changes x"]
        assert r.steps, "nothing was recorded"
        assert r.bytes_sent == r.bytes_received == 0
        return found


def refuse_to_send(mesh):
    """`check_mesh_of_one` where every way to another rank raises; how many ways were closed."""
    names = ["batch_isend_irecv", "all_gather_into_tensor", "all_to_all_single", "all_reduce", "send", "isend"]
    kept = {name: getattr(dist, name) for name in names}

    def closed(*args, **kwargs):
        raise AssertionError("a mesh of one sent something")

    ones = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("dp", "cp"))["cp"]
    try:
        for name in names:
            setattr(dist, name, closed)
        with pytest.raises(AssertionError, match="sent something"):
            dist.all_reduce(torch.ones(1))
        return check_cases(ones, SOME)
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


@pytest.mark.report("1.73")
def test_a_mesh_of_one_sends_nothing(worlds):
    assert_none(worlds(2).run(check_mesh_of_one))
    assert_none(worlds(2).run(refuse_to_send))


def traffic(mesh, case, dtype):
    """(kind, bytes sent, bytes received) forward and backward of one call."""
    shape = HEADS[case.heads]
    rows = layout_named(case.layout, case.seq_len, mesh.size()).local_len(mesh.get_local_rank())
    q, k, v = (
        torch.ones(shape.batch, heads, rows, dim, dtype=dtype, requires_grad=True)
        for heads, dim in (
            (shape.q_heads, shape.head_dim),
            (shape.kv_heads, shape.head_dim),
            (shape.kv_heads, shape.value_dim),
        )
    )
    with ringcp.record() as r:
        out = ringcp.attention(q, k, v, mesh=mesh, mask=MASKS[case.mask], layout=case.layout, **case.way)
        out.sum().backward()
    assert {step.direction for step in r.steps} == {"forward", "backward"}
    return {
        direction: tuple(
            sum(getattr(step, what) for step in r.steps if step.direction == direction)
            for what in ("bytes_sent", "bytes_received")
        )
        for direction in ("forward", "backward")
    }


SIZES = {torch.float64: (8, 8), torch.float32: (4, 4), torch.bfloat16: (2, 4)}


@pytest.mark.parametrize("heads", ["gqa", "mqa", "wide_v"])
@pytest.mark.parametrize("dtype", SIZES, ids=str)
@pytest.mark.report("1.66")
def test_bytes_of_a_ring(worlds, heads, dtype):
    """FACTS: ``(P-1) * 2 * S/P * Hkv * D * e`` forward, the same and ``P-1`` times dKV (fp32 at least) backward."""
    shape, (e, acc) = HEADS[heads], SIZES[dtype]
    for (world_size, mask), layout in itertools.product(((2, "full"), (4, "full"), (4, "causal")), LAYOUTS):
        block = 40 // world_size * shape.batch * shape.kv_heads * (shape.head_dim + shape.value_dim)
        forward, backward = (world_size - 1) * block * e, (world_size - 1) * block * (e + acc)
        for got in worlds(world_size).run(traffic, Case(40, mask, layout, heads), dtype):
            assert got == {"forward": (forward, forward), "backward": (backward, backward)}


def test_two_ranks_leave_out_what_the_other_does_not_need(worlds):
    """Causal head-tail: the second chunk of rank 0 is the last of the sequence, which rank 1 does not attend to."""
    shape, chunk = HEADS["gqa"], 40 // 4
    row = shape.batch * shape.kv_heads * (shape.head_dim + shape.value_dim) * 8
    first, second = worlds(2).run(traffic, Case(40, "causal", "head_tail", "gqa"), torch.float64)
    assert first["forward"] == (chunk * row, 2 * chunk * row) == second["forward"][::-1]
    assert first["backward"] == second["backward"] == (3 * chunk * row, 3 * chunk * row)


def test_bytes_of_an_uneven_ring(worlds):
    """A rank sends every block but that of the rank after it, and receives every block but its own."""
    by_rank = worlds(3).run(traffic, Case(37, "full", "contiguous", "mha"), torch.float64)
    row, rows = 3 * 10 * 8, [12, 12, 13]
    for rank, got in enumerate(by_rank):
        assert got["forward"] == ((37 - rows[(rank + 1) % 3]) * row, (37 - rows[rank]) * row)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.report("1.36")
def test_bytes_of_a_window_are_the_need(worlds, layout):
    """Each rank gets the rows of others that its queries attend to, counted here pair by pair, and no more."""
    shape, world_size, seq_len = HEADS["gqa"], 4, 50
    row = shape.batch * shape.kv_heads * (shape.head_dim + shape.value_dim)
    # In a striped layout, some rank attends to every key of a wider window: a ring, which passes all to all.
    for mask in ("window_1", "window_3") if layout == "striped" else ("window_1", "window_3", "window_8", "two_sided"):
        placed = [layout_named(layout, seq_len, world_size).positions(rank) for rank in range(world_size)]
        pairs = allowed(mask, seq_len)
        need = [[pairs[q][:, k].any(0).sum().item() * (q is not k) for k in placed] for q in placed]
        sent = [sum(of[rank] for of in need) for rank in range(world_size)]
        received = [sum(of) for of in need]
        if layout != "striped":
            assert sum(received) < seq_len * (world_size - 1) / 2, "the example shows nothing"
        for rank, got in enumerate(worlds(world_size).run(traffic, Case(seq_len, mask, layout), torch.bfloat16)):
            assert got["forward"] == (sent[rank] * row * 2, received[rank] * row * 2), (mask, rank)
            # Keys and values as in forward; their gradients go the other way, in fp32.
            back = (sent[rank] * 2 + received[rank] * 4, received[rank] * 2 + sent[rank] * 4)
            assert got["backward"] == tuple(n * row for n in back), (mask, rank)
