"""Cross-attention: keys and values of another sequence, in a layout of their own or on every rank, in every mode."""

import itertools
import random
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from calls import check_exact, ways
from cases import ALLOWED, HEADS, LAYOUTS, MASKS, assert_none, differences, gradients, normal

import ringcp
from ringcp.layout import layout_named
from ringcp.testing import reference_attention

# Tokens of queries and of keys: odd ones, fewer than ranks, and none.
LENGTHS = ((13, 7), (7, 13), (33, 1), (1, 33), (2, 24), (24, 2), (5, 0), (0, 5))
MEMORY = "on every rank"


class Case(NamedTuple):
    q_len: int
    k_len: int
    mask: str = "full"
    layout: str = "head_tail"
    kv_layout: str = "contiguous"
    heads: str = "gqa"
    upstream: str = "both"
    named: bool = False

    def layouts(self, world_size):
        layout = layout_named(self.layout, self.q_len, world_size)
        if self.kv_layout == MEMORY:
            return layout, ringcp.Joint(replicated=self.k_len, rest=ringcp.Contiguous(0, world_size))
        return layout, layout_named(self.kv_layout, self.k_len, world_size)


def cases(world_size):
    """Every mask of positions and pair of lengths, the rest drawn; and memories on every rank."""
    draw = random.Random(world_size)
    pairs = list(itertools.product(LENGTHS, MASKS))
    draw.shuffle(pairs)
    for (q_len, k_len), mask in pairs[::4]:
        layouts = draw.choice(LAYOUTS), draw.choice(LAYOUTS)
        upstream = draw.choice(("both", "out", "lse"))
        yield Case(q_len, k_len, mask, *layouts, draw.choice(list(HEADS)), upstream, draw.random() < 0.5)
    for q_len, k_len in LENGTHS:
        yield Case(q_len, k_len, "full", draw.choice(LAYOUTS), MEMORY, draw.choice(list(HEADS)))


def allowed(case):
    """Counted from the first of either sequence: causal is q_pos >= k_pos."""
    return ALLOWED[case.mask](torch.arange(case.q_len)[:, None], torch.arange(case.k_len))


def run_case(case, options):
    mesh, shape, rank = options["mesh"], HEADS[case.heads], dist.get_rank()
    layout, kv_layout = case.layouts(mesh.size())
    shapes = (
        (shape.q_heads, case.q_len, shape.head_dim),
        (shape.kv_heads, case.k_len, shape.head_dim),
        (shape.kv_heads, case.k_len, shape.value_dim),
    )
    whole = [normal(shape.batch, *each, seed=(case, i)).requires_grad_() for i, each in enumerate(shapes)]
    results = reference_attention(*whole, mask=allowed(case))
    upstream = [
        normal(*x.shape, seed=(case, what)) if case.upstream in ("both", what) else None
        for x, what in zip(results, ("out", "lse"), strict=True)
    ]
    grads = [x.clone() for x in gradients(results, upstream, whole)]
    if case.kv_layout == MEMORY:  # a copy has a share
        grads[1:] = [x / mesh.size() for x in grads[1:]]
    layouts = layout, kv_layout, kv_layout
    want = {name: layout.shard(x, rank, 2) for name, x in zip(("out", "lse"), results, strict=True)}
    want |= {n: lay.shard(x, rank, 2) for n, lay, x in zip(("dq", "dk", "dv"), layouts, grads, strict=True)}

    local = [lay.shard(x.detach(), rank, 2).requires_grad_() for lay, x in zip(layouts, whole, strict=True)]
    named = case.named and case.kv_layout != MEMORY
    out, lse = ringcp.attention(
        *local,
        mask=MASKS[case.mask],
        layout=case.layout if named else layout,
        kv_layout=case.kv_layout if named else kv_layout,
        return_lse=True,
        **options,
    )
    mine = [None if x is None else layout.shard(x, rank, 2) for x in upstream]
    got = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients((out, lse), mine, local), strict=True))}
    return differences(f"rank {rank} of {mesh.size()}, {case}, {options}", got, want)


def check_all(mesh, way):
    return [text for case in cases(mesh.size()) for text in run_case(case, ways(mesh)[way])]


WAYS = [(size, way) for size in (1, 2, 3) for way in ("ring", "gather", "ulysses")]
WAYS += [(4, way) for way in ("ring", "gather by heads", "ulysses", "usp", "usp on a grid", "gather on a grid")]


@pytest.mark.parametrize(("world_size", "way"), WAYS)
@pytest.mark.report("1.I3")
@pytest.mark.report("1.I5")
def test_exact(worlds, world_size, way):
    assert_none(worlds(world_size).run(check_all, way))


def make_cross(mesh, k_len=7):
    rank, world_size = mesh.get_local_rank(), mesh.size()
    layouts = [ringcp.HeadTail(13, world_size), *[ringcp.Striped(k_len, world_size)] * 2]
    local = [normal(2, 2, lay.local_len(rank), 4, seed=i) for i, lay in enumerate(layouts)]
    return local, {"mesh": mesh, "layout": layouts[0], "kv_layout": layouts[1]}


def refused(mesh, tensors, options, error, words):
    with ringcp.record() as recorder, pytest.raises(error) as info:
        ringcp.attention(*tensors, **options)
    assert recorder.steps == []
    assert words in str(info.value), str(info.value)
    check_exact(mesh, 9)


MASKS_OF_ONE = {
    "documents": ringcp.Documents([6, 7]) & ringcp.Causal(),
    "padding": ringcp.Padding([5, 3]),
    "left padding": ringcp.Window(2) | ringcp.Padding([5, 3], side="left", seq_len=13),
}


def refuse_masks(mesh, agree):
    tensors, options = make_cross(mesh)
    for mask in MASKS_OF_ONE.values():
        words = (
            f"mask: expected one of positions alone in cross-attention, got {mask}, whose lengths are of one sequence;"
        )
        refused(mesh, tensors, {**options, "mask": mask, "agree": agree}, ringcp.UnsupportedError, words)


def refuse_masks_of_copies(mesh, agree):
    """No mask holds among keys that every rank has; none is dropped."""
    (q, *_), options = make_cross(mesh)
    kv_layout = ringcp.Joint(replicated=6, rest=ringcp.Contiguous(0, mesh.size()))
    options |= {"kv_layout": kv_layout, "agree": agree}
    tensors = q, *(normal(2, 2, 6, 4, seed=i) for i in range(2))
    nothing = ringcp.Predicate(lambda b, h, q, k: q == k, name="same")
    for mask in (ringcp.Causal(), ringcp.Window(2, 2), ringcp.Chunked(3), ringcp.Prefix(2), nothing):
        words = f"mask: expected None or Full() where all keys are on every rank, in {kv_layout!r}, since a mask holds "
        refused(mesh, tensors, {**options, "mask": mask}, ringcp.UnsupportedError, words)
    full, none = (ringcp.attention(*tensors, **options, mask=mask) for mask in (ringcp.Full(), None))
    assert torch.equal(full, none)


@pytest.mark.parametrize("agree", ["call", "context"])
def test_masks_among_keys_that_every_rank_has_are_refused(worlds, agree):
    worlds(2).run(refuse_masks_of_copies, agree)


@pytest.mark.parametrize("agree", ["call", "context"])
def test_masks_of_one_sequence_are_refused_by_name(worlds, agree):
    worlds(2).run(refuse_masks, agree)


def wrong_lengths(mesh, odd, named):
    """Of k on one rank: all raise, and say which."""
    (q, k, v), options = make_cross(mesh)
    if named:
        options |= {"layout": "head_tail", "kv_layout": "striped"}
    mine = mesh.get_local_rank() == odd
    if mine:
        k, v = (torch.cat([x, x, x], 2) for x in (k, v))
    words = "k, v: expected the local lengths in dim 2 of (B, H, S, D) that Striped("
    refused(mesh, (q, k, v), options, ringcp.LayoutError, words)
    with pytest.raises(ringcp.LayoutError, match=f"on rank {odd} instead of"):
        ringcp.attention(q, k, v, **options)
    if mine:
        v = v[:, :, 1:]
    words = "q, k, v: expected equal local lengths in dim 2"
    refused(mesh, (q, k, v), options, ringcp.LayoutError if mine else ringcp.AgreementError, words)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("named", [False, True])
def test_keys_of_another_length_on_one_rank(worlds, world_size, named):
    worlds(world_size).run(wrong_lengths, world_size - 1, named)


def wrong_queries(mesh):
    (q, k, v), options = make_cross(mesh)
    words = "q: expected the local lengths in dim 2 of (B, H, S, D) that HeadTail(13, 2) gives"
    refused(mesh, (torch.cat([q, q], 2), k, v), options, ringcp.LayoutError, words)
    refused(mesh, (q, k, v), {**options, "kv_layout": "zigzag"}, ringcp.LayoutError, "kv_layout: expected a Layout or")
    words = "kv_layout: expected one for the 2 ranks of mesh, got one for 5"
    refused(mesh, (q, k, v), {**options, "kv_layout": ringcp.Striped(7, 5)}, ringcp.LayoutError, words)
    words = "kv_layout: expected a Layout, got Striped, not called"
    refused(mesh, (q, k, v), {**options, "kv_layout": ringcp.Striped}, ringcp.LayoutError, words)
    words = "pass that of k and v, which are another sequence, as kv_layout="
    refused(mesh, (q, k, v), {"mesh": mesh, "layout": options["layout"]}, ringcp.LayoutError, words)


def test_wrong_queries_and_layouts(worlds):
    worlds(2).run(wrong_queries)


def layouts_differ(mesh):
    tensors, options = make_cross(mesh, 2 * mesh.size())
    if mesh.get_local_rank() == 1:
        options["kv_layout"] = ringcp.Contiguous(2 * mesh.size(), mesh.size())
    words = (
        "rank 1 made a different call than rank 0: kv_layout=contiguous of 6 tokens, not kv_layout=striped of 6 tokens"
    )
    refused(mesh, tensors, options, ringcp.AgreementError, words)
    if mesh.get_local_rank() == 1:  # of the same local lengths
        options["kv_layout"] = None
        tensors = [tensors[0], *[tensors[0][..., :4]] * 2]
    refused(mesh, tensors, options, ringcp.AgreementError, "kv_layout=None, not kv_layout=striped of 6 tokens")


def test_ranks_with_different_kv_layouts(worlds):
    worlds(3).run(layouts_differ)


def not_taken(mesh):
    (q, k, v), options = make_cross(mesh, 13)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    with pytest.raises(
        ringcp.KeywordError, match=r"^kv_layout: expected an argument of ringcp.attention_varlen, got kv_"
    ):
        ringcp.attention_varlen(*packed, cu_seqlens=[0, 13], **options)
    with pytest.raises(TypeError, match="kv_layout"), ringcp.context_parallel(mesh, kv_layout=options["kv_layout"]):
        pass
    check_exact(mesh, 9)


def test_kv_layout_is_refused_where_it_means_nothing(worlds):
    worlds(2).run(not_taken)


def by_name_on_even_ranks(mesh, way):
    """The vote finds both lengths, also where this rank has no row of one of them."""
    options = ways(mesh)[way]
    found = []
    for q_len, k_len in ((1, 5), (9, 1), (2, 3)):
        found += run_case(Case(q_len, k_len, "causal", "striped", "head_tail", named=True), options)
    return found


@pytest.mark.parametrize("way", ["ring", "gather", "ulysses", "auto"])
def test_lengths_are_found_by_the_vote(worlds, way):
    assert_none(worlds(4).run(by_name_on_even_ranks, way))
