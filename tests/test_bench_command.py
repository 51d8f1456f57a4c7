"""The command of the benchmark: what it launches, resumes and says. It measures nothing here."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import bench, suite
from benchmarks.measured import Measured
from benchmarks.origin import Origin
from benchmarks.rows import append_csv

ROOT = Path(__file__).resolve().parents[1]
ORIGIN = Origin("2.13.0", "a cpu", "abc", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "warp"], "--only: expected names among latency, causal-2k-fp32"),
        (["--threads", "0"], "--threads: expected at least 1, got 0"),
        (["--suite", "slow"], "invalid choice: 'slow'"),
    ],
)
def test_bad_options_are_refused_by_name(options, message, capsys):
    with pytest.raises(SystemExit):
        bench.parse(options)
    assert message in capsys.readouterr().err


@pytest.fixture
def seconds():
    """How long the launches may take."""
    return []


@pytest.fixture
def launches(monkeypatch, seconds):
    """What would be launched; each launch appends what the cases want."""
    seen = []

    def launch(words, **kwargs):
        option = {word: words[words.index(word) + 1 :] for word in words if word.startswith("--")}
        names = option["--case"][: option["--case"].index("--provider")]
        seen.append((next(word for word in words if word.startswith("--nproc")), names))
        seconds.append(float(option["--until"][0]) - time.time())
        return 1 if "latency" in names else 0

    monkeypatch.setattr(bench.child, "run", launch)
    monkeypatch.setattr(bench.Origin, "of", classmethod(lambda cls, device, command: ORIGIN))
    return seen


def test_a_launch_for_each_number_of_ranks_and_a_failed_one_is_said(launches, tmp_path, capsys):
    only = ["--only", "latency", "causal-8k-bf16-w4", "window"]
    assert bench.main([*only, "--out", str(tmp_path)]) == 1
    assert launches == [("--nproc-per-node=2", ["latency", "window"]), ("--nproc-per-node=4", ["causal-8k-bf16-w4"])]
    assert "the launch on 2 ranks failed with status 1" in capsys.readouterr().out
    assert bench.main(["--only", "window", "--out", str(tmp_path)]) == 0


def test_a_file_with_other_columns_is_refused_before_anything_runs(launches, tmp_path, capsys):
    (tmp_path / "quick.csv").write_text("a,b\n")
    assert bench.main(["--only", "window", "--out", str(tmp_path)]) == 2
    assert "--out: csv: expected" in capsys.readouterr().out
    assert launches == []


def test_the_list_says_what_a_case_varies(capsys):
    assert bench.main(["--suite", "full", "--list", "--only", "causal-8k-bf16-w1", "causal-8k-bf16"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["causal-8k-bf16", "causal", "bf16", "B1", "H8", "D64", "S8192", "W2"]
    assert second.endswith("W1                ranks of causal-8k-bf16 varied")


def test_a_suite_resumes(launches, seconds, tmp_path, capsys):
    """What the CSV has of this commit is passed over, and said to be; also there, `--again` measures it again."""
    path, only = tmp_path / "full.csv", ["--only", "causal-8k-bf16-w1", "causal-4k-bf16"]
    named = next(named for named in suite.SUITES["full"].cases if named.name == "causal-8k-bf16-w1")
    for provider, mode in (("sdpa", "single"), ("ringcp", "ring")):
        measured = Measured(provider, named.title, mode, [[1.0] * 3], [[100.0] * 3])
        append_csv(path, measured.rows(ORIGIN, 1))
    before = path.read_text()
    assert bench.main(["--suite", "full", *only, "--out", str(tmp_path)]) == 0
    assert launches == [("--nproc-per-node=2", ["causal-4k-bf16"])]
    said = " ".join(capsys.readouterr().out.split())
    assert "has them of commit abc, passed over: causal-8k-bf16-w1 (--again: not so)" in said
    assert path.read_text() == before
    # Of its time it has what the case that is there leaves.
    planned = suite.SUITES["full"].only(only[1:]).planned()
    assert seconds == pytest.approx([suite.SUITES["full"].seconds - planned["causal-8k-bf16-w1"]], abs=5)
    bench.main(["--suite", "full", "--again", *only, "--out", str(tmp_path)])
    assert launches[1:] == [("--nproc-per-node=1", ["causal-8k-bf16-w1"]), ("--nproc-per-node=2", ["causal-4k-bf16"])]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--only", "latency", "window", "documents"], "--suite quick --only documents"),
        (["--suite", "full", "--only", "window", "documents"], "--suite full --only window documents"),
        (["--suite", "full", "--only", "window", "documents", "--again"], "--suite full --only documents"),
    ],
)
def test_an_interrupted_run_shows_what_is_there_and_says_how_to_go_on(
    launches, monkeypatch, tmp_path, capsys, options, left
):
    def interrupted(words, **kwargs):
        path = tmp_path / f"{options[1] if '--suite' in options else 'quick'}.csv"
        for named in (suite.QUICK[0], next(named for named in suite.FULL if named.name == "window")):
            for provider, mode in (("sdpa", "single"), *named.entrants(["ringcp"])):
                measured = Measured(provider, named.title, mode, [[1.0] * 3], [[100.0] * 3])
                append_csv(path, measured.rows(ORIGIN, 1))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.child, "run", interrupted)
    assert bench.main([*options, "--out", str(tmp_path)]) == 130
    said = " ".join(capsys.readouterr().out.split())
    assert said.endswith(f"stopped; to go on: python benchmarks/bench.py {left} --out {tmp_path}")
    assert "1000.0 (1000.0 – 1000.0)" in said, "the table"
    assert f"appended to: {tmp_path}" in said


CHILD = """
import sys, time
print("said", file=sys.stderr, flush=True)
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    raise ValueError("what nobody wants to read")
"""


def test_a_child_that_is_interrupted_is_silent_and_ends():
    """As by Ctrl-C, which every process of the terminal gets."""
    code = f"""
import sys
from pathlib import Path
from benchmarks import child
try:
    child.run([sys.executable, "-c", {CHILD!r}], cwd=Path(), env={{}})
except KeyboardInterrupt:
    print("interrupted")
sys.exit(child.run([sys.executable, "-c", "import sys; sys.exit('loud')"], cwd=Path(), env={{}}))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    time.sleep(3)  # what it has said is shown by then, also where this thread wakes up late
    os.killpg(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert out == "interrupted\n"
    assert error.splitlines() == ["said", "loud"]
    assert process.returncode == 1


def test_a_ringcp_that_is_wrong_or_refuses_is_a_failure(launches, tmp_path):
    named = next(named for named in suite.QUICK if named.name == "window")
    wrong = Measured("ringcp", named.title, "ring", [], [], wrong="dk: error 1")
    append_csv(tmp_path / "quick.csv", wrong.rows(ORIGIN, 1))
    assert bench.main(["--only", "window", "--out", str(tmp_path)]) == 1
    refused = Measured("ringcp", named.title, "ring", [], [], refused="mask: 1")
    append_csv(tmp_path / "quick.csv", refused.rows(ORIGIN, 1))
    assert bench.main(["--only", "window", "--out", str(tmp_path)]) == 1
