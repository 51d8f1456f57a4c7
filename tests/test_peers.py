"""What the comparison with other libraries stands on, without them: the stand-in for flash-attn, layouts, cases."""

import csv
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from benchmarks.cases import Case, document_lengths
from benchmarks.harness import METRICS, Harness
from benchmarks.origin import Origin
from benchmarks.peak_memory import peak_memory
from benchmarks.peers import adapters, bench, cpu_flash, measure
from benchmarks.peers.cases import CASES, Named
from benchmarks.peers.launches import run_case
from benchmarks.peers.measure import competitors
from benchmarks.peers.record import Record
from benchmarks.peers.results import Result
from benchmarks.peers.rows import in_each_document
from benchmarks.peers.standin.flash_attn import flash_attn_func, flash_attn_varlen_func
from benchmarks.peers.standin.flash_attn import flash_attn_interface as interface
from benchmarks.peers.tables import print_results, print_summary
from benchmarks.providers import PROVIDERS, Provider
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


def test_memory_is_counted_without_what_only_the_stand_in_takes(one_thread):
    q, k, v = (torch.randn(1, 2048, 8, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    block = q.numel() * q.element_size()

    def peaks():
        with peak_memory("cpu") as forward:
            out = flash_attn_func(q, k, v, causal=True)
        with peak_memory("cpu") as backward:
            out.backward(torch.ones_like(out))
        grads = [x.grad for x in (q, k, v)]
        q.grad = k.grad = v.grad = None
        return out.shape, [grad.shape for grad in grads], forward.num_bytes, backward.num_bytes

    out, grads, forward, backward = peaks()
    with cpu_flash.corner_only():
        assert (out, grads) == (lean := peaks())[:2]
    assert peaks()[2:] == (forward, backward), "it ends with the body"
    assert lean[2] <= forward - 2 * block, "no copies of keys and values"
    assert backward - 5.5 * block <= lean[3] <= backward - 4.5 * block, "nor of gradients; the workspace stays"


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
    for named in CASES:
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
    named = next(named for named in CASES if named.name == "causal-2k-fp32")
    small = replace(named, case=named.case.shrunk(8), less_memory=True)
    return [on_ranks(case, competitors(["torch"]), rounds=2) for case in (small, windowed(small))]


def on_ranks(named, providers, rounds=1, until=None):
    with TemporaryDirectory() as folder:
        record = Record(Path(folder))
        harness = Harness("cpu", torch.get_num_threads(), providers)
        found = measure.measure(harness, named, measure.Effort(rounds, until or time.time() + 60), record)
        assert harness.rank or record.results() == found
        return found


def windowed(named):
    return replace(named, case=replace(named.case, mask="window:64"))


def test_a_case_with_the_one_library_that_is_always_there(worlds, tmp_path, capsys):
    known = dict(PROVIDERS)
    first, second = worlds(2).run(measured)
    assert known == PROVIDERS
    assert [[(r.provider, r.mode, r.problem) for r in of_case] for of_case in first] == [
        [(r.provider, r.mode, r.problem) for r in of_case] for of_case in second
    ]
    causal, window = first
    assert [r.mode.partition(":")[0] for r in causal] == ["auto", "single", "p2p", "allgather"]
    assert all(len(r.seconds) == 2 and not r.verdict for r in causal)
    block = 2 * 8 * 128 * 64 * 4  # k and v of 128 tokens, 8 heads, 64 wide
    assert [r.sent for r in causal[2:]] == [4 * block, 4 * block]  # k and v in both directions, dk and dv twice
    assert all(r.peak > block for r in causal)
    assert all(r.our_peak == causal[0].peak for r in causal[2:])
    assert [r.verdict for r in window] == ["", "", "refused", "refused"]
    assert window[2].problem == "window: no mask but causal"

    origin = Origin("2.13.0", "a cpu", "abc", "python")
    rows = [row for result in (*causal, *window) for row in result.rows("a title", origin)]
    assert {row.metric for row in rows if "torch" in row.provider} == {"refused", "sent", "peak memory", *METRICS}
    assert {(row.metric, row.unit) for row in rows if row.provider == "ringcp"} >= {(METRICS[0], "% of sdpa")}
    append_csv(tmp_path / "x.csv", rows)
    print_results(Console(width=180), causal + window, CASES)
    assert "window: no mask but causal" in capsys.readouterr().out


TRIED = Named("tried", Case(4096, heads=1, kv_heads=1, head_dim=16))


def strangers(calls):
    """Stand-ins for libraries, and how many tokens a rank had in the calls of each."""
    ring = PROVIDERS["ringcp"].prepare

    def library(name, change=lambda out: out, pause=0.0):
        def prepare(setting):
            prepared = ring(setting)

            def attention(q, k, v):
                calls.setdefault(name, []).append(q.shape[2])
                time.sleep(pause if q.shape[2] > 128 else 0.0)
                return change(prepared.attention(q, k, v))

            return replace(prepared, attention=attention)

        return Provider(prepare, ("ring",))

    def raising(error):
        def prepare(setting):
            raise error

        return Provider(prepare, ("ring",))

    return {
        "right": library("right"),
        "late": library("late", pause=2.0),
        "wrong": library("wrong", change=lambda out: 2 * out),
        "silent": raising(NotImplementedError("documents: none")),
        "loud": raising(ValueError("no window here")),
        "broken": raising(RuntimeError("no such kernel")),
    }


def verdicts(mesh):
    calls = {}
    return on_ranks(TRIED, {**PROVIDERS, **strangers(calls)}), calls


def test_who_is_wrong_far_slower_or_refuses_is_not_called_in_the_case_itself(worlds):
    (found, calls), _ = worlds(2).run(verdicts)
    by_name = {r.provider: r for r in found}
    said = {name: (r.verdict, r.problem) for name, r in by_name.items()}
    assert said["right"] == said["ringcp"] == said["sdpa"] == ("", "")
    assert said["silent"] == ("refused", "documents: none")
    assert said["loud"] == ("refused", "no window here")
    assert said["broken"] == ("failed", "rank 0 raised RuntimeError: no such kernel")
    assert by_name["wrong"].verdict == "wrong"
    assert by_name["late"].verdict == "slow"
    # In a small case, a quarter of the length (twice if it was slow), all of it, one round, and once for the memory.
    assert calls == {"right": [128, 512, 2048, 2048, 2048], "late": [128, 512, 512], "wrong": [128]}
    row = by_name["late"].rows("a title", Origin("2", "a cpu", "abc", "python"))
    assert [(r.metric, r.median > 2000) for r in row] == [("slow", True)]
    assert re.match(r"ms a call of causal fp32 B1 H1 D16 S1024, \d+ times ringcp's \d+: left out", row[0].unit)


def hurried(mesh):
    providers = {**PROVIDERS, "right": strangers({})["right"]}
    small = replace(TRIED, case=replace(TRIED.case, seq_len=256))
    return [len(r.seconds) for until in (1.0, None) for r in on_ranks(small, providers, 3, until)]


def test_rounds_end_when_the_time_is_up_but_one_is_run(worlds):
    assert worlds(2).run(hurried)[0] == 3 * [1] + 3 * [3]


# What the ranks of a launch do, in one process; the options say in whose call it hangs or ends, and when.
LAUNCH = """
import sys, time
from pathlib import Path
from benchmarks.peers.record import Record
from benchmarks.peers.results import Result
record, calls = Record(Path(sys.argv[1])), Path(sys.argv[1], "launches")
calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
settled = record.settled()
modes = [m for m in ("ringcp", "a", "b", "c") if m not in [r.provider for r in settled]]
for what in ("checking", "round 1", "round 2"):
    for name in modes:
        record.begin(name, "ring", what)
        if (name, what) == (sys.argv[2], sys.argv[3]):
            time.sleep(60) if sys.argv[4] == "hangs" else sys.exit(3)
        done = modes[: modes.index(name) + 1] if what == "round 1" else modes if what == "round 2" else []
        record.write([Result("case", n, "ring", [[1.0] * 3], [[1.0] * 3]) for n in done] + settled)
record.begin("", "", "done")
sys.exit(sys.argv[2] == "end")
"""


@pytest.mark.parametrize(
    ("who", "when", "how", "timed", "launches"),
    [
        ("b", "checking", "hangs", ["ringcp", "a", "c"], 2),
        ("b", "checking", "ends", ["ringcp", "a", "c"], 2),
        ("b", "round 1", "hangs", ["ringcp", "a"], 1),
        ("b", "round 2", "ends", ["ringcp", "a", "c"], 1),
    ],
)
def test_a_mode_that_hangs_or_ends_its_process_costs_itself(tmp_path, who, when, how, timed, launches):
    record = Record(tmp_path)
    command = [sys.executable, "-c", LAUNCH, str(tmp_path), who, when, how]
    assert not run_case("case", command, record, patience=3 if how == "hangs" else 60)
    found = record.results()
    assert sorted(r.provider for r in found if r.seconds) == sorted(timed)
    (late,) = [r for r in found if r.verdict]
    reason = "it took more than 3 s" if how == "hangs" else "the launch failed with status 3"
    assert late == Result("case", "b", "ring", verdict="failed", problem=f"{when}: {reason}")
    assert len((tmp_path / "launches").read_text()) == launches


def test_a_file_with_other_columns_is_refused_before_anything_runs(tmp_path, capsys):
    path = tmp_path / "x.csv"
    path.write_text("a,b\n")
    assert bench.main(["--only", "causal-2k", "--csv", str(path)]) == 2
    assert "--csv: expected" in capsys.readouterr().out
    assert path.read_text() == "a,b\n"


def test_a_launch_that_fails_after_all_calls_costs_nothing(tmp_path):
    record = Record(tmp_path)
    command = [sys.executable, "-c", LAUNCH, str(tmp_path), "end", "", ""]
    assert not run_case("case", command, record, patience=60)
    assert [r.provider for r in record.results()] == ["ringcp", "a", "b", "c"]
    assert not any(r.verdict for r in record.results())


def test_a_case_without_ringcp_says_why(tmp_path):
    record = Record(tmp_path)
    command = [sys.executable, "-c", LAUNCH, str(tmp_path), "ringcp", "checking", "ends"]
    assert run_case("case", command, record, patience=60) == "the launch failed with status 3, checking ringcp ring"
    assert run_case("case", [sys.executable, "-c", "raise SystemExit(1)"], record, 60).endswith("with status 1")
    assert record.results() == []


@pytest.mark.parametrize(("seconds", "met"), [([2.0, 2.0, 4.0], True), ([1.1, 1.1, 4.0], False)])
def test_targets_are_of_the_median_of_ratios_in_the_same_round(seconds, met, capsys):
    documents = next(named for named in CASES if named.name == "documents")
    ours = Result(documents.name, "ringcp", "auto", [[1.0] * 3, [1.0] * 3, [2.0] * 3], single=[[1.0] * 3] * 3)
    theirs = Result(documents.name, "a library", "ring", [[s] * 3 for s in seconds], ours.seconds, ours.single)
    other = Result(documents.name, "a library", "zigzag", verdict="wrong", problem="out: error")
    assert theirs.ratios == [seconds[0], seconds[1], 2.0]
    assert theirs.percents() == [100 / s for s in seconds]
    results = [ours, theirs, other]
    print_results(Console(width=180), results, [documents])
    assert ("1.25 met" if met else "1.25 MISSED") in capsys.readouterr().out
    print_summary(Console(width=180), results, [documents])
    out = capsys.readouterr().out
    assert ("1 of 1" if met else "by 1 of 1") in out
    assert ("50.0 (2.00)" if met else "90.9 (1.10)") in out
    # Toy sizes say nothing about speed or memory.
    small = documents.shrunk()
    print_results(Console(width=180), results, [small])
    print_summary(Console(width=180), results, [small])
    assert not re.search("met|MISSED", capsys.readouterr().out)


def test_a_case_gets_the_time_that_it_costs():
    plan = bench._Plan(CASES, rounds=25, seconds=1000)
    costs = [named.seconds(3) for named in CASES]
    assert costs[0] < costs[2] < costs[-1]
    assert plan.share(0) - time.time() == pytest.approx(1000 * costs[0] / sum(costs), abs=5)
    assert plan.share(len(CASES) - 1) - time.time() == pytest.approx(1000, abs=5)
    assert 900 < plan.left(0) <= 1000
    assert plan.left(len(CASES) - 1) < 1000  # with 25 rounds it takes no longer
    minutes = bench.parse([]).minutes
    assert 15 <= minutes <= 20
    assert sum(costs) < 60 * minutes


def stand_in(monkeypatch, launched):
    """Instead of launches: what ringcp and a library would have found."""

    def run(name, command, record, patience):
        launched.append(command)
        ours = Result(name, "ringcp", "auto", [[0.001] * 3], single=[[0.001] * 3])
        record.write([ours, Result(name, "torch 2", "p2p", [[0.002] * 3], ours.seconds, ours.single)])
        time.sleep(0.2)
        return ""

    monkeypatch.setattr(bench, "run_case", run)
    monkeypatch.delenv("RANK", raising=False)


def test_a_run_appends_to_its_csv_and_says_what_is_left(tmp_path, monkeypatch, capsys):
    launched = []
    stand_in(monkeypatch, launched)
    path = tmp_path / "new" / "x.csv"
    assert bench.main(["--only", "causal-2k", "window", "--rounds", "2", "--csv", str(path)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\[1/2\] causal-2k: .*, about \d+ min left", out)
    assert re.search(r"\[2/2\] window: .*, about \d+ min left", out)
    assert [command[command.index("--only") + 1] for command in launched] == ["causal-2k", "window"]
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["command"] for row in rows} == {"python -m benchmarks.peers.bench --only causal-2k window --rounds 2"}
    assert {(row["provider"], row["case"]) for row in rows} == {
        (who, named.title) for who in ("ringcp", "torch 2") for named in CASES if named.name in ("causal-2k", "window")
    }


def test_a_case_for_which_no_time_is_left_is_named(tmp_path, monkeypatch, capsys):
    launched = []
    stand_in(monkeypatch, launched)
    assert bench.main(["--minutes", "0.001", "--smoke", "--csv", str(tmp_path / "x.csv")]) == 1
    assert len(launched) == 1
    assert "not measured, the time is up: --only causal-2k-fp32 window" in capsys.readouterr().out


def test_the_csv_has_the_command_as_one_would_type_it():
    typed = "python -m benchmarks.peers.bench"
    assert bench.parse([]).command == typed
    assert bench.parse(["--csv", "/a/private/x.csv"]).command == typed
    args = bench.parse(["--rounds", "7", "--only", "window", "--csv", "x.csv", "--smoke"])
    assert args.command == f"{typed} --only window --rounds 7 --smoke"
    assert [bench.parse(words).csv.name for words in ([], ["--smoke"])] == ["peers.csv", "peers-smoke.csv"]
    with (Path(bench.__file__).parents[1] / "results" / "peers.csv").open(newline="") as file:
        commands = {row["command"] for row in csv.DictReader(file)}
    assert commands
    assert not [command for command in commands if not command.startswith(typed) or "/" in command]


def test_the_options():
    args = bench.parse([])
    assert [named.name for named in args.cases] == [named.name for named in CASES]
    smoke = bench.parse(["--smoke", "--only", "documents", "window"])
    assert [(named.case.seq_len, named.case.small().seq_len) for named in smoke.cases] == [(2048, 256), (2048, 280)]
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
