"""What holds around a call must not change it: default devices, inference mode, autocast, and any scale."""

import subprocess
import sys

import pytest
import torch
from calls import attend, make_call

import ringcp
from ringcp.testing import assert_close, reference_attention

CONTEXTS = {"meta": lambda: torch.device("meta"), "inference_mode": torch.inference_mode}


def check_training(mesh, seq_len, *, mask, layout, scale=None, within=None, **options):
    """out and gradients of a call against attention over the whole sequence, in fp64."""
    call, whole, sized = make_call(mesh, seq_len, requires_grad=True)
    whole = [x.requires_grad_() for x in whole]
    call |= {"mask": mask, "layout": layout, "scale": scale, **options}
    if within is None:
        out = attend(call)
    else:
        with within():
            out = attend(call)
    expected, _ = reference_attention(*whole, mask=mask, scale=scale)
    assert_close(out, sized.shard(expected, mesh.get_local_rank(), 2), name="out")
    local = [call[name] for name in "qkv"]
    got = torch.autograd.grad(out.square().sum(), local)
    want = torch.autograd.grad(expected.square().sum(), whole)
    for name, ours, theirs in zip("qkv", got, want, strict=True):
        assert_close(ours, sized.shard(theirs, mesh.get_local_rank(), 2), name=f"d{name}")


def train_with_what_was_made_in(mesh, context, seq_len):
    with CONTEXTS[context]():
        mask = ringcp.Window(seq_len // 2) & ringcp.Causal()
        layout = ringcp.HeadTail(seq_len, mesh.size())
        mask.spec, layout.spec  # noqa: B018
    check_training(mesh, seq_len, mask=mask, layout=layout)
    check_training(mesh, seq_len, mask=mask, layout="head_tail")


@pytest.mark.parametrize("context", CONTEXTS)
def test_masks_and_layouts_do_not_remember_where_they_were_made(worlds, context):
    for seq_len in (17, 18):
        worlds(2).run(train_with_what_was_made_in, context, seq_len)


def train_under_meta(mesh):
    """Only the default device is "meta": q, k and v are where they are."""
    for layout in ("auto", ringcp.HeadTail(19, mesh.size())):
        check_training(mesh, 19, mask=ringcp.Causal(), layout=layout, within=CONTEXTS["meta"])
        call, *_ = make_call(mesh, 19)
        with CONTEXTS["meta"](), pytest.raises(ringcp.UnsupportedError, match="mode"):
            attend(call | {"mode": "rings"})


def test_a_default_device_is_not_for_our_own_tensors(worlds):
    worlds(2).run(train_under_meta)


IMPORTED_UNDER_META = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
x = torch.randn(1, 1, 4, 8)
with torch.device("meta"):
    import ringcp

    out = ringcp.attention(x, x, x, mesh=mesh)
assert out.device.type == "cpu"
assert ringcp.HeadTail(4, 1).spec.device.type == "cpu"
assert ringcp.Causal().spec.device.type == "cpu"
assert torch.equal(out, ringcp.attention(x, x, x, mesh=mesh, layout=ringcp.HeadTail(4, 1)))
assert torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(x, x, x), atol=1e-6)
dist.destroy_process_group()
"""


def test_imported_under_a_default_device():
    command = [sys.executable, "-c", IMPORTED_UNDER_META]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def autocast_the_reference(mesh):
    call, *_ = make_call(mesh, 13, dtype=torch.float32)
    wide = [call[name].clone().requires_grad_() for name in "qkv"]
    half = [x.detach().bfloat16().requires_grad_() for x in wide]
    upstream = torch.randn(wide[0].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    call |= {"kernel": "reference", "return_lse": True}
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = attend(call | dict(zip("qkv", wide, strict=True)))
        grads = torch.autograd.grad(out, wide, upstream)
    expected, expected_lse = attend(call | dict(zip("qkv", half, strict=True)))
    assert out.dtype == torch.bfloat16
    assert lse.dtype == expected_lse.dtype == torch.float32
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    for got, want in zip(grads, torch.autograd.grad(expected, half, upstream), strict=True):
        assert torch.equal(got, want.float())


@pytest.mark.parametrize("size", [1, 2])
def test_autocast_casts_the_inputs_and_nothing_inside_a_kernel(worlds, size):
    worlds(size).run(autocast_the_reference)


def train_with_scale(mesh, scale, kernel):
    for mask in (ringcp.Causal(), ringcp.Window(3, 2), None):
        layout = ringcp.HeadTail(13, mesh.size())
        check_training(mesh, 13, mask=mask, layout=layout, scale=scale, kernel=kernel)


@pytest.mark.parametrize(
    ("scale", "kernel"),
    [(0.3, "auto"), (2, "auto"), (0.3, "reference"), (-0.5, "auto"), (0.0, "auto"), (0, "reference")],
)
@pytest.mark.parametrize("size", [1, 2])
def test_any_finite_scale_is_exact(worlds, size, scale, kernel):
    worlds(size).run(train_with_scale, scale, kernel)


def refuse_scale(mesh, scale):
    call, *_ = make_call(mesh, 13)
    with pytest.raises(ringcp.UnsupportedError, match=f"scale {scale:g} <= 0, which turns masked scores"):
        attend(call | {"kernel": "sdpa", "scale": scale})


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_that_turns_masks_around_is_refused_by_fused_kernels(worlds, scale):
    worlds(2).run(refuse_scale, scale)
