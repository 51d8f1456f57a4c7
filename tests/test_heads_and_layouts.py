"""A part of the heads, and keys that lie otherwise than the queries: plans that the executor runs, exact in fp64."""

import itertools

import pytest
import torch
from cases import MASKS, MASKS_OF, Tensors, assert_none, differences
from executed import executed, in_order
from hypothesis import given
from schedule_checks import Shuffled, some_heads

import ringcp
from ringcp.kernels.registry import KERNELS
from ringcp.layout import Span, layout_named
from ringcp.lower import plan
from ringcp.schedule import Heads
from ringcp.testing import reference_attention
from ringcp.topology import ring

pytestmark = pytest.mark.usefixtures("one_thread")

GATHERS = (None, 1, 2)
KERNELS_OF = ("sdpa_flash_cpu", "reference")


def normal(generator, *shape):
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def tensors_of(seed, heads, num_q, num_k):
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (
        normal(generator, 2, n, rows, dim)
        for n, rows, dim in ((heads.q, num_q, 5), (heads.kv, num_k, 5), (heads.kv, num_k, 4), (heads.q, num_q, 4))
    )
    return Tensors(q, k, v, dout, normal(generator, 2, heads.q, num_q))


def reference(tensors, heads, allowed):
    """out, lse, dq, dk, dv with each query head's own copy of the KV head it uses."""
    group = heads.q // heads.kv if heads.group is None else heads.group
    used = [(heads.first + head) // group for head in range(heads.q)]
    q, k, v = leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out, lse = reference_attention(q, k[:, used], v[:, used], mask=allowed)
    grads = torch.autograd.grad((out, lse), leaves, tensors[3:])
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def compared(what, layout, mask, heads, *, kernel, gather=None, kv_layout=None):
    keys = layout if kv_layout is None else kv_layout
    tensors = tensors_of(layout.seq_len + 7 * heads.q, heads, layout.seq_len, keys.seq_len)
    allowed = mask.dense(torch.arange(layout.seq_len), torch.arange(keys.seq_len))
    more = {"gather": gather, "kv_layout": kv_layout}

    def plan_of(rank):
        return plan(layout, mask, ring(layout.world_size), rank, heads, KERNELS[kernel].caps, **more)

    got = in_order(plan_of, KERNELS[kernel], layout, tensors, kv_layout=kv_layout)
    return differences(f"{what} {more} {kernel}", got, reference(tensors, heads, allowed))


def masks(seq_len):
    yield from ((name, ringcp.Full() if mask is None else mask) for name, mask in MASKS.items())
    yield from ((name, make(seq_len, 2)) for name, make in MASKS_OF.items())


SOME = (Heads(6, 2, 0, 4), Heads(6, 2, 2, 4), Heads(7, 4, 1, 2), Heads(2, 2, 1, 2), Heads(1, 1, 3, 5))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_some_heads(world_size):
    """Query heads whose first and last KV heads serve fewer of them than the others."""
    found = []
    heads, kernels = itertools.cycle(SOME), itertools.cycle(KERNELS_OF)
    for layout, (name, mask), gather in itertools.product(("head_tail", "striped"), masks(29), GATHERS):
        of, lay = next(heads), layout_named(layout, 29, world_size)
        found += compared(f"{name} {lay} {of}", lay, mask, of, kernel=next(kernels), gather=gather)
    assert_none([found])


@given(some_heads())
def test_runs_are_the_fewest_that_a_kernel_takes(heads):
    used = [(heads.first + head) // heads.group for head in range(heads.q)]
    found = []
    for (q0, q1), (kv0, kv1) in heads.runs:
        served, rest = divmod(q1 - q0, kv1 - kv0)
        assert rest == 0
        found += [kv0 + i // served for i in range(q1 - q0)]
    assert found == used
    served = [used.count(j) for j in range(heads.kv)]
    assert len(heads.runs) == 1 + sum(a != b for a, b in itertools.pairwise(served))


@pytest.mark.parametrize(
    "heads, runs",
    [
        (Heads(12, 3), [((0, 12), (0, 3))]),
        (Heads(6, 2, 0, 4), [((0, 4), (0, 1)), ((4, 6), (1, 2))]),
        (Heads(6, 2, 2, 4), [((0, 2), (0, 1)), ((2, 6), (1, 2))]),
        (Heads(12, 4, 1, 4), [((0, 3), (0, 1)), ((3, 11), (1, 3)), ((11, 12), (3, 4))]),
        (Heads(4, 2, 2, 4), [((0, 4), (0, 2))]),
        (Heads(2, 1, 1, 8), [((0, 2), (0, 1))]),
    ],
)
def test_runs(heads, runs):
    assert list(heads.runs) == runs


def test_ranks_with_parts_of_the_heads_together_are_all_of_them():
    """12 query heads and 3 KV heads, half on each of two pairs of ranks: KV head 1 is shared, its gradients add up."""
    whole, layout, kernel = Heads(12, 3), ringcp.HeadTail(23, 2), KERNELS["sdpa_flash_cpu"]
    tensors = tensors_of(5, whole, 23, 23)
    want = reference(tensors, whole, ringcp.Causal().dense(torch.arange(23), torch.arange(23)))
    parts = []
    for first_q, of, kv in ((0, Heads(6, 2, 0, 4), (0, 2)), (6, Heads(6, 2, 2, 4), (1, 3))):
        q_part, kv_part = slice(first_q, first_q + 6), slice(*kv)
        local = Tensors(*(x[:, kv_part if i in (1, 2) else q_part] for i, x in enumerate(tensors)))

        def plan_of(rank, of=of):
            return plan(layout, ringcp.Causal(), ring(2), rank, of, kernel.caps)

        parts.append(in_order(plan_of, kernel, layout, local))
    got = {name: torch.cat([part[name] for part in parts], 1) for name in ("out", "lse", "dq")}
    for name in ("dk", "dv"):
        first, second = (part[name] for part in parts)
        got[name] = torch.stack([first[:, 0], first[:, 1] + second[:, 0], second[:, 1]], 1)
    assert_none([differences("together", got, want)])


CROSS = (ringcp.Full(), ringcp.Causal(), ringcp.Window(4, 2), ringcp.Window(3) | ringcp.Prefix([2]))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("layout", ["contiguous", "head_tail", "striped"])
def test_queries_and_keys_in_different_layouts(layout, world_size):
    found = []
    lengths = ((17, 33), (33, 17), (1, 20), (20, 1), (0, 9), (9, 0), (0, 0))
    kernels, names = itertools.cycle(KERNELS_OF), itertools.cycle(("contiguous", "head_tail", "striped"))
    heads = itertools.cycle((Heads(4, 2), Heads(3, 1), Heads(5, 3, 1, 2), Heads(3, 3)))
    for mask, (num_q, num_k), gather in itertools.product(CROSS, lengths, GATHERS):
        lay, keys = layout_named(layout, num_q, world_size), layout_named(next(names), num_k, world_size)
        of, kernel = next(heads), next(kernels)
        found += compared(f"{mask} {lay} {keys} {of}", lay, mask, of, kernel=kernel, gather=gather, kv_layout=keys)
    assert_none([found])


def test_ranks_that_only_lend_keys():
    """All queries on one rank, all keys on others, in an order of their own."""
    queries = Shuffled(11, ((), (Span(6, 11), Span(0, 6)), ()))
    keys = Shuffled(13, ((Span(9, 13), Span(0, 4)), (), (Span(4, 9),)))
    plans = {}
    for gather, mask in itertools.product(GATHERS, (ringcp.Full(), ringcp.Causal())):
        of_ranks = [
            plan(queries, mask, ring(3), rank, Heads(4, 2), KERNELS["reference"].caps, gather=gather, kv_layout=keys)
            for rank in range(3)
        ]
        plans[gather, mask] = [sum(len(step.calls) for step in of.forward.steps) for of in of_ranks]
        assert plans[gather, mask][0] == plans[gather, mask][2] == 0
        tensors = tensors_of(3, Heads(4, 2), 11, 13)
        at = [queries.positions(rank) for rank in range(3)], [keys.positions(rank) for rank in range(3)]
        local = [tuple(x[:, :, at[i in (1, 2)][rank]] for i, x in enumerate(tensors)) for rank in range(3)]
        want = reference(tensors, Heads(4, 2), mask.dense(torch.arange(11), torch.arange(13)))
        for rank, results in enumerate(executed(of_ranks, KERNELS["reference"], local, 5**-0.5)):
            got = dict(zip(("out", "lse", "dq", "dk", "dv"), results, strict=True))
            here = {name: x[:, :, at[name in ("dk", "dv")][rank]] for name, x in want.items()}
            assert_none([differences(f"rank {rank} {gather} {mask}", got, here)])
