"""The README is true: its snippets are the examples, and each of its commands is run by a test."""

import contextlib
import io
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import ringcp

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

# Commands that this very run is part of, or that another test runs (with --smoke).
RUN_ELSEWHERE = {
    "pip install -e .": "make install, before any test",
    "make test": "this run",
    "make lint": "CI, before any test",
    "make examples": "this run",
    "make matrix": "CI, before the core suite",
    "make demo": "tests/test_train_example.py",
    "make bench": "tests/test_bench_suite.py",
    "make bench-peers": "tests/test_peers.py, its parts: CI installs no other library",
    "make parity": "tests/test_parity.py",
    "python benchmarks/gpu_check.py": "tests/test_gpu_check.py",
    "torchrun --standalone --nproc-per-node=2 examples/train.py": "tests/test_train_example.py",
    "torchrun --standalone --nproc-per-node=2 benchmarks/attention.py": "tests/test_benchmarks.py",
    "python -m benchmarks.training": "tests/test_training_benchmark.py",
    "make bench-training": "tests/test_training_benchmark.py",
}
ONE_NODE = "torchrun --standalone --nproc-per-node=2 examples/"
FOUR_RANKS = "torchrun --standalone --nproc-per-node=4 examples/"
# What each example says, and on how many ranks.
EXAMPLES = {
    f"{ONE_NODE}quickstart.py": (r"torch.Size\(\[1, 8, 50[01], 64\]\) torch.Size\(\[1, 8, 1001, 64\]\)", 2),
    f"{ONE_NODE}attention.py": (r"torch.Size\(\[1, 8, 1001, 64\]\)", 2),
    f"{ONE_NODE}module.py": (r"torch.Size\(\[1, 1001, 64\]\)", 2),
    f"{ONE_NODE}cp_example.py": (r"rank [01]: 2048 of 4096 tokens in the context", 2),
    f"{FOUR_RANKS}usp.py": (
        r"(?s)4 ranks, 4 a node.*\* +usp +2 .*\nauto: largest.*\nusp: largest.*\ngather: largest",
        1,
    ),
    f"{FOUR_RANKS}fsdp.py": (r"loss \d.*, of one process \d.*; largest relative difference of a gradient: \de-0", 1),
    f"{FOUR_RANKS}fsdp_tp.py": (r"largest relative difference of a gradient: \de-0", 1),
    f"{FOUR_RANKS}joint.py": (r"step 1: loss (\S+), of one process .*\nstep 2: loss (?!\1)", 1),
}
MEMORY = "python benchmarks/memory.py --seq-len 131072"
DRAW = "python -m ringcp.draw --world-size 4 --seq-len 4096 --out docs/ring.png"
NODES = "torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=localhost:29500"
RUN_HERE = (*EXAMPLES, MEMORY, DRAW, f"{NODES} examples/train.py")


def commands():
    blocks = re.findall(r"```sh\n(.*?)```", README, re.S)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line] + re.findall(r"`((?:torchrun|python|make|pip) [^`]*)`", README)


@pytest.mark.parametrize("command", commands())
def test_every_command_is_run_by_a_test(command):
    assert command in RUN_HERE or any(command.startswith(known) for known in RUN_ELSEWHERE), command


@pytest.mark.parametrize("command", RUN_HERE)
def test_every_command_that_is_run_here_is_in_the_readme(command):
    assert command in commands()


def run(command):
    program, *args = shlex.split(command)
    start = [sys.executable, "-m", "torch.distributed.run"] if program == "torchrun" else [sys.executable]
    return subprocess.Popen([*start, *args], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def output(process):
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return out


@pytest.mark.examples
@pytest.mark.parametrize("command", EXAMPLES)
def test_the_examples_run(command):
    said, times = EXAMPLES[command]
    assert len(re.findall(said, output(run(command)))) == times


@pytest.mark.examples
def test_several_nodes():
    """Two nodes, on this one."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        command = f"{NODES} examples/train.py --smoke".replace("29500", str(free.getsockname()[1]))
    nodes = [run(command) for _ in range(2)]
    try:
        said = "".join(output(node) for node in nodes)
        assert len(re.findall(r"step   2/2  loss", said)) == 1, said
    finally:
        for node in nodes:
            node.kill()
            node.communicate()


@pytest.mark.examples
def test_the_table_of_memory():
    assert output(run(MEMORY)).rstrip() in README


@pytest.mark.examples
def test_the_picture(tmp_path):
    output(run(DRAW.replace("docs/ring.png", str(tmp_path / "ring.png"))))
    assert (tmp_path / "ring.png").stat().st_size > 10_000
    assert (ROOT / "docs" / "ring.png").is_file()


def test_what_explain_prints():
    call = re.search(r"`(ringcp\.explain\(q_heads=[^`]*)`", README)[1]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        eval(call, {"ringcp": ringcp})
    assert f"```\n{printed.getvalue()}```" in README


@pytest.mark.parametrize("example", ["quickstart", "attention", "usp", "joint", "fsdp", "fsdp_tp"])
def test_the_snippets_are_the_examples(example):
    text = (ROOT / "examples" / f"{example}.py").read_text()
    snippets = re.findall(r"```python\n(.*?)```", README, re.S)
    assert any(snippet in text for snippet in snippets)
    assert all(any(s in path.read_text() for path in (ROOT / "examples").glob("*.py")) for s in snippets)


def test_every_file_that_the_readme_names_exists():
    for path in re.findall(r"`?\(?((?:tests|examples|benchmarks|docs)/[\w/*]+\.\w+)\)?`?", README):
        assert any(found.is_file() for found in ROOT.glob(path)), path
    for name in re.findall(r"`(\w+\.py)`", README.split("## Read the code")[1]):
        assert (ROOT / "ringcp" / name).is_file(), name
