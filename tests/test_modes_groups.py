"""Every mode on groups of many kinds: models that share a mesh, groups side by side, and slices of larger meshes."""

import contextlib
import itertools
import time

import pytest
import torch
import torch.distributed as dist
from cases import Case, assert_none, check_cases, differences, expected, layout_of, mask_of, rank_in, whole
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringcp

# On any number of ranks.
ONE_AXIS = [
    Case(13, "causal", heads="gqa", mode="gather"),
    Case(24, "full", "striped", "12_3", mode="ulysses"),
    Case(33, "window_8", "contiguous", "7_1", mode="ring"),
    Case(2, "causal", heads="wide_v", mode="ulysses"),
    Case(37, "documents", "balanced", "gqa", mode="gather", gather_memory=1),
    Case(5, "full", heads="3_3", mode="auto"),
]
OTHERS = [
    Case(37, "window_3", "striped", "narrow_v", mode="ulysses"),
    Case(24, "or", heads="mha", upstream="lse", mode="gather"),
    Case(5, "prefix", heads="28_4", mode="ulysses"),
]
# With a second axis, whatever its size.
TWO_AXES = [
    Case(13, "causal", heads="12_3", mode="usp"),
    Case(24, "full", "striped", "7_1", mode="auto"),
    Case(33, "documents", "balanced", "gqa", mode="gather"),
    Case(3, "causal", heads="3_3", mode="usp"),
    Case(37, "window_8", "contiguous", "28_4", mode="usp"),
]


def check_two_models(mesh, cases):
    """All forwards, then all backwards in the order of the calls and not in reverse; twice over."""
    rank, found = rank_in(mesh), []
    for _ in range(2):
        calls = []
        for case in cases:
            layout, tensors = layout_of(case, mesh.size()), whole(case, mesh.size())
            q, k, v, dout, _ = (layout.shard(x, rank, 2) for x in tensors)
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = ringcp.attention(*leaves, mesh=mesh, mask=mask_of(case), layout=layout, **case.way)
            right = expected(case._replace(upstream="out"), tensors)
            calls.append((out, leaves, dout, {n: layout.shard(right[n], rank, 2) for n in ("out", "dq", "dk", "dv")}))
        for case, (out, leaves, dout, right) in zip(cases, calls, strict=True):
            grads = zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, dout), strict=True)
            found += differences(f"rank {rank}, {case}", {"out": out.detach(), **dict(grads)}, right)
    return found


@pytest.mark.report("5.DS #8291")
@pytest.mark.report("5.DS #7834")
def test_models_of_different_heads_and_modes_on_one_mesh(worlds):
    cases = [
        Case(33, heads="28_4", mode="ulysses"),
        Case(37, "full", "striped", "7_1", mode="usp", degree=2),
        Case(24, "window_3", "contiguous", "narrow_v", mode="ring"),
        Case(33, heads="28_4", mode="gather", gather_memory=1),
        Case(37, "full", "striped", "7_1", mode="ulysses"),
        Case(13, "documents", "balanced", "12_3", mode="gather", degree=2),
    ]
    assert_none(worlds(4).run(check_two_models, cases))


@contextlib.contextmanager
def grid(*sizes, names=("dp", "cp", "sp")):
    """A mesh of all ranks; its groups are destroyed after the body."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    try:
        yield mesh
    finally:
        dist.barrier()
        for axis in names:
            if mesh.get_group(axis) is not dist.group.WORLD:  # which an axis of all ranks is
                dist.destroy_process_group(mesh.get_group(axis))


def check_halves(mesh):
    """Two halves of the world at once, in different modes and one of them late: {0, 1}, {2, 3}; then {0, 2}, {1, 3}."""
    found = []
    with grid(2, 2, names=("dp", "cp")) as both:
        for axis, other in (("cp", "dp"), ("dp", "cp")):
            half = both.get_local_rank(other)
            time.sleep(0.05 * half)
            found += check_cases(both[axis], (ONE_AXIS, OTHERS)[half])
            found += check_two_models(both[axis], (OTHERS[:1], ONE_AXIS[:2])[half])
    return found + check_cases(mesh, ONE_AXIS[:2])


def test_halves_of_the_world_in_different_modes(worlds):
    assert_none(worlds(4).run(check_halves))


def check_members(mesh, members):
    """Some ranks attend, in their own order, while the others have gone on: nothing asks these for anything."""
    group = dist.new_group(members, use_local_synchronization=True) if mesh.get_rank() in members else None
    if group is None:
        return []
    some = DeviceMesh.from_group(group, "cpu")
    found = check_cases(some, ONE_AXIS)
    dist.destroy_process_group(group)
    return found


@pytest.mark.parametrize("members", [[1, 3], [0, 2, 3], [2]], ids=str)
def test_a_group_is_not_the_world(worlds, members):
    assert_none(worlds(4).run(check_members, members))


def check_slice(mesh, sizes):
    """The last two axes of three: each slice alone, the second one late and with other cases."""
    found = []
    with grid(*sizes) as cube:
        part = cube.get_local_rank("dp")
        time.sleep(0.05 * part)
        cases = TWO_AXES[part:] + TWO_AXES[:part]
        found += check_cases(cube["cp", "sp"], cases)
        # Its axes are meshes too, between whose calls those of both together come.
        for axis, case in itertools.product(("cp", "sp"), ONE_AXIS[:2]):
            found += check_cases(cube[axis], [case])
            found += check_cases(cube["cp", "sp"], cases[:1])
    return found + check_cases(mesh, ONE_AXIS[:1])


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 4, 1)], ids=str)
def test_two_axes_of_three(worlds, sizes):
    assert_none(worlds(4).run(check_slice, sizes))


def order_of(mesh, sizes):
    """Whose rows are next to whose: this rank's number among those of the two axes, and bytes sent in the exchange."""
    with grid(*sizes) as cube:
        both, case = cube["cp", "sp"], Case(24, "full", heads="gqa", mode="usp")
        with ringcp.record() as r:
            found = check_cases(both, [case])
        sent = sum(step.bytes_sent for step in r.steps if "exchange" in step.direction)
        return found, rank_in(both), sent


def test_the_exchange_is_the_last_axis(worlds):
    """Ranks are counted along it first; where it has one rank, nothing is exchanged."""
    for sizes, numbers in (((2, 2, 1), [0, 1, 0, 1]), ((1, 2, 2), [0, 1, 2, 3]), ((2, 1, 2), [0, 1, 0, 1])):
        by_rank = worlds(4).run(order_of, sizes)
        assert_none([found for found, *_ in by_rank])
        assert [number for _, number, _ in by_rank] == numbers
        assert all((sent > 0) == (sizes[2] > 1) for *_, sent in by_rank), sizes


def grid_beside_a_group_of_one(mesh):
    """torch names a group by how many the rank is in, and rank 0 is in one more."""
    one = dist.new_group([0])
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "sp"))
    found = check_cases(both, TWO_AXES[:2])
    if dist.get_rank() == 0:
        dist.destroy_process_group(one)
    return found


def test_ranks_of_a_grid_may_be_in_different_numbers_of_groups(worlds):
    assert_none(worlds(4).run(grid_beside_a_group_of_one))


def grid_in_another_order(mesh):
    both = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("cp", "sp"))
    x = torch.zeros(1, 2, 2, 4)
    with pytest.raises(
        ringcp.LayoutError, match=r"^mesh: expected ranks in ascending order, row by row, .*\[\[0, 2\], \["
    ):
        ringcp.attention(x, x, x, mesh=both)


def test_a_grid_whose_ranks_do_not_ascend_is_refused(worlds):
    """A group of torch has its ranks in ascending order: others than the mesh says would exchange heads."""
    worlds(4).run(grid_in_another_order)
