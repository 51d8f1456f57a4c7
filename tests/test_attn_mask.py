"""`attn_mask` of `F.scaled_dot_product_attention` in a context: each form is exact."""

import functools
import itertools

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from attn_masks import OF_KEYS, OF_ROWS, by_torch, check_case, made, sharded, spread, step, tensors
from cases import Case, assert_none, differences
from contexts import compiling
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import ringcp
from ringcp.testing import assert_close

sdpa = F.scaled_dot_product_attention


def causal(seq_len):
    return torch.ones(seq_len, seq_len, dtype=torch.bool).tril()


# --- exact


def check_forms(mesh):
    """Every mask, with masks of contexts, modes and layouts in turn."""
    found, size = [], mesh.size()
    modes = [("ring", None), ("gather", None), ("ulysses", None), *[("usp", 2)] * (size == 4)]
    turns = itertools.cycle(modes), itertools.cycle(("head_tail", "striped", "contiguous"))
    for (mode, degree), layout, name, mask in zip(
        *turns,
        *zip(*itertools.product((*OF_KEYS, *OF_ROWS), ("full", "causal", "documents")), strict=True),
        strict=False,
    ):
        found += check_case(mesh, Case(29, mask, layout, mode=mode, degree=degree), name)
    for seq_len, name in itertools.product((1, 2, size, size + 1, 2 * size - 1), ("keys", "rows")):
        if not (name == "keys" and seq_len == size > 1):  # a token each: see below
            found += check_case(mesh, Case(seq_len, "full", "head_tail"), name)
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.report("1.22")
@pytest.mark.report("1.23")
@pytest.mark.report("7.22")
def test_exact(worlds, size):
    assert_none(worlds(size).run(check_forms))


def check_dims(mesh):
    """Masks of fewer dims and of heads; queries of 2, 3 and 5 dims; one row for all of the queries."""
    found, rank, layout = [], mesh.get_local_rank(), ringcp.Striped(11, mesh.size())
    q, k, v, upstream = tensors(11)
    rows, keys = made("rows", 1, 1, 11, 11)[0, 0], made("keys", 1, 1, 11, 11)
    of_heads = made("bias of rows", 4, 1, 11, 11).transpose(0, 1)
    cases = {
        "(S, S)": (rows, layout.shard(rows, rank, 0)),
        "(1, S, S)": (rows[None], layout.shard(rows[None], rank, 1)),
        "(1, S)": (keys, layout.shard(keys, rank, 1)),
        "(H, S, S)": (of_heads[0], layout.shard(of_heads[0], rank, 1)),
        "(1, H, S, S)": (of_heads, layout.shard(of_heads, rank, 2)),
        "(B, H, 1, S)": (of_heads.transpose(0, 1)[:2, :, :1].expand(2, 4, 1, 11),) * 2,  # all keys, on every rank
    }
    local = [layout.shard(x, rank, 2) for x in (q, k, v)]
    for name, (mask, mine) in cases.items():
        dense = mask.expand(11, 11) if mask.ndim == 2 else mask
        want = step(lambda q, k, v, dense=dense: sdpa(q, k, v, dense, enable_gqa=True), [q, k, v], upstream)
        with ringcp.context_parallel(mesh, layout=layout):
            got = step(
                lambda q, k, v, mine=mine: sdpa(q, k, v, mine, enable_gqa=True), local, layout.shard(upstream, rank, 2)
            )
        found += differences(name, got, {key: layout.shard(x, rank, 2) for key, x in want.items()})
    five = torch.stack([q, q * 0.5, q + 1]), (keys.expand(2, 11)[:, None, None] * torch.ones(3, 1, 1, 1, 1)).bool()
    five[1][1:, :, :, :, 4] ^= True
    queries = {
        "2 dims": (q[0, 0], keys, lambda x: layout.shard(x, rank, 1)),
        "3 dims": (q[0], rows[None], lambda x: layout.shard(x, rank, 1)),
        "5 dims": (*five, lambda x: layout.shard(x, rank, 4)),
        "5 and 4 dims": (five[0], five[1][1], lambda x: layout.shard(x, rank, 3)),
    }
    for name, (x, mask, cut) in queries.items():
        shards = layout.shard(x, rank, -2)
        with ringcp.context_parallel(mesh, layout=layout):
            out = sdpa(shards, shards, shards, cut(mask))
        found += differences(name, {"out": out}, {"out": layout.shard(sdpa(x, x, x, mask), rank, -2)})
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_dims_of_masks_and_queries(worlds, size):
    assert_none(worlds(size).run(check_dims))


def check_dead(mesh):
    """A row that sees nothing, by the mask or with that of the context: exact zeros, as of bool in torch."""
    rank, layout = mesh.get_local_rank(), ringcp.HeadTail(12, mesh.size())
    q, k, v, upstream = tensors(12)
    valid = torch.arange(12).expand(2, 12) >= torch.tensor([[5], [0]])
    least = torch.zeros(2, 12, dtype=torch.float64).masked_fill(~valid, torch.finfo(torch.float64).min)
    cut = [layout.shard(x, rank, 2) for x in (q, k, v, upstream)]
    for mask in (valid, least, least.float()):
        with ringcp.context_parallel(mesh, layout=layout, mask=ringcp.Causal()):
            mine = spread(layout.shard(mask, rank, 1))
            got = step(lambda q, k, v, mine=mine: sdpa(q, k, v, mine, enable_gqa=True), cut[:3], cut[3])
        got = {name: ringcp.unshard(x, mesh, dim=2, layout=layout) for name, x in got.items()}
        for name, x in got.items():
            assert (x[0, :, :5] == 0).all(), name
            assert x[0, :, 5:].ne(0).any()
        want = step(lambda q, k, v: by_torch(q, k, v, valid, causal(12)), [q, k, v], upstream)
        for name, x in want.items():
            assert_close(got[name], x, name=name)


@pytest.mark.parametrize("size", [1, 2])
def test_rows_that_see_nothing_are_zero(worlds, size):
    worlds(size).run(check_dead)


def padded_batch(mesh, inside):
    """As with HF: the padding mask is a buffer beside the others; gradients are whole, also after the body."""
    whole, valid = tensors(15), made("padding", 2, 1, 15, 15)
    *qkv, upstream = whole
    want = step(lambda q, k, v: by_torch(q, k, v, valid, causal(15)), qkv, upstream)
    buffers, mask = [x.clone().requires_grad_() for x in qkv], valid.clone()
    layout, rank = ringcp.HeadTail(15, mesh.size()), mesh.get_local_rank()
    with ringcp.context_parallel(
        mesh, buffers=[*buffers, mask], buffer_seq_dims=[2, 2, 2, 1], mask=ringcp.Causal(), layout=layout
    ):
        out = sdpa(*buffers, attn_mask=mask[:, None, None, :], enable_gqa=True)
        if inside:
            out.backward(layout.shard(upstream, rank, 2))
    if not inside:
        out.backward(layout.shard(upstream, rank, 2))
    assert torch.equal(mask, valid)
    assert_close(out, layout.shard(want["out"], rank, 2))
    for name, x in zip(("dq", "dk", "dv"), buffers, strict=True):
        assert_close(x.grad, want[name], name=name)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.report("1.25")
def test_a_padded_batch_whose_mask_is_a_buffer(worlds, inside):
    worlds(3).run(padded_batch, inside)


def key_padding(mesh):
    """`key_padding_mask` of `nn.MultiheadAttention`, and of an encoder layer, bool and float."""
    torch.manual_seed(0)
    layout, rank = ringcp.HeadTail(13, mesh.size()), mesh.get_local_rank()
    x, pad = torch.randn(2, 13, 12, dtype=torch.float64), ~made("padding", 2, 1, 13, 13)
    mha = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    layer = nn.TransformerEncoderLayer(12, 3, 16, 0.0, batch_first=True, dtype=torch.float64)
    mine, of_keys = layout.shard(x, rank, 1).requires_grad_(), layout.shard(pad, rank, 1)
    for mask in (of_keys, torch.zeros(of_keys.shape, dtype=torch.float64).masked_fill(of_keys, -torch.inf)):
        runs = (
            lambda x, pad: mha(x, x, x, key_padding_mask=pad, need_weights=False)[0],
            lambda x, pad: layer(x, src_key_padding_mask=pad),
        )
        for run in runs:
            with ringcp.context_parallel(mesh, layout=layout):
                out = run(mine, mask)
            assert_close(out, layout.shard(run(x, pad), rank, 1))


def test_key_padding_of_multi_head_attention(worlds):
    worlds(2).run(key_padding)


def check_beside(mesh):
    """Beside ALiBi, a softcap, a function's mask and dropout of nothing: all hold, in each kernel that can."""
    found, rank, layout = [], mesh.get_local_rank(), ringcp.HeadTail(17, mesh.size())
    q, k, v, upstream = tensors(17)
    slopes = torch.linspace(-0.1, 0.5, 4)
    at = torch.arange(17)
    distance = -slopes.double()[:, None, None] * (at[:, None] - at).abs()
    odd = ringcp.Predicate(lambda b, h, i, j: (i + j) % 3 != h % 2, name="odd") & ringcp.Causal()
    dense = odd.dense(at, at, heads=4)
    cut = [layout.shard(x, rank, 2) for x in (q, k, v, upstream)]
    for name, kernel in itertools.product(("bias of keys", "rows of heads"), ("auto", "reference")):
        mask = made(name, 2, 4, 17, 17)
        mine = sharded(mask, layout, layout, rank)
        bias = spread(mask) if mask.is_floating_point() else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        both = torch.where(dense, bias.double() + distance, -torch.inf)
        want = step(lambda q, k, v, both=both: sdpa(q, k, v, both, enable_gqa=True), [q, k, v], upstream)
        for mode in ("ring", "ulysses"):
            with ringcp.context_parallel(
                mesh, layout=layout, mask=odd, alibi_slopes=slopes, kernel=kernel, mode=mode, agree="context"
            ):
                got = step(lambda q, k, v, mine=mine: sdpa(q, k, v, mine, enable_gqa=True), cut[:3], cut[3])
            cut_want = {key: layout.shard(x, rank, 2) for key, x in want.items()}
            found += differences(f"{name} {kernel} {mode}", got, cut_want)
    scores = 1.3 * torch.tanh(q @ k.repeat_interleave(2, 1).mT * 6**-0.5 / 1.3) + bias
    with ringcp.context_parallel(mesh, layout=layout, softcap=1.3, kernel="reference"):
        out = sdpa(*cut[:3], mine, enable_gqa=True)
        dropped = [sdpa(*cut[:3], mine, 0.4, enable_gqa=True) for _ in range(2)]
    capped = scores.masked_fill((bias == -torch.inf).all(-1, keepdim=True), 0).softmax(-1) @ v.repeat_interleave(2, 1)
    found += differences("softcap", {"out": out}, {"out": layout.shard(capped, rank, 2)})
    assert all(x.isfinite().all() for x in dropped)
    assert not torch.equal(*dropped)
    return found


def test_beside_everything_else(worlds):
    assert_none(worlds(3).run(check_beside))


def check_half(mesh):
    """In half precision and under autocast, with the dtypes that torch takes: as near to fp64 as torch itself."""
    rank, layout = mesh.get_local_rank(), ringcp.HeadTail(64, mesh.size())
    for dtype, of_mask in ((torch.bfloat16, None), (torch.bfloat16, torch.float32), (torch.float16, None)):
        whole = [x.to(dtype) for x in tensors(64)]
        mask = made("bias of keys", 2, 1, 64, 64).to(of_mask or dtype)
        exact = by_torch(*(x.double() for x in whole[:3]), mask)
        nearly = sdpa(*whole[:3], spread(mask), enable_gqa=True)
        mine = sharded(mask, layout, layout, rank)
        with ringcp.context_parallel(mesh, layout=layout):
            out = sdpa(*(layout.shard(x, rank, 2) for x in whole[:3]), mine, enable_gqa=True)
        assert out.dtype == dtype
        assert_close(ringcp.unshard(out, mesh, dim=2, layout=layout), exact, baseline=nearly)
    local = [layout.shard(x, rank, 2) for x in tensors(64, dtype=torch.float32)[:3]]
    with ringcp.context_parallel(mesh, layout=layout), torch.autocast("cpu", torch.bfloat16):
        out = sdpa(*local, sharded(mask.float(), layout, layout, rank), enable_gqa=True)
        assert out.dtype == torch.bfloat16
        with pytest.raises(ringcp.ArgumentError, match=r"expected bool, torch.float32 or the torch.bfloat16"):
            sdpa(*local, sharded(mask.double(), layout, layout, rank), enable_gqa=True)


def test_half_precision_and_autocast(worlds):
    worlds(2).run(check_half)


@compiling
def check_compiled(mesh):
    """Compiled with a full graph, before and inside; other values do not compile anew. With checkpoints, eager too."""
    rank, layout = mesh.get_local_rank(), ringcp.HeadTail(21, mesh.size())
    q, k, v, upstream = tensors(21)
    cut = [layout.shard(x, rank, 2) for x in (q, k, v, upstream)]

    def attend(q, k, v, mask):
        return sdpa(q * 1.0, k, v, attn_mask=mask, enable_gqa=True) * 2.0

    for name in ("keys", "bias of rows"):
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(attend, backend=counter, fullgraph=True)
        for number in range(3):
            mask = made(name, 2, 4, 21, 21).roll(number, 1)
            want = step(lambda q, k, v, mask=mask: by_torch(q, k, v, mask, causal(21)) * 2, [q, k, v], upstream)
            mine = sharded(mask, layout, layout, rank)
            with ringcp.context_parallel(mesh, layout=layout, mask=ringcp.Causal()):
                got = step(functools.partial(compiled, mask=mine), cut[:3], cut[3])
            assert_none([differences(name, got, {key: layout.shard(x, rank, 2) for key, x in want.items()})])
        assert counter.frame_count == 1, counter.frame_count
    for reentrant, inside in itertools.product((False, True), (False, True)):
        leaves = [x.clone().requires_grad_() for x in cut[:3]]
        with ringcp.context_parallel(mesh, layout=layout, mask=ringcp.Causal()):
            out = checkpoint(attend, *leaves, mine, use_reentrant=reentrant)
            if inside:
                out.backward(cut[3])
        if not inside:
            out.backward(cut[3])
        got = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True))}
        assert_none([differences("checkpoint", got, {key: layout.shard(x, rank, 2) for key, x in want.items()})])


def test_compiled_and_recomputed(worlds):
    worlds(2).run(check_compiled, timeout=150)


class Attend(nn.Module):
    def forward(self, q, k, v, attn_mask=None, is_causal=False):
        return sdpa(q, k, v, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=True)


class CausalAlone(nn.Module):
    """Causal where no mask says more, as many models write it."""

    def forward(self, q, k, v, attn_mask=None):
        return sdpa(q, k, v, attn_mask=attn_mask, is_causal=attn_mask is None, enable_gqa=True)


class Inverted(nn.Module):
    def forward(self, q, k, v, attn_mask=None):
        return sdpa(q, k, v, None if attn_mask is None else ~attn_mask, enable_gqa=True)


class Drops(nn.Module):
    def forward(self, q, k, v, **kwargs):
        return sdpa(q, k, v, enable_gqa=True)


def check_module(mesh):
    """`ContextParallel`: self- and cross-attention; a forward that makes something else of a mask is refused it."""
    found, rank, size = [], mesh.get_local_rank(), mesh.size()
    layout, kv_layout = ringcp.HeadTail(14, size), ringcp.Striped(9, size)
    for kind, name, keys in itertools.product((Attend, CausalAlone), ("keys", "bias of rows"), (14, 9)):
        of_keys = layout if keys == 14 else kv_layout
        q, k, v, upstream = tensors(14, keys=keys)
        mask = made(name, 2, 4, 14, keys)
        want = step(lambda q, k, v, mask=mask: by_torch(q, k, v, mask), [q, k, v], upstream)
        for mode in ("ring", "ulysses"):
            how = {"layout": layout, "kv_layout": None if keys == 14 else kv_layout, "mode": mode}
            module = parallelize_module(kind(), mesh, ringcp.ContextParallel(**how))
            mine = sharded(mask, layout, of_keys, rank)
            local = [layout.shard(q, rank, 2), of_keys.shard(k, rank, 2), of_keys.shard(v, rank, 2)]
            got = step(
                lambda q, k, v, mine=mine, module=module: module(q, k, v, mine), local, layout.shard(upstream, rank, 2)
            )
            cuts = (layout, layout, of_keys, of_keys)
            cut = {key: lay.shard(x, rank, 2) for (key, x), lay in zip(want.items(), cuts, strict=True)}
            found += differences(f"{kind.__name__} {name} {keys} {mode}", got, cut)
    q = layout.shard(tensors(14)[0], rank, 2)
    mine = layout.shard(made("keys", 2, 1, 14, 14), rank, 1)[:, None, None]
    for kind in (Inverted, Drops):
        module = parallelize_module(kind(), mesh, ringcp.ContextParallel(layout=layout))
        with pytest.raises(ringcp.UnsupportedError, match=r"attn_mask: expected None under ringcp.Context"):
            module(q, q, q, attn_mask=mine)
    module = parallelize_module(Attend(), mesh, ringcp.ContextParallel(layout=layout))
    with pytest.raises(ringcp.ArgumentError, match="attn_mask: expected None with is_causal=True"):
        module(q, q, q, mine, is_causal=True)
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_modules(worlds, size):
    assert_none(worlds(size).run(check_module))


def check_joint(mesh):
    """A key mask over text and video, and an encoder memory on every rank, also with a row for each query."""
    found, rank, size = [], mesh.get_local_rank(), mesh.size()
    rest = ringcp.HeadTail(11, size)
    layout = ringcp.Joint(replicated=3, rest=rest)
    whole = tensors(14)
    mask = made("keys", 2, 1, 14, 14)
    local = [layout.shard(x, rank, 2) for x in whole[:3]]
    with ringcp.context_parallel(mesh, layout=layout):
        out = sdpa(*local, layout.shard(mask, rank, 1)[:, None, None], enable_gqa=True)
        square = torch.ones(out.shape[2], out.shape[2], dtype=torch.bool)
        with pytest.raises(ringcp.RingcpError, match="attn_mask: expected a key mask in joint attention"):
            sdpa(*local, square, enable_gqa=True)
    found += differences("joint", {"out": out}, {"out": layout.shard(by_torch(*whole[:3], mask), rank, 2)})
    memory = ringcp.Joint(replicated=9, rest=ringcp.Contiguous(0, size))
    q, k, v, upstream = tensors(11, keys=9)
    for name in ("keys", "bias of rows"):
        mask = made(name, 2, 4, 11, 9)
        want = step(lambda q, k, v, mask=mask: by_torch(q, k, v, mask), [q, k, v], upstream)
        module = parallelize_module(Attend(), mesh, ringcp.ContextParallel(layout=rest, kv_layout=memory))
        mine = sharded(mask, rest, memory, rank)
        local = [rest.shard(q, rank, 2), k, v]
        got = step(
            lambda q, k, v, mine=mine, module=module: module(q, k, v, mine), local, rest.shard(upstream, rank, 2)
        )
        for grad in ("dk", "dv"):  # equal shares of it
            got[grad] = got[grad] * size
        want = {key: rest.shard(x, rank, 2) if key in ("out", "dq") else x for key, x in want.items()}
        found += differences(f"memory, {name}", got, want)
    return found


def test_joint_and_memory_on_every_rank(worlds):
    assert_none(worlds(3).run(check_joint))


def ones(*shape, dtype=torch.bool):
    return torch.ones(shape, dtype=dtype)


def sent(mesh):
    """A key mask is sent once a direction, one byte a key; rows are, in an exchange only."""
    layout, rank = ringcp.Contiguous(12, mesh.size()), mesh.get_local_rank()
    q, k, v, upstream = (layout.shard(x, rank, 2) for x in tensors(12))
    rows = made("rows", 1, 1, 12, 12)
    for mode, mask, count in (
        ("ring", ones(2, 1, 1, 4), 2 * 2 * 4),
        ("ulysses", ones(2, 1, 1, 4), 2 * 2 * 4),
        ("ring", layout.shard(rows, rank, 2), None),
        ("ulysses", layout.shard(rows, rank, 2), 2 * 4 * 12),
        ("ring", ones(2, 1, 1, 12), None),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        with ringcp.record() as recorder, ringcp.context_parallel(mesh, layout=layout, mode=mode):
            sdpa(*leaves, mask, enable_gqa=True).backward(upstream)
        steps = {s.direction: (s.bytes_sent, s.bytes_received) for s in recorder.steps if "attn_mask" in s.direction}
        both = {f"{direction} attn_mask": (count, count) for direction in ("forward", "backward")}
        assert steps == ({} if count is None else both), (mode, steps)


def test_what_is_sent(worlds):
    worlds(3).run(sent)
