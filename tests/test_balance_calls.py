"""Attention, contexts and compiled code with balanced layouts."""

import warnings

import pytest
import torch
import torch._dynamo.testing

import ringcp
from ringcp import Balanced, Causal, Documents, Prefix, Window
from ringcp.layout import Layout
from ringcp.testing import assert_close, in_process, reference_attention


def differentiated(attend, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """out, lse and the gradients of q, k, v, from fixed upstream gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out, lse = attend(*leaves)
    alive = lse.isfinite()
    grads = torch.autograd.grad((out, lse[alive]), leaves, (tensors[3], tensors[4][alive]))
    return [out, lse, *grads]


def tensors_of(seq_len: int, batch: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seq_len)
    shapes = [(batch, 4, seq_len, 8), (batch, 2, seq_len, 8), (batch, 2, seq_len, 8), (batch, 4, seq_len, 8)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in (*shapes, (batch, 4, seq_len))]


MASKS = [
    Documents([7, 20, 3, 7]) & Causal(),
    Documents([[7, 20, 10], [30, 2]]) & Causal(),
    Prefix(9),
    Window(11, 2),
    (Documents([20, 17]) & Causal()) | Window(2),
]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_attention_in_one_process_is_exact(mask, world_size):
    seq_len, tensors = 37, tensors_of(37)
    layout = Balanced(seq_len, world_size, mask)

    def ours(q, k, v):
        return in_process(q, k, v, world_size=world_size, mask=mask, layout=layout, return_lse=True)

    want = differentiated(lambda q, k, v: reference_attention(q, k, v, mask=mask), tensors)
    for name, got, expected in zip(("out", "lse", "dq", "dk", "dv"), differentiated(ours, tensors), want, strict=True):
        assert_close(got, expected, name=name)


def on_ranks(mesh):
    """Attention, shard and unshard with a balanced layout; the layouts that this rank makes."""
    rank, seq_len, specs = mesh.get_local_rank(), 37, []
    for mask in MASKS:
        layout = ringcp.make_layout(mask, seq_len, mesh)
        layout = layout if layout.owners else Balanced(seq_len, mesh.size(), mask)
        specs.append(layout.spec.tolist())
        whole = tensors_of(seq_len)
        local = [ringcp.shard(x, mesh, dim=2, layout=layout) for x in whole]

        def ours(q, k, v, mask=mask, layout=layout):
            return ringcp.attention(q, k, v, mesh=mesh, mask=mask, layout=layout, return_lse=True)

        want = differentiated(lambda q, k, v, mask=mask: reference_attention(q, k, v, mask=mask), whole)
        got = differentiated(ours, local)
        for name, mine, expected in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
            assert_close(mine, layout.shard(expected, rank, 2), name=f"{name} of {mask}")
        assert torch.equal(ringcp.unshard(local[0], mesh, dim=2, layout=layout), whole[0])
    return specs


@pytest.mark.parametrize("world_size", [2, 3])
def test_attention_on_ranks_is_exact_and_all_make_the_same_layout(worlds, world_size):
    specs = worlds(world_size).run(on_ranks)
    assert specs == [[Balanced(37, world_size, mask).spec.tolist() for mask in MASKS]] * world_size


def disagreeing(mesh):
    """Layouts of one length and number of chunks that differ in owners: the vote tells, before anything is sent."""
    mask = Documents([7, 20, 10]) & Causal()
    right = Balanced(40, mesh.size(), mask)
    other = Layout(right.spec[0].item(), 40, mesh.size(), right.owners[::-1])
    assert right != other
    layout = (right, other)[mesh.get_local_rank()]
    q, k, v = (layout.shard(x, mesh.get_local_rank(), 2) for x in tensors_of(40)[:3])
    messages = []
    for call in (
        lambda: ringcp.attention(q, k, v, mesh=mesh, mask=mask, layout=layout),
        lambda: ringcp.unshard(q, mesh, dim=2, layout=layout),
        lambda: enter(mesh, layout=layout),
    ):
        with pytest.raises(ringcp.AgreementError) as info:
            call()
        messages.append(str(info.value))
    return messages


def enter(mesh, **options):
    with ringcp.context_parallel(mesh, **options):
        pass


def test_ranks_that_deal_otherwise_hear_of_it(worlds):
    for messages in worlds(2).run(disagreeing):
        for message in messages:
            assert "Balanced(40, 2, 16 chunks #" in message


def in_a_context(mesh):
    mask, seq_len = Documents([7, 20, 10]) & Causal(), 37
    x, *_ = tensors_of(seq_len)
    positions = torch.cat([torch.arange(n) for n in (7, 20, 10)])
    want, _ = reference_attention(x, x, x, mask=mask)
    with ringcp.context_parallel(mesh, buffers=[x, positions], buffer_seq_dims=[2, 0], mask=mask) as ctx:
        assert ctx.layout == Balanced(seq_len, mesh.size(), mask)
        out = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        (whole,) = ringcp.context_parallel_unshard(mesh, [out], [2])
        assert x.shape[2] == ctx.layout.local_len(mesh.get_local_rank())
    assert_close(whole, want)
    assert x.shape[2] == len(positions) == seq_len
    with pytest.raises(ringcp.LayoutError, match=r"not head_tail, got None; pass layout=context\.layout"):
        ringcp.context_parallel_unshard(mesh, [out], [2])
    with pytest.raises(ringcp.LayoutError, match=r"not head_tail, got 'auto'; pass layout=context\.layout"):
        ringcp.unshard(out, mesh, dim=2)
    (again,) = ringcp.context_parallel_unshard(mesh, [out], [2], layout=ctx.layout)
    assert torch.equal(again, whole)

    chosen = []
    for mask in (None, Window(5), Causal()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # no attention in the body
            with ringcp.context_parallel(mesh, buffers=[x], buffer_seq_dims=[2], mask=mask) as ctx:
                chosen.append(ctx.layout.name)
    with ringcp.context_parallel(mesh, mask=Window(5)) as ctx:  # nothing says how long it is
        chosen.append(ctx.layout)
    with pytest.raises(ringcp.LayoutError, match="which needs the mask to balance by"):
        enter(mesh, layout="balanced")
    with pytest.raises(ringcp.LayoutError, match="documents of at most 37 tokens in all, got 38"):
        enter(mesh, buffers=[x], buffer_seq_dims=[2], mask=Documents([38]))
    with pytest.raises(ringcp.ArgumentError, match="mask: expected a ringcp mask or None, got 'causal'"):
        ringcp.make_layout("causal", seq_len, mesh)
    return chosen


@pytest.mark.parametrize("world_size", [2, 3])
def test_auto_in_a_context_is_what_suits_its_mask(worlds, world_size):
    assert worlds(world_size).run(in_a_context) == [["head_tail", "contiguous", "head_tail", "head_tail"]] * world_size


def compiled(mesh):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(q, k, v, mask, layout):
        return ringcp.attention(q * 2, k, v, mesh=mesh, mask=mask, layout=layout)

    run, frames = torch.compile(step, fullgraph=True, backend=counter), []
    for lengths in ([7, 25], [20, 12], [5, 5, 22], [32]):
        mask = Documents(lengths) & Causal()
        for chunk in (2, 4):  # of two numbers of chunks, too
            layout = Balanced(32, mesh.size(), mask, chunk=chunk)
            inputs = [layout.shard(x.float(), mesh.get_local_rank(), 2) for x in tensors_of(32)[:3]]
            assert torch.equal(run(*inputs, mask, layout), step(*inputs, mask, layout))
        frames.append(counter.frame_count)
    return frames


def test_balanced_layouts_do_not_recompile(worlds):
    for frames in worlds(2).run(compiled):
        assert frames == [1] * 4
