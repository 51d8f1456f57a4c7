"""The README is true: its snippet is the example, and each of its commands is run by a test."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

# Commands that this very run is part of, or that another test runs (with --smoke).
RUN_ELSEWHERE = {
    "pip install -e .": "make install, before any test",
    "make test": "this run",
    "torchrun --standalone --nproc-per-node=2 benchmarks/attention.py": "tests/test_benchmarks.py",
}
EXAMPLE = "torchrun --standalone --nproc-per-node=2 examples/attention.py"


def commands():
    blocks = re.findall(r"```sh\n(.*?)```", README, re.S)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line] + re.findall(r"`(torchrun [^`]*)`", README)


@pytest.mark.parametrize("command", commands())
def test_every_command_is_run_by_a_test(command):
    assert command == EXAMPLE or any(command.startswith(known) for known in RUN_ELSEWHERE), command


def test_the_snippet_is_the_example():
    snippet = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    example = (ROOT / "examples" / "attention.py").read_text()
    assert snippet in example


def test_the_example_runs():
    program, *args = shlex.split(EXAMPLE)
    assert program == "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", *args]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("torch.Size([1, 8, 1001, 64])") == 2


def test_every_file_that_the_readme_names_exists():
    for path in re.findall(r"`((?:tests|examples|benchmarks)/[\w/]+\.py)`", README):
        assert (ROOT / path).is_file(), path
    for name in re.findall(r"`(\w+\.py)`", README.split("## Read the code")[1]):
        assert (ROOT / "ringcp" / name).is_file(), name
