"""`make bench` from end to end: ranks, checks, rounds, CSV, table and pictures, at tiny sizes."""

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.suite import PEAK, SENT, SUITES

ROOT = Path(__file__).resolve().parents[1]
CASES = ("latency", "documents", "causal-8k-bf16", "causal-8k-bf16-w4")


def output(*options):
    """What the command prints; its ranks end with it, also if it is late."""
    process = subprocess.Popen(
        [sys.executable, "benchmarks/bench.py", *options],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    assert process.returncode == 0, out
    return out


@pytest.mark.timeout(220)
def test_the_command_measures_everything(tmp_path):
    out = output("--smoke", "--only", *CASES, "--out", str(tmp_path))
    assert "wrong" not in out.lower()
    assert "4 of 4, causal-8k-bf16-w4: about" in out

    path = tmp_path / "quick-smoke.csv"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(r["case"], r["provider"], r["mode"], r["metric"], r["unit"]) for r in rows}
    suite = SUITES["quick"].only(CASES).smoke()
    for named in suite.cases:
        for provider, mode in (("sdpa", "single"), *(("ringcp", mode) for mode in named.modes)):
            for metric, unit in (("forward+backward", "ms"), ("forward+backward", "% of sdpa"), (PEAK, "bytes")):
                assert (named.title, provider, mode, metric, unit) in found
            assert (named.title, provider, mode, SENT, "bytes") in found
    latency, documents, _, four = (named.title for named in suite.cases)
    assert {
        (latency, "ringcp", "ring", "forward minus bare transfers", "ms"),
        (latency, "ringcp", "ring", "forward+backward minus bare transfers", "ms"),
        (documents, "ringcp", "ulysses", "forward+backward", "% of dense rate"),
        (documents, "sdpa", "dense", "forward+backward", "ms"),
        (four, "ringcp", "ulysses", "forward+backward", "% of time on 2 ranks"),
        (four, "ringcp", "ring on 2 ranks", "forward+backward", "ms"),
        (four, "ringcp", "ring", PEAK, "% of formula"),
    } <= found
    assert {r["command"] for r in rows} == {
        f"python benchmarks/bench.py --suite quick --only {' '.join(CASES)} --smoke",
    }
    pictures = ["speed", "ranks", "steps-causal-8k-bf16", "steps-causal-8k-bf16-w4"]
    assert [f"drawn: {tmp_path}/quick-smoke-{name}.png" in out for name in pictures] == [True] * 4


@pytest.mark.timeout(170)
def test_an_interrupted_command_ends_without_a_traceback(tmp_path):
    """By a signal to all of its processes, as Ctrl-C is, while a case is measured; no rank stays."""
    process = subprocess.Popen(
        [sys.executable, "benchmarks/bench.py", "--smoke", "--out", str(tmp_path)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("2 of 12"):
                break
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=100)  # to the end of all that have this pipe
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        raise
    assert process.returncode == 130, out
    assert "Traceback" not in out
    assert "latency" in out, "the table has what was measured"
    *_, last = out.strip().splitlines()
    assert last.startswith(
        "stopped; to go on: python benchmarks/bench.py --suite quick --only causal-2k-fp32 causal-2k"
    )
