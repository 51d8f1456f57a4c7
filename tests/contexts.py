"""Models whose attention is to be context parallel: made alike on every rank, and held against one process."""

import contextlib
import functools
import threading
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import _get_current_function_mode_stack

import ringcp
from ringcp.testing import assert_close, reference_attention

NAMES = ("out", "dq", "dk", "dv")
DISPATCH_KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA")


class OnF(nn.Module):
    """Attention looked up on `F`, after a layer with parameters. 4 query and 2 key heads, head dims 6 and 5."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def shapes(self, seq_len):
        return (2, 4, seq_len, 6), (2, 2, seq_len, 6), (2, 2, seq_len, 5)

    def forward(self, q, k, v):
        return self.attend(self.linear(q), self.linear(k), v)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    def by_definition(self, q, k, v, mask):
        return reference_attention(self.linear(q), self.linear(k), v, mask=mask)[0]


class ByName(OnF):
    """Attention imported by name."""

    def attend(self, q, k, v):
        return scaled_dot_product_attention(q, k, v, enable_gqa=True)


class InMHA(nn.Module):
    """Attention inside `nn.MultiheadAttention`, whose tensors are (B, S, E)."""

    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)

    def shapes(self, seq_len):
        return ((2, seq_len, 12),) * 3

    def forward(self, q, k, v):
        return self.mha(q, k, v, need_weights=False)[0]

    def by_definition(self, q, k, v, mask):
        q, k, v = (
            F.linear(x, w, b).unflatten(-1, (3, 4)).transpose(1, 2)
            for x, w, b in zip((q, k, v), self.mha.in_proj_weight.chunk(3), self.mha.in_proj_bias.chunk(3), strict=True)
        )
        return self.mha.out_proj(reference_attention(q, k, v, mask=mask)[0].transpose(1, 2).flatten(2))


WAYS = {"F": OnF, "name": ByName, "MHA": InMHA}


class Subject:
    """A model, its inputs on this rank, a random upstream gradient, and what one process makes of the whole."""

    def __init__(self, mesh, way="name", *, seq_len=13, mask=None, layout=ringcp.HeadTail):
        torch.manual_seed(0)
        self.mesh, self.mask = mesh, mask
        self.layout = layout(seq_len, mesh.size())
        self.model = WAYS[way]()
        whole = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in self.model.shapes(seq_len)]
        out = self.model.by_definition(*whole, mask)
        upstream = torch.randn(out.shape, dtype=torch.float64)
        self.use(self.model)
        grads = torch.autograd.grad(out, [*whole, *self.params], upstream)
        self.expected = [self.mine(x) for x in (out, *grads[:3])]
        self.expected_params = grads[3:]
        self.inputs = [self.mine(x).requires_grad_() for x in whole]
        self.upstream = self.mine(upstream)

    def use(self, model):
        """Take another's model, which has the same values."""
        self.model, self.params = model, list(model.parameters())

    def mine(self, x):
        return self.layout.shard(x.detach(), self.mesh.get_local_rank(), -2)

    def context(self, **options):
        return ringcp.context_parallel(self.mesh, **{"layout": self.layout, "mask": self.mask, **options})

    def backward(self, out):
        """Fresh gradients."""
        for x in (*self.inputs, *self.params):
            x.grad = None
        out.backward(self.upstream)

    def train(self, fn, *, inside=True, **options):
        """One step in a context: right, or an assertion fails."""
        with self.context(**options):
            out = fn(*self.inputs)
            if inside:
                self.backward(out)
        if not inside:
            self.backward(out)
        self.check(out)

    def check(self, out):
        """The output, the gradients of this rank's rows, and those of the parameters summed over the ranks."""
        for name, x, expected in zip(NAMES, (out, *(x.grad for x in self.inputs)), self.expected, strict=True):
            assert_close(x, expected, name=name)
        for parameter, expected in zip(self.params, self.expected_params, strict=True):
            grad = parameter.grad.clone()
            dist.all_reduce(grad, group=self.mesh.get_group())
            assert_close(grad, expected, name="gradient of a parameter")

    def check_plain(self, out):
        """That the output and the gradients are those of attention among this rank's rows alone."""
        rows = [x.detach().requires_grad_() for x in self.inputs]
        expected = self.model.by_definition(*rows, None)
        grads = torch.autograd.grad(expected, rows, self.upstream)
        for name, x, grad in zip(NAMES, (out, *(x.grad for x in self.inputs)), (expected, *grads), strict=True):
            assert_close(x, grad, name=f"plain {name}")

    def train_plain(self, fn):
        """One step of plain attention among this rank's rows."""
        out = fn(*self.inputs)
        self.backward(out)
        self.check_plain(out)


def in_thread(fn):
    """What `fn` gives or raises, on another thread."""
    box = []

    def run():
        try:
            box.append((fn(), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (result, error), *_ = box
    if error is not None:
        raise error
    return result


def compiling(fn):
    """A function of a rank that compiles: torch's own warnings are not ours, and no other test's graphs come in."""

    @functools.wraps(fn)
    def run(*args):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # at graph breaks
            torch._dynamo.reset()
            return fn(*args)

    return run


def one_rank_mesh(mesh):
    """A mesh of this rank alone."""
    return init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("dp", "cp"))["cp"]


def _traces():
    aten = "aten::scaled_dot_product_attention"
    return {
        "context": ringcp.current_context(),
        "function modes": _get_current_function_mode_stack(),
        "kernels": [key for key in DISPATCH_KEYS if torch._C._dispatch_has_kernel_for_dispatch_key(aten, key)],
        "F": F.scaled_dot_product_attention,
        "reentrant": vars(torch.utils.checkpoint.CheckpointFunction).get("apply"),
        "not reentrant": torch.utils.checkpoint._CheckpointFrame.__init__,
        "saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
    }


@contextlib.contextmanager
def no_traces():
    """Everything that a context changes in the process is as before, after the body."""
    before = _traces()
    yield
    assert _traces() == before


# Checkpoints of other libraries: nothing says that their backward recomputes.


class Recomputed(torch.autograd.Function):
    """A reentrant checkpoint such as other libraries have."""

    @staticmethod
    def forward(ctx, fn, *args):
        ctx.fn = fn
        ctx.save_for_backward(*args)
        with torch.no_grad():
            return fn(*args)

    @staticmethod
    def backward(ctx, grad):
        args = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            torch.autograd.backward(ctx.fn(*args), grad)
        return None, *(x.grad for x in args)


class SetUp(Recomputed):
    """In the newer style of torch, whose forward has no ctx."""

    @staticmethod
    def forward(fn, *args):
        return fn(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.fn, *args = inputs
        ctx.save_for_backward(*args)


class OtherNames(Recomputed):
    @staticmethod
    def run(this, fn, *args):
        this.fn = fn
        this.save_for_backward(*args)
        with torch.no_grad():
            return fn(*args)

    forward = run


class WithGraph(Recomputed):
    """Its forward makes a graph, and drops it."""

    @staticmethod
    def forward(ctx, fn, *args):
        ctx.fn = fn
        ctx.save_for_backward(*args)
        with torch.enable_grad():
            return fn(*(x.detach().requires_grad_() for x in args)).detach()


WITH_ODD_FORWARDS = [SetUp, OtherNames, WithGraph]


# Stand-ins for attention of other libraries: no op of torch that computes attention is in them.


@torch.library.custom_op("flash_attn_standin::_flash_attn_forward", mutates_args=())
def _flash_attn_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return reference_attention(q, k, v)[0]


@_flash_attn_forward.register_fake
def _(q, k, v):
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def flash_by_op(q, k, v):
    return torch.ops.flash_attn_standin._flash_attn_forward(q, k, v)


class FlashAttnFunc(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        return reference_attention(q, k, v)[0]

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError("not needed")


def flash_by_function(q, k, v):
    return FlashAttnFunc.apply(q, k, v)


flash_attention = FlashAttnFunc.apply


def flash_bound_before(q, k, v):
    return flash_attention(q, k, v)


def flash_imported_late(q, k, v):
    """Of a library that is imported in the body of a context."""

    class LateAttnFunc(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return reference_attention(q, k, v)[0]

    return LateAttnFunc.apply(q, k, v)


# Ways that are refused: what is called with (q, k, v) of this rank, and words of the refusal.


def unpack(fn):
    """Of (B, H, S, D) make what nn.MultiheadAttention takes."""
    return lambda q, k, v: fn(q.transpose(1, 2).flatten(2))


MHA = nn.MultiheadAttention(24, 4, batch_first=True, dtype=torch.float64)


def self_attention(x, **options):
    return MHA(x, x, x, **options)[0]


def nested(layout):
    def call(q, k, v):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a prototype
            parts = (torch.nested.nested_tensor(list(x.transpose(1, 2)), layout=layout) for x in (q, k, v))
            return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in parts))

    return call


def distributed(dim):
    def call(*qkv):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return F.scaled_dot_product_attention(*(DTensor.from_local(x, mesh, [Shard(dim)]) for x in qkv))

    return call


def packed(q, k, v):
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    lengths = torch.tensor([0, len(q)], dtype=torch.int32)
    return varlen_attn(q, k, v, lengths, lengths, len(q), len(q))


SHARD_LENGTH = ["query, key, value: expected this rank's", "ringcp.local_attention()"]
ARGUMENTS = {
    "mask tensor": (
        lambda q, k, v: scaled_dot_product_attention(
            q, k, v, attn_mask=torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
        ),
        ringcp.UnsupportedError,
        ["attn_mask: expected one row", "the local rows and keys", "pass mask= a ringcp mask", "local_attention()"],
    ),
    "key padding and is_causal": (
        lambda q, k, v: scaled_dot_product_attention(
            q, k, v, torch.zeros(2, 1, 1, q.shape[2], dtype=q.dtype), is_causal=True
        ),
        ringcp.ArgumentError,
        ["attn_mask: expected None with is_causal=True"],
    ),
    "CausalBias": (
        lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], q.shape[2])),
        ringcp.UnsupportedError,
        ["attn_mask: expected a tensor or None, got CausalBias"],
    ),
    "dropout": (
        lambda q, k, v: scaled_dot_product_attention(q, k, v, dropout_p=0.1),
        ringcp.UnsupportedError,
        ["can do cpu float64", "dropout", "dropout only if asked for by name", 'Pass kernel="reference"'],
    ),
    "key heads": (
        lambda q, k, v: scaled_dot_product_attention(q, k[:, :2], v[:, :2]),
        ringcp.ArgumentError,
        ["enable_gqa: expected True for 4 query and 2 key heads, got False"],
    ),
    "an encoder": (
        lambda q, k, v: scaled_dot_product_attention(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:]),
        ringcp.LayoutError,
        SHARD_LENGTH,
    ),
    "cross-attention": (
        lambda q, k, v: scaled_dot_product_attention(q, torch.cat([k, k], 2), torch.cat([v, v], 2)),
        ringcp.LayoutError,
        SHARD_LENGTH,
    ),
    "numbers of dims": (
        lambda q, k, v: scaled_dot_product_attention(q, k[0], v[0]),
        ringcp.ArgumentError,
        ["query, key, value: expected equal"],
    ),
    "nested": (nested(torch.strided), ringcp.ArgumentError, ["query: expected a dense tensor", "got a NestedTensor"]),
    "jagged": (nested(torch.jagged), ringcp.ArgumentError, ["query: expected a dense tensor", "got a NestedTensor"]),
    "heads in DTensors": (distributed(1), ringcp.UnsupportedError, ["a local tensor, got a DTensor", "to_local()"]),
    "tokens in DTensors": (distributed(2), ringcp.UnsupportedError, ["a local tensor, got a DTensor", "to_local()"]),
    "vmap": (
        lambda q, k, v: torch.func.vmap(scaled_dot_product_attention)(q, k, v),
        ringcp.UnsupportedError,
        ["torch.func: "],
    ),
    "grad": (
        lambda q, k, v: torch.func.grad(lambda x: scaled_dot_product_attention(x, k, v).sum())(q),
        ringcp.UnsupportedError,
        ["torch.func: "],
    ),
    "grad of MHA": (
        unpack(lambda x: torch.func.grad(lambda x: self_attention(x, need_weights=False).sum())(x)),
        ringcp.UnsupportedError,
        ["torch.func: "],
    ),
}
OTHERS = {
    "weights": (unpack(self_attention), "nn.MultiheadAttention: expected need_weights=False"),
    "flex": (flex_attention, "flex_attention: expected attention by F.scaled_dot_product_attention"),
    "varlen": (packed, "varlen_attn"),
    "flash of aten": (
        lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0],
        "_scaled_dot_product_flash_attention_for_cpu",
    ),
    "math of aten": (
        lambda q, k, v: torch.ops.aten._scaled_dot_product_attention_math.default(q, k, v)[0],
        "_scaled_dot_product_attention_math",
    ),
    "torch._scaled_dot_product_attention_math": (
        lambda q, k, v: torch._scaled_dot_product_attention_math(q, k, v)[0],
        "_scaled_dot_product_attention_math",
    ),
    "op of a library": (flash_by_op, "flash_attn_standin._flash_attn_forward"),
    "function of a library": (flash_by_function, "FlashAttnFunc"),
    "bound before": (flash_bound_before, "FlashAttnFunc"),
    "imported late": (flash_imported_late, "LateAttnFunc"),
}
WORK_OUTSIDE = {"varlen"} ^ OTHERS.keys()  # varlen_attn has no kernel for the CPU
