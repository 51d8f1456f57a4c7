"""The public reports of faults in context parallelism, and what the tests that replay them say.

`reports.csv` lists the reports. A test names those that it replays by ``@pytest.mark.report(id)``, with ``raises=True``
where it shows a refusal; `tests/conftest.py` writes both into pytest's JUnit XML, which is read here.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
REPORTS = Path(__file__).with_name("reports.csv")


@dataclass(frozen=True)
class Report:
    """A line of `reports.csv`: section and number, where it was reported, and what about."""

    id: str
    upstream: str
    subject: str


@dataclass(frozen=True)
class Run:
    """A test that replays a report: one call of it, so that a parametrized one has several."""

    test: str
    raises: bool
    outcome: str  # "passed", "failed", "skipped"


def reports() -> list[Report]:
    with REPORTS.open(newline="") as file:
        return [Report(**row) for row in csv.DictReader(file)]


def run_tests(tests: Sequence[str]) -> dict[str, list[Run]]:
    """Runs the marked tests among `tests` (all, if empty) in a pytest of their own, which prints; runs by report.

    Raises:
        RuntimeError: pytest did not get as far as running them.
    """
    with tempfile.TemporaryDirectory() as directory:
        xml = Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "report", "-q", "-r", "fE", f"--junitxml={xml}", *tests]
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode not in (0, 1):  # 1: some tests failed, which the table says
            raise RuntimeError(f"pytest: expected it to run the tests, got exit code {done.returncode}; see above")
        return read_runs(xml)


def read_runs(xml: Path) -> dict[str, list[Run]]:
    """The runs by report in a JUnit XML file of pytest."""
    found: dict[str, list[Run]] = {}
    for case in ElementTree.parse(xml).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '').partition('[')[0]}"
        for mark in case.iter("property"):
            run = Run(test, mark.get("name") == "report raises", outcome)
            found.setdefault(mark.get("value", ""), []).append(run)
    return found


def verdict(runs: Sequence[Run]) -> str:
    """ "pass": replayed, and right; "raises": refused, by name; "FAILS"; "no test"."""
    if any(run.outcome == "failed" for run in runs):
        return "FAILS"
    passed = [run for run in runs if run.outcome == "passed"]
    if not passed:
        return "no test"
    return "raises" if all(run.raises for run in passed) else "pass"
