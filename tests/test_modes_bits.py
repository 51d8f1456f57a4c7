"""Results with the same bits as in one process, as equalities; and `explain`, which promises these and no others."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from cases import LAYOUTS, MASKS
from torch import Tensor

import ringcp
from ringcp.layout import layout_named
from ringcp.merge import accumulator_dtype
from ringcp.runs import Sizes
from ringcp.testing import in_process

# Bits are compared with those of ranks, which have one thread.
pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("out", "lse", "dq", "dk", "dv")
SINGLE = (torch.float32, torch.bfloat16)
SHORT = ringcp.Documents([1, 2, 9, 30, 20, 40]) & ringcp.Causal()


def tensors(heads: tuple[int, int], seq_len: int, dim: int, dtype: torch.dtype, batch: int = 1) -> list[Tensor]:
    """q, k, v, dout, dlse."""
    generator = torch.Generator().manual_seed(seq_len)
    shapes = ((heads[0], dim), (heads[1], dim), (heads[1], dim), (heads[0], dim), (heads[0],))
    *rest, dlse = (torch.randn(batch, n, seq_len, *d, generator=generator).to(dtype) for n, *d in shapes)
    return [*rest, dlse.to(accumulator_dtype(dtype))]


def graded(given: list[Tensor], attend, through_lse: bool) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    results = attend(*leaves)
    which = slice(0, 2) if through_lse else slice(0, 1)
    grads = torch.autograd.grad(results[which], leaves, given[3:][which])
    return dict(zip(NAMES, [*(x.detach() for x in results), *grads], strict=True))


def here(given: list[Tensor], through_lse: bool = False, **options) -> dict[str, Tensor]:
    return graded(given, lambda q, k, v: in_process(q, k, v, return_lse=True, **options), through_lse)


def equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[str, ...]:
    return tuple(name for name in want if torch.equal(got[name], want[name]))


def promised(mode, heads, seq_len, world_size, mask, dtype, dim) -> tuple[str, ...]:
    options = {"q_heads": heads[0], "kv_heads": heads[1], "seq_len": seq_len, "world_size": world_size}
    found = ringcp.explain(**options, mask=mask, device="cpu", dtype=dtype, head_dim=dim)
    return found.same_bits[mode]


# (dtype, length); in fp64 from 64 tokens on.
LENGTHS = [*itertools.product(SINGLE, (33, 129)), (torch.float64, 64), (torch.float64, 129)]
# 12 / 12 fit every world, 24 / 12 come in groups, 5 / 5 are shared out unevenly, 3 / 3 leave a rank of 4 without.
WHOLE = [(12, 12), (24, 12), (5, 5), (3, 3)]
SHARED = [(7, 1), (8, 2), (12, 3)]


@pytest.mark.parametrize("mask", ["full", "causal", "window_8", "two_sided"])
def test_ulysses_has_the_bits_of_one_process(mask):
    for i, ((dtype, seq_len), heads) in enumerate(itertools.product(LENGTHS, WHOLE + SHARED)):
        given, through_lse = tensors(heads, seq_len, 16, dtype), i % 2 == 0
        want = here(given, through_lse, mask=MASKS[mask], world_size=1)
        for world_size, layout in zip((2, 3, 4), LAYOUTS, strict=True):
            options = {"world_size": world_size, "mask": MASKS[mask], "layout": layout, "mode": "ulysses"}
            names = promised("ulysses", heads, seq_len, world_size, MASKS[mask], dtype, 16)
            # The gradients of a key head that goes to several ranks are sums.
            assert names == (NAMES if heads in WHOLE or heads[1] % world_size == 0 else NAMES[:3])
            same = equal(here(given, through_lse, **options), want)
            assert set(same) >= set(names), (dtype, seq_len, heads, world_size, through_lse, same)


@pytest.mark.parametrize("dtype", SINGLE, ids=str)
@pytest.mark.parametrize("left, same", [(800, NAMES), (2100, ())])
def test_ulysses_has_the_bits_of_one_process_with_a_wide_window(dtype, left, same):
    """Backward is cut into triangles in half precision; forward merges from 2,048 tokens on, and promises less."""
    heads, seq_len, window = (4, 4), 2600, ringcp.Window(left)
    given = tensors(heads, seq_len, 16, dtype)
    want = here(given, mask=window, world_size=1)
    got = here(given, mask=window, world_size=2, layout="head_tail", mode="ulysses")
    names = promised("ulysses", heads, seq_len, 2, window, dtype, 16)
    assert names == same
    assert set(equal(got, want)) >= set(names)


@pytest.mark.parametrize("causal", [False, True])
def test_ulysses_has_the_bits_of_torchs_attention(causal):
    mask = ringcp.Causal() if causal else None
    for (dtype, seq_len), heads in itertools.product(LENGTHS, WHOLE):
        *given, _ = tensors(heads, seq_len, 16, dtype, batch=2)
        leaves = [x.clone().requires_grad_() for x in given[:3]]
        out = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
        want = [out, *torch.autograd.grad(out, leaves, given[3])]
        for world_size, layout in zip((2, 3, 4), LAYOUTS, strict=True):
            got = here([*given, None], mask=mask, world_size=world_size, layout=layout, mode="ulysses")
            for name, x in zip(("out", "dq", "dk", "dv"), want, strict=True):
                assert torch.equal(got[name], x), (dtype, seq_len, heads, world_size, name)


JOBS = [
    (mask, dtype, seq_len, heads)
    for mask, (dtype, seq_len), heads in itertools.product(
        ("full", "causal", "window_8"), ((torch.float32, 257), (torch.bfloat16, 33), (torch.float64, 129)), WHOLE[1:3]
    )
]


def over_gloo(mesh, mode, jobs, parts=1):
    """out, lse, dq, dk, dv of each job in the order of the sequence; exchanged in so many parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sizes, "parts", lambda *_: parts)
        return all_over_gloo(mesh, mode, jobs)


def all_over_gloo(mesh, mode, jobs):
    found = []
    for i, (mask, dtype, seq_len, heads) in enumerate(jobs):
        layout = layout_named(LAYOUTS[i % 3], seq_len, mesh.size())
        local = [layout.shard(x, mesh.get_local_rank(), 2) for x in tensors(heads, seq_len, 16, dtype)]

        def attend(q: Tensor, k: Tensor, v: Tensor, mask=mask, layout=layout) -> object:
            options = {"mask": MASKS[mask], "layout": layout, "mode": mode, "return_lse": True}
            return ringcp.attention(q, k, v, mesh=mesh, **options)

        got = graded(local, attend, through_lse=True)
        found.append({name: ringcp.unshard(x, mesh, dim=2, layout=layout) for name, x in got.items()})
    return found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("parts", [1, 2])
def test_ulysses_over_gloo_has_the_bits_of_one_process(worlds, world_size, parts):
    for by_rank in worlds(world_size).run(over_gloo, "ulysses", JOBS, parts):
        for (mask, dtype, seq_len, heads), got in zip(JOBS, by_rank, strict=True):
            want = here(tensors(heads, seq_len, 16, dtype), through_lse=True, mask=MASKS[mask], world_size=1)
            assert equal(got, want) == NAMES, (mask, dtype, seq_len, heads)


@pytest.mark.parametrize("seq_len", [1024, 2048, 4096])
@pytest.mark.parametrize("dtype", SINGLE, ids=str)
def test_gather_has_the_bits_of_one_process(dtype, seq_len):
    """Under a full mask, out and dq: each row of q meets all keys in one call, in their order."""
    given = tensors((2, 1), seq_len, 16, dtype)
    want = here(given, world_size=1)
    for world_size, layout in ((2, "head_tail"), (4, "striped")) if seq_len < 4096 else ((4, "contiguous"),):
        got = here(given, world_size=world_size, layout=layout, mode="gather")
        names = promised("gather", (2, 1), seq_len, world_size, None, dtype, 16)
        assert names == ("out", "dq")
        assert set(equal(got, want)) >= set(names), (world_size, layout)


# Calls with other bits than one process, of which nothing must be promised: a gradient that is summed over ranks,
# results that are merged, and rows that do not start at a multiple of 16 bytes.
OTHERWISE = {
    "ring": ("ring", (4, 4), 257, ringcp.Causal(), torch.float32, 16),
    "gather, causal": ("gather", (4, 4), 1024, ringcp.Causal(), torch.float32, 16),
    "gather, odd length": ("gather", (4, 4), 1023, None, torch.float32, 16),
    "usp": ("usp", (4, 4), 257, ringcp.Causal(), torch.float32, 16),
    "a shared key head": ("ulysses", (7, 1), 257, ringcp.Causal(), torch.float32, 16),
    "merged": ("ulysses", (4, 4), 129, ringcp.Prefix(20), torch.float32, 8),
    "merged documents": ("ulysses", (4, 4), 129, SHORT | ringcp.Window(3), torch.float32, 8),
    "narrow rows": ("ulysses", (4, 4), 65, ringcp.Causal(), torch.float32, 6),
    "narrow rows, fp64": ("ulysses", (4, 4), 65, ringcp.Causal(), torch.float64, 5),
}


@pytest.mark.parametrize("what", OTHERWISE)
def test_nothing_is_promised_where_bits_differ(what):
    mode, heads, seq_len, mask, dtype, dim = OTHERWISE[what]
    given = tensors(heads, seq_len, dim, dtype)
    options = {"mask": mask, "mode": mode, "ulysses_degree": 2 if mode == "usp" else None}
    same = equal(here(given, world_size=4, **options), here(given, mask=mask, world_size=1))
    names = promised(mode, heads, seq_len, 4, mask, dtype, dim)
    assert names == (NAMES[:3] if what == "a shared key head" else ())
    assert set(names) <= set(same)
    if not what.startswith("narrow"):  # these differ with AVX2, and not with AVX-512
        assert set(same) < set(NAMES), "all bits are equal: explain promises too little"


def test_nothing_is_promised_of_few_rows_in_fp64():
    """Whose bits depend on threads, and on some numbers."""
    for seq_len, mask in ((63, ringcp.Causal()), (129, SHORT), (8, None)):
        assert promised("ulysses", (4, 4), seq_len, 4, mask, torch.float64, 32) == ()
        assert promised("ulysses", (4, 4), seq_len, 4, mask, torch.float32, 32) == NAMES
    assert promised("ulysses", (4, 4), 64, 4, ringcp.Causal(), torch.float64, 32) == NAMES
    assert promised("ulysses", (4, 4), 257, 4, ringcp.Causal(), torch.float16, 32) == ()
