"""Under torch.compile, checkpointing, autocast and what else wraps a model: the same numbers, and no surprises."""

import functools
import operator
import warnings

import pytest
import torch
import torch._dynamo.testing
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import ringcp
from ringcp.arguments import FACTS_WORDS
from ringcp.testing import assert_close, reference_attention

MASKS = [ringcp.Causal(), ringcp.Window(3), ringcp.Causal() & ringcp.Window(2)]
# Their encodings are longer than what all masks are padded to, and of three lengths.
LONG_MASKS = [
    functools.reduce(operator.or_, [ringcp.Window(i) & ringcp.Causal() for i in range(n)]) for n in (9, 13, 17)
]
LAYOUTS = [ringcp.HeadTail, ringcp.Striped, ringcp.Contiguous]


def quiet(fn):
    """torch's own warnings while it compiles are not ours: numpy's of its config, those of its scripted rules, and what
    it says of each tensor that has no grad of its own and passes a graph break, and hides if it is no error.

    Nor are the graphs that inductor keeps on disk, by the ops' names and not by what their fakes say: those of an
    earlier ringcp would come back.
    """

    @functools.wraps(fn)
    def run(*args):
        with (
            warnings.catch_warnings(),
            torch._inductor.config.patch(fx_graph_cache=False),
            torch._functorch.config.patch(enable_autograd_cache=False),
        ):
            warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            torch._dynamo.reset()
            return fn(*args)

    return run


def local_inputs(mesh, layout, dtype=torch.float32):
    whole = [
        torch.randn(2, heads, layout.seq_len, 8, dtype=dtype, generator=torch.Generator().manual_seed(heads + i))
        for i, heads in enumerate((4, 2, 2))
    ]
    return [layout.shard(x, mesh.get_local_rank(), 2).requires_grad_() for x in whole], whole


def run_both(fns, inputs, *args):
    """out, lse and the gradients of each function, from the same upstream gradients."""
    results = []
    for fn in fns:
        outputs = fn(*inputs, *args)
        upstream = [torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(9)) for x in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, inputs, upstream)])
    return results


@quiet
def compile_many(mesh, backend):
    def step(q, k, v, mask, layout):
        return ringcp.attention(q * 2, k, v, mesh=mesh, mask=mask, layout=layout, return_lse=True)

    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    frames = []
    for mask in MASKS:
        for make in LAYOUTS:
            layout = make(33, mesh.size())
            inputs, _ = local_inputs(mesh, layout)
            eager, other = run_both((step, compiled), inputs, mask, layout)
            for a, b in zip(eager, other, strict=True):
                assert torch.equal(a, b)
                assert a.stride() == b.stride()
        frames.append(counter.frame_count)
    for long in LONG_MASKS if backend == "aot_eager" else ():
        assert len(long.spec) > len(mask.spec)
        assert torch.equal(compiled(*inputs, long, layout)[0], step(*inputs, long, layout)[0])
        frames.append(counter.frame_count)
    by_name = compiled(*inputs, mask, "contiguous")  # S is found by the vote, inside compiled code
    assert torch.equal(by_name[0], eager[0])
    return frames


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.report("1.I11")
def test_compiled_equals_eager_and_masks_and_layouts_do_not_recompile(worlds, backend):
    for frames in worlds(2).run(compile_many, backend):
        # Local lengths of 33 tokens differ by layout: the first other one is compiled once more, with symbolic shapes.
        assert frames[0] <= 2
        assert frames[:3] == [frames[0]] * 3
        assert frames[3:] in ([], [frames[0] + 1] * 3)


@quiet
def compile_lengths(mesh, backend):
    def ring(q, k, v):
        layout = ringcp.HeadTail(q.shape[2] * mesh.size(), mesh.size())
        return ringcp.attention(q, k, v, mesh=mesh, mask=ringcp.Causal(), layout=layout)

    def ring_by_name(q, k, v):
        return ringcp.attention(q, k, v, mesh=mesh, mask=ringcp.Causal(), layout="head_tail")

    def plain(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    frames = {}
    for fn in (plain, ring_by_name, ring):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        compiled = torch.compile(fn, fullgraph=True, backend=counter)
        for seq_len in (32, 64, 96):
            inputs, whole = local_inputs(mesh, ringcp.HeadTail(seq_len, mesh.size()))
            out = compiled(*inputs)
            out.sum().backward()
            if fn is not plain:
                expected, _ = reference_attention(*whole, mask=ringcp.Causal())
                expected = ringcp.HeadTail(seq_len, mesh.size()).shard(expected, mesh.get_local_rank(), 2)
                assert_close(out, expected, baseline=fn(*inputs))
                assert torch.equal(out, fn(*inputs))
        frames[fn.__name__] = counter.frame_count
    return frames


@pytest.mark.report("1.71")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_lengths_in_a_row_compile_no_more_often_than_plain_attention(worlds, backend):
    for frames in worlds(2).run(compile_lengths, backend):
        assert 0 < frames["plain"] < 3  # so that the count counts
        assert frames["ring_by_name"] <= frames["plain"]
        assert frames["ring"] <= frames["plain"]


@quiet
def compile_on_a_slice(mesh):
    cp = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("dp", "cp"))["cp"]
    layout = ringcp.HeadTail(13, mesh.size())

    def step(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return ringcp.attention(q, k, v, mesh=cp, mask=ringcp.Causal() & ringcp.Window(4), layout=layout)

    inputs, _ = local_inputs(mesh, layout)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    eager, other = run_both((lambda *x: (step(*x),), lambda *x: (compiled(*x),)), inputs)
    assert eager[0].dtype == torch.bfloat16
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(eager, other, strict=True))


def test_masks_autocast_and_a_mesh_slice_inside_compiled_code(worlds):
    worlds(2).run(compile_on_a_slice)


@quiet
def compiled_checks(mesh):
    """Agreement and refusals happen inside the op, so compiled code has them as well."""
    layout = ringcp.HeadTail(13, mesh.size())
    inputs, _ = local_inputs(mesh, layout)
    masks = [ringcp.Causal(), ringcp.Window(3)]
    compiled = torch.compile(
        lambda q, k, v, mask: ringcp.attention(q, k, v, mesh=mesh, mask=mask, layout=layout),
        fullgraph=True,
        backend="aot_eager",
    )
    compiled(*inputs, masks[0])
    with pytest.raises(ringcp.AgreementError, match=r"mask=Window\(3, 0\), not mask=Causal\(\)"):
        compiled(*inputs, masks[mesh.get_local_rank()])
    with pytest.raises(ringcp.LayoutError, match="expected the local lengths in dim 2"):
        compiled(*(x.detach()[:, :, 1:] for x in inputs), masks[0])
    compiled(*inputs, masks[0])


def test_compiled_calls_vote_and_refuse(worlds):
    worlds(2).run(compiled_checks)


@quiet
def compiled_refusals(mesh):
    """What Python refuses before the op is refused when the compiled code runs, and every rank hears of it."""
    layout = ringcp.HeadTail(13, mesh.size())
    q, k, v = (x.detach() for x in local_inputs(mesh, layout)[0])
    tensor_mask = torch.ones(13, 13, dtype=torch.bool)

    def step(q, k, v, mask):
        return ringcp.attention(q, k, v, mesh=mesh, mask=mask, layout=layout)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    said = []
    for args in ((q, k, v, tensor_mask), (q[0], k, v, ringcp.Causal()), (q[0], k[0], v[0], ringcp.Causal())):
        with pytest.raises(ringcp.RingcpError) as info:
            compiled(*args)
        said.append(str(info.value))
    one_is_odd = tensor_mask if mesh.get_local_rank() else ringcp.Causal()
    with pytest.raises(ringcp.RingcpError) as info:
        compiled(q, k, v, one_is_odd)
    said.append(str(info.value))
    assert torch.equal(compiled(q, k, v, ringcp.Causal()), step(q, k, v, ringcp.Causal()))
    return said


def test_compiled_calls_refuse_when_they_run(worlds):
    for said in worlds(2).run(compiled_refusals):
        assert "mask: expected a ringcp mask or None, got a tensor (13, 13) of torch.bool" in said[0]
        assert "q, k, v: expected 4 dims" in said[1]
        assert "q, k, v: expected 4 dims" in said[2]
        assert "mask: expected a ringcp mask or None" in said[3]


def save_attention(ctx, op, *args, **kwargs):
    ours = op is torch.ops.ringcp.attention.default
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {
    "none": None,
    "not reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {
        "use_reentrant": False,
        "context_fn": functools.partial(create_selective_checkpoint_contexts, save_attention),
    },
}


@quiet
def checkpoint_all_ways(mesh, compiled):
    layout = ringcp.HeadTail(13, mesh.size())
    inputs, _ = local_inputs(mesh, layout)
    w = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def block(q, k, v):
        return ringcp.attention((q @ w).sin(), k @ w, v, mesh=mesh, mask=ringcp.Causal(), layout=layout) * 2

    results = {}
    for name, options in CHECKPOINTS.items():
        run = block if options is None else functools.partial(checkpoint, block, **options)
        if compiled:
            torch._dynamo.reset()
            run = torch.compile(run, backend="aot_eager")
        for x in (*inputs, w):
            x.grad = None
        with ringcp.record() as recorder:
            run(*inputs).square().sum().backward()
        forwards = [s for s in recorder.steps if s.direction == "forward"]
        results[name] = len(forwards), recorder.bytes_sent, [x.grad for x in (*inputs, w)]
    steps, sent, grads = results["none"]
    for name in CHECKPOINTS:
        assert all(torch.equal(a, b) for a, b in zip(grads, results[name][2], strict=True)), name
    return {name: (result[0] / steps, result[1] > sent) for name, result in results.items()}


@pytest.mark.parametrize("compiled", [False, True])
def test_selective_checkpointing_runs_no_transfer_in_recomputation(worlds, compiled):
    for runs in worlds(2).run(checkpoint_all_ways, compiled):
        assert runs["none"] == (1, False)
        assert runs["selective"] == (1, False)
        if not compiled:  # what is compiled may be saved anyway
            assert runs["not reentrant"] == runs["reentrant"] == (2, True)


def autocast_dtypes(mesh):
    wrong = []
    mixes = [
        (torch.float32,) * 3,
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.float32, torch.float16, torch.bfloat16),
    ]
    mixes += [(torch.bfloat16,) * 3, (torch.float16,) * 3, (torch.float64,) * 3]
    layout = ringcp.HeadTail(13, mesh.size())
    for autocast in (torch.bfloat16, torch.float16):
        for mix in mixes:
            inputs = [
                x.detach().to(dtype).requires_grad_()
                for x, dtype in zip(local_inputs(mesh, layout)[0], mix, strict=True)
            ]
            with torch.autocast("cpu", autocast):
                ours = ringcp.attention(*inputs, mesh=mesh, layout=layout)
                theirs = F.scaled_dot_product_attention(*inputs, enable_gqa=True)
            if ours.dtype != theirs.dtype:
                wrong.append((autocast, mix, ours.dtype, theirs.dtype))
            assert ours.dtype == (torch.float64 if mix[0] == torch.float64 else autocast)
            ours.sum().backward()
            assert [x.grad.dtype for x in inputs] == list(mix)
    return wrong


def test_autocast_gives_the_dtypes_of_torchs_attention(worlds):
    assert worlds(2).run(autocast_dtypes) == [[], []]


def without_gradients(mesh):
    layout = ringcp.HeadTail(13, mesh.size())
    inputs, whole = local_inputs(mesh, layout, torch.float64)
    expected, _ = reference_attention(*whole, mask=ringcp.Causal())
    expected = layout.shard(expected, mesh.get_local_rank(), 2)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            out = ringcp.attention(*inputs, mesh=mesh, mask=ringcp.Causal(), layout=layout)
        assert not out.requires_grad
        assert out.is_inference() == (mode is torch.inference_mode)
        assert_close(out, expected)


def test_inference_mode_and_no_grad(worlds):
    worlds(2).run(without_gradients)


@quiet
def check_op(mesh):
    group_name = mesh.get_group().group_name
    attn_mask = torch.ones(2, 1, 1, 13, dtype=torch.bool)
    for length, dims, given in ((13, (8, 8), None), (1, (8, 4), None), (13, (8, 8), attn_mask)):
        q = torch.randn(2, 4, length, dims[0], requires_grad=True)
        k = torch.randn(2, 2, length, dims[0], requires_grad=True)
        v = torch.randn(2, length, 2, dims[1]).transpose(1, 2).requires_grad_()
        args = (q, k, v, ringcp.HeadTail(length, 1).spec, None, ringcp.Causal().spec, None, given, None, group_name)
        args += ("auto", None, None, "auto", None, None, 0.0, None, "call", True, None)
        args += (True, True, "auto", True, "", "")
        # Numbers of a symbolic trace are those of a call that has been counted: the call number in `facts` differs.
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(torch.ops.ringcp.attention.default, args, test_utils=tests)
        out, lse, facts, kept = torch.ops.ringcp.attention(
            *(x.detach() if x is q or x is k or x is v else x for x in args)
        )
        assert (facts.dtype, facts.shape, facts.device.type) == (torch.int64, (FACTS_WORDS,), "cpu")
        assert (kept.dtype, kept.shape) == (torch.uint8, (0,))  # one rank exchanges nothing
        upstream = (torch.randn_like(out), torch.randn_like(lse))
        tensors = (q.detach(), k.detach(), v.detach(), out, lse, kept, *args[3:8], facts, *k.shape[1:])
        torch.library.opcheck(
            torch.ops.ringcp.attention_backward.default,
            (*upstream, *tensors, group_name, None, None, None, 0.0, None),
            test_utils=tests,
        )


def test_opcheck(worlds):
    worlds(1).run(check_op)


def strides(mesh):
    """What the fake promises holds: (B, S, H, D) in memory, whatever the inputs' strides are."""
    layout = ringcp.HeadTail(13, mesh.size())
    inputs, _ = local_inputs(mesh, layout)
    for change in (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x.expand_as(x)):
        out = ringcp.attention(*map(change, inputs), mesh=mesh, layout=layout)
        assert out.transpose(1, 2).is_contiguous()


def test_strides_do_not_depend_on_the_inputs(worlds):
    worlds(2).run(strides)


@quiet
def exchange_both_ways(mesh, backend):
    """Bytes sent by each `save=`, compiled and not, over lengths in a row; the same bits."""
    sent = {}
    for mode, save in (("ulysses", "auto"), ("ulysses", "local"), ("auto", "exchanged"), ("auto", "auto")):

        def step(q, k, v, mode=mode, save=save):
            return ringcp.attention(q * 2, k, v, mesh=mesh, mask=ringcp.Causal(), mode=mode, save=save, return_lse=True)

        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, backend=backend)
        for seq_len in (13, 24, 37):
            inputs, _ = local_inputs(mesh, ringcp.HeadTail(seq_len, mesh.size()))
            with ringcp.record() as by_eager:
                results = run_both([lambda *x, step=step: step(*x)], inputs)
            with ringcp.record() as by_compiled:
                results += run_both([compiled], inputs)
            assert all(map(torch.equal, *results)), (mode, save, seq_len)
        sent[mode, save] = by_eager.bytes_sent, by_compiled.bytes_sent
    return sent


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_exchanges_save_is_the_callers_to_say(worlds, backend):
    """What is exchanged; but compiled code that is not told the mode saves the local rows."""
    for sent in worlds(2).run(exchange_both_ways, backend):
        (few, _), (many, _) = sent["ulysses", "auto"], sent["ulysses", "local"]
        assert few < 0.75 * many
        assert sent == {
            ("ulysses", "auto"): (few, few),
            ("ulysses", "local"): (many, many),
            ("auto", "exchanged"): (few, few),
            ("auto", "auto"): (few, many),
        }


def saved_for_backward(mesh):
    """Shapes and dtypes of what autograd saves, by what `save` says; and a backward from the lse alone."""
    inputs, _ = local_inputs(mesh, ringcp.HeadTail(13, mesh.size()))
    found = {}
    for save in ("exchanged", "local"):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, to=saved: to.append(x) or x, lambda x: x):
            _, lse = ringcp.attention(*inputs, mesh=mesh, mode="ulysses", save=save, return_lse=True)
        found[save] = (
            sorted({tuple(x.shape) for x in saved if x.ndim == 4 or x.dtype == torch.uint8}),
            torch.autograd.grad(lse.sum(), inputs[:2]),
        )
    (kept, grads), (local, others) = found["exchanged"], found["local"]
    assert all(map(torch.equal, grads, others))
    return kept, local, inputs[0].shape[2]


def test_what_autograd_saves_of_an_exchange(worlds):
    """One buffer: for half the heads, q and out of 2 heads and k and v of one, all rows; and no local rows."""
    for kept, local, rows in worlds(2).run(saved_for_backward):
        sizes = [2 * 2 * 13 * 8 * 4] * 2 + [2 * 1 * 13 * 8 * 4] * 2 + [2 * 2 * 13 * 4]
        assert kept == [(sum(-(-size // 64) * 64 for size in sizes),)]
        assert local == [(0,), (2, 2, rows, 8), (2, 4, rows, 8)]


@quiet
def one_rank_compiles(mesh):
    """What falls back to eager on some ranks, or is compiled on some: the same result, and what all can do is sent."""

    def step(q, k, v):
        return ringcp.attention(q, k, v, mesh=mesh, mask=ringcp.Causal(), return_lse=True)

    inputs, _ = local_inputs(mesh, ringcp.HeadTail(13, mesh.size()))
    sent, first = [], None
    for compiled in (set(), {0}, {0, 1}):
        run = torch.compile(step, backend="aot_eager") if mesh.get_local_rank() in compiled else step
        with ringcp.record() as recorder:
            results = run_both([run], inputs)[0]
        first = first or results
        assert all(map(torch.equal, results, first)), compiled
        sent.append(recorder.bytes_sent)
    return sent


def test_ranks_agree_on_what_is_kept(worlds):
    for in_eager, on_one, on_all in worlds(2).run(one_rank_compiles):
        assert in_eager < 0.75 * on_one
        assert on_one == on_all


def gathers(layout):
    """Between shards and the whole sequence, by name: what takes a shard, or for "shard" the whole."""
    return {
        "shard": lambda x, mesh: ringcp.shard(x * 2, mesh, dim=0, layout=layout),
        "unshard": lambda x, mesh: ringcp.unshard(x * 2, mesh, dim=0, layout=layout),
        "all_gather": lambda x, mesh: ringcp.all_gather(x * 2, mesh, dim=0),
        "context_parallel_unshard": lambda x, mesh: ringcp.context_parallel_unshard(mesh, [x * 2], [0], layout=layout)[
            0
        ],
    }


@quiet
def compiled_gathers(mesh):
    layout = ringcp.Striped(5, mesh.size())
    whole = torch.arange(10.0).view(5, 2)
    wrong = []
    for name, gathered in gathers(layout).items():
        x = whole if name == "shard" else layout.shard(whole, mesh.get_local_rank(), 0)
        x = x.clone().requires_grad_()

        def step(x, gathered=gathered):
            return (gathered(x, mesh) ** 2).sum() + x.sum()

        with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
            torch.compile(step, backend="aot_eager", fullgraph=True)(x)
        results = []
        for fn in (step, torch.compile(step, backend="aot_eager")):
            loss = fn(x)
            results.append((loss, *torch.autograd.grad(loss, x)))
        wrong += [name for a, b in zip(*results, strict=True) if not torch.equal(a, b)]
    return wrong


def test_compiled_code_calls_what_gathers_eagerly(worlds):
    """It breaks the graph there; and where that is forbidden, the group is as it was."""
    assert worlds(2).run(compiled_gathers) == [[], []]


@quiet
def compiled_layouts():
    """Which layouts give other rows in compiled code."""
    wrong = []
    whole = torch.arange(44.0).view(11, 4)
    balanced = ringcp.Balanced(11, 3, ringcp.Documents(cu_seqlens=[0, 4, 11]))
    joint = ringcp.Joint(replicated=2, rest=ringcp.Striped(9, 3))
    for layout in (*(kind(11, 3) for kind in LAYOUTS), balanced, joint):
        for rank in range(3):

            def step(x, layout=layout, rank=rank):
                return layout.shard(x, rank, 0) * 2, layout.positions(rank) + 1

            torch._dynamo.reset()
            found = torch.compile(step, backend="aot_eager", fullgraph=True)(whole)
            wrong += [layout for a, b in zip(step(whole), found, strict=True) if not torch.equal(a, b)]
    return wrong


def test_layouts_are_traced_without_a_word():
    assert compiled_layouts() == []


def test_ops_with_a_part_on_the_host_stay_out_of_cuda_graphs():
    names = ("attention", "attention_backward", "split_copies_backward", "of_all_ranks", "of_all_ranks_backward")
    for name in names:
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.ringcp, name).default.tags
