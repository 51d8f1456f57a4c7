"""A call of `ringcp.attention` to vary, made alike on every rank of a pool, and the check that a valid one is exact."""

import ctypes
import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringcp
from ringcp.groups import GroupState
from ringcp.testing import assert_close, reference_attention


def make_call(mesh, seq_len, *, dtype=torch.float64, requires_grad=False):
    """The arguments of a valid call of a ring on this rank, and the whole tensors."""
    generator = torch.Generator().manual_seed(seq_len)
    layout = ringcp.HeadTail(seq_len, mesh.size())
    whole = [torch.randn(2, heads, seq_len, 8, dtype=dtype, generator=generator) for heads in (4, 2, 2)]
    local = [layout.shard(x, mesh.get_local_rank(), 2).requires_grad_(requires_grad) for x in whole]
    return (
        {**dict(zip("qkv", local, strict=True)), "mesh": mesh, "mask": ringcp.Causal(), "mode": "ring"},
        whole,
        layout,
    )


def attend(call):
    options = {name: value for name, value in call.items() if name not in "qkv"}
    return ringcp.attention(call["q"], call["k"], call["v"], **options)


def each(change, names="qkv"):
    """Of a call, these arguments changed."""
    return lambda call: {name: change(call[name]) for name in names}


def check_exact(mesh, seq_len, *, layout="auto", **options):
    """A valid call, held against the reference."""
    call, whole, sized = make_call(mesh, seq_len)
    expected, _ = reference_attention(*whole, mask=ringcp.Causal())
    out = attend({**call, **options, "layout": sized if layout == "instance" else layout})
    assert_close(out, sized.shard(expected, mesh.get_local_rank(), 2), name=f"out of S = {seq_len}")


def new_mesh(**options):
    """A mesh with a group of its own, which a test may break."""
    group = dist.new_group(**options)
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))


def readable(mesh):
    """From now on, this rank's memory can be read by the others, where a system would ask their parent (yama)."""
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER, any


def messages_by_gloo(mesh):
    """From now on, this rank copies none from another's memory. For all ranks of a pool."""
    GroupState.reads = lambda state, device: False


@functools.cache
def grid():
    """A 2-D mesh of the four ranks of a pool; made once in a process."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "sp"))


def ways(mesh):
    """The options of `ringcp.attention` that say how queries meet keys on the ranks of `mesh`: all that there are."""
    found = {mode: {"mesh": mesh, "mode": mode} for mode in ("ring", "gather", "ulysses", "auto")}
    found["gather by heads"] = {**found["gather"], "gather_memory": 1}
    if mesh.size() == 4:
        found["usp"] = {"mesh": mesh, "mode": "usp", "ulysses_degree": 2}
        found["usp on a grid"] = {"mesh": grid(), "mode": "usp"}
        found["gather on a grid"] = {"mesh": grid(), "mode": "gather"}
    return found
