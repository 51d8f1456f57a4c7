"""Calls with a `Predicate`: how long its function lives, compiling, checkpointing, agreement, and what is refused."""

import copy
import functools
import gc
import pickle
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo.testing
from calls import check_exact, make_call
from predicates import Given, causal, make, random, written
from test_compile import quiet
from torch.utils.checkpoint import checkpoint

import ringcp
from ringcp import Causal, Documents, Predicate, Window
from ringcp.attention import attend
from ringcp.kernels.base import Problem
from ringcp.kernels.registry import KERNELS
from ringcp.mask import decode_mask
from ringcp.options import Options
from ringcp.testing import assert_close, in_process, reference_attention


def other(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & ((h == 1) | (kv_idx % 3 == 0))


def test_algebra_and_specs():
    mask = Predicate(causal)
    both = (mask | Window(2)) & Documents([[3, 4], [7]])
    assert str(both) == "((Predicate(causal) | Window(2, 0)) & Documents([[3, 4], [7]]))"
    assert both.rows == 2
    assert both.superset == Documents([[3, 4], [7]])
    assert (mask & Window(3)).superset == Window(3)
    assert (mask | Window(3)).superset == mask.superset == (mask & mask).superset == ringcp.Full()
    assert (mask & Window(3)).reach == 3
    assert decode_mask(tuple(both.spec.tolist())) == both
    assert Causal().superset is not None
    assert not Causal().explicit
    named = Predicate(causal, name="längere Namen gehen auch")
    assert decode_mask(tuple(named.spec.tolist())) == named != mask == mask
    at, given = torch.arange(7), Given(2, 4, 7, 7)
    assert torch.equal(make("sparse", given).dense(at, at, batch=2, heads=4), written("sparse", given))
    with pytest.raises(
        ringcp.ArgumentError, match=r"batch: expected how many there are, for Predicate\(sparse\), got N"
    ):
        make("sparse", given).dense(at, at)


def test_copies_and_pickles_have_handles_of_their_own():
    at = torch.arange(9)
    mask = Predicate(other) & Window(4)
    for again in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
        assert str(again) == str(mask)
        assert not torch.equal(again.spec, mask.spec)
        assert torch.equal(again.dense(at, at, heads=3), mask.dense(at, at, heads=3))


class Table:
    __name__ = "table"

    def __init__(self, table):
        self.table = table

    def __call__(self, b, h, q_idx, kv_idx):
        return self.table[q_idx, kv_idx]


def call_and_forget(mesh, copies):
    """Backward after the mask is gone, then that nothing keeps its function: no memo, no map."""
    call, whole, layout = make_call(mesh, 24, requires_grad=True)
    allowed = Table(random(24, 24, seed=3))
    mask, whole = Predicate(allowed) & Causal(), [x.requires_grad_() for x in whole]
    expected, _ = reference_attention(*whole, mask=allowed.table.tril())
    watched = weakref.ref(allowed)
    del allowed
    options = {name: value for name, value in call.items() if name not in ("q", "k", "v", "mask", "mesh")}
    local = [call[name] for name in "qkv"]
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone) if copies else nullcontext():
        out = ringcp.attention(*local, mesh=mesh, mask=mask, layout=layout, **options)
    spec = mask.spec.clone()
    ringcp.make_layout(mask, 24, mesh)
    ringcp.explain(q_heads=4, kv_heads=2, seq_len=24, world_size=2, mask=mask)
    del mask
    gc.collect()
    for _ in range(2):
        got = torch.autograd.grad(out.square().sum(), local, retain_graph=True)
    want = torch.autograd.grad(expected.square().sum(), whole)
    for a, b in zip(got, want, strict=True):
        assert_close(a, layout.shard(b, mesh.get_local_rank(), 2))
    del out
    gc.collect()
    if copies:  # torch leaks a function that saves its output under such hooks
        return
    assert watched() is None
    with pytest.raises(
        ringcp.ArgumentError, match=r"expected the function of Predicate\(table\), got one that is gone"
    ):
        decode_mask(tuple(spec.tolist()))


@pytest.mark.parametrize("copies", [False, True])
def test_a_function_lives_as_long_as_the_graph_and_no_longer(worlds, copies):
    worlds(2).run(call_and_forget, copies)


def checkpointed(mesh):
    call, _, layout = make_call(mesh, 24, requires_grad=True)
    local = [call.pop(name) for name in "qkv"]
    call |= {"mask": Predicate(other), "layout": layout}

    def run(q, k, v):
        return ringcp.attention(q, k, v, **call).square().sum()

    plain = torch.autograd.grad(run(*local), local)
    for reentrant in (False, True):
        for x in local:
            x.grad = None
        checkpoint(run, *local, use_reentrant=reentrant).backward()
        assert all(torch.equal(x.grad, y) for x, y in zip(local, plain, strict=True))


def test_checkpointing(worlds):
    worlds(2).run(checkpointed)


@quiet
def compiled(mesh, backend):
    call, _, layout = make_call(mesh, 24, requires_grad=True)
    local = [call[name] for name in "qkv"]
    given = Given(2, 4, 24, 24)

    def step(q, k, v, mask):
        return ringcp.attention(q * 2, k, v, mesh=mesh, mask=mask, layout=layout)

    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    fast = torch.compile(step, fullgraph=True, backend=counter)
    makers = [lambda: Predicate(causal), lambda: Predicate(other), Causal, lambda: Predicate(causal) & Window(3)]
    makers += [functools.partial(make, name, given) for name in ("sparse", "types", "and or")]
    for maker in makers:
        out, same = fast(*local, maker()), step(*local, maker())
        gc.collect()  # the mask is gone before backward
        assert torch.equal(out, same)
        grads, others = (torch.autograd.grad(y.square().sum(), local) for y in (out, same))
        assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
    return counter.frame_count


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_another_predicate_does_not_recompile(worlds, backend):
    assert worlds(2).run(compiled, backend) == [1, 1]


NOT_PREDICATES = {
    "lambda": (lambda: Predicate(lambda b, h, q, k: q > k), "name: expected one by which ranks know <function"),
    "partial": (lambda: Predicate(functools.partial(causal)), "and without any of <>=;, got '<unnamed>'; pass name=\""),
    "name": (lambda: Predicate(causal, name="a; b"), "got 'a; b'; pass name="),
    "no name": (lambda: Predicate(causal, name=""), "got ''; pass name="),
    "number": (lambda: Predicate(3), "fn: expected a function of (b, h, q_idx, kv_idx) or a BlockMask, got 3; of a"),
    "tensor": (lambda: Predicate(torch.ones(3, 3)), "got a tensor (3, 3); of a dense mask, pass lambda b, h, q, k"),
    "class": (lambda: Predicate(dict), "fn: expected a function of (b, h, q_idx, kv_idx) or a BlockMask, got <class"),
    "not called": (lambda: Causal() & Predicate, "got ringcp.Predicate, not called; write Predicate(...)"),
}


@pytest.mark.parametrize("case", NOT_PREDICATES)
def test_what_is_no_predicate(case):
    make_it, words = NOT_PREDICATES[case]
    with pytest.raises(ringcp.ArgumentError) as info:
        make_it()
    assert words in str(info.value)


def raises(b, h, q_idx, kv_idx):
    raise KeyError("no such document")


SHORT, ROWS = torch.arange(9), random(24, 3)
# By case: the function, and what its rank is told.
BROKEN = {
    "raises": (raises, "expected Predicate(broken) to say of pairs on cpu whether they attend, got KeyError: "),
    "no tensor": (lambda b, h, q, k: True, "must only return Tensors, got type <class 'bool'>"),
    "no bool": (
        lambda b, h, q, k: q - k,
        "expected one bool from Predicate(broken) for each pair, got torch.int64",
    ),
    "no scalar": (lambda b, h, q, k: q == SHORT, "got torch.bool of shape (9,); return a comparison"),
    "a row": (lambda b, h, q, k: ROWS[q], "got torch.bool of shape (3,); return a comparison"),
    "too short": (lambda b, h, q, k: SHORT[q] == SHORT[k], "got IndexError: index 23 is out of bounds"),
    "item": (
        lambda b, h, q, k: torch.tensor(q.item() > 3),
        "vmap: It looks like you're calling .item()",
    ),
    "device": (lambda b, h, q, k: torch.ones(24, 24, device="meta")[q, k] > 0, "meta"),
}


def check_broken(mesh, case, agree):
    fn, words = BROKEN[case]
    call, _, layout = make_call(mesh, 24)
    local = [call.pop(name) for name in "qkv"]
    odd = mesh.get_local_rank() == 1
    mask = Predicate(fn if odd else causal, name="broken")
    with ringcp.record() as recorder, pytest.raises(ringcp.RingcpError) as info:
        ringcp.attention(*local, **{**call, "mask": mask, "layout": layout})
    assert recorder.steps == []
    assert isinstance(info.value, ringcp.ArgumentError if odd else ringcp.AgreementError)
    assert words in str(info.value) or (not odd and "rank 1 refused its arguments (mask: ex" in str(info.value))
    check_exact(mesh, 24)


@pytest.mark.parametrize("case", BROKEN)
def test_a_function_that_does_not_work_is_refused_on_every_rank(worlds, case):
    worlds(2).run(check_broken, case, "call")


def check_names(mesh):
    call, *_ = make_call(mesh, 24)
    local = [call.pop(name) for name in "qkv"]
    masks = [Predicate(causal), Predicate(other)]
    with pytest.raises(ringcp.AgreementError, match=r"mask=Predicate\(other\), not mask=Predicate\(causal\)"):
        ringcp.attention(*local, **{**call, "mask": masks[mesh.get_local_rank()]})
    for _ in range(mesh.get_local_rank()):
        Predicate(causal)  # handles differ from rank to rank
    ringcp.attention(*local, **{**call, "mask": Predicate(causal)})


def test_ranks_agree_on_names_and_not_on_handles(worlds):
    worlds(2).run(check_names)


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in ("reference", "flex", "sdpa_flash_cpu")])
def test_kernels_that_take_no_masks_say_so(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    needs = {"needs_band": False, "needs_grad": True, "needs_lse_grad": False}
    for explicit in (False, True):
        on_gpu = Problem(torch.device("cuda"), torch.bfloat16, 8, 8, 1, 1, 0.3, **needs, explicit=explicit)
        assert ("no explicit masks (Predicate)" in KERNELS[name].refusals(on_gpu)) is explicit
    x = torch.zeros(1, 1, 8, 8)
    with pytest.raises(ringcp.UnsupportedError, match=rf"{name}: device cpu is not cuda") as info:
        in_process(x, x, x, world_size=2, mask=Predicate(causal), kernel=name)
    assert "key/value heads, explicit masks (Predicate), but" in str(info.value)


_TABLE = torch.ones(13, dtype=torch.bool)


def _by_name(b, h, q_idx, kv_idx):
    return _TABLE[kv_idx]


class _Object:
    def __init__(self, table):
        self.tables = [table]

    def mask(self, b, h, q_idx, kv_idx):
        return self.tables[0][kv_idx] & _by_name(b, h, q_idx, kv_idx)

    __call__ = mask


def capturing(table):
    """Functions that capture a tensor, in every way there is."""
    yield lambda b, h, q, k: table[k]
    yield lambda b, h, q, k, table=table: table[k]
    yield functools.partial(lambda table, b, h, q, k: table[k], table)
    yield _Object(table)
    yield _Object(table).mask
    inner = lambda k: table[k]  # noqa: E731
    yield lambda b, h, q, k: inner(k)


def test_a_captured_tensor_that_is_written_to_before_backward_is_no_silent_error():
    q, k, v = (torch.randn(1, 2, 13, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mesh_of_one = {"group_name": "", "return_lse": False, "refusal": None}
    for i in range(6):
        table = torch.ones(13, dtype=torch.bool)
        fn = list(capturing(table))[i]
        options = Options(mask=Predicate(fn, name=f"captures {i}"))
        attend(q, k, v, options, **mesh_of_one).sum().backward()
        out = attend(q, k, v, options, **mesh_of_one)
        table[3] = False
        with pytest.raises(
            ringcp.ArgumentError, match=rf"Predicate\(captures {i}\) captures as they were in forward, got"
        ):
            out.sum().backward()
        attend(q, k, v, options, **mesh_of_one).sum().backward()
    out = attend(q, k, v, Options(mask=Predicate(_by_name)), **mesh_of_one)
    _TABLE[3] = True
    with pytest.raises(ringcp.ArgumentError, match=r"Predicate\(_by_name\) captures"):
        out.sum().backward()
