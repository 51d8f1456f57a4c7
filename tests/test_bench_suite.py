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
    assert "4 of 4, causal-8k-bf16-w4: at most" in out

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
