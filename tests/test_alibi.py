"""ALiBi: a bias by distance, on positions of the whole sequence, through every way to call. Modes are in the matrix."""

import functools
import warnings

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from cases import Case, assert_none, differences, whole
from pairwise_cases import oracle, results, slopes_of
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import flex_attention

import ringcp
from ringcp.kernels.base import Form
from ringcp.kernels.pairwise import Alibi
from ringcp.kernels.reference import Reference
from ringcp.kernels.sdpa_cpu import SdpaFlashCpu
from ringcp.sinks import fold_sinks
from ringcp.testing import assert_close, in_process, reference_attention

CAP = 1.3


def test_the_oracles_agree_with_flex_attention():
    """Torch's own, told the bias of flash-attn's README: the cap comes before it."""
    q, k, v, *_ = whole(Case(16, "causal", heads="mha"), 1)
    slopes = slopes_of(Case(16, heads="mha"))

    def biased(score, b, h, i, j):
        return CAP * torch.tanh(score / CAP) - slopes[h].double() * (i - j).abs()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it wants to be compiled
        want = flex_attention(q, k, v, score_mod=biased)
    given = {"softcap": CAP, "mask": None}
    assert (oracle(q, k, v, slopes=slopes, **given)[0] - want).abs().max() < 1e-10
    assert (reference_attention(q, k, v, alibi_slopes=slopes, **given)[0] - want).abs().max() < 1e-10


def test_slopes_of_zero_change_nothing_and_distances_are_global():
    case = Case(24, "full", heads="gqa")
    q, k, v, *_ = whole(case, 3)
    plain, zero, far = (
        in_process(q, k, v, world_size=3, layout="striped", alibi_slopes=slopes)
        for slopes in (None, torch.zeros(8), torch.full((8,), 1e4))
    )
    assert_close(zero, plain)
    assert_close(far, v.repeat_interleave(4, 1))  # all but the token itself are too far away


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_distances_keep_their_digits_in_half_precision(dtype):
    """A bias near -300 in 8 bits would be off by 1: as near to fp64 as without a bias."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 64, 8, generator=generator).to(dtype) for _ in range(4))
    rows, keys = torch.arange(600, 664), torch.arange(64)
    alibi, how = Alibi(torch.tensor([[0.5, 0.03]]), rows, keys), {"form": Form(), "scale": 0.3}
    exact = [x.double() for x in (q, k, v)]
    want_out, want_lse = Reference().forward(*exact, **how, alibi=alibi)
    want = Reference().backward(dout.double(), *exact, want_out, want_lse, None, **how, alibi=alibi)
    out, lse = SdpaFlashCpu().forward(q, k, v, **how, alibi=alibi)
    got = SdpaFlashCpu().backward(dout, q, k, v, out, lse, None, **how, alibi=alibi)
    assert (lse - want_lse).abs().max() < 1e-4
    for mine, real in zip((out, *got), (want_out, *want), strict=True):
        assert (mine - real).abs().max() < 4 * torch.finfo(dtype).eps * real.abs().max()


@pytest.mark.parametrize("form", [Form(), Form(lo=0), Form(lo=-4), Form(lo=-2, hi=3), Form(hi=6)])
@pytest.mark.parametrize("limit", [1, 200, 1 << 20])
def test_a_large_bias_is_made_for_some_rows_at_a_time(monkeypatch, form, limit):
    monkeypatch.setattr("ringcp.kernels.sdpa_cpu._BIAS_ELEMENTS", limit)
    generator = torch.Generator().manual_seed(1)
    m = n = 11
    q, k, v, dout, dlse = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((2, 4, m, 5), (2, 2, n, 5), (2, 2, n, 3), (2, 4, m, 3), (2, 4, m))
    )
    allowed = torch.rand(2, 1, m, n, generator=generator) > 0.3
    alibi = Alibi(torch.rand(2, 4, generator=generator), torch.arange(m) * 2 + 5, torch.arange(n))
    for pairs in (None, allowed):
        how = {"form": form, "scale": 0.4, "alibi": alibi, "allowed": pairs}
        out, lse = Reference().forward(q, k, v, **how)
        safe = lse.masked_fill(lse == -torch.inf, torch.inf)
        want = [out, lse, *Reference().backward(dout, q, k, v, out, safe, dlse, **how)]
        got = SdpaFlashCpu().forward(q, k, v, **how)
        got = [*got, *SdpaFlashCpu().backward(dout, q, k, v, out, safe, dlse, **how)]
        for x, y in zip(got, want, strict=True):
            assert_close(x, y)


# --- over ranks


class Attend(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def check_every_way(mesh):
    """`attention` with a softcap and sinks, `attention_varlen`, `context_parallel`, `ContextParallel`: exact."""
    rank, found = mesh.get_local_rank(), []
    case = Case(23, "causal", heads="gqa")
    layout, tensors, mask = ringcp.HeadTail(23, mesh.size()), whole(case, 1), ringcp.Causal()
    slopes, sinks = slopes_of(case, each_row=True), torch.linspace(-2, 4, 8, dtype=torch.float64)
    local = [layout.shard(x, rank, 2) for x in tensors]
    how = {"mesh": mesh, "layout": layout, "alibi_slopes": slopes}

    def capped(q, k, v):
        return ringcp.attention(q, k, v, mask=mask, softcap=CAP, sinks=sinks, return_lse=True, **how)

    want = results(tensors, lambda q, k, v: fold_sinks(*oracle(q, k, v, mask, slopes=slopes, softcap=CAP), sinks))
    found += differences("capped", results(local, capped), {name: layout.shard(x, rank, 2) for name, x in want.items()})

    q, k, v = (x[0].transpose(0, 1) for x in local[:3])
    for given in (slopes[0], slopes[:1]):
        row = {**how, "alibi_slopes": given}
        out = ringcp.attention_varlen(q, k, v, cu_seqlens=[0, 9, 23], mask=mask, **row)
        packed = oracle(*(x[:1] for x in tensors[:3]), ringcp.Documents([9, 14]) & mask, slopes=slopes[:1])[0]
        found += differences("varlen", {"out": out.transpose(0, 1)[None]}, {"out": layout.shard(packed, rank, 2)})

    want = results([*tensors[:4], tensors.dlse * 0], functools.partial(oracle, mask=mask, slopes=slopes))
    module = parallelize_module(Attend(), mesh, ringcp.ContextParallel(layout=layout, alibi_slopes=slopes))
    found += differences("module", {"out": module(*local[:3])}, {"out": layout.shard(want["out"], rank, 2)})

    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    with ringcp.context_parallel(mesh, buffers=leaves, buffer_seq_dims=[2] * 3, alibi_slopes=slopes):
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        out.backward(layout.shard(tensors.dout, rank, 2))
    got = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True))}
    want["out"] = layout.shard(want["out"], rank, 2)
    return found + differences("context", got, {name: want[name] for name in got})


def test_exact_every_way(worlds):
    assert_none(worlds(2).run(check_every_way))


def compiled(mesh):
    """In one graph: the numbers of eager, and no other graph for other slopes."""
    layout = ringcp.HeadTail(21, mesh.size())
    tensors = [layout.shard(x, mesh.get_local_rank(), 2) for x in whole(Case(21), 1, torch.float32)]

    def attend(q, k, v, slopes):
        how = {"mesh": mesh, "mask": ringcp.Causal(), "layout": layout, "return_lse": True}
        return ringcp.attention(q, k, v, alibi_slopes=slopes, **how)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        fast = torch.compile(attend, fullgraph=True, backend=counter)
        for slopes in (slopes_of(Case(21)), torch.zeros(8)):
            got, want = (results(tensors, functools.partial(f, slopes=slopes)) for f in (fast, attend))
            for name, x in got.items():
                torch.testing.assert_close(x, want[name], rtol=1e-6, atol=1e-6)
    return counter.frame_count


def test_compiled(worlds):
    assert worlds(2).run(compiled) == [1, 1]


# --- refusals

WRONG = [
    torch.ones(8).double(),
    torch.ones(2),
    torch.ones(3, 8),
    torch.ones(1, 8, 1),
    torch.ones(8).long(),
    [0.5] * 8,
    0.5,
]


def refused(mesh):
    """Each on every rank, and the next call works."""
    layout, said = ringcp.HeadTail(12, mesh.size()), []
    tensors = whole(Case(12), 1)[:3]
    q, k, v = (layout.shard(x, mesh.get_local_rank(), 2) for x in tensors)
    call = functools.partial(ringcp.attention, q, k, v, mesh=mesh, layout=layout)

    def in_context(slopes):
        with ringcp.context_parallel(mesh, alibi_slopes=slopes, layout=layout):
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    for slopes in WRONG:
        ways = (call, lambda alibi_slopes: in_process(*tensors, world_size=2, alibi_slopes=alibi_slopes))
        for way in ways:
            with pytest.raises(ringcp.ArgumentError) as info:
                way(alibi_slopes=slopes)
            said.append(str(info.value))
        with pytest.raises(ringcp.ArgumentError, match=r"^alibi_slopes: expected a float32 tensor"):
            in_context(slopes)
    learned = torch.ones(8, requires_grad=True)
    for way in (lambda: call(alibi_slopes=learned), lambda: in_context(learned)):
        with pytest.raises(ringcp.ArgumentError, match=r"need no gradient, .*; pass alibi_slopes\.detach\(\)$"):
            way()
    with torch.no_grad():
        assert torch.isfinite(call(alibi_slopes=learned)).all()
    own = torch.full((8,), 0.5 + mesh.get_local_rank())
    for way in (lambda: call(alibi_slopes=own), lambda: in_context(own)):
        with pytest.raises(ringcp.AgreementError, match=r"alibi_slopes=\(8,\) with signature \d+ of their values, not"):
            way()
    cross = {"kv_layout": layout}, {"layout": ringcp.Joint(replicated=1, rest=ringcp.Contiguous(10, mesh.size()))}
    for given in cross:
        with pytest.raises(ringcp.UnsupportedError, match=r"^alibi_slopes: expected None in cross-attention"):
            call(alibi_slopes=torch.ones(8), **given)
    assert torch.isfinite(call(alibi_slopes=torch.ones(8))).all()
    return said


def test_refused_on_every_rank(worlds):
    for said in worlds(2).run(refused):
        assert len(said) == 2 * len(WRONG)
        for text in said:
            assert text.startswith("alibi_slopes: expected a float32 tensor of one slope for each query head, ")
            assert text.endswith("; pass slopes of shape (Hq,) or (B, Hq), .float()")
