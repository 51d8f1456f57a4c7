"""Kernel "flex" on a stand-in that reads blocks as the compiled kernels do, and on torch's own function, compiled.

The tests that every kernel passes are in test_kernels.py, those of the choice in test_kernels_registry.py.
"""

import gc
import inspect
import itertools
import sys
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from calls import make_call
from flex_standin import CALLS, flex_attention
from predicates import NAMES, Given, causal, make, random, written
from test_kernels import BANDS, FULL, SCALE, SQUARE, operands
from test_kernels_registry import cpu, gpu
from torch.nn.attention import flex_attention as torchs

import ringcp
from ringcp.kernels import flex
from ringcp.kernels.base import Form
from ringcp.kernels.flex import Flex
from ringcp.kernels.pairwise import Alibi, Allowed
from ringcp.kernels.reference import Reference
from ringcp.layout import layout_named
from ringcp.lower import Call
from ringcp.testing import assert_close, in_process, reference_attention
from ringcp.written import Extras, Written, WrittenStep

STANDIN = Flex(flex_attention, None)
# torch's own function, traced by Dynamo as on a GPU, then run by matmuls in place of Triton's kernels.
TRACED = Flex(None, "eager")
INF = float("inf")
# Of Dynamo's own code.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")


@pytest.fixture(autouse=True)
def fresh():
    CALLS.clear()


@pytest.fixture
def torchs_own(monkeypatch):
    """torch refuses gradients on the CPU, where it has them all the same."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *tensors: None)


def merged(q, k, v, dlse, how, seed=0):
    """The final out and lse of rows that also attend elsewhere, some of which attend to nothing anywhere."""
    generator = torch.Generator().manual_seed(seed)
    out, lse = Reference().forward(q, k, v, **how)
    other, other_lse = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (out, lse))
    dead = torch.rand(lse.shape, generator=generator) < 0.2
    final = torch.logaddexp(lse, 2 * other_lse)
    weight = (lse - final).exp().unsqueeze(-1)
    return out.lerp(other, 1 - weight), torch.where(dead, INF, final), dead


def allowed_of(kind, m, n, generator):
    """Sparse, of one of four shapes, with rows that attend to nothing and keys that nobody attends to."""
    shape = (2 if "b" in kind else 1, 4 if "h" in kind else 1, m, n)
    allowed = torch.rand(shape, generator=generator) > 0.5
    allowed[..., 1::5, :] = False
    allowed[..., 2::7] = False
    return allowed


def compare(kernel, m, n, form, kind, softcap, slopes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(m * n)
    q, k, v, dout, dlse = operands(m, n, dims=(9, 7), dtype=dtype)
    alibi = (
        None
        if slopes is None
        else Alibi(torch.rand(slopes, 4, generator=generator), torch.arange(m) * 3, torch.arange(n))
    )
    how = {"form": form, "scale": SCALE, "softcap": softcap, "alibi": alibi}
    how["allowed"] = None if kind is None else allowed_of(kind, m, n, generator)
    out, lse, dead = merged(q, k, v, dlse, how)
    want = [*Reference().forward(q, k, v, **how), *Reference().backward(dout, q, k, v, out, lse, dlse, **how)]
    got = [*kernel.forward(q, k, v, **how), *kernel.backward(dout, q, k, v, out, lse, dlse, **how)]
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert_close(x, y, name=name)
    assert (got[2][dead] == 0).all(), "rows that attend to nothing anywhere have no gradient"


FORMS = FULL + SQUARE + BANDS


@pytest.mark.parametrize(
    "kind, softcap, slopes",
    [
        (None, 1.3, None),
        (None, None, 2),
        (None, 1.3, 1),
        ("", None, None),
        ("b", 1.3, 2),
        ("h", None, 1),
        ("bh", 1.3, 1),
    ],
)
def test_a_part_of_the_keys_with_final_results(kind, softcap, slopes):
    for m, n, form in [*FORMS, (150, 290, Form(lo=-140, hi=100)), (257, 131, Form(hi=140))]:
        compare(STANDIN, m, n, form, kind, softcap, slopes)
    assert {call["grad"] for call in CALLS} == {False, True}


def test_only_blocks_in_which_something_attends_are_computed():
    q, k, v, *_ = operands(512, 640)
    for form, allowed, want in [
        (Form(), None, None),
        (Form(lo=0), None, (10, 20)),
        (Form(lo=-128, hi=127), None, (11, 20)),
        (Form(), torch.arange(640)[None] // 128 == torch.arange(512)[:, None] // 128, (4, 20)),
        (Form(), torch.zeros(512, 640, dtype=torch.bool), (0, 20)),
    ]:
        pairs = None if allowed is None else allowed[None, None]
        out, lse = STANDIN.forward(q, k, v, form=form, scale=SCALE, allowed=pairs)
        assert CALLS[-1]["blocks"] == want
    assert (lse == -INF).all()
    assert (out == 0).all()


def by_row_and_head(b, h, q, k):
    return (q + k + b * 3 + h) % 4 != 0


def whole_blocks(b, h, q, k):
    """Blocks that are full for some batch rows and heads, and empty for others."""
    return ((q < 31 + 2 * 128) == (h == 9)) & ((b == 6) | (q < 31 + 2 * 128))


@pytest.mark.parametrize(
    "functions", [(causal,), (by_row_and_head,), (causal, by_row_and_head), (whole_blocks,)], ids=str
)
def test_functions_see_the_numbers_of_the_whole_call(functions):
    m, n = 140, 70
    q, k, v, dout, dlse = operands(m, n)
    batch, heads = torch.tensor([5, 6]), torch.arange(8, 12)
    rows, keys = torch.arange(m) * 2 + 31, torch.cat((torch.arange(50, 100), torch.arange(20)))
    at = [x.view([-1 if dim == i else 1 for i in range(4)]) for dim, x in enumerate((batch, heads, rows, keys))]
    pairs = torch.stack([function(*at).expand(2, 4, m, n) for function in functions]).all(0)
    both = len(functions) > 1 or functions != (causal,)
    how = {"form": Form(lo=-60), "scale": SCALE}
    fused = Allowed(functions, both, both, batch, heads, rows, keys)
    out, lse = Reference().forward(q, k, v, **how, allowed=pairs)
    final = lse.masked_fill(lse == -INF, INF)
    want = [out, lse, *Reference().backward(dout, q, k, v, out, final, dlse, **how, allowed=pairs)]
    got = STANDIN.forward(q, k, v, **how, allowed=fused)
    got = [*got, *STANDIN.backward(dout, q, k, v, out, final, dlse, **how, allowed=fused)]
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert_close(x, y, name=name)


# --- masks of calls


def passed(mask, given):
    """What a kernel is given for the whole of it."""
    layout = layout_named("contiguous", given.q_len, 1)
    rows = torch.arange(given.q_len)
    step = WrittenStep(Written(mask, layout, layout, 0, Extras()), rows, rows, given.batch, given.heads)
    call = Call((0, given.q_len), (0, given.k_len), Form(), None, None, None, True)
    return step.keywords(call, functions=True)["allowed"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_compiled_in_and_what_is_written_out(name):
    """Functions that all have to hold, beside masks that pieces know, unless they do more than compute pointwise."""
    given = Given(2, 3, 13, 13)
    allowed = passed(make(name, given), given)
    fused = name not in ("types", "or window", "and or", "or padding")
    assert isinstance(allowed, Allowed if fused else torch.Tensor)
    if fused:
        assert allowed.by_row == (name in ("by_row", "sparse", "and causal", "and documents"))
        assert allowed.by_head == (name not in ("causal", "documents", "by_row"))


def test_a_block_mask_is_compiled_in():
    def mod(b, h, q, k):
        return q >= k

    with torch.no_grad():
        blocks = torchs.create_block_mask(mod, 2, 3, 40, 40, "cpu", BLOCK_SIZE=16)
    allowed = passed(ringcp.Predicate(blocks) & ringcp.Window(20), Given(2, 3, 40, 40))
    assert isinstance(allowed, Allowed)
    assert (allowed.by_row, allowed.by_head) == (True, True)


WAYS = [*itertools.product(["ring", "gather", "ulysses"], [2, 3]), ("usp", 4)]


@pytest.mark.parametrize(
    "name, mode, world_size", [(name, *WAYS[at % len(WAYS)]) for i, name in enumerate(NAMES) for at in (i, i + 3)]
)
def test_exact_over_ranks(monkeypatch, name, mode, world_size):
    monkeypatch.setattr(sys.modules["ringcp.testing.in_process"], "choose", lambda kernel, problem: STANDIN)
    given = Given(2, 4, 37, 37)
    generator = torch.Generator().manual_seed(world_size)
    shapes = (2, 4, 37, 6), (2, 2, 37, 6), (2, 2, 37, 5), (2, 4, 37, 5), (2, 4, 37)
    *qkv, dout, dlse = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    extra = {"softcap": 2.0, "alibi_slopes": torch.rand(2, 4, generator=generator)} if name == "sparse" else {}
    how = {"mode": mode, "ulysses_degree": 2 if mode == "usp" else None, "world_size": world_size}
    how |= {"gather_memory": 1} if mode == "gather" else {}
    how |= {"layout": "striped" if name == "by_head" else "auto", "return_lse": True, "mask": make(name, given)}
    results = []
    for attend, options in ((in_process, how), (reference_attention, {"mask": written(name, given)})):
        leaves = [x.clone().requires_grad_() for x in qkv]
        out, lse = attend(*leaves, **options, **extra)
        results.append((out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse))))
    for what, got, want in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        assert_close(got, want, name=f"{name} {mode} {what}")
    assert CALLS


# --- torch's own function


def test_the_stand_in_has_the_signature_of_torch():
    assert list(inspect.signature(flex_attention).parameters) == list(
        inspect.signature(torchs.flex_attention).parameters
    )


@pytest.mark.timeout(175)
@pytest.mark.parametrize("kernel", [STANDIN, TRACED], ids=["stand-in", "torch"])
@pytest.mark.parametrize(
    "case", [(33, 70, Form(lo=-37), None, 1.5, 1), (40, 131, Form(), "bh", None, None)], ids=["band", "mask"]
)
def test_torchs_own_function_has_these_conventions(torchs_own, kernel, case):
    """Forward, backward and the gradient through the lse, of dead rows as well."""
    compare(kernel, *case)


@pytest.mark.timeout(175)
def test_other_lengths_are_no_other_kind(torchs_own):
    compare(TRACED, 131, 40, Form(hi=95), "h", None, None)
    kinds = flex._compiled.cache_info().currsize
    compare(TRACED, 140, 45, Form(hi=97), "h", None, None)
    assert flex._compiled.cache_info().currsize == kinds


def test_other_tensors_in_the_same_functions_do_not_compile_anew(torchs_own):
    torch._dynamo.reset()
    q, k, v, *_ = operands(20, 20)

    def run(ids, lo, offset):
        function = lambda b, h, q, k: ids[q] == ids[k]  # noqa: E731
        at = torch.arange(2), torch.arange(4), torch.arange(20) + offset, torch.arange(20)
        fused = Allowed((function,), False, False, *at)
        got = TRACED.forward(q, k, v, form=Form(lo=lo), scale=SCALE, allowed=fused)
        pairs = function(0, 0, at[2][:, None], at[3])[None, None]
        for x, y in zip(got, Reference().forward(q, k, v, form=Form(lo=lo), scale=SCALE, allowed=pairs), strict=True):
            assert_close(x, y)

    run(torch.arange(40) // 6, 0, 0)
    with torch._dynamo.config.patch(error_on_recompile=True):
        run(torch.arange(40) // 3, -4, 11)
    assert flex._compiled.cache_info().currsize <= flex._compiled.cache_info().maxsize


def test_functions_of_other_code_are_other_kinds():
    """torch compiles a function so many times and then no more, or raises."""
    at = torch.arange(2), torch.arange(4), torch.arange(6), torch.arange(6)
    for i in range(2, 5):
        fused = Allowed((eval(f"lambda b, h, q, k: (q + k) % {i} != 0"),), False, False, *at)
        mask_mod = flex._mask_mod(Form(), fused, torch.device("cpu"))
        make = TRACED._compiled(flex._blocks, tuple(flex._codes(mask_mod)))
        with torch._dynamo.config.patch(recompile_limit=1):
            blocks = make(mask_mod, 6, 6, 1, 1, torch.device("cpu"))
        want = (at[2][:, None] + at[3]) % i != 0
        assert torch.equal(blocks.mask_mod(at[0][0], at[1][0], at[2][:, None], at[3]), want)


@pytest.mark.timeout(175)
def test_masks_and_biases_become_fused_code():
    """What Dynamo hands on, lowered by inductor: on the CPU to C++, forward alone and without the lse."""
    m, n = 300, 260
    q, k, v, *_ = operands(m, n, dims=(16, 16), dtype=torch.float32)
    at = torch.arange(3, 5), torch.arange(4, 8), torch.arange(m) * 2 + 5, torch.arange(n) * 2
    ids = torch.arange(700) // 30
    function = lambda b, h, q, k: (ids[q] == ids[k]) | ((h == 5) & (k % 3 == 0))  # noqa: E731
    alibi = Alibi(torch.rand(2, 4), *at[2:])
    mask_mod = flex._mask_mod(Form(lo=-20), Allowed((function,), False, True, *at), q.device)
    with torch.no_grad():
        blocks = Flex()._compiled(flex._blocks, (test_masks_and_biases_become_fused_code,))(
            mask_mod, m, n, 1, 4, q.device
        )
        out = torch.compile(torchs.flex_attention, fullgraph=True)(
            q, k, v, score_mod=flex._score_mod(2.0, alibi), block_mask=blocks, scale=SCALE, enable_gqa=True
        )
    pairs = function(0, at[1][:, None, None], at[2][:, None], at[3])[None]
    want, _ = Reference().forward(q, k, v, form=Form(lo=-20), scale=SCALE, softcap=2.0, allowed=pairs, alibi=alibi)
    assert (out - want).abs().max() < 1e-5
    assert blocks.to_dense().unique().tolist() == [0, 1], "some blocks are empty"


class Table:
    """A mask_mod that is no function."""

    def __init__(self, table):
        self.table = table

    def __call__(self, b, h, q_idx, kv_idx):
        return self.table[q_idx, kv_idx]


def test_nothing_keeps_what_a_function_captures(torchs_own):
    q, k, v, *_ = operands(9, 9)
    table = Table(random(9, 9, seed=3))
    at = torch.arange(2), torch.arange(4), torch.arange(9), torch.arange(9)
    watched = weakref.ref(table)
    got = TRACED.forward(q, k, v, form=Form(), scale=SCALE, allowed=Allowed((table,), False, False, *at))
    want = Reference().forward(q, k, v, form=Form(), scale=SCALE, allowed=table.table[None, None])
    for x, y in zip(got, want, strict=True):
        assert_close(x, y)
    del table
    gc.collect()
    assert watched() is None


# --- inside the registered op, with what is around it


def other(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & ((h == 1) | (kv_idx % 3 == 0))


def check_around(mesh, how):
    """A kernel that uses autograd, below autograd; in a context, which refuses `flex_attention`; compiled."""
    whole, layout = make_call(mesh, 37)[1:]
    rank, mask = mesh.get_local_rank(), ringcp.Predicate(other) & ringcp.Causal()
    at = torch.arange(37)
    leaves = [x.clone().requires_grad_() for x in whole]
    want_out, _ = reference_attention(*leaves, mask=mask.dense(at, at, batch=2, heads=4))
    want = torch.autograd.grad(want_out.square().sum(), leaves)
    local = [layout.shard(x, rank, 2).requires_grad_() for x in whole]

    def attend(q, k, v):
        if "context" in how:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return ringcp.attention(q, k, v, mesh=mesh, mask=mask, layout=layout)

    def run(attend):
        out = attend(*local)
        return out, *torch.autograd.grad(out.square().sum(), local)

    if "compiled" in how:
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        patch.setattr(torchs, "_validate_device", lambda *tensors: None)
        for name in ("choose", "kernel_at"):
            patch.setattr(sys.modules["ringcp.call"], name, lambda *_: TRACED)
        if "context" in how:
            with ringcp.context_parallel(mesh, mask=mask, layout=layout):
                out, *got = run(attend)
        else:
            out, *got = run(attend)
    assert_close(out, layout.shard(want_out, rank, 2))
    for a, b in zip(got, want, strict=True):
        assert_close(a, layout.shard(b, rank, 2))


@pytest.mark.parametrize("how", ["eager", "compiled", "context", "context compiled"])
def test_inside_the_op(worlds, how):
    worlds(2).run(check_around, how)


# --- refusals


@pytest.fixture
def there(monkeypatch):
    monkeypatch.setattr(flex, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.version, "hip", None)
    return lambda *chip: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: chip)


@pytest.mark.parametrize(
    "chip, problem, reasons",
    [
        ((9, 0), gpu(explicit=True, alibi=True, softcap=3.0, head_dim=7, value_dim=200), []),
        ((9, 0), gpu(dtype=torch.float32, deterministic=True, needs_lse_grad=True), []),
        ((7, 5), gpu(dtype=torch.float16), []),
        ((7, 5), gpu(), ["compute capability 7.5 < 8.0"]),
        ((6, 1), gpu(dtype=torch.float16), ["compute capability 6.1 < 7.0"]),
        ((9, 0), gpu(dtype=torch.float64), ["dtype float64 is not float32 or float16 or bfloat16"]),
        ((9, 0), gpu(head_dim=264), ["head_dim 264 > 256"]),
        ((9, 0), gpu(value_dim=300, dropout=True), ["no dropout", "value_dim 300 > 256"]),
        ((9, 0), gpu(scale=-0.5), ["scale -0.5 <= 0, which turns masked scores of -inf around"]),
        ((9, 0), cpu(), ["device cpu is not cuda"]),
    ],
)
def test_what_it_refuses(there, chip, problem, reasons):
    there(*chip)
    assert Flex().refusals(problem) == reasons


def test_without_triton(there, monkeypatch):
    there(9, 0)
    monkeypatch.setattr(flex, "find_spec", lambda name: None)
    assert Flex().refusals(gpu()) == ["triton is not installed"]
