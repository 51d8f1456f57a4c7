"""`make bench` from end to end: ranks, checks, rounds, CSV, table and pictures, at tiny sizes."""

import csv
import subprocess
import sys
from pathlib import Path

from benchmarks.suite import PEAK, SENT, SUITES

ROOT = Path(__file__).resolve().parents[1]
CASES = ("latency", "documents", "causal-8k-bf16", "causal-8k-bf16-w4")


def test_the_command_measures_everything(tmp_path):
    command = [sys.executable, "benchmarks/bench.py", "--smoke", "--only", *CASES, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong" not in done.stdout.lower()
    assert "4 of 4, causal-8k-bf16-w4: at most" in done.stdout

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
    assert [f"drawn: {tmp_path}/quick-smoke-{name}.png" in done.stdout for name in pictures] == [True] * 4
