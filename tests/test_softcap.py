"""Softcap: scores through ``C * tanh(score / C)`` before the mask, in every mode, through every way to call."""

import functools
import itertools
import math
import warnings

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from cases import Case, assert_none, differences, mask_of, whole
from pairwise_cases import NAMES, results
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import ringcp
from ringcp.kernels.base import Form
from ringcp.kernels.operands import allowed
from ringcp.kernels.reference import Reference
from ringcp.testing import in_process, reference_attention

CAP = 1.3  # among the scores, so that it bends them


def oracle(q: Tensor, k: Tensor, v: Tensor, mask, sinks=None, softcap=CAP) -> tuple[Tensor, Tensor]:
    """The definition, written as Gemma 2's eager attention and gpt-oss's have it: the sink comes after the cap."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = torch.tanh(scores / softcap) * softcap
    dense = (ringcp.Full() if mask is None else mask).dense(*(torch.arange(x.shape[2]) for x in (q, k)))
    scores = scores.masked_fill(~dense, -math.inf)
    if sinks is None:
        dead = ~dense.expand(scores.shape).any(-1)
        probs = scores.masked_fill(dead[..., None], 0.0).softmax(-1).masked_fill(dead[..., None], 0.0)
        return probs @ v, scores.masked_fill(dead[..., None], 0.0).logsumexp(-1).masked_fill(dead, -math.inf)
    scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., :-1] @ v, scores.logsumexp(-1)


MASKS = ("full", "causal", "window_3", "two_sided", "documents", "documents_window", "prefix", "padding", "chunked")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "mode, degree", [("ring", None), ("gather", None), ("gather", 2), ("ulysses", None), ("usp", 2)]
)
@pytest.mark.parametrize("world_size", [2, 4])
def test_exact_in_process(mode, degree, world_size):
    if degree == world_size:
        degree = None if mode == "gather" else degree
    found = []
    layouts = itertools.cycle(("head_tail", "contiguous", "striped"))
    for mask, heads, layout in zip(MASKS, itertools.cycle(("gqa", "mqa", "wide_v", "mha")), layouts, strict=False):
        case = Case(29, mask, layout, "gqa" if mask in ("documents", "prefix", "padding") else heads)
        tensors, made = whole(case, world_size), mask_of(case)
        how = {"mode": mode, "ulysses_degree": degree, "layout": layout, "world_size": world_size, "return_lse": True}
        got = results(tensors, functools.partial(in_process, mask=made, softcap=CAP, **how))
        found += differences(f"{mode} {case}", got, results(tensors, functools.partial(oracle, mask=made)))
    assert_none([found])


def test_a_sink_is_not_capped():
    case = Case(19, "causal", heads="gqa")
    tensors, sinks = whole(case, 3), torch.tensor([-3.0, 0.0, 2 * CAP, 9.0, 1.0, 0.5, -1.0, 4.0], dtype=torch.float64)
    mask = ringcp.Causal()
    how = {"world_size": 3, "mask": mask, "softcap": CAP, "return_lse": True}
    got = results(tensors, lambda q, k, v: in_process(q, k, v, sinks=sinks, **how))
    assert_none([differences("sinks", got, results(tensors, lambda q, k, v: oracle(q, k, v, mask, sinks)))])


def test_a_huge_cap_is_none_and_a_small_one_bounds_the_lse():
    q, k, v, *_ = whole(Case(17, "full"), 2)
    q = q * 30
    plain, capped = (in_process(q, k, v, world_size=2, softcap=c, return_lse=True) for c in (None, 1e9))
    assert_none([differences("huge", dict(zip("ol", capped, strict=True)), dict(zip("ol", plain, strict=True)))])
    _, lse = in_process(q, k, v, world_size=2, softcap=0.5, return_lse=True)
    assert (lse <= math.log(17) + 0.5).all()
    assert plain[1].max() > math.log(17) + 0.5


def test_the_oracles_agree_with_flex_attention():
    """Torch's own, told to cap: the cap is on the scaled scores, and before the mask."""
    case = Case(16, "causal", heads="mha")
    q, k, v, *_ = whole(case, 1)

    def cap(score, *_):
        return CAP * torch.tanh(score / CAP)

    block = torch.nn.attention.flex_attention.create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it wants to be compiled
        want = flex_attention(q, k, v, score_mod=cap, block_mask=block)
    for name, out in (
        ("reference_attention", reference_attention(q, k, v, mask=ringcp.Causal(), softcap=CAP)[0]),
        ("oracle", oracle(q, k, v, ringcp.Causal())[0]),
    ):
        assert (out - want).abs().max() < 1e-10, name


def test_the_reference_kernel_keeps_infinite_scores_out_of_the_gradient():
    """Masked scores, keys of huge norm, and rows that are told that they attend to nothing."""
    generator = torch.Generator().manual_seed(2)
    q, k, v, dout = (torch.randn(1, 2, 6, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    k[:, :, 4] *= 1e200
    lse = torch.full((1, 2, 6), math.inf, dtype=torch.float64)
    how = {"form": Form(lo=0, hi=2), "scale": 0.5, "softcap": CAP}
    out, real = Reference().forward(q, k, v, **how)
    assert torch.isfinite(out).all()
    for each in (real, lse):
        for grad in Reference().backward(dout, q, k, v, out, each, None, **how):
            assert torch.isfinite(grad[:, :, :4]).all()
    assert all((x == 0).all() for x in Reference().backward(dout, q, k[:, :, :6] * 0, v, out, lse, None, **how))
    assert allowed(6, 6, how["form"], torch.device("cpu")).sum() == 15


# --- over ranks


def check_every_way(mesh):
    """`attention`, with sinks and replicated tokens, `attention_varlen`, `context_parallel`: exact on each rank."""
    rank, found = mesh.get_local_rank(), []
    case = Case(23, "causal", heads="gqa")
    layout, tensors, mask = ringcp.HeadTail(23, mesh.size()), whole(case, 1), ringcp.Causal()
    sinks = torch.linspace(-2, 4, 8, dtype=torch.float64)
    local = [layout.shard(x, rank, 2) for x in tensors]
    for given in (None, sinks):
        for mode in ("ring", "gather", "ulysses"):
            how = {"mesh": mesh, "mask": mask, "layout": layout, "mode": mode, "sinks": given, "return_lse": True}
            got = results(local, lambda q, k, v, how=how: ringcp.attention(q, k, v, softcap=CAP, **how))
            want = results(tensors, lambda q, k, v, given=given: oracle(q, k, v, mask, given))
            found += differences(f"{mode}", got, {name: layout.shard(x, rank, 2) for name, x in want.items()})

    joint = ringcp.Joint(replicated=5, rest=ringcp.Contiguous(18, mesh.size()))
    q, k, v = (joint.shard(x, rank, 2) for x in tensors[:3])
    out = ringcp.attention(q, k, v, mesh=mesh, layout=joint, softcap=CAP)
    found += differences("joint", {"out": out}, {"out": joint.shard(oracle(*tensors[:3], None)[0], rank, 2)})

    packed = ringcp.Documents([9, 14]) & mask
    q, k, v = (x[0].transpose(0, 1) for x in local[:3])
    out = ringcp.attention_varlen(q, k, v, cu_seqlens=[0, 9, 23], mesh=mesh, mask=mask, layout=layout, softcap=CAP)
    want = layout.shard(oracle(*(x[:1] for x in tensors[:3]), packed)[0], rank, 2)
    found += differences("varlen", {"out": out.transpose(0, 1)[None]}, {"out": want})

    whole_leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    with ringcp.context_parallel(mesh, buffers=whole_leaves, buffer_seq_dims=[2] * 3, softcap=CAP) as context:
        assert context.options.softcap == CAP
        out = F.scaled_dot_product_attention(*whole_leaves, is_causal=True, enable_gqa=True)
        out.backward(layout.shard(tensors.dout, rank, 2))
    got = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), (x.grad for x in whole_leaves), strict=True))}
    want = results([*tensors[:4], tensors.dlse * 0], lambda q, k, v: oracle(q, k, v, mask))
    want["out"] = layout.shard(want["out"], rank, 2)
    return found + differences("context", got, {name: want[name] for name in got})


def test_exact_over_ranks(worlds):
    assert_none(worlds(2).run(check_every_way))


def compiled(mesh):
    """Compiled in one graph: the numbers of eager, for one cap and another."""
    layout = ringcp.HeadTail(21, mesh.size())
    tensors = [layout.shard(x, mesh.get_local_rank(), 2) for x in whole(Case(21), 1, torch.float32)]

    def attend(q, k, v, softcap):
        return ringcp.attention(
            q, k, v, mesh=mesh, mask=ringcp.Causal(), layout=layout, softcap=softcap, return_lse=True
        )

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        torch._dynamo.reset()
        fast = torch.compile(attend, fullgraph=True, backend="aot_eager")
        for softcap in (CAP, 2.5, None):
            got, want = (results(tensors, lambda q, k, v, f=f, c=softcap: f(q, k, v, c)) for f in (fast, attend))
            for name in NAMES:
                torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=1e-6)
    return True


def test_compiled(worlds):
    assert all(worlds(2).run(compiled))


# --- refusals

WRONG = [0.0, -1.0, math.inf, math.nan, True, "30", torch.tensor(30.0)]


def refused(mesh):
    layout, said = ringcp.HeadTail(12, mesh.size()), []
    tensors = whole(Case(12), 1)[:3]
    q, k, v = (layout.shard(x, mesh.get_local_rank(), 2) for x in tensors)

    def in_context(softcap):
        with ringcp.context_parallel(mesh, softcap=softcap):
            pass

    for softcap in WRONG:
        for call in (
            lambda c: ringcp.attention(q, k, v, mesh=mesh, layout=layout, softcap=c),
            in_context,
            lambda c: in_process(*tensors, world_size=2, softcap=c),
        ):
            with pytest.raises(ringcp.ArgumentError) as info:
                call(softcap)
            said.append(str(info.value))
    own = CAP + mesh.get_local_rank()
    for call in (lambda: ringcp.attention(q, k, v, mesh=mesh, layout=layout, softcap=own), lambda: in_context(own)):
        with pytest.raises(ringcp.AgreementError, match=r"softcap=2\.3, not softcap=1\.3"):
            call()
    with pytest.raises(ringcp.UnsupportedError) as info:
        ringcp.attention(q, k, v, mesh=mesh, layout=layout, softcap=CAP, kernel="sdpa")
    assert torch.isfinite(ringcp.attention(q, k, v, mesh=mesh, layout=layout, softcap=30)).all()
    return said, str(info.value)


def test_refused_on_every_rank(worlds):
    for said, unsupported in worlds(2).run(refused):
        assert len(said) == 3 * len(WRONG)
        for text in said:
            assert text.startswith("softcap: expected a positive number or None, got ")
            assert text.endswith("; pass None for scores without a cap")
        assert "a softcap" in unsupported
        assert "sdpa_flash_cpu: no softcap. Pass" in unsupported
