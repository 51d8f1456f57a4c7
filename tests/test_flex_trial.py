"""That kernel "flex" tries the functions of a mask before anything is sent: what it cannot compile is refused."""

import gc
import re
import sys
import warnings
import weakref
from contextlib import contextmanager

import pytest
import torch
import torch._dynamo.testing
from calls import check_exact, make_call
from flex_standin import CALLS
from predicates import Given, make, random
from test_flex import STANDIN, TRACED, Table
from torch.nn.attention import flex_attention as torchs

import ringcp
from ringcp import Causal, Padding, Predicate
from ringcp.attention import attend
from ringcp.kernels.flex import Flex
from ringcp.options import Options
from ringcp.testing import assert_close, reference_attention


@pytest.fixture(autouse=True)
def fresh():
    CALLS.clear()


@contextmanager
def chosen(kernel):
    """Whatever the call, this kernel; torch's own function refuses gradients on the CPU, which it has all the same."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")  # of Dynamo's own code
        patch.setattr(torchs, "_validate_device", lambda *tensors: None)
        for name in ("choose", "kernel_at"):
            patch.setattr(sys.modules["ringcp.call"], name, lambda *_: kernel)
        yield


# --- on ranks

LIMIT, TABLE, SEEN = torch.tensor(20), torch.arange(24), []


def fine(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & ((h == 1) | (kv_idx % 3 == 0))


def prints(b, h, q_idx, kv_idx):
    print(end="")
    return fine(b, h, q_idx, kv_idx)


def branches(b, h, q_idx, kv_idx):
    return fine(b, h, q_idx, kv_idx) if LIMIT > 3 else q_idx == kv_idx


def notes(b, h, q_idx, kv_idx):
    SEEN.append(len(SEEN))
    return fine(b, h, q_idx, kv_idx)


# By case: the function, and how its compiler begins.
BAD = {
    "prints": (prints, "Unsupported: Failed to trace builtin operator. Explanation: .*`print`"),
    "branches": (branches, "Unsupported: Data-dependent branching. Explanation: "),
    "notes": (notes, "Unsupported: HOP: Unsafe side effect. "),
}


def check_refused(mesh, case, odd):
    """Functions that evaluate as they should, and that Dynamo does not take; of one rank or of all."""
    call, _, layout = make_call(mesh, 24)
    rank, local = mesh.get_local_rank(), [call.pop(name) for name in "qkv"]
    function, words = BAD[case]
    mask = Predicate(fine if odd and rank == 0 else function, name="odd") & Causal()
    call |= {"mask": mask, "layout": layout}
    with chosen(TRACED):
        with ringcp.record() as recorder, pytest.raises(ringcp.RingcpError) as info:
            ringcp.attention(*local, **call)
        assert recorder.steps == []
        text = str(info.value)
        if odd and rank == 0:
            assert type(info.value) is ringcp.AgreementError
            assert text.startswith("rank 0: rank 1 refused its arguments (mask: expected functions that")
        else:
            assert type(info.value) is ringcp.UnsupportedError
            start = (
                r"mask: expected functions that kernel 'flex' can compile in \(Predicate\(odd\) & Causal\(\)\), got "
            )
            assert re.match(rf'{start}{words}[^\n]*; write them with .*, or pass kernel="reference"$', text), text
    check_exact(mesh, 24)


@pytest.mark.parametrize("case, odd", [("prints", True), ("branches", False), ("notes", False)])
def test_what_does_not_compile_is_refused_before_anything_is_sent(worlds, case, odd):
    worlds(2).run(check_refused, case, odd)


def without_lse(*qkv, return_aux, **options):
    """All that inductor compiles of it for a CPU."""
    out = torchs.flex_attention(*qkv, **options)
    return out, torchs.AuxOutput(lse=out[..., 0])


@pytest.mark.parametrize(
    "name, fn",
    [
        ("an item", lambda b, h, q, k: (q >= k) & (k < LIMIT.item())),
        ("a reduction", lambda b, h, q, k: (q >= k) & (k < TABLE.max())),
    ],
)
def test_what_only_the_compiler_behind_dynamo_refuses(name, fn):
    with chosen(Flex(without_lse, "inductor")), pytest.raises(ringcp.UnsupportedError, match="got InductorError: "):
        attended(Predicate(fn, name=name))


# --- once


def attended(mask, *, seq_len=13, grad=False, **options):
    """One rank's call, held against the reference."""
    generator = torch.Generator().manual_seed(seq_len)
    qkv = [torch.randn(2, heads, seq_len, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2)]
    leaves = [x.requires_grad_(grad) for x in qkv]
    out = attend(*leaves, Options(mask=mask, **options), group_name="", return_lse=False, refusal=None)
    at = torch.arange(seq_len)
    want, _ = reference_attention(*leaves, mask=mask.dense(at, at, batch=2, heads=4), **options)
    assert_close(out, want)
    if grad:
        grads = (torch.autograd.grad(x.square().sum(), leaves) for x in (out, want))
        for got, expected in zip(*grads, strict=True):
            assert_close(got, expected)


def tried():
    """What the kernel has been called for since it was asked last, and was no call."""
    calls = [call for call in CALLS if (call["m"], call["n"]) == (128, 128)]
    CALLS.clear()
    return calls


def test_a_mask_is_tried_once_for_each_problem():
    mask = Predicate(fine) & Causal()
    with chosen(STANDIN):
        attended(mask)
        (call,) = tried()
        assert not call["grad"]
        attended(mask, seq_len=17)
        assert len(tried()) == 1, "another number of positions, as far as it is below a tile's"
        for _ in range(2):
            attended(mask)
            assert not tried()
        attended(mask, grad=True)
        (call,) = tried()
        assert call["grad"], "which computes the tile as well"
        attended(mask, softcap=2.0, grad=True)
        (call,) = tried()
        assert call["bias"]
        attended(Predicate(fine) & Causal())
        assert len(tried()) == 1, "what another function does, is not known"


def test_what_is_written_out_is_not_tried():
    given = Given(2, 4, 13, 13)
    with chosen(STANDIN):
        for mask in (Causal(), make("types", given), make("or window", given)):
            attended(mask)
            assert not tried()


def test_no_function_is_asked_for_positions_that_there_are_not():
    def mod(b, h, q, k):
        return allowed[b, h, q, k]

    allowed = random(2, 4, 13, 13)
    with torch.no_grad():
        blocks = torchs.create_block_mask(mod, 2, 4, 13, 13, "cpu", BLOCK_SIZE=16)
    with chosen(STANDIN):
        for mask in (Predicate(mod), Predicate(blocks) & Padding([13, 7])):
            attended(mask)
            assert len(tried()) == 1
        with pytest.raises(ringcp.LayoutError, match="expected a BlockMask of "):
            attended(Predicate(blocks), seq_len=17)


def test_nothing_keeps_a_function_that_was_tried():
    table = Table(random(13, 13, seed=3))
    watched = weakref.ref(table)
    with chosen(STANDIN):
        attended(Predicate(table, name="table"))
    assert tried()
    del table
    gc.collect()
    assert watched() is None


def test_what_is_compiled():
    """Nothing for a later call, nor for other tensors in the same functions; and calls find no lengths but their own,
    so that their first ones are taken as they are.
    """

    def same(ids):
        return Predicate(lambda b, h, q, k: ids[q] == ids[k], name="same")

    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    mask = same(torch.arange(13) // 5)
    with chosen(Flex(backend=counter)), torch._dynamo.config.patch(error_on_recompile=True):
        attended(mask)
        compiled = counter.frame_count
        assert compiled == 4, "the blocks of a mask and attention, for the trial and for the call"
        attended(mask)
        attended(same(torch.arange(13) // 3))
    assert counter.frame_count == compiled
