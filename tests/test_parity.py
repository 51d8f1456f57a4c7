"""The parity run works by its command, and its tables can show a fault."""

import csv
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.origin import Origin, commit
from benchmarks.parity.cells import MASKS, Cell, in_one_process, one_kernel, reference
from benchmarks.parity.errors import ATTENTION, ONE_KERNEL, QUANTITIES, Error, above_bar, compared
from benchmarks.parity.page import Parity, markdown
from benchmarks.parity.probe import Answer, Count, Question, reachable
from benchmarks.parity.reports import Report, Run, read_runs, reports, verdict
from ringcp import Causal, Documents, Full, Window

ORIGIN = Origin("2.13.0", "a cpu", "abc", "python")
ROOT = Path(__file__).resolve().parents[1]


def test_a_small_run(tmp_path):
    """By its command: every way to compute is there and right, nothing leaks, and a mark of a test is in the table."""
    command = [sys.executable, "-m", "benchmarks.parity", "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=115, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "parity.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = Counter((r["mode"], int(r["ranks"]), r["ran"]) for r in rows)
    modes = {1: {"ring"}, 2: {"ring", "gather", "ulysses"}, 4: {"ring", "gather", "ulysses", "usp"}}
    want = {(mode, ranks, "gloo") for ranks in modes for mode in modes[ranks]}
    want |= {(ONE_KERNEL, 1, "torch")} | {(mode, 8, "one process") for mode in modes[4]}
    assert found == dict.fromkeys(want, len(QUANTITIES))
    assert all(float(r["max_abs"]) < 1e-13 for r in rows)
    assert {(r["torch"], r["command"]) for r in rows} == {(torch.__version__, "python -m benchmarks.parity --smoke")}
    assert {r["commit"] for r in rows} == {commit()}
    page = (tmp_path / "parity.md").read_text()
    assert f"Written by `python -m benchmarks.parity --smoke` at commit {commit() or 'unknown'}, " in page
    assert "All is as it must be." in page
    for mode in ("ring", "gather", "ulysses", "usp"):
        cells = " | ".join(["33 of 33"] * 4)
        assert f"| token 1 of the first of two documents | {mode} | 4 | {cells} |" in page
        cells = " | ".join(["33 of 33 **+ 34**"] * 4)
        assert f"| control: two documents, the mask forgotten | {mode} | 4 | {cells} |" in page
    assert "| labels shifted after sharding | pass | `tests/test_layout.py::test_labels_are_shifted" in page
    assert (tmp_path / "parity.png").read_bytes().startswith(b"\x89PNG")


def test_make_parity_runs_it():
    assert "\n\t$(BIN)/python -m benchmarks.parity $(ARGS)\n" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("spoiled", QUANTITIES)
def test_one_wrong_number_is_an_error(spoiled):
    cell = Cell("causal", "fp64", seq_len=13)
    truth, got = reference(cell), in_one_process(cell, "ring", 2)
    if spoiled in ATTENTION:
        got.attention[ATTENTION.index(spoiled)][1, 2, 3, 4] += 0.5
    elif spoiled == "loss":
        got = replace(got, step=replace(got.step, loss=got.step.loss + 0.5))
    else:
        got.step.gradient[7] += 0.5
    found = {name: (most, relative) for name, most, relative in compared(got, truth)}
    hit = {"gradient", "gradient norm"} if "gradient" in spoiled else {spoiled}
    for name, (most, relative) in found.items():
        assert (relative > 1e-4) == (name in hit), name
        if name == spoiled != "gradient norm":
            assert most == pytest.approx(0.5)


@pytest.mark.parametrize("mask", MASKS)
def test_half_precision_costs_what_it_costs_one_kernel(mask):
    """Also where rows attend to nothing, which torch's attention leaves open."""
    cell = Cell(mask, "bf16", seq_len=31)
    truth = reference(cell)
    ways = (ONE_KERNEL, one_kernel(cell)), ("ring", in_one_process(cell, "ring", 4))
    found = [error("bf16", way, 1, name, *off) for way, of in ways for name, *off in compared(of, truth)]
    assert all(1e-7 < e.rel_l2 < 3e-2 for e in found if e.quantity in (*ATTENTION, "gradient"))
    assert above_bar(found) == []


def error(dtype="fp64", mode="ring", ranks=2, quantity="dk", max_abs=1e-12, rel_l2=1e-13):
    return Error(dtype, "causal", mode, ranks, "gloo", quantity, max_abs, rel_l2)


def test_the_bars():
    kernel = [error("bf16", ONE_KERNEL, 1, rel_l2=1e-3), error(mode=ONE_KERNEL, ranks=1)]
    assert above_bar([*kernel, error("bf16", max_abs=1.0, rel_l2=1.4e-3), error()]) == []
    assert above_bar([*kernel, error("bf16", rel_l2=1.6e-3), error(max_abs=2e-10)]) == [
        "dk, bf16, causal, ring, 2 ranks: relative L2 1.6e-03, more than 1.5e-03",
        "dk, fp64, causal, ring, 2 ranks: off by 2.0e-10, more than 1e-10",
    ]
    assert len(above_bar([*kernel, error("bf16", rel_l2=float("nan")), error(max_abs=float("nan"))])) == 2


@pytest.mark.parametrize(
    "token, mask, queries, keys",
    [
        (1, Causal(), [1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
        (2, Window(1), [2, 3], [1, 2, 3]),
        (1, Documents([3, 2]) & Causal(), [1, 2], [0, 1, 2]),
        (5, Documents([3, 2]), [], []),
        (0, Full(), [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
    ],
    ids=str,
)
def test_what_a_token_can_change(token, mask, queries, keys):
    reach = [x.nonzero().flatten().tolist() for x in reachable(Question("", token, mask, mask), 6)]
    assert reach == [queries, queries, keys, keys]


def parity(answers=(), runs=()):
    kernel = [error(mode=ONE_KERNEL, ranks=1, quantity=q) for q in QUANTITIES]
    errors = kernel + [error(quantity=q) for q in QUANTITIES]
    return Parity(errors, list(answers), [Report("1.1", "a/b#2, c/d#3", "a | b")], {"1.1": list(runs)}, "", ORIGIN)


def answer(elsewhere, *, control):
    question = Question("q", 1, Full() if control else Causal(), Causal())
    return Answer(question, "ring", 4, dict.fromkeys(ATTENTION, Count(3, 3, elsewhere)))


@pytest.mark.parametrize(
    "elsewhere, control, said", [(0, False, []), (2, False, ["leaks"]), (2, True, []), (0, True, ["sees nothing"])]
)
def test_a_leak_is_a_failure_and_a_blind_control_too(elsewhere, control, said):
    found = parity([answer(elsewhere, control=control)])
    assert found.failures() == [f"probe: q, ring: {words}" for words in said]
    assert ("NOT as it must be" in markdown(found)) == bool(said)


def test_a_failing_report_is_a_failure():
    found = parity(runs=[Run("t", False, "passed"), Run("t", False, "failed")])
    assert found.failures() == ["report 1.1: FAILS"]
    links = "[a/b#2](https://github.com/a/b/issues/2), [c/d#3](https://github.com/c/d/issues/3)"
    assert f"| 1.1 | {links} | a &#124; b | FAILS | `t` |" in markdown(found)


def case(name, marks, outcome=""):
    """A test in pytest's JUnit XML."""
    said = "".join(f'<property name="{kind}" value="{number}"/>' for kind, number in marks)
    return f'<testcase classname="tests.test_a" name="{name}"><properties>{said}</properties>{outcome}</testcase>'


XML = [
    case("test_x[1]", [("report", "1.1")]),
    case("test_x[2]", [("report", "1.1")], '<failure message="no"/>'),
    case("test_y", [("report raises", "1.2"), ("report", "1.3")]),
    case("test_z", [("report", "1.4")], "<skipped/>"),
    case("test_e", [("report", "1.5")], "<error/>"),
]


def test_what_pytest_says_of_the_reports(tmp_path):
    (tmp_path / "x.xml").write_text(f"<testsuites><testsuite>{''.join(XML)}</testsuite></testsuites>")
    runs = read_runs(tmp_path / "x.xml")
    assert runs["1.1"] == [
        Run("tests/test_a.py::test_x", False, "passed"),
        Run("tests/test_a.py::test_x", False, "failed"),
    ]
    verdicts = {number: verdict(of) for number, of in runs.items()}
    assert verdicts == {"1.1": "FAILS", "1.2": "raises", "1.3": "pass", "1.4": "no test", "1.5": "FAILS"}
    assert verdict([*runs["1.2"], *runs["1.3"]]) == "pass"
    assert verdict([]) == "no test"


def test_reports_are_listed_once():
    assert max(Counter(report.id for report in reports()).values()) == 1
    assert all(report.upstream and report.subject for report in reports())


def test_cells_pickle_and_make_the_same_tensors():
    first, second = (Cell("documents & causal", "bf16", seq_len=19).tensors() for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
