"""`ringcp.ContextParallel`: modules that are attention become context parallel, one by one, or are refused."""

import copy

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
import torch.nn.functional as F
from contexts import compiling
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import ringcp
from ringcp.testing import assert_close, reference_attention

SEQ_LEN = 37
WIDTH, HEADS, KV_HEADS, HEAD_DIM = 20, 4, 2, 6


class Attend(nn.Module):
    def forward(self, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=True):
        options = {"scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, **options)


class HiddenCausal(nn.Module):
    """As its authors wrote it by hand: causal, and repeating the key and value heads."""

    def forward(self, xq, xk, xv):
        xk, xv = (x.repeat_interleave(xq.shape[1] // x.shape[1], 1) for x in (xk, xv))
        scores = xq @ xk.mT / xq.shape[-1] ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -torch.inf).softmax(-1) @ xv


class ByDefinition(nn.Module):
    """Attention of one process, in fp64."""

    def __init__(self, mask, scale=None):
        super().__init__()
        self.mask, self.scale = mask, scale

    def forward(self, q, k, v, **_):
        return reference_attention(q, k, v, mask=self.mask, scale=self.scale)[0]


class Block(nn.Module):
    """A transformer block: (B, S, WIDTH) to the same."""

    def __init__(self, attend=Attend, **options):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wq = nn.Linear(WIDTH, HEADS * HEAD_DIM)
        self.wk = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM)
        self.wv = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM)
        self.attend = attend()
        self.wo = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.options = options

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (w(h).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        x = x + self.wo(self.attend(q, k, v, **self.options).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Step:
    """A model, its input on this rank, an upstream gradient, and what one process makes of the whole with `masks`."""

    def __init__(self, mesh, model, masks, layout=None, scale=None):
        self.mesh, self.rank = mesh, mesh.get_local_rank()
        self.layout = ringcp.HeadTail(SEQ_LEN, mesh.size()) if layout is None else layout
        torch.manual_seed(1)
        self.model = model().double()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
        reference = copy.deepcopy(self.model)
        blocks = [module for module in reference.modules() if isinstance(module, Block)]
        for block, mask in zip(blocks, masks, strict=True):
            block.attend = ByDefinition(mask, scale)
        whole = torch.randn(2, SEQ_LEN, WIDTH, dtype=torch.float64, requires_grad=True)
        upstream = torch.randn(2, SEQ_LEN, WIDTH, dtype=torch.float64)
        out = reference(whole)
        out.backward(upstream)
        self.expected = {"out": self.mine(out), "dx": self.mine(whole.grad)}
        self.expected_params = {name: p.grad for name, p in reference.named_parameters()}
        self.x = self.mine(whole).requires_grad_()
        self.upstream = self.mine(upstream)

    def mine(self, x):
        return self.layout.shard(x.detach(), self.rank, 1)

    def parallelize(self, plan):
        parallelize_module(self.model, self.mesh, plan)
        return self

    def check(self, fn=None, *, parameters=True):
        """The output, the gradient of this rank's rows, and those of the parameters, summed over the ranks."""
        self.model.zero_grad()
        self.x.grad = None
        out = (self.model if fn is None else fn)(self.x)
        out.backward(self.upstream)
        for name, x in (("out", out), ("dx", self.x.grad)):
            assert_close(x, self.expected[name], name=name)
        for name, parameter in self.model.named_parameters() if parameters else ():
            grad = parameter.grad
            grad = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
            dist.all_reduce(grad, group=self.mesh.get_group())
            assert_close(grad, self.expected_params[name], name=f"gradient of {name}")


# ---- right -----------------------------------------------------------------------------------------------------------

DOCUMENTS = ringcp.Documents([9, 0, 17, 6])
# The module, the keywords of its calls, those of the style, and the mask that must come of them.
EXACT = {
    "full": (Attend, {}, {}, None),
    "is_causal": (Attend, {"is_causal": True}, {}, ringcp.Causal()),
    "mask": (Attend, {}, {"mask": ringcp.Window(4, 2)}, ringcp.Window(4, 2)),
    "mask and is_causal": (Attend, {"is_causal": True}, {"mask": ringcp.Window(4, 2)}, ringcp.Window(4)),
    "documents": (
        Attend,
        {"is_causal": True},
        {"mask": DOCUMENTS, "layout": ringcp.Balanced},
        DOCUMENTS & ringcp.Causal(),
    ),
    "hidden causal": (HiddenCausal, {}, {}, ringcp.Causal()),
    "hidden causal and mask": (HiddenCausal, {}, {"mask": DOCUMENTS}, DOCUMENTS & ringcp.Causal()),
    "by name": (Attend, {"is_causal": True}, {"layout": "striped", "kernel": "reference"}, ringcp.Causal()),
    "no probe": (Attend, {"is_causal": True}, {"probe": False, "mode": "ring"}, ringcp.Causal()),
}


def check_exact(mesh, which):
    attend, options, style, mask = EXACT[which]
    layout, style = style.get("layout"), dict(style)
    if layout == "striped":
        layout = ringcp.Striped(SEQ_LEN, mesh.size())
    elif layout is not None:
        style["layout"] = layout = layout(SEQ_LEN, mesh.size(), mask)
    step = Step(mesh, lambda: Block(attend, **options), [mask], layout)
    names, keys = [name for name, _ in step.model.named_modules()], list(step.model.state_dict())
    step.parallelize({"attend": ringcp.ContextParallel(**style)}).check()
    step.check()
    assert ([name for name, _ in step.model.named_modules()], list(step.model.state_dict())) == (names, keys)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("which", EXACT)
def test_a_block_is_exact(worlds, which, size):
    worlds(size).run(check_exact, which)


def check_scale(mesh):
    Step(mesh, lambda: Block(scale=0.7), [None], scale=0.7).parallelize({"attend": ringcp.ContextParallel()}).check()


def test_the_scale_of_a_call_counts(worlds):
    worlds(2).run(check_scale)


def two_blocks():
    return nn.Sequential(Block(), Block(is_causal=True))


MASKS = [ringcp.Window(5, 3), ringcp.Causal() & DOCUMENTS]


def check_two_modules(mesh):
    plan = {
        "0.attend": ringcp.ContextParallel(mask=MASKS[0], kernel="reference"),
        "1.attend": ringcp.ContextParallel(mask=DOCUMENTS, layout=ringcp.HeadTail(SEQ_LEN, mesh.size())),
    }
    step = Step(mesh, two_blocks, MASKS).parallelize(plan)
    step.check()
    q = torch.randn(1, 4, step.x.shape[1], 8)
    plain, by_hand = (ringcp.attention(q, q, q, mesh=mesh, mask=MASKS[0], kernel=k) for k in ("auto", "reference"))
    assert torch.equal(step.model[0].attend(q, q, q), by_hand)  # with its kernel, to the bit
    assert not torch.equal(plain, by_hand)


@pytest.mark.parametrize("size", [2, 3])
def test_two_modules_of_a_model_have_masks_of_their_own(worlds, size):
    worlds(size).run(check_two_modules)


def check_pattern(mesh):
    """One style for all modules whose names fit."""
    step = Step(mesh, lambda: nn.Sequential(Block(is_causal=True), Block(is_causal=True)), [ringcp.Causal()] * 2)
    step.parallelize({"*.attend": ringcp.ContextParallel()}).check()


def test_a_style_can_be_applied_to_many_modules(worlds):
    worlds(2).run(check_pattern)


def check_ways(mesh):
    """Checkpoints, a copy, and a call without a batch dim."""
    step = Step(mesh, lambda: Block(HiddenCausal), [ringcp.Causal()]).parallelize({"attend": ringcp.ContextParallel()})
    for reentrant in (False, True):
        step.check(lambda x, reentrant=reentrant: checkpoint(step.model, x, use_reentrant=reentrant))
    step.model = copy.deepcopy(step.model)
    step.check()
    alone = step.model.attend
    q, k, v = (torch.randn(n, 5, 8, dtype=torch.float64) for n in (4, 2, 2))
    assert torch.equal(alone(q, k, v), alone(q[None], k[None], v[None])[0])


def test_checkpoints_and_copies(worlds):
    worlds(2).run(check_ways)


def check_autocast(mesh):
    """The numbers of `ringcp.attention` under autocast, bit for bit."""
    attend = parallelize_module(Attend(), mesh, ringcp.ContextParallel(mask=ringcp.Causal()))
    layout = ringcp.HeadTail(SEQ_LEN, mesh.size())
    q, k, v = (torch.randn(1, n, layout.local_len(mesh.get_local_rank()), 8, requires_grad=True) for n in (4, 2, 2))
    with torch.autocast("cpu", torch.bfloat16):
        outs = attend(q, k, v), ringcp.attention(q, k, v, mesh=mesh, mask=ringcp.Causal())
    first, second = ([out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))] for out in outs)
    assert first[0].dtype == torch.bfloat16
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_autocast(worlds):
    worlds(2).run(check_autocast)


@compiling
def check_compiled(mesh):
    """Three layers compile once; a layer with another mask does not compile anew."""
    masks = [ringcp.Causal()] * 3 + [ringcp.Causal() & DOCUMENTS]
    step = Step(mesh, lambda: nn.Sequential(*(Block(is_causal=True) for _ in masks)), masks)
    plan = {f"{i}.attend": ringcp.ContextParallel(mask=mask) for i, mask in enumerate(masks)}
    step.parallelize(plan)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for block in step.model:
        block.compile(fullgraph=True, backend=counter)
    step.check()
    return counter.frame_count


def test_compiled_blocks(worlds):
    assert worlds(2).run(check_compiled) == [1, 1]


# ---- in a context ----------------------------------------------------------------------------------------------------


def check_context(mesh):
    """The style's own mask applies, the context sees the call, and the probe is not intercepted."""
    step = Step(mesh, Block, [ringcp.Causal()])
    buffer = torch.zeros(SEQ_LEN)
    buffers = {"buffers": [buffer], "buffer_seq_dims": [0]}  # for the warning if nothing attends, here an error
    with ringcp.context_parallel(mesh, **buffers, mask=ringcp.Window(2), layout="head_tail"):
        step.parallelize({"attend": ringcp.ContextParallel(mask=ringcp.Causal())}).check()
        assert ringcp.current_context().mask == ringcp.Window(2)
    with (
        pytest.raises(ringcp.LayoutError, match="expected striped"),
        ringcp.context_parallel(mesh, layout="striped"),
    ):
        step.model(step.x)


def test_in_a_context_the_style_counts(worlds):
    worlds(2).run(check_context)


# ---- with tensor parallelism -----------------------------------------------------------------------------------------

TENSOR_PARALLEL = {
    **{name: ColwiseParallel(use_local_output=False) for name in ("wq", "wk", "wv")},
    "wo": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


@compiling
def check_tensor_parallel(mesh, compiled):
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    step = Step(grid["cp"], lambda: Block(is_causal=True), [ringcp.Causal()])
    parallelize_module(step.model, grid["tp"], TENSOR_PARALLEL)
    step.parallelize({"attend": ringcp.ContextParallel()})
    seen = []
    step.model.attend.register_forward_hook(lambda _, args, out: seen.append((type(out), out.placements)))
    step.check()
    assert seen == [(DTensor, (Shard(1),))]
    del step.model.attend._forward_hooks
    step.model.attend._forward_hooks = {}
    if compiled:
        step.check(torch.compile(step.model, fullgraph=True, backend="aot_eager"))
    dist.barrier()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.report("1.70")
@pytest.mark.report("7.30")
def test_with_heads_sharded_by_tensor_parallelism(worlds, compiled):
    worlds(4).run(check_tensor_parallel, compiled)


def check_replicated(mesh):
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    attend = parallelize_module(Attend(), grid["cp"], ringcp.ContextParallel())
    whole = dtensors_of(grid, Replicate())
    out = attend(*whole)
    assert out.placements == (Replicate(),)
    assert torch.equal(out.to_local(), ringcp.attention(*(x.to_local() for x in whole), mesh=grid["cp"]))
    dist.barrier()


def test_replicated_dtensors(worlds):
    worlds(4).run(check_replicated)


class Cross(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def with_sinks(q, k, v, sinks):
    """Attention in one process; a sink is a key of that score and no value."""
    scores = q @ k.repeat_interleave(HEADS // KV_HEADS, 1).mT / HEAD_DIM**0.5
    logits = sinks[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, logits], -1).softmax(-1)[..., :-1] @ v.repeat_interleave(HEADS // KV_HEADS, 1)


def check_cross_and_sinks(mesh, replicated):
    """Keys of another sequence, sharded or on every rank; and a logit for each head, which gets its gradient."""
    rank, size = mesh.get_local_rank(), mesh.size()
    layout, memory = ringcp.HeadTail(SEQ_LEN, size), 11
    keys = ringcp.Contiguous(memory, size)
    kv_layout = ringcp.Joint(replicated=memory, rest=ringcp.Contiguous(0, size)) if replicated else keys
    torch.manual_seed(2)
    shapes = (HEADS, SEQ_LEN), (KV_HEADS, memory), (KV_HEADS, memory), (HEADS, SEQ_LEN)
    whole = [torch.randn(2, *shape, HEAD_DIM, dtype=torch.float64) for shape in shapes]
    sinks = torch.randn(HEADS, dtype=torch.float64)

    def graded(q, k, v, dout, attend):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
        out = attend(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    def attend(q, k, v, sinks):
        style = ringcp.ContextParallel(layout=layout, kv_layout=kv_layout, sinks=sinks)
        return parallelize_module(Cross(), mesh, style)(q, k, v)

    def mine(x, of):
        return x if of is keys and replicated else of.shard(x, rank, 2)

    local = [mine(x, of) for of, x in zip((layout, keys, keys, layout), whole, strict=True)]
    got = graded(*local, attend)
    for copied in got[2:] if replicated else got[4:]:
        dist.all_reduce(copied)
    out, dq, dk, dv, dsinks = graded(*whole, with_sinks)
    want = mine(out, layout), mine(dq, layout), mine(dk, keys), mine(dv, keys), dsinks
    for name, x, y in zip(("out", "dq", "dk", "dv", "dsinks"), got, want, strict=True):
        assert_close(x, y, name=name)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("replicated", [False, True])
def test_cross_attention_and_sinks(worlds, size, replicated):
    worlds(size).run(check_cross_and_sinks, replicated)


def dtensors_of(grid, placement, heads=(4, 2, 2), axis="tp"):
    """q, k and v of 5 tokens on every rank of cp, the same on each of tp."""
    generator = torch.Generator().manual_seed(grid.get_local_rank("cp"))
    whole = [torch.randn(2, n, 5, 8, dtype=torch.float64, generator=generator) for n in heads]
    mesh = grid[axis]
    return [DTensor.from_local(x, mesh, [Replicate()], run_check=False).redistribute(mesh, [placement]) for x in whole]


MISPLACED = {
    "a mix": (lambda g: [*dtensors_of(g, Shard(1))[:2], torch.zeros(2, 2, 5, 8)], "DTensors or tensors, all three"),
    "sharded over tokens": (lambda g: dtensors_of(g, Shard(2)), r"sharded over heads, Shard\(1\)"),
    "sharded over head dims": (lambda g: dtensors_of(g, Shard(3)), "sharded over heads"),
    "uneven": (
        lambda g: dtensors_of(g, Shard(1), (6, 3, 3)),
        r"2 tensor-parallel ranks .* got \[6, 3, 3\]",
    ),
    "one head": (lambda g: dtensors_of(g, Shard(1), (4, 1, 1)), "divide evenly"),
    "differently": (
        lambda g: [*dtensors_of(g, Shard(1))[:1], *dtensors_of(g, Replicate())[1:]],
        "of one mesh, placed alike",
    ),
    "the same mesh": (lambda g: dtensors_of(g, Shard(1), axis="cp"), "a mesh apart from that of ContextParallel"),
}


def check_misplaced(mesh):
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    attend = parallelize_module(Attend(), grid["cp"], ringcp.ContextParallel())
    for make, words in MISPLACED.values():
        odd, valid = make(grid), dtensors_of(grid, Shard(1))
        for ranks in ((0, 1), (1,)):  # of cp
            mine = grid.get_local_rank("cp") in ranks
            with ringcp.record() as recorder, pytest.raises(ringcp.RingcpError, match=words if mine else "rank 1"):
                attend(*(odd if mine else valid))
            assert recorder.steps == []
        attend(*valid)
    dist.barrier()


def test_misplaced_dtensors_raise_on_every_rank(worlds):
    worlds(4).run(check_misplaced)


# ---- what is refused when it is applied ------------------------------------------------------------------------------


class Scaled(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, scale=1.0)


class Capped(nn.Module):
    def forward(self, q, k, v):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return (torch.tanh(scores / 50) * 50).softmax(-1) @ v


class Windowed(nn.Module):
    def forward(self, q, k, v):
        at = torch.arange(q.shape[2])
        behind = at[:, None] - at
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(behind >= 0) & (behind <= 1000))


class DropsOut(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)


class BSHD(nn.Module):
    def forward(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Joined(nn.Module):
    def forward(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class Pair(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v), None


class Counts(nn.Module):
    calls = 0

    def forward(self, q, k, v):
        self.calls += 1
        return F.scaled_dot_product_attention(q, k, v)


class Particular(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q.view(-1, 32, 5, 8), k.view(-1, 32, 5, 8), v.view(-1, 32, 5, 8))


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.register_buffer("bias", torch.zeros(1))

    forward = Attend.forward


class OtherNames(nn.Module):
    def forward(self, x, mask=None):
        return x


class KeysFirst(nn.Module):
    def forward(self, k, q, v):
        return F.scaled_dot_product_attention(q, k, v)


class CallsElse(Attend):
    def __call__(self, q, k, v):
        return q


class NeedsMore(nn.Module):
    def forward(self, q, k, v, freqs):
        return F.scaled_dot_product_attention(q * freqs, k * freqs, v)


U, A = ringcp.UnsupportedError, ringcp.ArgumentError
REFUSED = {
    Scaled: (U, ["Scaled.forward: expected softmax", "full or causal", "got outputs off by", "a scale in a keyword"]),
    Capped: (U, ["got outputs off by"]),
    Windowed: (U, ["got outputs off by", "a window in mask="]),
    DropsOut: (U, ["got outputs off by"]),
    BSHD: (U, ["got that of tensors (B, S, H, D)"]),
    Joined: (U, ["got a tensor (2, 5, 32) of torch.float32 for q of shape (2, 4, 5, 8)"]),
    Pair: (U, ["got tuple"]),
    Counts: (U, ["got one that changes self.calls", "probe=False"]),
    Particular: (
        U,
        ["tensors (2, 4, 5, 8) of fp32 on", "got RuntimeError: shape '[-1, 32, 5, 8]'", "probe=False"],
    ),
    Weighted: (
        U,
        ["parameter norm.weight, parameter norm.bias, buffer bias, ..., whose work", "context_parallel("],
    ),
    CallsElse: (U, ["whose call runs its forward in Python, got a CallsElse"]),
    nn.Identity: (U, ["Identity.forward: expected q, k, v first", "got (input"]),
    OtherNames: (U, ["expected q, k, v first", "got (x, mask=None)"]),
    KeysFirst: (U, ["got (k, q, v)"]),
    NeedsMore: (U, ["expected defaults for all arguments behind q, k, v, got none for freqs"]),
}


def refuse_modules(mesh):
    for kind, (error, words) in REFUSED.items():
        module = kind()
        before = dict(vars(module))
        with pytest.raises(error) as info:
            parallelize_module(module, mesh, ringcp.ContextParallel())
        assert type(info.value) is error
        assert vars(module) == before
        text = str(info.value)
        assert "\n" not in text
        for word in (": expected ", ", got ", "; ", *words):
            assert word in text, text
    parallelize_module(Windowed(), mesh, ringcp.ContextParallel(mask=ringcp.Window(1000)))  # it is the one it hides
    parallelize_module(Particular(), mesh, ringcp.ContextParallel(probe=False))


def test_modules_that_are_more_than_attention_are_refused(worlds):
    worlds(1).run(refuse_modules)


OPTIONS = {
    "mode": ({"mode": "spiral"}, U, "mode: expected one of"),
    "layout": ({"layout": "zigzag"}, ringcp.LayoutError, "layout: expected a Layout or one of"),
    "ranks": ({"layout": ringcp.HeadTail(8, 3)}, ringcp.LayoutError, "for the 1 ranks of mesh"),
    "mask": ({"mask": ringcp.Causal}, A, "mask: expected a ringcp mask or None"),
    "kernel": ({"kernel": "fast"}, U, "kernel='fast': expected"),
    "agree": ({"agree": "never"}, U, "agree: expected one of"),
    "timeout": ({"timeout": -1}, A, "timeout: expected seconds"),
}


def refuse_options(mesh):
    for options, error, words in OPTIONS.values():
        with pytest.raises(error, match=words):
            parallelize_module(Attend(), mesh, ringcp.ContextParallel(**options))
    with pytest.raises(ringcp.LayoutError, match="expected a 1-D or 2-D DeviceMesh"):
        ringcp.ContextParallel()._apply(Attend(), None)
    module = parallelize_module(Attend(), mesh, ringcp.ContextParallel())
    for again in (module, copy.deepcopy(module)):
        with pytest.raises(A, match="not applied yet, got a Attend"):
            parallelize_module(again, mesh, ringcp.ContextParallel())


def test_options_that_do_not_fit_are_refused(worlds):
    worlds(1).run(refuse_options)


def probe_quietly(mesh):
    """Random numbers, modes, autocast and a context around are nothing to the probe."""
    for training in (True, False):
        module = Attend().train(training)
        torch.manual_seed(5)
        before = torch.get_rng_state()
        with (
            torch.autocast("cpu", torch.bfloat16),
            torch.device("meta"),
            ringcp.context_parallel(mesh, mask=ringcp.Causal()) as context,
        ):
            parallelize_module(module, mesh, ringcp.ContextParallel())
        assert module.training is training
        assert torch.equal(torch.get_rng_state(), before)
        assert context.mask == ringcp.Causal()
        with pytest.raises(U):
            parallelize_module(DropsOut().train(training), mesh, ringcp.ContextParallel())
        assert torch.equal(torch.get_rng_state(), before)
    q, k, v = (torch.randn(1, n, 5, 8, dtype=torch.float64) for n in (4, 2, 2))
    assert_close(module(q, k, v), reference_attention(q, k, v)[0])  # full: the context around did not make it causal


def test_the_probe_leaves_no_traces(worlds):
    worlds(1).run(probe_quietly)


# ---- what is refused in a call ---------------------------------------------------------------------------------------


class Extended(nn.Module):
    """Keywords of its own, one of which it passes on."""

    def forward(self, q, k, v, is_causal=True, *, name="layer", temperature=1.0, **kwargs):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=kwargs.get("scale"))


BAD_CALLS = {
    "attn_mask": (Attend, lambda q, k, v: ((q, k, v, torch.ones(9)), {}), A, "attn_mask: expected 2 to 4 dims"),
    "dropout": (Attend, lambda q, k, v: ((q, k, v), {"dropout_p": 0.1}), U, "dropout_p: expected 0.0"),
    "grouped": (
        Attend,
        lambda q, k, v: ((q, k, v), {"enable_gqa": False}),
        A,
        "enable_gqa: expected True for 4 query and 2 key heads",
    ),
    "too many": (Attend, lambda q, k, v: ((q, k, v, None, 0.0, True, None, True, 1), {}), ringcp.KeywordError, "got 9"),
    "twice": (Attend, lambda q, k, v: ((q, k, v), {"q": q}), ringcp.KeywordError, "q: expected it once"),
    "unknown": (
        Attend,
        lambda q, k, v: ((q, k, v), {"softcap": 5.0}),
        ringcp.KeywordError,
        "softcap: expected an argument of the module's forward",
    ),
    "missing": (Attend, lambda q, k, v: ((q, k), {}), A, "value: expected a dense tensor"),
    "scale": (Attend, lambda q, k, v: ((q, k, v), {"scale": "big"}), A, "scale: expected a number"),
    "lengths": (Attend, lambda q, k, v: ((q, k[:, :, :2], v), {}), ringcp.LayoutError, "equal local lengths"),
    "changed": (
        Extended,
        lambda q, k, v: ((q, q, q), {"temperature": 2.0}),
        ringcp.KeywordError,
        "temperature: expected its default under ringcp.ContextParallel, got temperature=2.0",
    ),
    "unheeded": (
        Extended,
        lambda q, k, v: ((q, q, q), {"enable_gqa": True}),
        ringcp.KeywordError,
        "enable_gqa: .* whose effect the probe could not tell",
    ),
    "unheard of": (
        Extended,
        lambda q, k, v: ((q, q, q), {"block_mask": q}),
        ringcp.KeywordError,
        "block_mask: expected its default .* got block_mask=a tensor",
    ),
}


def refuse_call(mesh, which):
    kind, change, error, words = BAD_CALLS[which]
    attend = parallelize_module(kind(), mesh, ringcp.ContextParallel())
    q, k, v = (torch.randn(2, n, 5, 8) for n in (4, 2, 2))
    args, kwargs = change(q, k, v)
    valid = (q, k, v) if kind is Attend else (q, q, q)
    for odd in ((0, 1), (1,)):
        mine = mesh.get_local_rank() in odd
        with ringcp.record() as recorder, pytest.raises(ringcp.RingcpError, match=words if mine else "rank 1") as info:
            attend(*args, **kwargs) if mine else attend(*valid)
        assert recorder.steps == []
        assert not mine or isinstance(info.value, error), info.value
    attend(*valid)


@pytest.mark.parametrize("which", BAD_CALLS)
def test_a_bad_call_raises_on_every_rank_and_the_next_works(worlds, which):
    worlds(2).run(refuse_call, which)


def heed_own_defaults(mesh):
    attend = parallelize_module(Extended(), mesh, ringcp.ContextParallel())
    q = torch.randn(1, 4, 5, 8, dtype=torch.float64)
    for mask, kwargs in ((ringcp.Causal(), {}), (ringcp.Causal(), {"temperature": 1.0}), (None, {"is_causal": False})):
        for scale in (None, 0.4):
            out = attend(q, k=q, v=q, name="layer", scale=scale, **kwargs)
            assert_close(out, reference_attention(q, q, q, mask=mask, scale=scale)[0])


def test_the_defaults_of_the_forward_hold(worlds):
    worlds(1).run(heed_own_defaults)
