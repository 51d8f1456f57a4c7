"""What attention in a `context_parallel` may be called with and by: right, or refused by name on every rank."""

import itertools
import time
import warnings

import pytest
import torch
import torch.nn.functional as F
from contexts import (
    ARGUMENTS,
    NAMES,
    OTHERS,
    WORK_OUTSIDE,
    Subject,
    compiling,
    no_traces,
    self_attention,
    unpack,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ringcp
from ringcp.testing import assert_close, reference_attention

sdpa = F.scaled_dot_product_attention
SHAPES = ((2, 4, 6), (2, 2, 6), (2, 2, 5))  # batch, heads, head dim; the sequence goes before the last


def whole_tensors(seq_len, shapes=SHAPES, dtype=torch.float64):
    """q, k and v of the whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(seq_len)
    return [torch.randn(*s[:-1], seq_len, s[-1], dtype=dtype, generator=generator).requires_grad_() for s in shapes]


def step(fn, inputs, upstream):
    out = fn(*inputs)
    return dict(zip(NAMES, (out, *torch.autograd.grad(out, inputs, upstream.to(out.dtype))), strict=True))


def check_step(mesh, fn, whole, expected_fn, *, layout, baseline=False, **options):
    """Output and gradients of `fn` on this rank's rows in a context, against `expected_fn` on the whole tensors.

    With `baseline`, all rows are held against the error of `fn` on the whole tensors.
    """

    def mine(x):
        return layout.shard(x.detach(), mesh.get_local_rank(), -2)

    upstream = torch.randn(expected_fn(*whole).shape, generator=torch.Generator().manual_seed(1)).double()
    expected = step(expected_fn, whole, upstream)
    with ringcp.context_parallel(mesh, **{"layout": layout, **options}):
        found = step(fn, [mine(x).requires_grad_() for x in whole], mine(upstream))
    if baseline:
        for name, x in step(fn, whole, upstream).items():
            everywhere = ringcp.unshard(found[name].detach(), mesh, dim=-2, layout=layout)
            assert_close(everywhere, expected[name], baseline=x, name=name)
        return
    for name in NAMES:
        assert_close(found[name], mine(expected[name]), name=name)


def gqa(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


def by_definition(mask, scale=None):
    """Attention of the whole for tensors of any number of dims."""

    def attend(*qkv):
        shaped = [x.unsqueeze(0) if x.ndim == 3 else x.flatten(0, -4) for x in qkv]
        return reference_attention(*shaped, mask=mask, scale=scale)[0].reshape(*qkv[0].shape[:-1], qkv[2].shape[-1])

    return attend


MASKS = [None, ringcp.Causal(), ringcp.Window(3), ringcp.Window(1, 4)]


def causal_and_masks(mesh):
    layout = ringcp.HeadTail(13, mesh.size())
    for mask, is_causal in itertools.product(MASKS, (False, True)):
        expected = ringcp.Full() if mask is None else mask
        expected = expected & ringcp.Causal() if is_causal else expected
        check_step(
            mesh,
            lambda *x, is_causal=is_causal: gqa(*x, is_causal=is_causal),
            whole_tensors(13),
            by_definition(expected),
            layout=layout,
            mask=mask,
        )


@pytest.mark.report("1.5")
@pytest.mark.report("1.26")
@pytest.mark.report("7.10")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_is_causal_is_intersected_with_the_mask(worlds, size):
    worlds(size).run(causal_and_masks)


SHAPED = {
    "3 dims": ((4, 6), (2, 6), (2, 5)),
    "5 dims": ((2, 3, 4, 6), (2, 3, 2, 6), (2, 3, 2, 5)),
    "head dims 5 and 7": ((1, 3, 5), (1, 3, 5), (1, 3, 7)),
    "head dims 7 and 5": ((2, 2, 7), (2, 1, 7), (2, 1, 5)),
    "no batch": ((0, 4, 6), (0, 2, 6), (0, 2, 5)),
}


def shapes_and_scale(mesh):
    layout = ringcp.Striped(11, mesh.size())
    for shapes, scale in itertools.product(SHAPED.values(), (None, 0.3)):
        check_step(
            mesh,
            lambda *x, scale=scale: gqa(*x, scale=scale),
            whole_tensors(11, shapes),
            by_definition(ringcp.Causal(), scale),
            layout=layout,
            mask=ringcp.Causal(),
        )


@pytest.mark.report("7.20")
@pytest.mark.report("7.27")
def test_numbers_of_dims_head_dims_and_scales(worlds):
    worlds(2).run(shapes_and_scale)


def low_precision(mesh):
    """fp32 and bf16, and under autocast fp32 q and k with bf16 v, as a model's projections give them."""
    layout = ringcp.HeadTail(13, mesh.size())
    autocast = torch.autocast("cpu", torch.bfloat16)
    for dtypes, within in (
        ([torch.float32] * 3, torch.autocast("cpu", enabled=False)),
        ([torch.bfloat16] * 3, torch.autocast("cpu", enabled=False)),
        ([torch.float32, torch.float32, torch.bfloat16], autocast),
    ):

        def attend(*x, within=within):
            with within:
                out = gqa(*x, is_causal=True)
            assert out.dtype == x[2].dtype
            return out

        whole = [x.detach().to(t).requires_grad_() for x, t in zip(whole_tensors(13), dtypes, strict=True)]
        check_step(mesh, attend, whole, by_definition(ringcp.Causal()), layout=layout, baseline=True)


@pytest.mark.report("7.2")
def test_dtypes_and_autocast(worlds):
    worlds(2).run(low_precision)


def without_gradients(mesh):
    subject = Subject(mesh, mask=ringcp.Causal())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), subject.context():
            out = subject.model(*subject.inputs)
        assert not out.requires_grad
        assert out.is_inference() == (mode is torch.inference_mode)
        assert_close(out, subject.expected[0])
        with subject.context(), mode():
            assert_close(subject.model(*subject.inputs), subject.expected[0])


@pytest.mark.report("1.I9")
@pytest.mark.report("5.DS #7821")
def test_no_grad_and_inference_mode(worlds):
    worlds(2).run(without_gradients)


def check_gradients(mesh):
    inputs = [x.detach().requires_grad_() for x in whole_tensors(7, ((1, 2, 3), (1, 1, 3), (1, 1, 2)))]
    with ringcp.context_parallel(mesh):
        assert torch.autograd.gradcheck(lambda *x: gqa(*x, is_causal=True), inputs)


@pytest.mark.report("7.28")
def test_gradcheck(worlds):
    worlds(1).run(check_gradients)


def all_layouts(mesh):
    """By name without buffers, the length is found by the vote; there may be fewer tokens than ranks."""
    for seq_len in (1, 2, 14):
        for make in (ringcp.HeadTail, ringcp.Contiguous, ringcp.Striped):
            layout = make(seq_len, mesh.size())
            names = (layout.name, "auto") if make is ringcp.HeadTail else (layout.name,)
            for given in (layout, *names):
                options = {"layout": given, "mask": ringcp.Causal()}
                with ringcp.context_parallel(mesh, **options) as context:
                    assert ringcp.current_context() is context
                    assert context.mask == ringcp.Causal()
                    if given is layout:
                        assert context.layout is layout
                        assert torch.equal(context.positions, layout.positions(mesh.get_local_rank()))
                    else:
                        assert context.layout == layout.name
                        with pytest.raises(ringcp.LayoutError, match="pass buffers="):
                            context.positions  # noqa: B018
                    with ringcp.local_attention():
                        assert ringcp.current_context() is None
                    gqa(*(layout.shard(x, mesh.get_local_rank(), 2) for x in whole_tensors(seq_len)))
                assert ringcp.current_context() is None
                attend = by_definition(ringcp.Causal())
                check_step(mesh, gqa, whole_tensors(seq_len), attend, **{**options, "layout": layout})


@pytest.mark.report("7.9")
@pytest.mark.report("7.14")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_layouts_and_the_current_context(worlds, size):
    worlds(size).run(all_layouts)


def rotated(mesh):
    """Rotary embeddings, in effect, by the positions of the context or by a table that is a buffer."""
    table = torch.randn(13, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    buffer = table.clone()

    def by_positions(q, k, v):
        context = ringcp.current_context()
        rows = table if context is None else table[context.positions]
        return gqa(q * rows, k * rows, v, is_causal=True)

    def by_buffer(q, k, v):
        return gqa(q * buffer, k * buffer, v, is_causal=True)

    for make in (ringcp.HeadTail, ringcp.Contiguous, ringcp.Striped):
        layout = make(13, mesh.size())
        for fn, buffers in ((by_positions, {}), (by_buffer, {"buffers": [buffer], "buffer_seq_dims": [0]})):
            check_step(mesh, fn, whole_tensors(13), fn, layout=layout, **buffers)
    ids = torch.zeros(2, 12)
    for order in ([table, ids], [ids, table]):
        dims = [-2 if x is table else 1 for x in order]
        with (
            pytest.raises(ringcp.LayoutError) as info,
            ringcp.context_parallel(mesh, buffers=order, buffer_seq_dims=dims, layout=ringcp.HeadTail(12, mesh.size())),
        ):
            pass
        assert "cut a longer table to the length of the sequence" in str(info.value)


@pytest.mark.report("1.67")
@pytest.mark.report("1.68")
@pytest.mark.report("5.MLM #1473")
def test_positions_and_rope_tables(worlds):
    worlds(2).run(rotated)


def local_inputs(mesh, layout):
    return [
        layout.shard(x.detach(), mesh.get_local_rank(), -2) for x in whole_tensors(layout.seq_len, ((2, 4, 6),) * 3)
    ]


def refused_arguments(mesh):
    layout = ringcp.HeadTail(13, mesh.size())
    inputs = local_inputs(mesh, layout)
    for fn, error, words in ARGUMENTS.values():
        with ringcp.context_parallel(mesh, layout=layout):
            with pytest.raises(error) as info:
                fn(*inputs)
            sdpa(*inputs)  # no rank is out of step
        for word in words:
            assert word in str(info.value)


@pytest.mark.report("1.22", raises=True)
@pytest.mark.report("1.23", raises=True)
@pytest.mark.report("1.70", raises=True)
@pytest.mark.report("7.11", raises=True)
@pytest.mark.report("7.22", raises=True)
@pytest.mark.report("7.23", raises=True)
def test_arguments_that_are_refused(worlds):
    worlds(2).run(refused_arguments)


@compiling
def other_ways(mesh, names):
    """Refused inside, eager and compiled before and inside; as ever outside, and in a local region."""
    layout = ringcp.HeadTail(13, mesh.size())
    inputs, not_refused = local_inputs(mesh, layout), []
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    for name in names:
        fn, word = OTHERS[name]
        expected = fn(*inputs) if name in WORK_OUTSIDE else None
        torch._dynamo.reset()
        before, inside = (torch.compile(fn, backend="eager", dynamic=False) for _ in range(2))
        if name in WORK_OUTSIDE:
            assert torch.equal(before(*inputs), expected)
        for how, call in {"eager": fn, "before": before, "inside": inside}.items():
            with ringcp.context_parallel(mesh, layout=layout):
                try:
                    call(*inputs)
                    not_refused.append((name, how))
                except (ringcp.UnsupportedError, torch._dynamo.exc.Unsupported) as error:
                    assert word in str(error)  # noqa: PT017
                sdpa(*inputs)
                if name in WORK_OUTSIDE:
                    with ringcp.local_attention():
                        assert torch.equal(call(*inputs), expected)
        if name in WORK_OUTSIDE:
            assert torch.equal(fn(*inputs), expected)
    return not_refused


@pytest.mark.parametrize("names", [[name] for name in OTHERS], ids=OTHERS)
def test_other_ways_into_attention_are_refused(worlds, names):
    assert worlds(2).run(other_ways, names) == [[], []]


def scripted(mesh):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)

        @torch.jit.script
        def attend(q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    for inputs in (((2, 3, 6),) * 3, ((1, 2, 4),) * 3):
        layout = ringcp.Striped(9, mesh.size())
        check_step(mesh, attend, whole_tensors(9, inputs), by_definition(ringcp.Causal()), layout=layout)


def test_scripted_functions(worlds):
    worlds(2).run(scripted)


def encoder_layers(mesh):
    """`nn.TransformerEncoderLayer` in all its modes; evaluation outside of a context takes torch's fast path."""
    layout = ringcp.Contiguous(13, mesh.size())
    for dropout, norm_first in itertools.product((0.0, 0.1), (False, True)):
        torch.manual_seed(3)
        model = nn.TransformerEncoderLayer(12, 3, 17, dropout, batch_first=True, norm_first=norm_first).double()
        x = torch.randn(2, 13, 12, dtype=torch.float64)
        mine = layout.shard(x, mesh.get_local_rank(), 1)
        expected = model.eval()(x)
        assert not torch.allclose(model(mine), layout.shard(expected, mesh.get_local_rank(), 1))
        for training, grad in itertools.product((False, True), (False, True)):
            model.train(training)
            with ringcp.context_parallel(mesh, layout=layout), torch.set_grad_enabled(grad):
                if training and dropout:
                    with pytest.raises(ringcp.UnsupportedError, match=r"can do .*, dropout.* but every one refuses"):
                        model(mine)
                    continue
                out = model(mine)
            assert_close(out, layout.shard(expected, mesh.get_local_rank(), 1))


def test_encoder_layers(worlds):
    worlds(2).run(encoder_layers)


@compiling
def unseen(mesh):
    """The warning on exit."""
    layout, buffer = ringcp.HeadTail(13, mesh.size()), torch.arange(13)
    inputs = local_inputs(mesh, layout)
    buffers = {"buffers": [buffer], "buffer_seq_dims": [0]}
    for body in (lambda: None, lambda: torch.softmax(inputs[0] @ inputs[1].mT, -1) @ inputs[2]):
        with (
            pytest.warns(UserWarning, match="expected attention in the body, got none") as caught,
            ringcp.context_parallel(mesh, **buffers),
        ):
            body()
        assert [warning.filename for warning in caught] == [__file__]  # where the context is
    # Warnings are errors here.
    with ringcp.context_parallel(mesh):
        pass
    with pytest.raises(KeyError), ringcp.context_parallel(mesh, **buffers):
        raise KeyError
    for fn in (sdpa, torch.compile(sdpa, backend="eager"), unpack(lambda x: self_attention(x, need_weights=False))):
        for _ in range(2):  # the second time from the cache
            with ringcp.context_parallel(mesh, **buffers):
                fn(*inputs)


@pytest.mark.report("1.78")
def test_the_model_was_not_context_parallel(worlds):
    worlds(2).run(unseen)


@compiling
def one_refuses(mesh):
    layout = ringcp.HeadTail(13, mesh.size())
    inputs = local_inputs(mesh, layout)
    for given in (layout, "auto"):
        with ringcp.context_parallel(mesh, layout=given):
            for fn in (sdpa, torch.compile(sdpa, backend="eager")):
                odd = {"attn_mask": torch.ones(1, dtype=torch.bool)} if mesh.get_local_rank() == 1 else {}
                start = time.monotonic()
                with pytest.raises(ringcp.RingcpError, match="attn_mask: expected 2 to 4 dims") as info:
                    fn(*inputs, **odd)
                assert time.monotonic() - start < (1 if fn is sdpa else 20)
                if fn is sdpa:
                    expected = ringcp.ArgumentError if odd else ringcp.AgreementError
                    assert isinstance(info.value, expected)
                fn(*inputs)
    check_step(mesh, gqa, whole_tensors(13), by_definition(None), layout=layout)


def test_one_rank_refuses(worlds):
    worlds(3).run(one_refuses)


def sent(mesh):
    """Bytes of a call with two key heads, and of one with them repeated."""
    layout, found = ringcp.HeadTail(13, mesh.size()), []
    q, k, v = (layout.shard(x.detach(), mesh.get_local_rank(), -2) for x in whole_tensors(13))
    for repeats in (1, 2):
        with ringcp.context_parallel(mesh, layout=layout, mode="ring"), ringcp.record() as recorder:
            gqa(q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1))
        found.append(recorder.bytes_sent)
    return found


@pytest.mark.report("7.26")
def test_key_heads_travel_unrepeated(worlds):
    for once, twice in worlds(2).run(sent):
        assert once > 0
        assert twice == 2 * once


def meshes(mesh):
    square = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("cp", "dp"))
    with no_traces():
        for wrong in (square, "cp", mesh.get_group()):
            with pytest.raises(ringcp.LayoutError, match=r"^mesh: "), ringcp.context_parallel(wrong):
                pass
    layout = ringcp.HeadTail(9, mesh.size())
    check_step(square["cp"], gqa, whole_tensors(9), by_definition(None), layout=layout)


@pytest.mark.report("1.75")
@pytest.mark.report("7.21")
def test_meshes(worlds):
    worlds(2).run(meshes)
