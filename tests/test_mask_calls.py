"""Calls with masks of a batch: who agrees on what, what is refused, what a context refuses to guess, and compiling."""

import random
import warnings

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from calls import attend, check_exact, make_call
from cases import packed

import ringcp
from ringcp import Causal, Chunked, Documents, Full, Padding, Prefix, Window
from ringcp.layout import layout_named
from ringcp.testing import assert_close, reference_attention

LONG = [3] * 400
# By case: the masks of two ranks, for a batch of two and 24 tokens, and what each is told of the other.
DIFFERENT = {
    "documents": (
        Documents([3, 9]),
        Documents([3, 10]),
        "mask=Documents([3, 10]), not mask=Documents([3, 9])",
    ),
    "rows": (
        Documents([[3], [4]]),
        Documents([[4], [3]]),
        "mask=Documents([[4], [3]]), not mask=Documents([[3], [4]])",
    ),
    "prefix": (Prefix(3), Prefix([3, 4]), "mask=Prefix([3, 4]), not mask=Prefix(3)"),
    "padding": (Padding([9]), Padding([8]), "mask=Padding([0, 8]), not mask=Padding([0, 9])"),
    "chunks": (Chunked(8) & Causal(), Causal(), "mask=Causal(), not mask=(Chunked(8) & Causal())"),
    "none": (None, Documents([24]), "mask=Documents([24]), not mask=Full()"),
}


def check_different(mesh, ours, theirs):
    call, *_ = make_call(mesh, 24)
    with ringcp.record() as r, pytest.raises(ringcp.AgreementError) as info:
        attend({**call, "mask": theirs if mesh.get_local_rank() == 1 else ours})
    assert r.steps == []
    check_exact(mesh, 24)
    return str(info.value)


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_with_different_masks_are_named(worlds, case):
    ours, theirs, told = DIFFERENT[case]
    for text in worlds(3).run(check_different, ours, theirs):
        assert f"rank 1 made a different call than rank 0: {told}" in text
        assert "Nothing was sent" in text


def check_long(mesh):
    """Of hundreds of documents the text shows the first, and still tells the ranks apart by the last."""
    x = torch.zeros(1, 1, ringcp.HeadTail(1203, mesh.size()).local_len(mesh.get_local_rank()), 4)
    last = [2, 1] if mesh.get_local_rank() else [1, 2]
    with pytest.raises(ringcp.AgreementError) as info:
        ringcp.attention(x, x, x, mesh=mesh, mask=Documents([*LONG, *last]) & Causal())
    ringcp.attention(x, x, x, mesh=mesh, mask=Documents(LONG) & Causal())
    return str(info.value)


def test_documents_that_differ_at_the_end_are_told_apart(worlds):
    for text in worlds(2).run(check_long):
        assert text.count("mask=(Documents([3, 3, 3") == 2
        assert len(text) < 600


# For a batch of two and 24 tokens.
DO_NOT_FIT = {
    "three rows": (Prefix([1, 2, 3]), "expected one entry for each of 2 batch rows, or one for all, got 3 in Prefix("),
    "one too long": (
        Documents([20, 5]),
        "expected documents of at most 24 tokens in all, got 25 in Documents([20, 5])",
    ),
    "a row too long": (Causal() & Documents([[24], [30]]), "expected documents of at most 24 tokens in all, got 30 in"),
    "prefix": (Prefix(25), "expected a prefix of at most 24 tokens, got 25 in Prefix(25)"),
    "padding": (Padding([3, 25]), "expected at most 24 valid tokens, got 25 in Padding("),
    "left": (
        Padding([3], side="left", seq_len=30) | Window(1),
        "expected seq_len=24, the length of the whole sequence, got 30 in (Padding(",
    ),
}


def check_fit(mesh, mask, options):
    call, *_ = make_call(mesh, 24)
    with ringcp.record() as r, pytest.raises(ringcp.LayoutError) as info:
        attend({**call, **options, "mask": mask})
    assert r.steps == []
    check_exact(mesh, 24)
    return str(info.value)


@pytest.mark.parametrize("options", [{}, {"agree": "context", "seq_len": 24}], ids=["vote", "no_vote"])
@pytest.mark.parametrize("case", DO_NOT_FIT)
def test_masks_of_another_batch_are_refused_on_every_rank(worlds, case, options):
    mask, words = DO_NOT_FIT[case]
    for text in worlds(3).run(check_fit, mask, options):
        assert text.startswith(f"mask: {words}")
        assert "; give " in text


def enter(mesh, ids, dim, **options):
    """One attention call in a context whose buffers are q, k, v and `ids`; out, and what it should be."""
    whole = [torch.randn(1, 2, 12, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(3)]
    qkv = [x.clone() for x in whole]
    with ringcp.context_parallel(mesh, buffers=[*qkv, ids], buffer_seq_dims=[2, 2, 2, dim], **options):
        out = F.scaled_dot_product_attention(*qkv, is_causal=True)
        (out,) = ringcp.context_parallel_unshard(mesh, [out], [2])
    mask = options.get("mask")
    assert_close(out, reference_attention(*whole, mask=Causal() if mask is None else mask & Causal())[0])


PACKED_IDS = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3])
OTHER_IDS = torch.tensor([0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
ONE_RUN = torch.arange(12)
# By case: the buffer and its sequence dim.
RESTARTS = {
    "one row": (PACKED_IDS, 0),
    "int32": (PACKED_IDS.int(), -1),
    "int16": (PACKED_IDS.short(), -1),
    "uint8": (PACKED_IDS.byte(), -1),
    "batch": (torch.stack([PACKED_IDS, OTHER_IDS]), 1),
    "sequence first": (torch.stack([PACKED_IDS, OTHER_IDS], 1), 0),
    "three axes": (PACKED_IDS.expand(3, 2, 12), 2),
    "some rows": (torch.stack([PACKED_IDS, ONE_RUN]), 1),
    "padding of zeros": (torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0]), 0),
}
NO_RESTARTS = {
    "one run": (ONE_RUN, 0),
    "all zero": (torch.zeros(2, 12, dtype=torch.int64), 1),
    "ones for padding": (torch.tensor([1, 1, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8]), 0),
    "from one on": (PACKED_IDS + 1, 0),
    "tokens": (torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 7, 0, 1, 2]), 0),
    "floating": (PACKED_IDS.float(), 0),
    "bool": (PACKED_IDS > 0, 0),
    "a row of nothing": (torch.zeros(0, 12, dtype=torch.int64), 1),
}


def check_honest(mesh, ids, dim):
    before = ids.clone()
    with pytest.raises(ringcp.ArgumentError) as info:
        enter(mesh, ids, dim)
    assert torch.equal(ids, before)
    for mask in (Documents([5, 3, 4]), Full(), Causal()):
        enter(mesh, ids.clone(), dim, mask=mask)
    with pytest.raises(ringcp.RingcpError) as other:  # the ids of one rank alone
        enter(mesh, ids.clone() if mesh.get_local_rank() else torch.zeros_like(ids), dim)
    enter(mesh, ONE_RUN.clone(), 0)
    return str(info.value), str(other.value)


@pytest.mark.parametrize("case", RESTARTS)
@pytest.mark.report("1.28", raises=True)
@pytest.mark.report("1.33", raises=True)
def test_position_ids_that_restart_without_a_mask_are_refused(worlds, case):
    for rank, (text, other) in enumerate(worlds(2).run(check_honest, *RESTARTS[case])):
        assert text.startswith("mask: expected one, since buffers[3] looks like the position ids of packed documents")
        assert "got None; pass mask=ringcp.Documents(position_ids=...), or ringcp.Full() if all attend" in text
        assert other == text if rank else "rank 1 refused its arguments (mask: expected one" in other


@pytest.mark.parametrize("case", NO_RESTARTS)
def test_buffers_that_only_look_a_little_like_documents_are_taken(worlds, case):
    ids, dim = NO_RESTARTS[case]
    worlds(2).run(enter, ids, dim)


def compiled_batches(mesh, backend):
    """Frames compiled over batches of 1 to 100 documents, one of them with rows of their own."""
    rank, seq_len, draw = mesh.get_local_rank(), 240, random.Random(5)
    layout = layout_named("head_tail", seq_len, mesh.size())
    x = [torch.randn(2, 2, seq_len, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    local = [layout.shard(each, rank, 2).requires_grad_() for each in x]

    def step(q, k, v, mask):
        return ringcp.attention(q * 2, k, v, mesh=mesh, mask=mask, layout=layout)

    batches = []
    for count in (2, 1, 100, 7, 31, 3, 64, 99, 5, 12):
        cuts = sorted(draw.sample(range(1, seq_len), count - 1))
        batches.append(Documents(cu_seqlens=[0, *cuts, seq_len]) & Causal())
    batches += [Documents([packed(seq_len), packed(seq_len, 1)]) & Causal(), Prefix([3, 100]), Padding([240, 9])]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        compiled = torch.compile(step, fullgraph=True, backend=counter)
        for mask in batches:
            out, same = compiled(*local, mask), step(*local, mask)
            assert torch.equal(out, same)
            grads, others = (torch.autograd.grad(y.square().sum(), local) for y in (out, same))
            assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
    return counter.frame_count


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_batches_of_documents_compile_at_most_twice(worlds, backend):
    for frames in worlds(2).run(compiled_batches, backend):
        assert 1 <= frames <= 2
