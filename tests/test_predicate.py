"""`Predicate`: masks that a function says, exact in every mode, layout and batch, and what is refused of them."""

import re
import warnings

import pytest
import torch
from calls import ways
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from predicates import NAMES, OF_TWO, Given, causal, make, random, written
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

import ringcp
from ringcp import Causal, Predicate, Window
from ringcp.band import count
from ringcp.kernels.base import Form
from ringcp.kernels.reference import Reference
from ringcp.kernels.sdpa_cpu import SdpaFlashCpu
from ringcp.layout import layout_named
from ringcp.schedule import build
from ringcp.testing import assert_close, in_process, reference_attention
from ringcp.topology import ring
from ringcp.vectorize import is_pointwise, vectorized

HEADS = ((4, 2), (3, 3), (5, 1), (6, 2))
LAYOUTS = ("contiguous", "head_tail", "striped")


def tensors(given, kv_heads, dtype=torch.float64):
    """q, k, v, and the upstream gradients of out and lse."""
    generator = torch.Generator().manual_seed(sum(given))
    shapes = ((given.heads, given.q_len, 5), (kv_heads, given.k_len, 5), (kv_heads, given.k_len, 6))
    shapes += ((given.heads, given.q_len, 6), (given.heads, given.q_len))
    return [torch.randn(given.batch, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def results(attend, q, k, v, dout, dlse):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = attend(*leaves)
    return out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse))


def wanted(given, name, inputs, **options):
    mask = written(name, given)
    return results(lambda *x: reference_attention(*x, mask=mask, **options), *(x.double() for x in inputs))


def same(got, want, what=""):
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert_close(a, b, name=f"{what} {name}")


def check_in_process(given, kv_heads, name, world_size, **options):
    inputs = tensors(given, kv_heads)
    mask = make(name, given)
    got = results(lambda *x: in_process(*x, world_size=world_size, mask=mask, return_lse=True, **options), *inputs)
    same(got, wanted(given, name, inputs, **{k: v for k, v in options.items() if k == "softcap"}), name)


@settings(max_examples=80)
@drawn(st.data())
def test_exact_in_process(data):
    world_size, seq_len = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 26))
    mode = data.draw(st.sampled_from(["ring", "gather", "ulysses", "usp"]))
    degree = data.draw(st.sampled_from([d for d in range(1, world_size + 1) if world_size % d == 0]))
    heads, kv_heads = data.draw(st.sampled_from(HEADS))
    name = data.draw(st.sampled_from(NAMES))
    options = {"mode": mode, "layout": data.draw(st.sampled_from(LAYOUTS))}
    options |= {"gather_memory": 1} if mode == "gather" else {}
    if mode == "usp" or (mode == "gather" and data.draw(st.booleans())):
        options["ulysses_degree"] = degree
    kernel = data.draw(st.sampled_from(["auto", "reference"]))
    given = Given(data.draw(st.sampled_from([1, 2])), heads, seq_len, seq_len)
    check_in_process(given, kv_heads, name, world_size, kernel=kernel, **options)


@pytest.mark.parametrize("name", NAMES)
def test_exact_on_many_ranks(name):
    for layout, mode in zip((*LAYOUTS, "striped"), ("gather", "ring", "ring", "ulysses"), strict=True):
        check_in_process(Given(2, 4, 33, 33), 2, name, 4, layout=layout, mode=mode)
    check_in_process(Given(1, 4, 33, 33), 2, name, 3, softcap=0.7)


@pytest.mark.parametrize("name", OF_TWO)
def test_exact_between_two_sequences(name):
    for mode in ("ring", "gather", "ulysses"):
        options = {"mode": mode, "layout": "head_tail", "kv_layout": "striped"}
        check_in_process(Given(2, 4, 13, 22), 2, name, 3, **options)


def check_on_gloo(mesh, names):
    world_size, rank = mesh.size(), mesh.get_rank()
    for n, name in enumerate(names):
        given = Given(2, 4, 21, 21)
        mask, inputs = make(name, given), tensors(given, 2)
        want = wanted(given, name, inputs)
        for at, (way, options) in enumerate(ways(mesh).items()):
            layout = layout_named(LAYOUTS[(n + at) % 3], 21, world_size)
            call = {**options, "mask": mask, "layout": layout, "return_lse": True}
            local = [layout.shard(x, rank, 2) for x in inputs]
            got = results(lambda *x, call=call: ringcp.attention(*x, **call), *local)
            same(got, [layout.shard(x, rank, 2) for x in want], f"{name}, {way}, rank {rank}")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_exact_on_gloo(worlds, world_size):
    worlds(world_size).run(check_on_gloo, NAMES if world_size < 4 else ("by_head", "and causal", "or padding"))


def check_joint_and_cross(mesh):
    """The mask counts positions of the rest; replicated tokens see everything."""
    rank, given = mesh.get_local_rank(), Given(1, 4, 17, 17)
    rest = ringcp.HeadTail(17, mesh.size())
    layout = ringcp.Joint(replicated=3, rest=rest)
    allowed = torch.ones(1, 4, 20, 20, dtype=torch.bool)
    allowed[:, :, 3:, 3:] = written("sparse", given)
    q, k, v, *_ = tensors(Given(1, 4, 20, 20), 2)
    local = [torch.cat([x[:, :, :3], rest.shard(x[:, :, 3:], rank, 2)], 2) for x in (q, k, v)]
    out = ringcp.attention(*local, mesh=mesh, mask=make("sparse", given), layout=layout)
    want, _ = reference_attention(q, k, v, mask=allowed)
    assert_close(out, torch.cat([want[:, :, :3], rest.shard(want[:, :, 3:], rank, 2)], 2))
    given, keys = Given(1, 4, 17, 11), ringcp.Striped(11, mesh.size())
    q, k, v, *_ = tensors(given, 2)
    local = [lay.shard(x, rank, 2) for lay, x in zip((rest, keys, keys), (q, k, v), strict=True)]
    out = ringcp.attention(*local, mesh=mesh, mask=make("sparse", given), layout=rest, kv_layout=keys)
    assert_close(out, rest.shard(reference_attention(q, k, v, mask=written("sparse", given))[0], rank, 2))


def test_joint_and_cross_attention_on_gloo(worlds):
    worlds(3).run(check_joint_and_cross)


def in_a_context(mesh):
    given = Given(2, 4, 24, 24)
    whole = tensors(given, 4)[:2]
    q, k = (x.clone() for x in whole)
    mask = make("sparse", given)
    with ringcp.context_parallel(mesh, buffers=[q, k], buffer_seq_dims=[2, 2], mask=mask):
        outs = [torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=c) for c in (False, True)]
        outs = ringcp.context_parallel_unshard(mesh, outs, [2, 2])
        with pytest.raises(ringcp.RingcpError, match="attn_mask: expected one row"):
            torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=written("sparse", given))
    for out, name in zip(outs, ("sparse", "and causal"), strict=True):
        assert_close(out, reference_attention(whole[0], whole[1], whole[1], mask=written(name, given))[0])


def test_in_a_context(worlds):
    worlds(2).run(in_a_context)


@pytest.mark.parametrize("name", ["sparse", "and window", "or padding"])
def test_bf16_is_as_near_as_one_kernel(name):
    given = Given(2, 4, 70, 70)
    inputs = tensors(given, 2, torch.bfloat16)
    want = wanted(given, name, inputs)
    mask = make(name, given)

    def run(world_size):
        return results(lambda *x: in_process(*x, world_size=world_size, mask=mask, return_lse=True), *inputs)

    for at, (a, b, alone) in enumerate(zip(run(4), want, run(1), strict=True)):
        assert_close(a, b, baseline=alone, name=("out", "lse", "dq", "dk", "dv")[at])


@pytest.mark.parametrize("kernel", [Reference(), SdpaFlashCpu()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("form", [Form(), Form(lo=0), Form(lo=-3, hi=9)], ids=str)
@pytest.mark.parametrize("around", [(1, 1), (2, 1), (1, 4), (2, 4)], ids=str)
def test_kernels_of_rows_that_attend_to_nothing(kernel, form, around):
    """Dead rows, rows whose first 1,100 keys are all masked, in calls as long as a kernel's own blocks."""
    m, n = 24, 1200
    allowed = random(*around, m, n, share=0.05)
    allowed[:, :, 4::5] = False
    allowed[:, :, 2, :1100] = False
    given = Given(2, 4, m, n)
    inputs = q, k, v, dout, dlse = tensors(given, 2)
    ahead = torch.arange(m)[:, None] - torch.arange(n)
    in_form = (ahead >= (-n if form.lo is None else form.lo)) & (ahead <= (n if form.hi is None else form.hi))
    want = results(lambda *x: reference_attention(*x, mask=allowed & in_form, scale=0.4), *inputs)
    out, lse = kernel.forward(q, k, v, form=form, scale=0.4, allowed=allowed)
    dead = ~(allowed & in_form).any(-1).expand(lse.shape)
    assert dead.any()
    assert torch.equal(lse == -torch.inf, dead)
    assert not out[dead].any()
    safe = lse.masked_fill(dead, torch.inf)
    grads = kernel.backward(dout, q, k, v, out, safe, dlse, form=form, scale=0.4, allowed=allowed)
    same((out, lse, *grads), want)
    assert not grads[0][dead].any()


def test_what_nobody_may_see_changes_nothing():
    given = Given(2, 4, 30, 30)
    mask, hidden = make("sparse", given), (2, 8, 14, 20, 26)
    for options in ({"mode": "ring", "layout": "striped"}, {"mode": "gather"}, {"mode": "ulysses"}):
        first, other = tensors(given, 2), tensors(given, 2)
        for x in other[1:3]:
            x[:, :, hidden] += 1000
        a, b = (
            results(lambda *x: in_process(*x, world_size=3, mask=mask, return_lse=True, **options), *inputs)  # noqa: B023
            for inputs in (first, other)
        )
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert not any(x[:, :, hidden].any() for x in a[3:])


def moved(mesh, mask, mode):
    layout = ringcp.Contiguous(64, mesh.size())
    x = torch.zeros(1, 2, layout.local_len(mesh.get_local_rank()), 4)
    with ringcp.record() as recorder:
        ringcp.attention(x, x, x, mesh=mesh, mask=mask, layout=layout, mode=mode)
    return recorder.bytes_sent


def test_what_it_is_combined_with_says_what_moves(worlds):
    pool = worlds(4)
    for around, mode in ((Window(5), "ring"), (Causal(), "gather")):
        sent = pool.run(moved, around, mode)
        assert pool.run(moved, Predicate(causal) & around, mode) == sent
        assert sum(pool.run(moved, Predicate(causal), mode)) > sum(sent)
    assert pool.run(moved, Predicate(causal) & Window(5), "ring") == [5 * 2 * 2 * 4 * 4] * 3 + [0]


HALF, OF, TABLE = torch.tensor(0.3).half(), random(9, 3), random(2, 3, 9, 9)
ODD = {
    "vector": lambda b, h, q, k: (OF[q] & OF[k]).any(),
    "dtypes": lambda b, h, q, k: torch.tensor([0.1, 0.3]).half()[b] * torch.tensor(3.0) == HALF * 3.0,
    "rows of a table": lambda b, h, q, k: TABLE[b, h][q][k],
    "in place": lambda b, h, q, k: q.add_(1) > k,
    "constant": lambda b, h, q, k: torch.tensor(True),
    "new": lambda b, h, q, k: b.new_ones((), dtype=torch.bool) & (q > k),
    "where": lambda b, h, q, k: torch.where(h == 1, q // 2, q) >= k,
    "minimum": lambda b, h, q, k: torch.minimum(q, k) % 3 == 0,
    "stacked": lambda b, h, q, k: torch.stack([q == k, q > k + 2]).any(0),
}


@pytest.mark.parametrize("name", ODD)
def test_functions_mean_what_they_mean_to_flex_attention(name):
    b, h, q, k = indices = [torch.arange(n) for n in (2, 3, 9, 8)]
    found, want = vectorized(ODD[name], *indices), create_mask(ODD[name], 2, 3, 9, 8, device="cpu")
    assert torch.equal(found.expand(want.shape), want)
    assert [x.tolist() for x in (b, h, q, k)] == [list(range(n)) for n in (2, 3, 9, 8)]
    assert found.shape[0] == 1 or name in ("dtypes", "rows of a table")


POINTWISE = {
    "operators": lambda b, h, q, k: (q // 4 == k // 4) & ((h == 1) | (b == 0)) ^ (k % 3 == 0),
    "shifts": lambda b, h, q, k: (q >> 2 == k >> 2) | (q << 1 > k),
    "lookup": lambda b, h, q, k: TABLE[b, h, q, k] & TABLE[b, 0, 1, q],
    "where": ODD["where"],
}


@torch.library.custom_op("ringcp_tests::is_pointwise", mutates_args=())
def pointwise_inside(x: torch.Tensor, name: str) -> torch.Tensor:
    return x.new_tensor(is_pointwise({**ODD, **POINTWISE}[name], x.device))


@pytest.mark.parametrize("name", [*POINTWISE, "vector", "rows of a table", "in place", "constant", "stacked"])
def test_what_is_pointwise_is_so_inside_an_op_too(name):
    """There, below autograd, other operations are seen."""
    x = torch.zeros(1)
    assert is_pointwise({**ODD, **POINTWISE}[name], x.device) == (name in POINTWISE)
    assert bool(pointwise_inside(x, name)) == (name in POINTWISE)


def compiled_in_a_context(mesh):
    """Where AOT has compiled the caller, functorch has to be let in again for what only vmap gets right."""
    given = Given(2, 4, 24, 24)
    layout = ringcp.HeadTail(24, mesh.size())
    q, k, v, *_ = tensors(given, 4)
    want = layout.shard(reference_attention(q, k, v, mask=written("types", given))[0], mesh.get_local_rank(), 2)
    local = [layout.shard(x, mesh.get_local_rank(), 2) for x in (q, k, v)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        attend = torch.compile(lambda *x: torch.nn.functional.scaled_dot_product_attention(*x), backend="aot_eager")
        with ringcp.context_parallel(mesh, mask=make("types", given), layout=layout):
            assert_close(attend(*local), want)


def test_compiled_in_a_context(worlds):
    worlds(2).run(compiled_in_a_context)


def test_written_in_parts_is_the_same(monkeypatch):
    given = Given(2, 3, 9, 8)
    at = torch.arange(9)
    for name in ("sparse", "by_head", "types"):
        whole = make(name, given).dense(at, at[:8], batch=2, heads=3)
        monkeypatch.setattr("ringcp.mask_mods._PAIRS", 16)
        assert torch.equal(make(name, given).dense(at, at[:8], batch=2, heads=3), whole)
        monkeypatch.undo()
        assert torch.equal(whole.expand(given), written(name, given))


@pytest.mark.report("1.I10")
@pytest.mark.report("7.32")
def test_block_masks():
    given = Given(2, 3, 300, 300)
    table = random(2, 3, 5, share=0.5)

    def by_block(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (table[b, h, kv_idx // 64] | (q_idx - kv_idx < 9))

    blocks = create_block_mask(by_block, 2, 3, 300, 300, device="cpu", BLOCK_SIZE=64)
    mask, at = Predicate(blocks), torch.arange(300)
    assert re.fullmatch(
        r"Predicate\(by_block, 2 x 3 x 300 x 300\) in \d+ rectangles of blocks #[0-9a-f]{16}", repr(mask)
    )
    want = create_mask(by_block, 2, 3, 300, 300, device="cpu")
    assert torch.equal(mask.dense(at, at, batch=2, heads=3), want)
    inputs = tensors(given, 3)
    same(
        results(lambda *x: in_process(*x, world_size=3, mask=mask, return_lse=True), *inputs),
        results(lambda *x: reference_attention(*x, mask=want), *inputs),
    )
    # Blocks that are not made from the function: one that is full, one that is partial, and two that are not listed.
    counts, listed = torch.tensor([[[0, 1]]]).int(), torch.tensor([[[[0, 1], [1, 0]]]]).int()
    made = BlockMask.from_kv_blocks(counts, listed, counts.flip(-1), listed * 0, BLOCK_SIZE=32, mask_mod=causal)
    dense = Predicate(made).dense(at[:64], at[:64])
    assert dense[:32, :32].all()
    assert torch.equal(dense[32:, 32:], torch.ones(32, 32).tril().bool())
    assert not dense[:32, 32:].any()
    assert not dense[32:, :32].any()
    for shape in ((2, 3, 299, 300), (2, 2, 300, 300), (3, 3, 300, 300)):
        q, k, v, *_ = tensors(Given(*shape), 1)
        with pytest.raises(ringcp.LayoutError, match=r"mask: expected a BlockMask of \(B, H, Q_LEN, KV_LEN\) = \("):
            in_process(q, k, v, world_size=2, mask=mask, kv_layout="contiguous")
    with pytest.raises(ringcp.ArgumentError, match=r"got BlockMask; write ringcp.Predicate\(...\) of it"):
        in_process(*inputs[:3], world_size=2, mask=blocks)


def blocks_of_documents(b, h, q_idx, kv_idx):
    return (q_idx // 24 == kv_idx // 24) & (q_idx >= kv_idx)


def test_of_a_block_mask_only_what_its_blocks_need_is_planned_and_moved():
    """Blocks of 8, documents of 24 tokens, 4 ranks of 24: nothing moves; ranks of 32 and 16 fetch a document's rest."""
    blocks = create_block_mask(blocks_of_documents, 1, None, 96, 96, device="cpu", BLOCK_SIZE=8)
    mask = Predicate(blocks)
    for world_size, rows in ((4, [0, 0, 0, 0]), (3, [8, 16, 0]), (6, None)):
        layout = layout_named("contiguous", 96, world_size)
        needed = [set() for _ in range(world_size)]
        positions = torch.arange(96) // (96 // world_size)
        listed = (torch.arange(96)[:, None] // 24 == torch.arange(96) // 24) & (
            torch.arange(96)[:, None] // 8 >= torch.arange(96) // 8
        )
        for q, k in listed.nonzero().tolist():
            if positions[q] != positions[k]:
                needed[positions[k]].add((positions[q].item(), k))
        want = [len(of_rank) for of_rank in needed]
        assert rows is None or want == rows
        got = [build(layout, mask.superset, ring(world_size), rank).rows_sent("kv") for rank in range(world_size)]
        assert got == want
    (step,) = build(layout_named("contiguous", 96, 1), mask.superset, ring(1), 0).forward
    assert sum(count(tile.band) for tile in step.tiles) == listed.sum()
    given = Given(1, 4, 96, 96)
    q, k, v, dout, dlse = tensors(given, 2)
    dense = create_mask(blocks_of_documents, 1, 1, 96, 96, device="cpu")
    want = results(lambda *x: reference_attention(*x, mask=dense), q, k, v, dout, dlse)
    for mode in ("ring", "gather", "ulysses"):
        how = {"world_size": 3, "mask": mask, "mode": mode, "return_lse": True}
        same(results(lambda *x, how=how: in_process(*x, **how), q, k, v, dout, dlse), want, mode)
