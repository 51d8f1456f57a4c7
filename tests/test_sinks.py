"""Attention sinks: a logit a head in every softmax, folded in once, with the whole gradient."""

import functools
import itertools
import warnings

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from cases import LAYOUTS, MASKS_OF, Case, assert_none, differences, mask_of, restride, whole
from torch import Tensor

import ringcp
from ringcp.layout import layout_named
from ringcp.sinks import fold_sinks
from ringcp.testing import assert_close

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
INF = torch.inf


def oracle(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: ringcp.Mask | None) -> tuple[Tensor, Tensor]:
    """The definition: one more column of scores, and its probability thrown away."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    positions = torch.arange(q.shape[2])
    dense = (ringcp.Full() if mask is None else mask).dense(positions, positions)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~dense, -INF)
    scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1).to(scores.dtype)], -1)
    return scores.softmax(-1)[..., :-1] @ v, scores.logsumexp(-1)


def results(tensors, sinks: Tensor, attend, *, both: bool = True) -> dict[str, Tensor]:
    q, k, v, dout, dlse = tensors
    leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
    out, lse = attend(*leaves)
    upstream = ((out, lse), (dout, dlse)) if both else ((out,), (dout,))
    grads = torch.autograd.grad(upstream[0], leaves, upstream[1])
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


def logits(heads: int) -> Tensor:
    """One of each kind: far below the scores, among them, above them, far above."""
    return torch.tensor([-30.0, 0.3, 2.0, 30.0, -1.0, 0.0, 5.0, 1.0], dtype=torch.float64)[:heads]


def check_exact(mesh, cases):
    """Out, lse and gradients on each rank; that of the sinks is of the rank's own rows."""
    rank, found = mesh.get_local_rank(), []
    for case in cases:
        layout, mask = layout_named(case.layout, case.seq_len, mesh.size()), mask_of(case)
        tensors = whole(case, mesh.size())
        sinks, both = logits(tensors.q.shape[1]), case.upstream == "both"
        own = torch.zeros(case.seq_len, dtype=torch.float64).index_fill_(0, layout.positions(rank), 1.0)
        mine = tensors._replace(dout=tensors.dout * own[:, None], dlse=tensors.dlse * own)
        want = results(tensors, sinks, lambda *x, mask=mask: oracle(*x, mask), both=both)
        want = {name: layout.shard(x, rank, 2) for name, x in want.items() if name != "dsinks"}
        want["dsinks"] = results(mine, sinks, lambda *x, mask=mask: oracle(*x, mask), both=both)["dsinks"]

        def attend(q, k, v, sinks, mask=mask, layout=layout, kernel=case.kernel):
            options = {"mesh": mesh, "mask": mask, "layout": layout, "kernel": kernel, "return_lse": True}
            return ringcp.attention(q, k, v, sinks=sinks, **options)

        local = type(tensors)(*(restride(layout.shard(x, rank, 2), case.strides) for x in tensors))
        found += differences(f"rank {rank}, {case}", results(local, sinks, attend, both=both), want)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.report("1.65")
def test_exact(worlds, world_size):
    inputs = ("gaussian", "dominating_key", "far_scores")
    kinds = itertools.product((29, 29, 2), inputs, ("both", "out"), ("auto", "reference"), ("dense", "as_BSHD"))
    kinds = itertools.islice(itertools.cycle(kinds), 0, None, 11)  # coprime to their number: neighbours differ
    masks = itertools.product(("full", "causal", "window_3", *MASKS_OF), LAYOUTS, range(2))
    cases = [
        Case(seq_len, mask, layout, "gqa", inputs, strides, upstream, kernel)
        for (mask, layout, _), (seq_len, inputs, upstream, kernel, strides) in zip(masks, kinds, strict=False)
    ]
    assert_none(worlds(world_size).run(check_exact, cases))


def check_half(mesh, structure):
    """This rank's results, in bf16, of q, k, v and sinks in bf16."""
    case = Case(203, "causal", "head_tail", "gqa", structure)
    layout, tensors = layout_named("head_tail", 203, mesh.size()), whole(case, 1, torch.bfloat16)
    tensors = tensors._replace(dlse=tensors.dlse.float())
    local = type(tensors)(*(layout.shard(x, mesh.get_local_rank(), 2) for x in tensors))

    def attend(q, k, v, sinks):
        return ringcp.attention(q, k, v, mesh=mesh, mask=ringcp.Causal(), layout=layout, sinks=sinks, return_lse=True)

    got = results(local, logits(8).bfloat16(), attend)
    assert got["out"].dtype == got["dsinks"].dtype == torch.bfloat16
    assert got["lse"].dtype == torch.float32
    gathered = {name: ringcp.unshard(x, mesh, dim=2, layout=layout) for name, x in got.items() if name != "dsinks"}
    return {**gathered, "dsinks": ringcp.all_gather(got["dsinks"][None].float(), mesh, dim=0).sum(0).bfloat16()}


@pytest.mark.parametrize("structure", ["gaussian", "outlier_channel"])
def test_half_precision_against_one_process(worlds, structure):
    tensors = whole(Case(203, "causal", "head_tail", "gqa", structure), 1, torch.bfloat16)
    doubled = type(tensors)(*(x.double() for x in tensors))
    want = results(doubled, logits(8).bfloat16().double(), lambda *x: oracle(*x, ringcp.Causal()))
    (baseline,) = worlds(1).run(check_half, structure)
    for got in worlds(4).run(check_half, structure):
        for name in NAMES:
            assert_close(got[name], want[name], baseline=baseline[name], name=name)


def check_nothing_to_see(mesh):
    """Rows that attend to nothing: out 0, the sink for an lse; pads may hold NaN, in their dout too."""
    rank, seq_len, sinks = mesh.get_local_rank(), 11, logits(4)
    layout = layout_named("head_tail", seq_len, mesh.size())
    tensors = whole(Case(seq_len, heads="wide_v"), 1)
    mask, pad = ringcp.Padding([6]) & ringcp.Causal(), (torch.arange(seq_len) >= 6)
    tensors = tensors._replace(dlse=tensors.dlse.masked_fill(pad, 0.0))
    clean = [x.masked_fill(pad[:, None], 0.0) for x in tensors[:4]]
    want = results([*clean, tensors.dlse], sinks, lambda *x: oracle(*x, mask))
    dirty = [x.masked_fill(pad[:, None], torch.nan) for x in tensors[:4]]

    def attend(q, k, v, sinks):
        return ringcp.attention(q, k, v, mesh=mesh, mask=mask, layout=layout, sinks=sinks, return_lse=True)

    got = results([layout.shard(x, rank, 2) for x in (*dirty, tensors.dlse)], sinks, attend)
    dsinks = ringcp.all_gather(got["dsinks"][None], mesh, dim=0).sum(0)
    own_pads = layout.shard(pad[None, None].expand(1, 4, -1), rank, 2)
    want = {name: x if name == "dsinks" else layout.shard(x, rank, 2) for name, x in want.items()}
    found = differences(f"rank {rank}", {**got, "dsinks": dsinks}, want)
    if not torch.equal(got["lse"][own_pads], sinks[None, :, None].expand_as(got["lse"])[own_pads]):
        found.append("the lse of a row that attends to nothing is not its sink")
    zero = [(got[name][..., 0] == 0)[..., layout.shard(pad[None], rank, 1)[0]] for name in ("out", "dq", "dk", "dv")]
    return found if all(bool(x.all()) for x in zero) else [*found, f"rank {rank}: not zero on pads"]


@pytest.mark.parametrize("world_size", [1, 3])
def test_rows_that_attend_to_nothing(worlds, world_size):
    assert_none(worlds(world_size).run(check_nothing_to_see))


def check_no_sink(mesh):
    """A sink of -inf is none: the same results as without, also in rows that attend to nothing; gradient 0."""
    case = Case(14, "padding", "striped", "gqa")
    layout, mask, tensors = ringcp.Striped(14, mesh.size()), mask_of(case), whole(case, 1)
    local = [layout.shard(x, mesh.get_local_rank(), 2) for x in tensors]
    attend = functools.partial(ringcp.attention, mesh=mesh, mask=mask, layout=layout, return_lse=True)
    q, k, v = (x.clone().requires_grad_() for x in local[:3])
    plain = attend(q, k, v)
    want = [*plain, *torch.autograd.grad(plain, (q, k, v), local[3:])]
    got = results(local, torch.full((8,), -INF).double(), lambda q, k, v, sinks: attend(q, k, v, sinks=sinks))
    found = differences(
        "-inf", {name: x for name, x in got.items() if name != "dsinks"}, dict(zip(NAMES[:5], want, strict=True))
    )
    return found if torch.equal(got["dsinks"], torch.zeros(8).double()) else [*found, f"dsinks {got['dsinks']}"]


def test_a_sink_of_minus_infinity_is_none(worlds):
    assert_none(worlds(2).run(check_no_sink))


def check_only_sinks(mesh):
    """Only the sinks are trained; and nothing at all is."""
    layout = ringcp.HeadTail(13, mesh.size())
    q, k, v, dout, _ = (layout.shard(x, mesh.get_local_rank(), 2) for x in whole(Case(13), 1))
    attend = functools.partial(ringcp.attention, q, k, v, mesh=mesh, mask=ringcp.Causal(), layout=layout)
    sinks = logits(8).requires_grad_()
    out = attend(sinks=sinks)
    (dsinks,) = torch.autograd.grad(out, sinks, dout)
    every = results([q, k, v, dout, dout[..., 0]], logits(8), lambda q, k, v, sinks: ringcp.attention(
        q, k, v, mesh=mesh, mask=ringcp.Causal(), layout=layout, sinks=sinks, return_lse=True), both=False)  # fmt: skip
    with torch.no_grad():
        silent = attend(sinks=sinks)
    assert torch.equal(silent, out.detach())
    assert not silent.requires_grad
    return differences("only sinks", {"dsinks": dsinks}, {"dsinks": every["dsinks"]})


def test_only_sinks_need_gradients(worlds):
    assert_none(worlds(2).run(check_only_sinks))


def test_gradcheck():
    generator = torch.Generator().manual_seed(1)
    out, lse, sinks = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 3, 4, 5), (2, 3, 4), (3,))
    )
    assert torch.autograd.gradcheck(fold_sinks, (out, lse, sinks))
    far = torch.tensor([-900.0, 900.0, 0.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(fold_sinks, (out, lse, far))


def test_half_precision_out_stays_half_precision():
    out, lse = fold_sinks(torch.ones(1, 2, 3, 4).bfloat16(), torch.zeros(1, 2, 3), torch.zeros(2).bfloat16())
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert (out == 0.5).all()
    torch.testing.assert_close(lse, torch.full((1, 2, 3), 2.0).log())


def compiled(mesh):
    """Compiled, in one graph: the bits of eager, and no other graph for other sinks."""
    layout = ringcp.HeadTail(21, mesh.size())
    tensors = [layout.shard(x, mesh.get_local_rank(), 2) for x in whole(Case(21), 1, torch.float32)]

    def attend(q, k, v, sinks):
        return ringcp.attention(q, k, v, mesh=mesh, mask=ringcp.Causal(), layout=layout, sinks=sinks, return_lse=True)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        fast = torch.compile(attend, fullgraph=True, backend=counter)
        for sinks in (logits(8).float(), torch.zeros(8)):
            got, want = results(tensors, sinks, fast), results(tensors, sinks, attend)
            for name in NAMES:
                torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=1e-6)
    return counter.frame_count


def test_compiled(worlds):
    assert worlds(2).run(compiled) == [1, 1]


def refused(mesh):
    layout, said = ringcp.HeadTail(12, mesh.size()), []
    q, k, v = (layout.shard(x, mesh.get_local_rank(), 2) for x in whole(Case(12), 1)[:3])
    for sinks in (torch.zeros(2), torch.zeros(8, 1), torch.zeros(8).long(), [0.0] * 8):
        with pytest.raises(ringcp.ArgumentError) as info:
            ringcp.attention(q, k, v, mesh=mesh, layout=layout, sinks=sinks)
        said.append(str(info.value))
    with pytest.raises(ringcp.RingcpError) as info:
        ringcp.attention(q, k, v, mesh=mesh, layout=layout, sinks=torch.zeros(8 - mesh.get_local_rank()))
    assert torch.isfinite(ringcp.attention(q, k, v, mesh=mesh, layout=layout, sinks=torch.zeros(8))).all()
    return [*said, str(info.value)]


def test_sinks_of_other_heads_are_refused_on_every_rank(worlds):
    for said in worlds(2).run(refused):
        for text in said:
            assert "sinks: expected a floating tensor of one logit for each query head, (8,), got " in text
            assert "; pass sinks of shape (Hq,)" in text


def test_the_oracle_is_torchs_attention_with_one_more_key():
    """A key whose score is the sink, and whose value is 0."""
    q, k, v, _, _ = whole(Case(9, "full", heads="mha"), 1)
    q = F.pad(q, (0, 1), value=1.0)
    sinks, scale = logits(3), 5**-0.5
    k = torch.cat([F.pad(k, (0, 1)), F.pad((sinks / scale)[None, :, None, None], (5, 0))], 2)
    v = F.pad(v, (0, 0, 0, 1))
    want = F.scaled_dot_product_attention(q, k, v, scale=scale)
    torch.testing.assert_close(oracle(*whole(Case(9, "full", heads="mha"), 1)[:3], sinks, None)[0], want)
