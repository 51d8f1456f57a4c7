"""What the tests of buffers share: tensors to shard in place, all that must stay of one, and a context without a model.

Checks assert on the ranks, so that a pool in which one failed is started afresh.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask

import ringcp
from ringcp.sdpa import Context

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def numbered(seq_len: int, dim: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor of 3 dims, its rows apart from one another as far as the dtype can tell, with the sequence in `dim`."""
    shape = [2, 3, 4]
    shape[dim] = seq_len
    numbers = torch.arange(torch.Size(shape).numel()).view(shape) % 251
    if dtype.is_complex:
        return torch.complex(numbers.double(), -numbers.double() - 1).to(dtype)
    return numbers % 3 == 0 if dtype == torch.bool else numbers.double().to(dtype)


def bits(x: Tensor) -> bytes:
    """The values, to compare to the last bit in any dtype."""
    dense = x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return bytes(dense.view(-1).view(torch.uint8).tolist())


def same(x: Tensor, y: Tensor) -> bool:
    return (x.dtype, x.shape, bits(x)) == (y.dtype, y.shape, bits(y))


def facts(x: Tensor) -> dict[str, object]:
    """All that a context must leave of a tensor: what it is, where it lies, and every byte of the memory it lies in."""
    grad = x.grad if x.is_leaf else None
    memory = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
    return {
        "shape": x.shape,
        "strides": x.stride(),
        "offset": x.storage_offset(),
        "dtype": x.dtype,
        "data_ptr": x.data_ptr(),
        "storage": x.untyped_storage()._cdata,
        "memory": bytes(memory.tolist()),
        "conjugate": x.is_conj(),
        "version": None if x.is_inference() else x._version,
        "inference": x.is_inference(),
        "requires_grad": x.requires_grad,
        "leaf": x.is_leaf,
        "base": id(x._base),
        "grad": None if grad is None else (id(grad), grad._version, bits(grad)),
    }


@contextmanager
def sharded(mesh, buffers: object, dims: object, **options: object) -> Iterator[Context]:
    """`context_parallel` without a model: it does not complain that it saw no attention."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="context_parallel: expected attention")
        with ringcp.context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, **options) as context:
            yield context


def check_works(mesh, seq_len: int = 9) -> None:
    """A valid context, with shards, a gradient and everything whole afterwards."""
    layout = ringcp.HeadTail(seq_len, mesh.size())
    ids, leaf = torch.arange(seq_len), torch.ones(2, seq_len, dtype=torch.float64, requires_grad=True)
    before = facts(ids)
    with sharded(mesh, [ids, leaf], [0, -1]):
        assert torch.equal(ids, layout.positions(mesh.get_local_rank()))
        (leaf * ids).sum().backward()
    assert facts(ids) == before
    assert torch.equal(leaf.grad, ids.double().expand(2, -1))


def attend(x: Tensor) -> Tensor:
    """Causal attention over x (B, S, E) as query, key and value, of one head."""
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(got: Tensor | None, want: Tensor, bar: float = 1e-12) -> bool:
    return got is not None and got.shape == want.shape and torch.allclose(got, want, rtol=bar, atol=bar)


def refusals(mesh):
    """What is wrong with one argument: the error, its words, and the arguments beside a valid call's."""
    argument, layout, unsupported = ringcp.ArgumentError, ringcp.LayoutError, ringcp.UnsupportedError
    ids, rope, size = torch.arange(18).view(2, 9), random(9, 4), mesh.size()
    leaf = random(9, 4).requires_grad_()
    stays = random(9, 4).requires_grad_()
    stays.grad = random(9, 4)
    block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 9, 9, device="cpu")
    replicated = distribute_tensor(torch.arange(9), init_device_mesh("cpu", (size,)), [Replicate()])

    def both(second, dim=0):
        return {"buffers": [ids, second], "buffer_seq_dims": [1, dim]}

    yield argument, r"^buffers: expected a list of tensors, got a tensor \(2, 9\).*buffers=\[", {"buffers": ids}
    yield argument, r"^buffers: expected a list of tensors, got dict; write buffers=\[", {"buffers": {"ids": ids}}
    yield argument, "^buffers: expected a list of tensors, got int", {"buffers": 3}
    yield argument, "^buffer_seq_dims: expected a list of integers, got int", {"buffer_seq_dims": 1}
    yield argument, "^buffer_seq_dims: expected one for each of the 2 buffers, got 1; give", {"buffer_seq_dims": [1]}
    yield argument, "^buffer_seq_dims: expected one for each of the 2 buffers, got 0", {"buffer_seq_dims": None}
    for dim in (2, -3, 0.0, True, None, "0", torch.tensor(0)):
        yield layout, r"^buffer_seq_dims: .*a dim of buffers\[1\] with 2 dims, got .*; name", both(rope, dim)
    yield layout, r"^buffer_seq_dims: .*a dim of buffers\[1\] with 0 dims", both(torch.tensor(1))
    yield argument, r"^buffers\[1\]: expected a tensor, got NoneType", both(None)
    yield argument, r"^buffers\[1\]: expected a tensor, got list", both([1, 2])
    yield argument, r"^buffers\[1\]: expected a tensor, got BlockMask", both(block_mask)
    yield unsupported, r"^buffers\[1\]: expected a plain dense tensor, got DTensor", both(replicated)
    yield unsupported, r"^buffers\[1\]: .* layout torch.sparse_coo", both(torch.eye(9).to_sparse())
    yield (
        argument,
        r"^buffers\[1\]: expected a leaf.* <MulBackward.*: ringcp.shard\(x, mesh, dim=-2\)",
        both(leaf * 2, -2),
    )
    yield argument, r"^buffers\[1\]: expected each tensor once, got buffers\[0\] again; list", both(ids, 1)
    yield (
        layout,
        r"^buffers\[1\]: expected 9 tokens in dim 0, like buffers\[0\], got 12; cut a longer",
        both(random(12, 4)),
    )
    odd_first = {"buffers": [random(8), ids, rope], "buffer_seq_dims": [0, 1, 0]}
    yield layout, r"^buffers\[0\]: expected 9 tokens in dim 0, like buffers\[1\], got 8", odd_first
    eight = {"layout": ringcp.Striped(8, size)}
    yield layout, rf"^buffers\[0\]: expected 8 tokens in dim 1, like Striped\(8, {size}\), got 9", eight
    yield layout, f"^layout: expected one for the {size} ranks of mesh", {"layout": ringcp.Striped(9, 5)}
    yield layout, "^layout: expected a Layout or one of .*, got 'zigzag'", {"layout": "zigzag"}
    yield argument, "^no_restore_buffers: expected tensors of buffers, .* number 0", {"no_restore_buffers": [leaf]}
    yield argument, "^no_restore_buffers: expected a list of tensors, got a tensor", {"no_restore_buffers": ids}
    kept = {**both(stays), "no_restore_buffers": {stays}}
    yield argument, r"^buffers\[1\]: expected no .grad on a buffer that stays a shard, got one of shape \(9, 4\)", kept
    yield argument, r"^mask: .*not called; write ringcp.Causal\(", {"mask": ringcp.Causal}
    yield argument, r"^mask: expected a ringcp mask or None, got a tensor", {"mask": torch.ones(9, 9)}
    yield argument, "^timeout: expected seconds above 0", {"timeout": -1}
    yield unsupported, "^mode: expected one of .*, got 'spiral'", {"mode": "spiral"}
    yield unsupported, "^kernel='fast': expected one of", {"kernel": "fast"}
    yield unsupported, "^agree: expected one of .*, got 'never'", {"agree": "never"}
    yield argument, "^ulysses_degree: expected a divisor of . ranks, got 7; choose one", {"ulysses_degree": 7}
    yield argument, "^ulysses_degree: expected a number of ranks of at least 1 or None, got 0", {"ulysses_degree": 0}


# What one rank does otherwise, and what the error must say of it.
MISMATCHES = {
    "length": (
        lambda ids, rope: {"buffers": [ids[:, :8], rope[:8]]},
        r"buffers\[0\]=\(2, 8\) .*, not buffers\[0\]=\(2, 9\)",
    ),
    "batch": (lambda ids, rope: {"buffers": [ids[:1], rope]}, r"buffers\[0\]=\(1, 9\)"),
    "dtype": (lambda ids, rope: {"buffers": [ids.int(), rope]}, r"buffers\[0\]=\(2, 9\) torch.int32 "),
    "dim": (
        lambda ids, rope: {"buffers": [ids, random(9, 9)], "buffer_seq_dims": [1, 1]},
        r"buffers\[1\]=\(9, 9\) torch.float64 along dim 1",
    ),
    "requires_grad": (
        lambda ids, rope: {"buffers": [ids, rope.detach().requires_grad_()]},
        r"buffers\[1\]=.* requires_grad",
    ),
    "numbers": (lambda ids, rope: {"buffers": [ids ^ 1, rope]}, r"the numbers in buffers\[0\] \(whole, .*=#"),
    "their order": (lambda ids, rope: {"buffers": [ids.flip(1), rope]}, r"the numbers in buffers\[0\] \(whole, .*=#"),
    "number": (lambda ids, rope: {"buffers": [ids], "buffer_seq_dims": [1]}, "number of buffers=1, not"),
    "none at all": (lambda ids, rope: {"buffers": None, "buffer_seq_dims": None}, "number of buffers=0, not"),
    "no_restore_buffers": (lambda ids, rope: {"no_restore_buffers": [rope]}, r"buffers\[1\]=.* not restored"),
    "layout": (lambda ids, rope: {"layout": "striped"}, r"layout=Striped\(9, 3\), not layout=HeadTail\(9, 3\)"),
    "mask": (lambda ids, rope: {"mask": ringcp.Window(3)}, r"mask=Window\(3, 0\), not mask=None"),
    "mode": (lambda ids, rope: {"mode": "ring"}, "mode=ring, not mode=auto"),
    "kernel": (lambda ids, rope: {"kernel": "reference"}, "kernel=reference, not kernel=auto"),
    "agree": (lambda ids, rope: {"agree": "context"}, "agree=context, not agree=call"),
}


VOCABULARY, CHANNELS = 7, 5


class Batch:
    """A batch with buffers of all kinds, and a loss whose nodes save them; made alike on every rank.

    Each token has weights of its own in the loss, so the sum of the losses of all ranks is the loss of one process.
    """

    def __init__(self, seq_len: int = 9, dtype: torch.dtype = torch.float64) -> None:
        self.ids = random(2, seq_len, seed=1).mul(100).long() % VOCABULARY
        self.labels = random(2, seq_len, seed=2).mul(100).long() % CHANNELS
        self.keep = random(2, seq_len, 1, seed=3) > 0
        self.factor = random(2, seq_len, 1, seed=4, dtype=dtype)
        self.weights = random(2, seq_len, CHANNELS, seed=5, dtype=dtype)
        self.rope = random(seq_len, CHANNELS, seed=6, dtype=dtype).requires_grad_()
        self.bias = random(CHANNELS, seq_len, 2, seed=7, dtype=dtype).transpose(0, 2).requires_grad_()
        self.table = random(VOCABULARY, CHANNELS, seed=8, dtype=dtype).requires_grad_()
        self.buffers = [self.ids, self.labels, self.keep, self.factor, self.weights, self.rope, self.bias]
        self.dims = [1, -1, 1, -2, 1, 0, 1]

    @property
    def leaves(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rope, self.bias

    def context(self, mesh, **options):
        return ringcp.context_parallel(mesh, buffers=self.buffers, buffer_seq_dims=self.dims, **options)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.where(self.keep, x * self.factor + self.rope, (x + self.bias).sin())
        return attend(x * self.rope + self.table.index_select(0, self.ids.flatten()).view_as(x))

    def loss(self, hidden=None) -> torch.Tensor:
        x = F.embedding(self.ids, self.table) + self.table[self.ids]
        out = (hidden or self.hidden)(x)
        scores = F.cross_entropy(out.flatten(0, 1), self.labels.flatten(), reduction="sum")
        return (out * self.weights).sum() + scores

    def check(self, mesh, times: float = 1, before=(0, 0), bar: float = 1e-12, what: object = "") -> None:
        """Both leaves have `times` the gradient of one process, beside what they had; the table's adds up to it."""
        alone = Batch(self.rope.shape[0], self.rope.dtype)
        alone.loss().backward()
        for name, leaf, one, had in zip(("rope", "bias"), self.leaves, alone.leaves, before, strict=True):
            assert leaf.grad.dtype == leaf.dtype, (what, name)
            assert close(leaf.grad, had + times * one.grad, bar), (what, name)
        # Of a parameter that is no buffer, each rank has the part of its own tokens.
        parts = ringcp.all_gather(self.table.grad[None], mesh, dim=0)
        assert close(parts.sum(0), times * alone.table.grad, bar), (what, "table")


def inside(mesh, batch, **options):
    with batch.context(mesh, **options):
        batch.loss().backward()
    return 1


def outside(mesh, batch, **options):
    with batch.context(mesh, **options):
        loss = batch.loss()
    loss.backward()
    return 1


def on_both_sides(mesh, batch, **options):
    with batch.context(mesh, **options):
        first, second = batch.loss(), 2 * batch.loss()
        first.backward()
    second.backward()
    return 3


def of_one_graph_on_both_sides(mesh, batch, **options):
    with batch.context(mesh, **options):
        loss = batch.loss()
        loss.backward(retain_graph=True)
    loss.backward()
    return 2


def twice_inside(mesh, batch, **options):
    with batch.context(mesh, **options):
        loss = batch.loss()
        loss.backward(retain_graph=True)
        (2 * loss).backward()
    return 3


def twice_outside(mesh, batch, **options):
    with batch.context(mesh, **options):
        loss = batch.loss()
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    return 3


def of_two_contexts_at_once(mesh, batch, **options):
    with batch.context(mesh, **options):
        first = batch.loss()
    with batch.context(mesh, layout="contiguous"):
        second = 2 * batch.loss()
    (first + second).backward()
    return 3


def accumulated(mesh, batch, **options):
    return inside(mesh, batch, **options) + outside(mesh, batch) + inside(mesh, batch)


def on_another_thread(mesh, batch, **options):
    with batch.context(mesh, **options):
        first, second = batch.loss(), batch.loss()
        run_on_thread(first.backward)
    run_on_thread(second.backward)
    return 2


def run_on_thread(function) -> None:
    errors = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not errors, errors


WAYS = (
    inside, outside, on_both_sides, of_one_graph_on_both_sides, twice_inside, twice_outside, of_two_contexts_at_once,
    accumulated, on_another_thread,
)  # fmt: skip


class Counting(saved_tensors_hooks):
    """Hooks of the user: as offloading does, they keep what they are given, and they count."""

    def __init__(self, keep=lambda x: x) -> None:
        self.packed = self.unpacked = 0

        def pack(x):
            self.packed += 1
            return keep(x)

        def unpack(x):
            self.unpacked += 1
            return x

        super().__init__(pack, unpack)
