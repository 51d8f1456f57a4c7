"""The training benchmark: every mode trains as one process does, what is wrong is found, and its sums are right."""

import csv
import math
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from benchmarks.origin import Origin
from benchmarks.peak_memory import peak_memory
from benchmarks.rows import Row, append_csv
from benchmarks.training import __main__ as training
from benchmarks.training import ranks as training_ranks
from benchmarks.training import report as training_report
from benchmarks.training.ranks import ROUNDED, SINGLE, Curve, Plan, Timed
from examples.model import Decoder

ROOT = Path(__file__).parents[1]


def test_one_command_measures_draws_and_appends(tmp_path):
    path = tmp_path / "new" / "training-smoke.csv"
    options = ["--smoke", "--mode", "ring", "usp", "--out", str(path.parent)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.training", *options],
        cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=110,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for said in (
        "Training on 2 ranks of 1 thread on",
        "Training on 4 ranks of 1 thread on",
        "3 steps of 128 tokens: the largest relative difference from one process",
        "4 ranks, usp: loss 5.5",
    ):
        assert said in done.stdout
    assert "wrong" not in done.stdout
    for name in ("speed", "curves"):
        assert path.with_name(f"training-smoke-{name}.png").read_bytes().startswith(b"\x89PNG")

    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    timed = [(r["provider"], r["mode"], r["case"]) for r in rows if r["unit"] == "tokens/s" and float(r["median"]) > 0]
    two, four = "decoder fp32 B1 S128 W2", "decoder fp32 B1 S128 W4"
    assert timed == [
        *[("torch", SINGLE, two), ("ringcp", "ring", two)],
        *[("torch", SINGLE, four), ("ringcp", "ring", four), ("ringcp", "usp", four)],
    ]
    trained = [(r["mode"], r["case"][-11:]) for r in rows if (r["metric"], r["unit"]) == ("loss", "last")]
    one, two, four = "W1, 3 steps", "W2, 3 steps", "W4, 3 steps"
    assert trained == [(SINGLE, one), (ROUNDED, one), ("ring", two), ("ring", four), ("usp", four)]
    with path.with_name("training-smoke-curves.csv").open(newline="") as file:
        steps = list(csv.DictReader(file))
    drawn = [(mode, case, step) for mode, case in trained for step in ("1", "2", "3")]
    assert [(r["mode"], r["case"][-11:], r["step"]) for r in steps] == drawn
    last = {(r["mode"], r["case"]): float(r["median"]) for r in rows if (r["metric"], r["unit"]) == ("loss", "last")}
    for r in steps:
        assert float(r["gradient_norm"]) > 0
        if r["step"] == "3":
            assert float(r["loss"]) == pytest.approx(last[r["mode"], r["case"]], rel=1e-5)
    assert all(r["command"].startswith("python -m benchmarks.training --smoke --mode ring usp") for r in rows)


def measured(mesh, modes, seq_len):
    heard = []
    ranks = training_ranks.Ranks(mesh, threads=1, together=1)
    ranks.timed((SINGLE, *modes), seq_len, 2, heard.append)
    for mode in (SINGLE, *modes):
        ranks.curve(mode, seq_len, 3, heard.append)
    return [said for said in heard if not isinstance(said, training_ranks.Progress)]


def test_every_mode_trains_as_one_process_and_needs_less_memory(worlds):
    modes = ("auto", "ring", "gather", "ulysses", "usp")
    (timed, single, *curves), *others = worlds(4).run(measured, modes, 509, timeout=100)
    assert [t.mode for t in timed] == [SINGLE, "auto: ring", *modes[1:]]
    assert all(len(t.seconds) == 2 and min(t.seconds) > 0 for t in timed)
    assert all(other[0] == timed for other in others), "the slowest rank, and the one that needs most, count"
    parameters = sum(p.numel() for p in Decoder().parameters())
    floor = 4 * 4 * parameters  # of themselves, gradients, and two moments, in fp32
    for t in timed[1:]:
        # Of what a step adds, a rank has a quarter, but for what modes buffer.
        assert 0 < t.peak_bytes - floor < 0.6 * (timed[0].peak_bytes - floor), t.mode

    assert [curve.mode for curve in curves] == list(modes)
    assert single.losses[2] < single.losses[0] - 0.02, "a step has to matter"
    for curve in curves:
        assert training_report.difference(curve, single).first < 1e-5, curve.mode
        for other in others:
            assert other[2 + curves.index(curve)] == curve, "every rank sees the same loss"


def trained_with_the_mean_of_gradients(mesh):
    sum_over = training_ranks.sum_over

    def mean_over(group, grads):
        sum_over(group, grads)
        for grad in grads:
            grad /= 2

    training_ranks.sum_over = mean_over
    try:
        heard = []
        ranks = training_ranks.Ranks(mesh, threads=1, together=1)
        for mode in (SINGLE, "ring"):
            ranks.curve(mode, 128, 2, heard.append)
    finally:
        training_ranks.sum_over = sum_over
    return [said for said in heard if isinstance(said, Curve)]


def test_gradients_of_the_wrong_scale_are_found(worlds):
    (single, ring), _ = worlds(2).run(trained_with_the_mean_of_gradients)
    apart = training_report.difference(ring, single)
    assert apart.norm == pytest.approx(0.5, rel=1e-3)
    assert apart.wrong.endswith("got a difference of 5.0e-01")


def test_a_rank_that_raises_ends_the_launch():
    plan = Plan("cpu", 2, 1, 1, (SINGLE, "warp"), (16,), 1, (), 16, 1)
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="warp"):
        list(training.launch(plan))


@torch.library.custom_op("training_benchmark::wasteful", mutates_args=())
def wasteful(x: torch.Tensor) -> torch.Tensor:
    torch.zeros(1 << 20, dtype=torch.uint8)  # freed at once
    torch.zeros(3 << 20, dtype=torch.uint8)
    return x.clone()


def test_the_peak_counts_what_a_custom_op_allocates():
    x = torch.ones(10)
    with peak_memory("cpu") as peak:
        kept = torch.zeros(1 << 20, dtype=torch.uint8)
        wasteful(x)
        del kept
        torch.zeros(2 << 20, dtype=torch.uint8)
    assert peak.num_bytes == (1 << 20) + (3 << 20)


def test_labels_are_the_next_tokens_of_a_text_that_is_the_same_in_every_run():
    first, second = (list(zip(range(2), training_ranks.batches(50, "cpu"), strict=False)) for _ in range(2))
    for (_, (ids, labels)), (_, again) in zip(first, second, strict=True):
        assert ids.shape == labels.shape == (1, 50)
        assert ids[0, 1:].equal(labels[0, :-1])
        assert ids.equal(again[0])
        assert labels.equal(again[1])
        assert bytes(labels[0].tolist()) in bytes(training_ranks.text().tolist())
    assert not first[0][1][0].equal(first[1][1][0])
    with pytest.raises(ValueError, match="seq_len: expected less than the"):
        next(training_ranks.batches(10_000_000, "cpu"))


def timed(mode, seconds, peak_bytes=100):
    return Timed(2, mode, 512, seconds, peak_bytes)


PLAN = Plan("cpu", 2, 1, 2, (SINGLE, "ring"), (512,), 2, (SINGLE, "ring"), 512, 4)
ORIGIN = Origin("2.13.0", "a cpu", "abc", "python")


def test_speed_is_compared_round_by_round():
    # The machine is ten times slower in the second round; both feel it, and the ratio does not.
    rows = training_report.speed_rows([timed(SINGLE, [1.0, 10.0]), timed("ring", [2.0, 20.0], 60)], PLAN, ORIGIN)
    found = {(r.mode, r.metric, r.unit): r for r in rows}
    ratio = found["ring", "training", "% of one process"]
    assert (ratio.median, ratio.p20, ratio.p80) == (50.0, 50.0, 50.0)
    assert found["ring", "training", "tokens/s"].median == pytest.approx((256 + 25.6) / 2)
    assert found["ring", "peak memory", "bytes"].median == 60
    assert {(r.mode, r.threads) for r in rows} == {(SINGLE, 2), ("ring", 1)}


def test_each_step_of_a_curve_is_kept(tmp_path):
    """As exactly as it was measured: a picture can be drawn from the file."""
    curve = Curve(2, "ring", [4.0, 1 / 3, 2e-7, 1.0], [0.1, math.pi, 5.0, 6.0])
    path = tmp_path / "curves.csv"
    append_csv(path, training_report.steps(curve, PLAN, ORIGIN), training_report.Step)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["step"] for r in rows] == ["1", "2", "3", "4"]
    assert [float(r["loss"]) for r in rows] == curve.losses
    assert [float(r["gradient_norm"]) for r in rows] == curve.norms
    who = {(r["provider"], r["mode"], r["case"], r["threads"], r["commit"]) for r in rows}
    assert who == {("ringcp", "ring", "decoder fp32 B1 S512 W2, 4 steps", "1", "abc")}
    origin_of_rows = [field.name for field in fields(Row)][-8:]
    assert [field.name for field in fields(training_report.Step)][-8:] == origin_of_rows


def test_differences_of_curves():
    single = Curve(1, SINGLE, [4.0, 2.0, 2.0, 1.0], [1.0, 1.0, 1.0, 2.0])
    ring = Curve(2, "ring", [4.0, 2.0, 2.0, 1.5], [1.0, 1.00005, 1.0, 1.5])
    apart = training_report.difference(ring, single)
    assert (apart.loss, apart.loss_step, apart.norm, apart.norm_step) == (0.5, 4, 0.25, 4)
    assert apart.first == pytest.approx(5e-5)
    assert apart.wrong == "", "later steps are reported, not judged"
    rows = training_report.curve_rows(ring, single, PLAN, ORIGIN)
    assert {r.median for r in rows if r.unit.startswith("largest")} == {0.5, 0.25}
    assert "wrong" not in {r.metric for r in rows}


@pytest.mark.parametrize("loss, norm", [(2.0003, 1.0), (2.0, 0.999), (math.nan, 1.0), (2.0, math.nan)])
def test_a_wrong_curve_is_said_to_be_wrong(loss, norm):
    single = Curve(1, SINGLE, [4.0, 2.0], [1.0, 1.0])
    wrong = Curve(2, "ring", [4.0, loss], [1.0, norm])
    rows = training_report.curve_rows(wrong, single, PLAN, ORIGIN)
    assert [r.unit for r in rows if r.metric == "wrong"] == [training_report.difference(wrong, single).wrong]
    assert "wrong: expected the first 3 losses" in training_report.curve_line(wrong, single)


def test_wrong_curves_end_in_an_error(monkeypatch, tmp_path):
    curves = [Curve(1, SINGLE, [4.0], [1.0]), Curve(2, "ring", [4.1], [0.5])]
    monkeypatch.setattr(training, "launch", lambda plan: (curve for curve in curves))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="expected curves like that of one process"):
        training.main(["--smoke", "--ranks", "2", "--part", "curves", "--out", str(tmp_path)])


def test_plans():
    args = training.parse(["--seq-len", "64"])
    two, four = training.plans(args, "cpu", cores=2)
    assert two.modes == (SINGLE, "auto", "ring", "gather", "ulysses")
    assert four.modes == (SINGLE, "auto", "ring", "gather", "ulysses", "usp")
    # One process trains once, and "auto" is one of the others.
    assert set(two.curves) == {SINGLE, ROUNDED, "ring", "gather", "ulysses"}
    assert set(four.curves) == {"ring", "gather", "ulysses", "usp"}
    assert (two.together, four.together) == (2, 2), "no more threads than cores"
    assert args.csv == Path("build/training/training.csv")
    assert training.parse(["--smoke", "--out", "x"]).csv == Path("x/training-smoke.csv")
    only_speed, _ = training.plans(training.parse(["--part", "speed"]), "cpu", cores=2)
    assert only_speed.lengths
    assert not only_speed.curves


@pytest.mark.parametrize(
    "options, message",
    [
        (["--ranks", "0"], "--ranks: expected at least 1, got [0]"),
        (["--curve-len", "0"], "--curve-len: expected at least 1, got 0"),
        (["--seq-len", "9999999"], "--seq-len, --curve-len: expected at most the"),
        (["--mode", "usp"], "--mode: expected one that runs on 2 ranks, got usp"),
        (["--mode", "warp"], "argument --mode: invalid choice: 'warp'"),
    ],
)
def test_bad_options_are_refused_by_name(options, message, capsys):
    with pytest.raises(SystemExit):
        training.parse(options)
    assert message in capsys.readouterr().err
