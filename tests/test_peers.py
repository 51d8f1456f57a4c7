"""What the comparison with other libraries stands on, without them: the stand-in for flash-attn, layouts, cases."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from benchmarks.cases import Case, document_lengths
from benchmarks.harness import METRICS, Harness
from benchmarks.origin import Origin
from benchmarks.peers import adapters, bench
from benchmarks.peers.rows import in_each_document
from benchmarks.peers.standin.flash_attn import flash_attn_func, flash_attn_varlen_func
from benchmarks.peers.standin.flash_attn import flash_attn_interface as interface
from benchmarks.providers import PROVIDERS
from benchmarks.rows import append_csv
from benchmarks.suite import DOCUMENTS
from ringcp.testing import assert_close, reference_attention

HEADS, KV_HEADS, DIM = 4, 2, 16
SCALE = 0.3


def tensors(rows, keys, batch=2):
    generator = torch.Generator().manual_seed(rows + keys)
    shapes = [(rows, HEADS), (keys, KV_HEADS), (keys, KV_HEADS), (rows, HEADS)]
    return [torch.randn(batch, *shape, DIM, generator=generator).bfloat16() for shape in shapes]


def attending(rows, keys, causal, left, right):
    """From the documentation of flash-attn: the mask is aligned to the bottom right corner."""
    ahead = torch.arange(keys) - torch.arange(rows).unsqueeze(1) - (keys - rows)
    right = 0 if causal else right
    return (ahead <= (right if right >= 0 else rows + keys)) & (ahead >= (-left if left >= 0 else -rows - keys))


def hold(q, k, v, dout, mask, out, lse, grads):
    """(B, S, H, D) results against fp64, and rows without a key against flash-attn's conventions."""
    heads_first = [x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse = reference_attention(*heads_first, mask=mask, scale=SCALE)
    expected = [wanted, *torch.autograd.grad(wanted, heads_first, dout.transpose(1, 2).double())]
    alive = mask.any(-1)
    qa, ka, va = (x.detach().requires_grad_() for x in heads_first)
    one = F.scaled_dot_product_attention(qa[:, :, alive], ka, va, mask[alive], scale=SCALE, enable_gqa=True)
    baseline = [one, *torch.autograd.grad(one, (qa, ka, va), dout.transpose(1, 2)[:, :, alive])]
    for name, actual, exact, kernel in zip(("out", "dq", "dk", "dv"), (out, *grads), expected, baseline, strict=True):
        actual = actual.transpose(1, 2)
        if name == "out":
            assert not actual[:, :, ~alive].any()
            actual, exact = actual[:, :, alive], exact[:, :, alive]
        assert_close(actual, exact.detach(), baseline=kernel.detach(), name=name)
    assert lse.dtype == torch.float32
    assert lse[:, :, ~alive].eq(torch.inf).all()
    torch.testing.assert_close(lse[:, :, alive].double(), wanted_lse[:, :, alive].detach(), atol=2e-3, rtol=0)


FORMS = [(False, -1, -1), (True, -1, -1), (True, 20, -1), (False, 20, 5), (False, 3, -1)]


@pytest.mark.parametrize(("rows", "keys"), [(96, 96), (40, 96), (96, 40)])
@pytest.mark.parametrize("form", FORMS)
def test_the_stand_in_aligns_masks_to_the_bottom_right(rows, keys, form):
    causal, left, right = form
    q, k, v, dout = tensors(rows, keys)
    out, lse, _, _ = interface._flash_attn_forward(q, k, v, 0.0, SCALE, causal, left, right, 0.0, None, False)
    assert out.shape == q.shape
    assert lse.shape == (2, HEADS, rows)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    interface._flash_attn_backward(
        dout, q, k, v, out, lse, *grads, 0.0, SCALE, causal, left, right, 0.0, None, False
    )  # fmt: skip
    hold(q, k, v, dout, attending(rows, keys, causal, left, right), out, lse, grads)


@pytest.mark.parametrize("form", FORMS)
def test_packed_sequences_do_not_see_each_other(form):
    causal, left, right = form
    lengths = [(30, 30), (1, 50), (33, 16)]
    q, k, v, dout = tensors(64, 96, batch=1)
    offsets = [torch.tensor([0, *(pair[i] for pair in lengths)]).cumsum(0).int() for i in (0, 1)]
    longest = [max(pair[i] for pair in lengths) for i in (0, 1)]
    flat = [x.squeeze(0) for x in (q, k, v)]
    out, lse, _, _ = interface._flash_attn_varlen_forward(*flat, *offsets, *longest, 0.0, SCALE, causal, left, right)
    assert lse.shape == (HEADS, 64)
    grads = [torch.full_like(x, torch.nan) for x in flat]
    interface._flash_attn_varlen_backward(
        dout[0], *flat, out, lse, *grads, *offsets, *longest, 0.0, SCALE, causal, left, right, 0.0, None, False
    )
    mask = torch.block_diag(*(attending(*pair, causal, left, right) for pair in lengths)).bool()
    hold(q, k, v, dout, mask, out[None], lse[None], [x[None] for x in grads])


def test_backward_takes_the_lse_of_more_keys():
    # As in a ring: two blocks of keys, each with the out and lse of both.
    q, k, v, dout = tensors(48, 96)
    left_out = 0.0, None, False
    whole = interface._flash_attn_forward(q, k, v, 0.0, SCALE, False, -1, -1, *left_out)[:2]
    dq = torch.zeros(q.shape)
    grads_k, grads_v = [], []
    for keys in (slice(0, 48), slice(48, 96)):
        grads = [torch.empty_like(x) for x in (q, k[:, keys], v[:, keys])]
        interface._flash_attn_backward(
            dout, q, k[:, keys], v[:, keys], *whole, *grads, 0.0, SCALE, False, -1, -1, 0.0, None, False
        )
        dq += grads[0]
        grads_k.append(grads[1])
        grads_v.append(grads[2])
    grads = dq.bfloat16(), torch.cat(grads_k, 1), torch.cat(grads_v, 1)
    hold(q, k, v, dout, torch.ones(48, 96, dtype=torch.bool), *whole, grads)


@pytest.mark.parametrize("packed", [False, True])
def test_the_differentiable_functions_are_those(packed):
    q, k, v, dout = tensors(64, 64, batch=1)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = {"softmax_scale": SCALE, "causal": True, "return_attn_probs": True}
    if packed:
        cu = torch.tensor([0, 24, 64], dtype=torch.int32)
        out, lse, _ = flash_attn_varlen_func(*(x[0] for x in leaves), cu, cu, 40, 40, **options)
        out, lse = out[None], lse[None]
        mask = torch.block_diag(torch.ones(24, 24).tril(), torch.ones(40, 40).tril()).bool()
    else:
        out, lse, _ = flash_attn_func(*leaves, **options)
        mask = torch.ones(64, 64, dtype=torch.bool).tril()
    hold(q, k, v, dout, mask, out.detach(), lse, torch.autograd.grad(out, leaves, dout))


def test_the_stand_in_refuses_what_it_cannot_do():
    q, k, v, _ = tensors(8, 8)
    with pytest.raises(RuntimeError, match="only supports fp16 and bf16"):
        flash_attn_func(q.float(), k.float(), v.float())
    with pytest.raises(NotImplementedError, match="dropout_p: expected none"):
        flash_attn_func(q, k, v, dropout_p=0.1)


LENGTHS = [8, 4, 16, 4]


@pytest.mark.parametrize("head_tail", [False, True])
def test_each_document_is_cut_among_all_ranks(head_tail):
    rows = in_each_document(LENGTHS, 2, head_tail=head_tail)
    whole = torch.arange(32.0).view(1, 1, 32, 1).expand(1, 3, 32, 2)
    parts = [rows.shard(whole, rank, 2) for rank in range(2)]
    # The documents begin at 0, 8, 12 and 28.
    first = [0, 1, 6, 7, 8, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 31]
    if not head_tail:
        first = [0, 1, 2, 3, 8, 9, 12, 13, 14, 15, 16, 17, 18, 19, 28, 29]
    assert parts[0][0, 0, :, 0].tolist() == first
    assert all(part.transpose(1, 2).is_contiguous() for part in parts)
    assert torch.equal(rows.unshard(parts, 2), whole)


def test_documents_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"expected lengths that 4 parts divide, got \[6\]"):
        in_each_document([8, 6], 2, head_tail=True)


def test_the_small_case_keeps_what_divides_the_documents():
    for named in bench.CASES:
        small = named.case.small()
        if lengths := document_lengths(small.mask):
            assert (len(lengths), sum(lengths)) == (len(DOCUMENTS), small.seq_len)
            assert all(n % 8 == 0 for n in lengths)
    assert document_lengths(Case(12, mask="documents:5,7").small().mask) == [5, 7]


def wanted(mask, dtype="bf16", seq_len=256):
    return adapters.Wanted(Case(seq_len, dtype, mask), None)


def test_what_a_library_cannot_be_asked_for_raises_by_name():
    with pytest.raises(NotImplementedError, match="dtype: flash-attn takes bf16 and fp16, got fp32"):
        wanted("causal", "fp32").refuse(half=True)
    with pytest.raises(NotImplementedError, match="documents: none"):
        wanted("documents:100,156").refuse(documents="none")
    with pytest.raises(NotImplementedError, match="window: none"):
        wanted("window:8").refuse(window="none")
    wanted("causal").refuse(half=True, documents="none", window="none")


def test_cases_in_the_words_of_flash_attn():
    assert (wanted("window:8").window, wanted("window:8").causal) == ((7, 0), True)
    assert (wanted("full").window, wanted("full").causal) == ((-1, -1), False)
    assert wanted("documents:100,156").cu_seqlens(2).tolist() == [0, 50, 128]
    assert wanted("causal").cu_seqlens().tolist() == [0, 256]


def measured(mesh):
    known = dict(PROVIDERS)
    try:
        h = Harness("cpu", torch.get_num_threads())
        named = next(named for named in bench.CASES if named.name == "causal-2k-fp32")
        small = replace(named, case=named.case.shrunk(8), memory=True)
        return [bench.measure(h, case, ["torch"], 2, 1.0) for case in (small, windowed(small))]
    finally:
        PROVIDERS.clear()
        PROVIDERS.update(known)


def windowed(named):
    return replace(named, case=replace(named.case, mask="window:64"))


def test_a_case_with_the_one_library_that_is_always_there(worlds, tmp_path, capsys):
    first, second = worlds(2).run(measured)
    assert [[(r.provider, r.mode, r.problem) for r in of_case] for of_case in first] == [
        [(r.provider, r.mode, r.problem) for r in of_case] for of_case in second
    ]
    causal, window = first
    assert [r.mode.partition(":")[0] for r in causal] == ["auto", "p2p", "allgather"]
    assert all(len(r.seconds) == 2 and not r.problem for r in causal)
    block = 2 * 8 * 128 * 64 * 4  # k and v of 128 tokens, 8 heads, 64 wide
    assert [r.sent for r in causal[1:]] == [4 * block, 4 * block]  # k and v in both directions, dk and dv twice
    assert all(r.peak > block and r.our_peak == causal[0].peak for r in causal)
    assert [bool(r.problem) for r in window] == [False, True, True]
    assert "window: no mask but causal" in window[1].problem

    origin = Origin("2.13.0", "a cpu", "abc", "python")
    rows = [row for result in (*causal, *window) for row in result.rows("a title", origin)]
    assert {row.metric for row in rows if "torch" in row.provider} == {"wrong", "sent", "peak memory", *METRICS}
    append_csv(tmp_path / "x.csv", rows)
    bench.print_results(Console(width=180), causal + window, bench.CASES)
    assert "window: no mask but causal" in capsys.readouterr().out


@pytest.mark.parametrize(("seconds", "met"), [([2.0, 2.0, 4.0], True), ([1.1, 1.1, 4.0], False)])
def test_targets_are_of_the_median_of_ratios_in_the_same_round(seconds, met, capsys):
    documents = bench.CASES[0]
    ours = bench.Result(documents.name, "ringcp", "auto", [[1.0] * 3, [1.0] * 3, [2.0] * 3], [[1.0] * 3] * 3)
    theirs = bench.Result(documents.name, "a library", "ring", [[s] * 3 for s in seconds], ours.seconds)
    assert theirs.ratios == [seconds[0], seconds[1], 2.0]
    bench.print_results(Console(width=180), [ours, theirs], [documents])
    assert ("1.25 met" if met else "1.25 MISSED") in capsys.readouterr().out


def test_the_options():
    args = bench.parse([])
    assert [named.name for named in args.cases] == [named.name for named in bench.CASES]
    smoke = bench.parse(["--smoke", "--only", "documents", "window"])
    assert [(named.case.seq_len, named.case.small().seq_len) for named in smoke.cases] == [(2048, 280), (2048, 256)]
    assert smoke.rounds == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "warp"], "argument --only: invalid choice: 'warp'"),
        (["--library", "warp"], "argument --library: invalid choice: 'warp'"),
        (["--rounds", "0"], "--rounds: expected more than 0, got 0"),
    ],
)
def test_bad_options_are_refused_by_name(options, message, capsys):
    with pytest.raises(SystemExit):
        bench.parse(options)
    assert message in capsys.readouterr().err
