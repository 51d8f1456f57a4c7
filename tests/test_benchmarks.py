"""The benchmark runs by the command of its docstring, and its arithmetic is right. Speeds are not tested."""

import csv
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import ringcp
from benchmarks import attention as runner
from benchmarks import cases, checks, harness, providers
from benchmarks.measured import Measured
from benchmarks.origin import Origin
from benchmarks.rows import Quantiles, Row, append_csv, percent_of_baseline, quantiles

ROOT = Path(__file__).resolve().parents[1]


def launch(*options, world_size=2, timeout=100):
    """The docstring's command with further options; its output."""
    command = next(line for line in runner.__doc__.splitlines() if line.strip().startswith("torchrun"))
    words = shlex.split(command.replace("--nproc-per-node=2", f"--nproc-per-node={world_size}"))
    assert words.pop(0) == "torchrun"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, *options],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_command_of_the_docstring_prints_a_table_and_appends_to_the_csv(tmp_path):
    path = tmp_path / "results.csv"
    path.write_text(",".join(Row.__dataclass_fields__) + "\nan,earlier,line\n")
    out = launch("--smoke", "--breakdown", "--mode", "ring", "--mask", "causal", "window:48", "--csv", str(path))

    assert "wrong" not in out.lower()
    assert "% of single-process SDPA's speed" in out
    assert f"appended to: {path}\n" in out
    for shown in ("causal fp32 B1 H8 D64 S128 W2", "window:48 bf16 B1 H8 D64 S128 W2", "sdpa", "ringcp", "wait ms"):
        assert shown in out

    earlier, *rows = read(path)
    assert earlier["provider"] == "an", "what was in the file stays"
    timed = {(r["case"], r["provider"], r["metric"]): r for r in rows if r["unit"] == "ms"}
    for case in ("causal fp32", "causal bf16", "window:48 fp32", "window:48 bf16"):
        for provider in ("sdpa", "ringcp"):
            both, forward, backward = (
                float(timed[f"{case} B1 H8 D64 S128 W2", provider, metric]["median"]) for metric in harness.METRICS
            )
            assert both > 0
            assert max(forward, backward) < both <= (forward + backward) * 1.001
    sent = {r["case"]: float(r["median"]) for r in rows if r["metric"] == "forward sent"}
    block = 2 * 8 * 64 * 64 * 4  # k and v of 64 tokens, 8 heads, 64 wide; rank 1 does not need half of rank 0's
    assert sent["causal fp32 B1 H8 D64 S128 W2"] in (block, block // 2)
    assert {r["torch"] for r in rows} == {torch.__version__}
    assert all("--nproc-per-node=2 benchmarks/attention.py" in r["command"] for r in rows)
    assert {r["provider"]: r["threads"] for r in rows}["ringcp"] == "1"


def test_quantiles_interpolate():
    assert quantiles([3.0]) == Quantiles(3.0, 3.0, 3.0)
    q = quantiles([5.0, 1.0, 2.0, 4.0, 3.0, 0.0])
    assert (q.median, q.p20, q.p80) == pytest.approx((2.5, 1.0, 4.0))
    with pytest.raises(ValueError, match="expected at least one, got none"):
        quantiles([])


def test_percentages_pair_the_rounds():
    # The machine is ten times slower in the second round; both feel it, and the ratio does not.
    percents = percent_of_baseline([1.0, 10.0, 1.0], [1.25, 12.5, 1.25])
    assert percents == pytest.approx([80.0, 80.0, 80.0])
    assert percent_of_baseline([1.0], [0.5], devices=2) == pytest.approx([100.0])
    with pytest.raises(ValueError, match="expected 1 rounds, as the baseline has, got 2"):
        percent_of_baseline([1.0], [1.0, 2.0])


def test_rounds_alternate_the_order_and_leave_out_the_warm_up():
    class Counting(harness.Harness):
        def __init__(self):
            self.order = []

        def _slowest(self, entrant, calls):
            assert calls == 1
            self.order.append(entrant)
            return [float(len(self.order))] * 3

    counting, ticks = Counting(), []
    seconds = counting.rounds(["a", "b"], warmup=1, rounds=2, progress=lambda: ticks.append(1))
    assert counting.order == ["a", "b", "b", "a", "a", "b"]
    assert seconds == [[[4.0] * 3, [5.0] * 3], [[3.0] * 3, [6.0] * 3]]
    assert len(ticks) == 6


def own_shard_only(setting):
    layout = ringcp.Contiguous(setting.case.seq_len, setting.mesh.size())
    return providers.Prepared(torch.nn.functional.scaled_dot_product_attention, layout)


def raises_on_rank_1(setting, error):
    def attention(q, k, v):
        if setting.mesh.get_local_rank() == 1:
            raise error
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return providers.Prepared(attention, ringcp.Contiguous(setting.case.seq_len, setting.mesh.size()))


def refuses_and_raises(setting):
    """As a rank does that waits for one that refuses."""
    if setting.mesh.get_local_rank() == 1:
        raise ConnectionError("the peer is gone")
    raise NotImplementedError("mask: not causal")


def verdicts(mesh):
    strangers = {
        "own shard": own_shard_only,
        "raises": partial(raises_on_rank_1, error=ValueError("no causal mask")),
        "refuses": partial(raises_on_rank_1, error=NotImplementedError("mask: not causal")),
        "both": refuses_and_raises,
    }
    known = dict(providers.PROVIDERS)
    providers.PROVIDERS.update({name: providers.Provider(prepare, ("ring",)) for name, prepare in strangers.items()})
    try:
        setting = providers.Setting(cases.Case(512, heads=2, kv_heads=2), mesh, "ring", "auto", "call")
        h = harness.Harness("cpu", torch.get_num_threads())
        admitted = [h.admit(name, setting) for name in ("ringcp", *strangers, "ringcp")]
        return [(answer, isinstance(answer, harness.Refusal)) if isinstance(answer, str) else "" for answer in admitted]
    finally:
        providers.PROVIDERS.clear()
        providers.PROVIDERS.update(known)


def test_every_rank_learns_that_a_provider_is_wrong_or_refuses(worlds):
    first, second = worlds(2).run(verdicts)
    assert first == second
    right, wrong, raised, refused, both, right_again = first
    assert (right, right_again) == ("", "")
    assert wrong[0].startswith("out: error")
    assert not wrong[1]
    assert raised == ("rank 1 raised ValueError: no causal mask", False)
    assert refused == ("rank 1 raised NotImplementedError: mask: not causal", True)
    assert both == ("rank 1 raised ConnectionError: the peer is gone", False)


def in_every_mode(mesh):
    found = {}
    for mode in providers.PROVIDERS["ringcp"].modes:
        setting = providers.Setting(cases.Case(128, kv_heads=4), mesh, mode, "auto", "call")
        h = harness.Harness("cpu", torch.get_num_threads())
        entrant = h.admit("ringcp", setting)
        assert isinstance(entrant, harness.Entrant), entrant
        found[entrant.mode] = [b.bytes_sent for b in h.breakdown(entrant, calls=1)]
    return found


def test_every_mode_is_right_and_sends_what_is_explained(worlds):
    first, *others = worlds(4).run(in_every_mode)
    assert all(other == first for other in others)
    told = ringcp.explain(
        q_heads=8, kv_heads=4, head_dim=64, seq_len=128, world_size=4, mask=ringcp.Causal(), dtype=torch.float32
    )
    assert set(first) == {f"auto: {told.choice.mode}", *told.bytes_sent}
    for mode, most in told.bytes_sent.items():
        forward, backward = first[mode]  # of the rank that was slowest
        assert 0 < forward <= most.forward
        assert 0 < backward <= most.backward
    assert first["ulysses"] == [told.bytes_sent["ulysses"].forward, told.bytes_sent["ulysses"].backward]


class OneRank:
    device_type = "cpu"


def single(case):
    setting = providers.Setting(case, OneRank(), "single", "auto", "call")
    tensors = [x.requires_grad_(i < 3) for i, x in enumerate(case.tensors("cpu"))]
    return providers.PROVIDERS["sdpa"].prepare(setting).attention, tensors


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("mask", ["causal", "full", "window:100", "documents:100,1,155"])
def test_the_checks_find_one_wrong_row(dtype, mask):
    """In every row of a small case, and in sampled rows, each of which sees to what all keys get."""
    case = cases.Case(256, dtype, mask, heads=4, kv_heads=2, head_dim=32)
    for rows in (None, checks.sampled(case)):
        part = checks.results_at(rows, *single(case), None, 0)
        assert checks.compare(case, rows, [part], "cpu") == ""
        for i, name in enumerate(("out", "dq", "dk", "dv")):
            results = [x.clone() for x in part.results]
            results[i][0, 1, 7] += results[i].abs().max()
            assert checks.compare(case, rows, [part._replace(results=results)], "cpu").startswith(f"{name}: error")
        assert checks.compare(case, rows, [part, part], "cpu").startswith("layout: expected every position")


def test_sampled_rows_see_what_a_block_of_keys_misses():
    """The last rows give nothing to the first keys, in the long case only."""
    case = cases.Case(4096, heads=1, kv_heads=1, head_dim=16)
    rows = checks.sampled(case)
    attention, tensors = single(case)

    def forgetful(q, k, v):
        early = torch.cat([k[:, :, :100].detach(), k[:, :, 100:]], 2)
        return torch.cat([attention(q[:, :, :4000], k[:, :, :4000], v[:, :, :4000]), late(q, early, v)], 2)

    def late(q, k, v):
        positions = torch.arange(4096)
        mask = ringcp.Causal().dense(positions[4000:], positions)
        return torch.nn.functional.scaled_dot_product_attention(q[:, :, 4000:], k, v, attn_mask=mask)

    wrong = checks.results_at(rows, forgetful, tensors, None, 0)
    assert checks.compare(case, rows, [wrong], "cpu").startswith("dk: error")


def test_a_provider_that_is_not_timed_is_one_line_with_the_reason(tmp_path):
    origin = Origin("2.13.0", "a cpu", "abc", "torchrun")
    wrong = Measured("peer", "causal", "ring", [], [], wrong="dk: error 1\n at (0, 1)")
    append_csv(tmp_path / "x.csv", wrong.rows(origin, 1))
    refused = Measured("peer", "window", "ring", [], [], refused="window: not here")
    append_csv(tmp_path / "x.csv", refused.rows(origin, 1))
    lines = [(row["metric"], row["unit"], row["median"]) for row in read(tmp_path / "x.csv")]
    assert lines == [("wrong", "dk: error 1 at (0, 1)", ""), ("refused", "window: not here", "")]


def test_a_csv_of_other_columns_is_refused(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="give another file name"):
        append_csv(path, [])
    assert path.read_text() == "a,b\n1,2\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mask", "window:0"], "mask: expected causal, full, window:N or documents"),
        (["--mask", "documents:5,0"], "mask: expected causal, full, window:N or documents"),
        (["--seq-len", "9", "--mask", "documents:5,5"], "seq_len: expected the 10 tokens of the documents, got 9"),
        (["--kv-heads", "3"], "kv_heads: expected a divisor of heads = 8, got 3"),
        (["--seq-len", "0"], "seq_len: expected at least 1, got 0"),
        (["--mode", "warp"], "--mode: expected modes among auto, gather, ring, ulysses, usp, got warp"),
        (["--rounds", "0"], "--rounds: expected at least 1, got 0"),
    ],
)
def test_bad_options_are_refused_by_name(options, message, capsys):
    with pytest.raises(SystemExit):
        runner.parse(options)
    assert message in capsys.readouterr().err


def test_smoke_is_tiny():
    assert runner.parse([]).csv == Path("build/attention/attention.csv")
    args = runner.parse(["--seq-len", "2048", "8192", "--dtype", "bf16", "--kv-heads", "2", "--smoke"])
    assert args.csv == Path("build/attention/attention-smoke.csv")
    assert [case.name for case in args.cases] == ["causal bf16 B1 H8/2 D64 S128"]
    assert (args.rounds, args.warmup) == (1, 0)
