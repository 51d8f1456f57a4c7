"""Dropout: the same weights are dropped whoever computes them, in both directions. Modes are in the matrix."""

import functools
import math
import warnings

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from cases import Case, assert_none, differences, whole
from pairwise_cases import P, factors, oracle, results, seed_of
from torch.utils.checkpoint import checkpoint

import ringcp
from ringcp.kernels.pairwise import Dropout
from ringcp.sinks import fold_sinks
from ringcp.testing import in_process

# --- what is dropped


def kept(p=0.5, seed=3, batch=2, heads=4, rows=256, keys=256) -> torch.Tensor:
    return Dropout(p, seed, *(torch.arange(n) for n in (batch, heads, rows, keys))).kept()


def assert_like_coins(x, y=None):
    """That x, or x and y, agree in half of their entries, up to 5 deviations."""
    heads = x if y is None else x == y
    assert abs(heads.double().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(heads.numel())


@pytest.mark.parametrize("p", [0.0, 0.01, 0.3, 0.9])
def test_as_many_are_dropped_as_was_asked_for(p):
    found = kept(p)
    assert abs(found.double().mean().item() - (1 - p)) <= 5 * math.sqrt(p * (1 - p) / found.numel())
    numbers = [torch.arange(n) for n in (2, 4, 256, 256)]
    weights = Dropout(p, 3, *numbers).factors(torch.float64)
    assert torch.equal(weights, found.double() / (1 - p))


def test_pairs_are_dropped_apart_from_each_other():
    bits = kept()
    for shift in (1, 2, 3, 64):
        assert_like_coins(bits[..., shift:], bits[..., :-shift])
        assert_like_coins(bits[:, :, shift:], bits[:, :, :-shift])
        assert_like_coins(bits[:, :, shift:, shift:], bits[:, :, :-shift, :-shift])
    off = ~torch.eye(256, dtype=torch.bool)
    assert_like_coins(bits[..., off], bits.mT[..., off])
    assert_like_coins(bits[0], bits[1])
    assert_like_coins(bits[:, 0], bits[:, 1])
    for seed in (2, 4, 3 + (1 << 32), 3 + (1 << 61)):
        assert_like_coins(bits, kept(seed=seed))
    # Sums over rows and over keys vary as those of coins do.
    signs = bits.double() * 2 - 1
    for dim in (-1, -2):
        assert abs(signs.sum(dim).square().mean().item() / 256 - 1) < 5 * math.sqrt(2 / (signs.numel() / 256))


def test_a_tile_drops_what_the_whole_drops():
    whole_one = kept()
    tile = Dropout(0.5, 3, torch.tensor([1]), torch.tensor([2, 3]), torch.arange(50, 90, 3), torch.arange(200, 7, -5))
    assert torch.equal(tile.kept(), whole_one[1:, 2:, 50:90:3][..., torch.arange(200, 7, -5)])


def test_without_dropout_nothing_is_drawn_and_each_call_draws_anew():
    q, k, v, *_ = whole(Case(16, "causal", heads="mha"), 2)
    state = torch.get_rng_state()
    in_process(q, k, v, world_size=2)
    assert torch.equal(torch.get_rng_state(), state)
    first, second = (in_process(q, k, v, world_size=2, dropout_p=P, kernel="reference") for _ in range(2))
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(in_process(q, k, v, world_size=2, dropout_p=P, kernel="reference"), first)


# --- over ranks


def check_every_way(mesh):
    """`attention` with sinks and ALiBi, `attention_varlen`, `context_parallel`: exact, with the seed of rank 0."""
    rank, found = mesh.get_local_rank(), []
    case = Case(23, "causal", heads="gqa")
    layout, tensors, mask = ringcp.HeadTail(23, mesh.size()), whole(case, 1), ringcp.Causal()
    sinks, slopes = torch.linspace(-2, 4, 8, dtype=torch.float64), torch.linspace(0, 0.5, 8)
    local = [layout.shard(x, rank, 2) for x in tensors]
    how = {"mesh": mesh, "mask": mask, "layout": layout, "dropout_p": P, "kernel": "reference"}
    seed = seed_of(7)
    of_all = factors(tensors.q, tensors.k, seed)
    mine = functools.partial(torch.manual_seed, 7 + rank)

    def attend(q, k, v, agree):
        mine()
        return ringcp.attention(q, k, v, alibi_slopes=slopes, sinks=sinks, return_lse=True, agree=agree, **how)

    want = results(tensors, lambda q, k, v: fold_sinks(*oracle(q, k, v, mask, slopes=slopes, kept=of_all), sinks))
    want = {name: layout.shard(x, rank, 2) for name, x in want.items()}
    for agree in ("call", "context"):
        found += differences(agree, results(local, functools.partial(attend, agree=agree)), want)

    q, k, v = (x[0].transpose(0, 1) for x in local[:3])
    mine()
    out = ringcp.attention_varlen(q, k, v, cu_seqlens=[0, 9, 23], **how)
    packed = oracle(*(x[:1] for x in tensors[:3]), ringcp.Documents([9, 14]) & mask, kept=of_all[:1])[0]
    found += differences("varlen", {"out": out.transpose(0, 1)[None]}, {"out": layout.shard(packed, rank, 2)})

    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    with ringcp.context_parallel(mesh, buffers=leaves, buffer_seq_dims=[2] * 3, kernel="reference"):
        mine()
        out = F.scaled_dot_product_attention(*leaves, None, P, True, enable_gqa=True)
        out.backward(layout.shard(tensors.dout, rank, 2))
    got = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True))}
    want = results([*tensors[:4], tensors.dlse * 0], functools.partial(oracle, mask=mask, kept=of_all))
    want["out"] = layout.shard(want["out"], rank, 2)
    return found + differences("context", got, {name: want[name] for name in got})


def test_exact_every_way(worlds):
    assert_none(worlds(2).run(check_every_way))


def check_checkpoints(mesh):
    """What is recomputed drops the same, though each rank has another generator, which goes on meanwhile."""
    rank, found = mesh.get_local_rank(), []
    layout = ringcp.HeadTail(13, mesh.size())
    tensors = [layout.shard(x, rank, 2) for x in whole(Case(13), 1)]
    how = {"mesh": mesh, "layout": layout, "dropout_p": P, "kernel": "reference", "return_lse": True}
    attend = functools.partial(ringcp.attention, **how)

    def two_layers(q, k, v, call):
        torch.manual_seed(40 + rank)
        first, _ = call(attend, q, k, v)
        torch.rand(3)
        return call(attend, first, k, v)

    want = results(tensors, functools.partial(two_layers, call=lambda f, *x: f(*x)))
    for reentrant in (False, True):
        again = functools.partial(checkpoint, use_reentrant=reentrant)
        q, k, v, dout, dlse = tensors
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = two_layers(*leaves, again)
        torch.autograd.backward((out, lse), (dout, dlse))
        got = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True))}
        found += differences(f"reentrant={reentrant}", got, {name: want[name] for name in got})
    return found


def test_checkpoints_drop_the_same_again(worlds):
    assert_none(worlds(2).run(check_checkpoints))


def compiled(mesh):
    """In one graph, with the generator of eager: its numbers."""
    layout, rank = ringcp.HeadTail(21, mesh.size()), mesh.get_local_rank()
    tensors = [layout.shard(x, rank, 2) for x in whole(Case(21), 1, torch.float32)]
    how = {"mesh": mesh, "mask": ringcp.Causal(), "layout": layout, "kernel": "reference", "return_lse": True}

    def attend(q, k, v):
        return ringcp.attention(q, k, v, dropout_p=P, **how)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        torch._dynamo.reset()
        found = []
        for call in (torch.compile(attend, fullgraph=True, backend="aot_eager"), attend):
            torch.manual_seed(20 + rank)
            found.append([results(tensors, call) for _ in range(2)])
    for got, want in zip(*found, strict=True):
        for name, x in got.items():
            torch.testing.assert_close(x, want[name], rtol=1e-6, atol=1e-6)
    return bool((found[0][0]["out"] != found[0][1]["out"]).any())


def test_compiled(worlds):
    assert all(worlds(2).run(compiled))


def compiled_checkpoint(mesh):
    """Out is linear in v, with the weights that were kept: ``sum(out) = sum(v * dv)``, if dv is of the same ones."""
    layout, rank = ringcp.HeadTail(21, mesh.size()), mesh.get_local_rank()
    q, k, v = (layout.shard(x, rank, 2).requires_grad_() for x in whole(Case(21, heads="mha"), 1)[:3])
    attend = functools.partial(ringcp.attention, mesh=mesh, layout=layout, dropout_p=P, kernel="reference")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        torch._dynamo.reset()
        again = torch.compile(
            lambda *x: checkpoint(attend, *x, use_reentrant=False), fullgraph=True, backend="aot_eager"
        )
        torch.manual_seed(rank)
        out = again(q, k, v)
        torch.manual_seed(99)  # what is recomputed has nothing to do with it
        (dv,) = torch.autograd.grad(out.sum(), v)
    return torch.stack([out.detach().sum(), (dv * v.detach()).sum()])


def test_compiled_checkpoints_drop_the_same_again(worlds):
    of_out, of_v = sum(worlds(2).run(compiled_checkpoint)).tolist()
    assert abs(of_out - of_v) < 1e-10


# --- refusals

WRONG = [1.0, 1, -0.1, math.nan, True, "0.1", torch.tensor([0.1, 0.2]), None]


def refused(mesh):
    """Each on every rank, whenever they vote, and the next call works."""
    layout, said = ringcp.HeadTail(12, mesh.size()), []
    tensors = whole(Case(12), 1)[:3]
    q, k, v = (layout.shard(x, mesh.get_local_rank(), 2) for x in tensors)
    call = functools.partial(ringcp.attention, q, k, v, mesh=mesh, layout=layout)
    for dropout_p in WRONG:
        for way in (
            call,
            functools.partial(call, agree="context"),
            lambda dropout_p: in_process(*tensors, world_size=2, dropout_p=dropout_p),
        ):
            with pytest.raises(ringcp.ArgumentError) as info:
                way(dropout_p=dropout_p)
            said.append(str(info.value))
    own = (mesh.get_local_rank() + 1) / 10
    for agree in ("call", "context"):
        with pytest.raises(ringcp.AgreementError, match=r"dropout_p=0\.2, not dropout_p=0\.1"):
            call(dropout_p=own, agree=agree, kernel="reference")
    for kernel in ("auto", "sdpa", "sdpa_flash_cpu"):
        with pytest.raises(ringcp.UnsupportedError, match=r'no dropout.*Pass kernel="reference"'):
            call(dropout_p=0.1, kernel=kernel)
    joint = ringcp.Joint(replicated=1, rest=ringcp.Contiguous(10, mesh.size()))
    with pytest.raises(ringcp.UnsupportedError, match=r"^dropout_p: expected 0\.0 in joint attention"):
        call(dropout_p=0.1, kernel="reference", layout=joint)
    assert torch.isfinite(call(dropout_p=0.1, kernel="reference")).all()
    return said


def test_refused_on_every_rank(worlds):
    for said in worlds(2).run(refused):
        assert len(said) == 3 * len(WRONG)
        for text in said:
            assert text.startswith("dropout_p: expected a number from 0 to below 1, got ")
            assert text.endswith("; pass 0.0 for no dropout")
