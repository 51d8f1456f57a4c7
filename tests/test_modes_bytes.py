"""What each mode sends, as `ringcp.record()` counts it: the formulas of `ringcp.modes`, and what `explain` says."""

import itertools

import pytest
import torch
from cases import SHAPES, Case, layout_of, mask_of, rank_in
from torch import Tensor

import ringcp
from ringcp.balance import choose_layout
from ringcp.explain import Explanation
from ringcp.grouped import grouped
from ringcp.layout import Layout
from ringcp.modes import (
    Rows,
    Traffic,
    Weight,
    exchange_bytes,
    gathered,
    most,
    ring_lengths,
    rows_bytes,
    usp_bytes,
    whole_blocks,
)
from ringcp.testing import in_process

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
WAYS = {
    2: [("ring", None), ("gather", None), ("gather", 2), ("ulysses", None)],
    3: [("ring", None), ("gather", None), ("ulysses", None)],
    4: [("ring", None), ("gather", None), ("gather", 2), ("ulysses", None), ("usp", 2)],
}


def local_tensors(case: Case, layout: Layout, rank: int, dtype: torch.dtype) -> list[Tensor]:
    shape, rows = SHAPES[case.heads], layout.local_len(rank)
    dims = (shape.q_heads, shape.head_dim), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.value_dim)
    return [torch.ones(shape.batch, n, rows, dim, dtype=dtype, requires_grad=True) for n, dim in dims]


def counted(mesh, jobs: list[tuple[Case, torch.dtype, Layout]]) -> list[dict[str, tuple[int, int]]]:
    """For each job and direction, the bytes that this rank sent and received."""
    found = []
    for case, dtype, layout in jobs:
        q, k, v = local_tensors(case, layout, rank_in(mesh), dtype)
        with ringcp.record() as r:
            out = ringcp.attention(q, k, v, mesh=mesh, mask=mask_of(case), layout=layout, **case.way)
            out.sum().backward()
        found.append({d: (sum(s.bytes_sent for s in r.steps if s.direction == d),
                          sum(s.bytes_received for s in r.steps if s.direction == d))
                      for d in sorted({s.direction for s in r.steps})})  # fmt: skip
    return found


def sent(by_direction: dict[str, tuple[int, int]]) -> Traffic:
    """With what was exchanged."""
    return Traffic(*(
        sum(n for d, (n, _) in by_direction.items() if d.startswith(way)) for way in ("forward", "backward")
    ))  # fmt: skip


def weight_of(case: Case, dtype: torch.dtype) -> Weight:
    shape = SHAPES[case.heads]
    return Weight(shape.q_heads, shape.kv_heads, shape.head_dim, dtype.itemsize, shape.batch, shape.value_dim)


def need(case: Case, layout: Layout, degree: int) -> list[list[int]]:
    """For each ring rank, how many rows of each other one some query attends to, counted pair by pair."""
    rows = grouped(layout, degree)
    placed = [torch.cat([torch.arange(*s) for s in rows.spans(c)] or [torch.arange(0)]) for c in range(rows.world_size)]
    mask = mask_of(case)
    pairs = (ringcp.Full() if mask is None else mask).dense(torch.arange(case.seq_len), torch.arange(case.seq_len))
    pairs = pairs.reshape(-1, case.seq_len, case.seq_len).any(0)
    return [[int(pairs[q][:, k].any(0).sum()) * (q is not k) for k in placed] for q in placed]


def formula(case: Case, dtype: torch.dtype, layout: Layout) -> list[Traffic]:
    """What each rank sends by the formulas."""
    world_size, weight = layout.world_size, weight_of(case, dtype)
    lens = [layout.local_len(rank) for rank in range(world_size)]
    degree = world_size if case.mode == "ulysses" else case.degree or 1
    saved = "exchanged" if case.save == "auto" else case.save
    if case.mode == "ulysses":
        return list(exchange_bytes(lens, degree, weight, saved))
    needed = need(case, layout, degree)
    blocks = ring_lengths(lens, degree)
    passes_blocks = case.mode != "gather" and len(blocks) > 2 and any(
        sum(of) == sum(blocks) - own > 0 for of, own in zip(needed, blocks, strict=True)
    )  # fmt: skip
    moved: tuple[Rows, ...] = whole_blocks(blocks) if passes_blocks else gathered(needed)
    return list(rows_bytes(moved, weight) if degree == 1 else usp_bytes(lens, degree, moved, weight, saved))


def jobs_of(world_size: int) -> list[tuple[Case, torch.dtype, Layout]]:
    """Each way with full, causal, a window and documents, on odd lengths; all else in turn."""
    masks = ("full", "causal", "window_3", "two_sided", "documents")
    heads = itertools.cycle(("gqa", "7_1", "28_4", "wide_v", "12_3", "3_3", "narrow_v"))
    layouts, dtypes = itertools.cycle(("contiguous", "head_tail", "balanced", "striped")), itertools.cycle(DTYPES)
    jobs, saves = [], itertools.cycle(("auto", "local", "exchanged"))
    for (mode, degree), mask, seq_len in itertools.product(WAYS[world_size], masks, (37, world_size - 1)):
        layout = next(layouts)
        if layout == "striped" and mask in ("two_sided", "documents"):
            layout = "contiguous"  # a wider mask than ranks is taken to need every row of a striped one
        case = Case(seq_len, mask, layout, next(heads), mode=mode, degree=degree, save=next(saves))
        jobs.append((case, next(dtypes), layout_of(case, world_size)))
    return jobs


@pytest.mark.parametrize("world_size", WAYS)
def test_bytes_are_those_of_the_formulas(worlds, world_size):
    jobs = jobs_of(world_size)
    by_rank = worlds(world_size).run(counted, jobs)
    modes_that_sent = set()
    for i, (case, dtype, layout) in enumerate(jobs):
        got = [found[i] for found in by_rank]
        totals = [sent(by_direction) for by_direction in got]
        assert totals == formula(case, dtype, layout), (case, dtype)
        # What is sent is received.
        for direction in got[0]:
            assert sum(of[direction][0] for of in got) == sum(of[direction][1] for of in got), (case, direction)
        exchanges = {direction for direction in got[0] if direction.endswith("exchange")}
        degree = world_size if case.mode == "ulysses" else case.degree
        assert exchanges == ({"forward exchange", "backward exchange"} if degree else set()), case
        if case.mask == "full" and case.seq_len == 37:
            assert all(total.forward > 0 and total.backward > 0 for total in totals), (case, totals)
            modes_that_sent.add((case.mode, case.degree))
    assert modes_that_sent == set(WAYS[world_size])


@pytest.mark.parametrize(("mode", "degree"), [("ring", 1), ("gather", 1), ("usp", 2), ("gather", 2)])
def test_a_ring_never_repeats_key_heads(worlds, mode, degree):
    """28 query heads bring no byte more than 4 would: what passes are the key heads, those of one's share in usp."""
    case = Case(40, "full", "contiguous", "28_4", mode=mode, degree=degree)
    layout = layout_of(case, 4)
    shape, blocks = SHAPES["28_4"], 4 // degree
    for found in worlds(4).run(counted, [(case, torch.float32, layout)]):
        heads = 4 if degree == 1 else 2  # the exchange of two has two key heads on each
        rows = (blocks - 1) * 40 // blocks * heads * (shape.head_dim + shape.value_dim)
        assert found[0]["forward"] == (rows * 4, rows * 4)
        assert found[0]["backward"] == (rows * 8, rows * 8)


def test_an_exchange_in_plain_numbers(worlds):
    """24 tokens on 2 ranks, 8 query and 2 key heads of 5, batch 2, fp32: each sends half the heads of its 12 tokens."""
    case = Case(24, "causal", mode="ulysses")
    layout = layout_of(case, 2)
    for found in worlds(2).run(counted, [(case._replace(save=s), torch.float32, layout) for s in ("auto", "local")]):
        there, back = 12 * (4 * 5 + 1 * 10), 12 * 4 * (5 + 1)
        assert found[0]["forward exchange"] == (2 * 4 * (there + back),) * 2
        there, back = 12 * 4 * 5, 12 * (4 * 5 + 1 * 10)  # dout; dq, dk, dv
        assert found[0]["backward exchange"] == (2 * 4 * (there + back),) * 2
        assert found[1]["forward exchange"] == found[0]["forward exchange"]
        there += 12 * (4 * (2 * 5 + 1) + 1 * 10)  # q, out, lse, k, v
        assert found[1]["backward exchange"] == (2 * 4 * (there + back),) * 2
        assert found[0]["forward"] == found[0]["backward"] == (0, 0)


def explained(case: Case, dtype: torch.dtype) -> Explanation:
    """What is said of the case, whose values are as wide as its keys."""
    shape = SHAPES[case.heads]
    assert shape.value_dim == shape.head_dim
    heads = {"q_heads": shape.q_heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "batch": shape.batch}
    return ringcp.explain(**heads, seq_len=case.seq_len, mask=mask_of(case), dtype=dtype, world_size=4)


def test_explain_says_what_is_sent(worlds):
    """On 4 ranks, for every mode: the bytes of the busiest rank, forward and backward, in the layout of the mask."""
    jobs, said = [], []
    calls = itertools.product(("gqa", "28_4", "7_1", "mha"), ("full", "causal", "window_8", "documents"))
    for (heads, mask), dtype, seq_len in zip(calls, itertools.cycle(DTYPES), itertools.cycle((37, 50)), strict=False):
        case = Case(seq_len, mask, heads=heads)
        found, layout = explained(case, dtype), choose_layout(mask_of(case), seq_len, 4)
        assert found.degrees["usp"] == 2
        for mode in found.degrees:
            jobs.append((case._replace(mode=mode, degree=2 if mode == "usp" else None), dtype, layout))
            said.append(found.bytes_sent[mode])
    by_rank = worlds(4).run(counted, jobs)
    for i, (job, expected) in enumerate(zip(jobs, said, strict=True)):
        assert most([sent(found[i]) for found in by_rank]) == expected, job
    assert {job[0].mode for job in jobs} == {"ring", "gather", "ulysses", "usp"}
    assert min(expected.total for expected in said) > 0


def test_in_one_process_as_over_gloo(worlds):
    """The same messages: what all ranks of one process send is what ranks send."""
    jobs = [job for job in jobs_of(4) if job[0].seq_len == 37]
    by_rank = worlds(4).run(counted, jobs)
    for i, (case, dtype, layout) in enumerate(jobs):
        ranks = [local_tensors(case, layout, rank, dtype) for rank in range(4)]
        q, k, v = (layout.unshard(parts, 2).detach().requires_grad_() for parts in zip(*ranks, strict=True))
        with ringcp.record() as r:
            in_process(q, k, v, world_size=4, mask=mask_of(case), layout=layout, **case.way).sum().backward()
        assert r.bytes_sent == sum(sent(found[i]).total for found in by_rank), case
