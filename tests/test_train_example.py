"""The training example: several ranks train as one does, and that one as plain torch; `make demo` shows it."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from examples import demo
from examples.model import Decoder

pytestmark = pytest.mark.examples

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def run(command, timeout=110):
    """On the CPU, one thread a process: the runs are small, and the machine may be busy."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def launch(ranks, losses, *options):
    """Train on so many ranks; what rank 0 measured, and what was printed."""
    options = ["examples/train.py", "--smoke", "--losses", str(losses), *options]
    done = run([*TORCHRUN, f"--nproc-per-node={ranks}", *options])
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(losses.read_text()), done.stdout


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file of an odd number of tokens and one more byte, so that a window is all of it; no byte predicts the next."""
    path = tmp_path_factory.mktemp("text") / "text.bin"
    generator = torch.Generator().manual_seed(0)
    path.write_bytes(bytes(torch.randint(256, (402,), generator=generator).tolist()))
    return path


@pytest.fixture(scope="module")
def on_two_ranks(text):
    return launch(2, text.with_name("two.json"), "--data", str(text))


def test_two_ranks_train_as_one_does(text, on_two_ranks):
    two, _ = on_two_ranks
    one, _ = launch(1, text.with_name("one.json"), "--data", str(text))
    assert (two["world_size"], one["world_size"]) == (2, 1)
    assert two["seq_len"] == one["seq_len"] == 401
    assert len(two["losses"]) == len(one["losses"]) == 2
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert two["gradient_norms"] == pytest.approx(one["gradient_norms"], rel=1e-4)
    assert two["losses"][1] != pytest.approx(two["losses"][0], rel=1e-2), "a step has to matter"


def test_the_first_step_is_that_of_plain_torch(text, on_two_ranks):
    """The loss predicts each byte of the file from those before it; its gradient is not a mean over the ranks."""
    two, _ = on_two_ranks
    data = torch.tensor(list(text.read_bytes()))
    torch.manual_seed(0)
    model = Decoder()
    loss = F.cross_entropy(model(data[None, :-1], torch.arange(401)[None])[0], data[1:])
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    assert two["losses"][0] == pytest.approx(loss.item(), rel=1e-5)
    assert two["gradient_norms"][0] == pytest.approx(norm.item(), rel=1e-4)


def test_plain_lines_without_a_terminal(on_two_ranks):
    _, printed = on_two_ranks
    assert "401 tokens a step on 2 ranks (cpu)" in printed
    for step in (1, 2):
        assert printed.count(f"step   {step}/2  loss ") == 1, "rank 0 alone speaks"
    assert printed.count("tokens/s") == 2


def test_the_demo(tmp_path):
    """Two ranks, then one, on the text that comes with Python; the losses side by side; a picture."""
    done = run([sys.executable, "examples/demo.py", "--smoke", "--ranks", "2", "--out", str(tmp_path / "demo.png")])
    assert done.returncode == 0, done.stdout + done.stderr
    for said in (
        "torchrun --standalone --nproc-per-node=2 examples/train.py --smoke",
        "torchrun --standalone --nproc-per-node=1 examples/train.py --smoke --steps 2",
        "512 tokens a step on 2 ranks",
        "loss, 2 ranks",
        "loss, 1 rank",
        "relative difference",
        f"{tmp_path / 'demo.png'}: who owns which tokens",
        "The losses are equal to 1e-04 relative.",
    ):
        assert said in done.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def measured(ranks, losses, norms=(1.0, 1.0)):
    measures = {"seq_len": 512, "kv_heads": 2, "head_dim": 32, "seconds": [1.0, 1.0]}
    return {"world_size": ranks, "losses": losses, "gradient_norms": norms, **measures}


@pytest.mark.parametrize(
    "losses, norms, equal",
    [
        ([5.5, 4.0], [1.0, 1.0], True),
        ([5.5, 4.0003], [1.0, 1.0], True),
        ([5.5, 4.0005], [1.0, 1.0], False),
        ([5.5006, 4.0], [1.0, 1.0], False),
        ([5.5, 4.0], [1.0, 0.5], False),
        ([5.5, float("nan")], [1.0, 1.0], False),
    ],
)
def test_the_demo_fails_where_losses_or_gradients_differ(losses, norms, equal, monkeypatch, tmp_path, capsys):
    results = {2: measured(2, losses, norms), 1: measured(1, [5.5, 4.0])}
    monkeypatch.setattr(demo, "train", lambda ranks, options, console: results[ranks])
    options = ["--ranks", "2", "--out", str(tmp_path / "demo.png")]
    if equal:
        demo.main(options)
    else:
        with pytest.raises(SystemExit, match="demo: expected losses that are equal to 1e-04 relative"):
            demo.main(options)
    printed = capsys.readouterr().out
    assert f"{losses[1]:.6f}" in printed
    assert "4.000000" in printed


def test_a_run_that_fails_ends_the_demo(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as ended:
        demo.train(1, ["--data", str(tmp_path / "nothing")], Console(quiet=True))
    assert ended.value.code not in (0, None)
    assert f"No such file or directory: '{tmp_path / 'nothing'}'" in capfd.readouterr().err


@pytest.fixture
def train(monkeypatch):
    """examples/train.py as a module."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("train")


def test_labels_are_the_next_tokens_and_every_rank_draws_the_same_windows(train):
    text = torch.arange(250, dtype=torch.uint8)
    drawn = list(zip(train.windows(text, 101, 7), train.windows(text, 101, 7), range(5), strict=False))
    for (ids, labels), again, _ in drawn:
        assert torch.equal(labels, ids + 1)
        assert ids.shape == (1, 101)
        assert all(map(torch.equal, (ids, labels), again))
    assert len({int(ids[0, 0]) for (ids, _), _, _ in drawn}) > 1


@pytest.mark.parametrize(
    "options, said",
    [
        ([], "expected a launch by torchrun, got no RANK"),
        (["--steps", "0"], "--steps: expected at least 1, got 0"),
        (["--seq-len", "-4"], "--seq-len: expected at least 1, got -4"),
    ],
)
def test_the_example_says_what_is_wrong(train, options, said, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as ended:
        train.main(options)
    assert said in f"{ended.value.code} {capsys.readouterr().err}"


def test_a_text_that_is_too_short(train, tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x")
    with pytest.raises(SystemExit, match="--data: expected a file of at least 2 bytes, got 1; give a longer one"):
        train.read_bytes(path)


def test_make_demo_runs_it():
    done = run(["make", "-n", "demo"])
    assert done.returncode == 0, done.stderr
    assert ".venv/bin/python examples/demo.py" in done.stdout
    assert "demo" in run(["make", "help"]).stdout
    assert "demo.png" in (ROOT / ".gitignore").read_text().splitlines()
