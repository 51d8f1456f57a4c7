"""`shard`, `unshard` and `all_gather`: values, gradients over ranks, and errors that every rank raises."""

import itertools

import pytest
import torch
import torch.distributed as dist
from cases import LAYOUTS, assert_none
from torch.distributed.device_mesh import DeviceMesh

import ringcp
from ringcp.layout import layout_named

LENGTHS = (0, 1, 3, 8, 13)
DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8)


def whole_tensor(seq_len: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of 3 dims, no two of its rows alike, with the sequence in `dim`."""
    shape = [2, 3, 4]
    shape[dim] = seq_len
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    return numbers % 3 == 0 if dtype == torch.bool else (numbers % 251).to(dtype)


def check_values(mesh):
    """Round trips of every layout, length, dim and dtype, and of strided inputs."""
    rank, found = mesh.get_local_rank(), []
    for name, seq_len, dim, dtype in itertools.product(LAYOUTS, LENGTHS, (0, 2, -1, -2), DTYPES):
        layout = layout_named(name, seq_len, mesh.size())
        x = whole_tensor(seq_len, dim, dtype)
        given = layout if seq_len % 2 else name
        local = ringcp.shard(x, mesh, dim=dim, layout=given)
        back = ringcp.unshard(local, mesh, dim=dim, layout=given)
        rows = ringcp.all_gather(local, mesh, dim=dim)
        strided = ringcp.unshard(local.mT.contiguous().mT, mesh, dim=dim, layout=given)
        right = (
            torch.equal(local, x.index_select(dim, layout.positions(rank))),
            torch.equal(rows, torch.cat([x.index_select(dim, layout.positions(r)) for r in range(mesh.size())], dim)),
            torch.equal(back, x),
            torch.equal(strided, x),
            {y.dtype for y in (local, back, rows)} == {dtype},
        )
        found += [] if all(right) else [f"rank {rank}: {name}, {seq_len} tokens in dim {dim}, {dtype}: {right}"]
    local = ringcp.shard(torch.arange(13), mesh, dim=0)
    auto = ringcp.HeadTail(13, mesh.size()).positions(rank)
    found += [] if torch.equal(local, auto) else ["the layout of a bare call is not head-tail"]
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.report("1.60")
@pytest.mark.report("1.69")
def test_values(worlds, world_size):
    assert_none(worlds(world_size).run(check_values))


def weights(rank: int, *shape: int) -> torch.Tensor:
    """What rank `rank` multiplies its result with in its own loss."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def check_gradients(mesh):
    """Gradients are those of the sum over ranks of each rank's loss, computed here in one process."""
    rank, ranks, found = mesh.get_local_rank(), range(mesh.size()), []
    for name, seq_len, dim in itertools.product(LAYOUTS, (1, 8, 13), (1, -1)):
        layout = layout_named(name, seq_len, mesh.size())
        x = whole_tensor(seq_len, dim, torch.float64).requires_grad_()
        parts = [layout.shard(x.detach(), r, dim).requires_grad_() for r in ranks]

        def loss_of(y: torch.Tensor, r: int) -> torch.Tensor:
            return (weights(r, *y.shape) * y.square()).sum()

        (got,) = torch.autograd.grad(loss_of(ringcp.shard(x, mesh, dim=dim, layout=layout), rank), x)
        (want,) = torch.autograd.grad(sum(loss_of(layout.shard(x, r, dim), r) for r in ranks), x)
        same = {"shard": (got, want)}
        mine = parts[rank].detach().requires_grad_()
        (got,) = torch.autograd.grad(loss_of(ringcp.unshard(mine, mesh, dim=dim, layout=layout), rank), mine)
        (want,) = torch.autograd.grad(sum(loss_of(layout.unshard(parts, dim), r) for r in ranks), parts[rank])
        same["unshard"] = got, want
        (got,) = torch.autograd.grad(loss_of(ringcp.all_gather(mine, mesh, dim=dim), rank), mine)
        (want,) = torch.autograd.grad(sum(loss_of(torch.cat(parts, dim), r) for r in ranks), parts[rank])
        same["all_gather"] = got, want
        for what, (got, want) in same.items():
            if got.shape != want.shape or not torch.allclose(got, want, rtol=1e-13, atol=1e-13):
                found.append(f"rank {rank}: the gradient of {what}, {layout!r}, dim {dim}")
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.report("1.13")
def test_gradients(worlds, world_size):
    assert_none(worlds(world_size).run(check_gradients))


def check_sum_of_gradients_in_bf16(mesh):
    """256 and three times 1 is 259, which bf16 rounds to 260; added up in bf16, each 1 would be lost."""
    x = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    rows = ringcp.all_gather(x, mesh, dim=0)
    (grad,) = torch.autograd.grad(rows, x, torch.full_like(rows, 1.0 if mesh.get_local_rank() else 256.0))
    return [] if grad.dtype == torch.bfloat16 and grad.item() == 260 else [f"the sum is {grad}"]


def test_gradients_are_summed_in_fp32(worlds):
    assert_none(worlds(4).run(check_sum_of_gradients_in_bf16))


def check_subgroups(mesh, pairs):
    """The pairs at once with different lengths, in turn with different layouts."""
    groups = [dist.new_group(pair) for pair in pairs]
    part = next(i for i, pair in enumerate(pairs) if mesh.get_local_rank() in pair)
    own = DeviceMesh.from_group(groups[part], "cpu")
    found = check_gradients(own) + check_values(own) if part else check_values(own) + check_gradients(own)
    dist.barrier()
    dist.destroy_process_group(groups[part])
    return found


@pytest.mark.parametrize("pairs", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3], [2, 0, 1]]], ids=str)
@pytest.mark.report("5.DS #7672")
def test_subgroups(worlds, pairs):
    assert_none(worlds(4).run(check_subgroups, pairs))


def check_errors(mesh):
    """Whatever one rank or all do wrong, each rank raises, and the next valid call works."""
    rank, world_size = mesh.get_local_rank(), mesh.size()
    odd = rank == 1
    layout = ringcp.Contiguous(8, world_size)
    x = ringcp.shard(torch.arange(8.0), mesh, dim=0, layout=layout)
    longer = torch.cat([x, x[:1]])
    for_5, other = ringcp.Contiguous(8, 5), ringcp.Striped(8, 3) if odd else layout

    def shard(x: torch.Tensor, layout="auto", dim: int = 0) -> torch.Tensor:
        return ringcp.shard(x, mesh, dim=dim, layout=layout)

    def unshard(x: torch.Tensor, layout=layout, dim: int = 0) -> torch.Tensor:
        return ringcp.unshard(x, mesh, dim=dim, layout=layout)

    def gather(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return ringcp.all_gather(x, mesh, dim=dim)

    def leaf(seq_len: int) -> torch.Tensor:
        return torch.ones(seq_len, requires_grad=True)

    local, agreed = ringcp.LayoutError, ringcp.AgreementError
    refused = local if odd else agreed
    calls = [
        (local, r"\[3\] on ranks \[1\], got \[4\]", lambda: unshard(longer if odd else x)),
        (local, r"expected one for the 3 ranks of mesh, got Contiguous\(8, 5\)", lambda: unshard(x, for_5)),
        (local, "expected a Layout or one of .*, got 'zigzag'", lambda: unshard(x, "zigzag")),
        (local, "^dim: expected a dim of x with 1 dims, got 1", lambda: unshard(x, dim=1)),
        (local, "^dim: expected a dim of x with 1 dims, got -2", lambda: gather(x, dim=-2)),
        (refused, "dim: expected a dim", lambda: gather(x, dim=2 if odd else 0)),
        (refused, "got 'zigzag'", lambda: unshard(x, "zigzag" if odd else layout)),
        (agreed, "rank 1 .*layout=Striped.*not layout=Contiguous", lambda: unshard(x, other)),
        (agreed, "rank 1 .*dtype=torch.int64, not dtype=torch.float32", lambda: gather(x.long() if odd else x)),
        (agreed, r"rank 1 .*x=\[2\].*not x=\[1\]", lambda: gather(x[:, None].expand(-1, 2 if odd else 1))),
        (agreed, "rank 1 .*call=all_gather, not call=unshard", lambda: gather(x) if odd else unshard(x)),
        (agreed, "rank 1 .*requires_grad=True, not requires_grad=False", lambda: gather(leaf(3) if odd else x)),
        (local, "x: expected 8 tokens in dim 0 for .*, got 9", lambda: shard(torch.ones(9), layout)),
        (local, "dim: expected a dim of x", lambda: shard(torch.ones(9), dim=3)),
        (refused, "got 'zigzag'", lambda: shard(leaf(8), "zigzag" if odd else "auto")),
        (agreed, r"rank 1 .*\(9,\)", lambda: shard(leaf(9 if odd else 8))),
    ]  # fmt: skip
    found = []
    for i, (kind, text, call) in enumerate(calls):
        try:
            with pytest.raises(kind, match=text):
                call()
        except BaseException as error:
            found.append(f"rank {rank}, call {i} ({text}): {error!r}")
        if not torch.equal(unshard(x), torch.arange(8.0)):
            found.append(f"rank {rank}: a valid call after call {i} is wrong")
    return found


@pytest.mark.report("1.64", raises=True)
def test_errors(worlds):
    assert_none(worlds(3).run(check_errors))


def check_complex_gradients(mesh):
    """The conjugate of a gradient must not get lost on its way as bytes, nor its imaginary part in the sum."""
    rank, ranks, found = mesh.get_local_rank(), range(mesh.size()), []
    numbers = torch.Generator().manual_seed(3)
    x = torch.randn(9, 2, dtype=torch.complex64, generator=numbers)
    factors = torch.randn(mesh.size(), 9, 2, dtype=torch.complex64, generator=numbers)
    layout = ringcp.HeadTail(9, mesh.size())

    def loss_of(y: torch.Tensor, r: int) -> torch.Tensor:
        return (factors[r] * y.square()).real.sum()

    parts = [layout.shard(x, r, 0).requires_grad_() for r in ranks]
    mine = parts[rank].detach().requires_grad_()
    for what, run in {
        "unshard": lambda: ringcp.unshard(mine, mesh, dim=0, layout=layout),
        "all_gather": lambda: layout.unshard(
            ringcp.all_gather(mine, mesh, dim=0).split([layout.local_len(r) for r in ranks]), 0
        ),
    }.items():
        (got,) = torch.autograd.grad(loss_of(run(), rank), mine)
        (want,) = torch.autograd.grad(sum(loss_of(layout.unshard(parts, 0), r) for r in ranks), parts[rank])
        if got.dtype != torch.complex64 or not torch.allclose(got, want, rtol=1e-5, atol=1e-5):
            found.append(f"rank {rank}: the gradient of {what}: {got.dtype}, {got} instead of {want}")
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_complex_gradients(worlds, world_size):
    assert_none(worlds(world_size).run(check_complex_gradients))


def create_graph(mesh):
    leaf = torch.ones(8, requires_grad=True)
    for run in (
        lambda: ringcp.shard(leaf, mesh, dim=0),
        lambda: ringcp.unshard(leaf, mesh, dim=0),
        lambda: ringcp.all_gather(leaf, mesh, dim=0),
    ):
        y = run().square().sum()
        with pytest.raises(ringcp.UnsupportedError, match=r"double backward: .*create_graph=True"):
            torch.autograd.grad(y, leaf, create_graph=True)
        torch.autograd.grad(run().square().sum(), leaf)  # and without it, all goes well


def test_create_graph_is_refused(worlds):
    worlds(2).run(create_graph)
