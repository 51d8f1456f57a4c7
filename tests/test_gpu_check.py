"""The check for GPUs: its parts run on CPUs at small sizes, and nothing that goes wrong in one stops the others."""

import json
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kernel_standins import cudnn_forward, efficient_forward, flash_forward
from torch.nn.attention import flex_attention

import ringcp
from benchmarks import gpu_check
from benchmarks.gpu import (
    clock,
    exactness,
    facts,
    functions,
    machine,
    one_rank,
    part,
    peaks,
    plan,
    runner,
    speed,
    table,
)
from benchmarks.gpu.part import Bench, Found, Orders, Row, Skipped
from benchmarks.origin import commit
from ringcp.kernels.flex import Flex
from ringcp.kernels.registry import KERNELS
from ringcp.kernels.sdpa_cudnn import SdpaCudnn
from ringcp.kernels.sdpa_efficient import SdpaEfficient
from ringcp.kernels.sdpa_flash import SdpaFlash

ROOT = Path(__file__).resolve().parents[1]
LONG = 600.0


def bench_here(rows, *, seconds=LONG, rank=0, device="cpu"):
    """A part's side in this process, whose rows end in a list."""
    ends = time.monotonic() + seconds
    orders = Orders(device, device == "cpu", rank, ends, ends, "")
    return Bench(orders, lambda message: rows.append(message[1]) if message[0] == "row" else None)


def raises(error):
    def check():
        raise error

    return check


def test_a_check_says_what_came_of_it():
    rows = []
    here = bench_here(rows)
    assert here.check("fine", lambda: Found({"ms": 1.5}, "as expected")).values == {"ms": 1.5}
    here.check("wrong", raises(AssertionError("off by one")))
    here.check("not here", raises(Skipped("no NCCL")))
    here.check("broken", raises(RuntimeError("no such kernel")))
    assert [row.status for row in rows] == ["ok", "wrong", "skipped", "error"]
    assert rows[1].detail == "off by one"
    assert "RuntimeError: no such kernel" in rows[3].detail
    assert "in check" in rows[3].detail, "the traceback is there"
    assert bench_here(rows, seconds=-1).check("late", raises(AssertionError())) is None
    assert rows[-1].status == "no time"


def test_of_other_ranks_only_what_went_wrong_is_news():
    rows = []
    here = bench_here(rows, rank=1)
    here.check("fine", lambda: Found({}))
    here.check("not here", raises(Skipped("no")))
    here.check("wrong", raises(AssertionError("off")))
    assert [(row.name, row.status) for row in rows] == [("rank 1: wrong", "wrong")]


# Parts that the processes of `run_part` import from here.


def two_rows(here, word):
    here.check("first", lambda: Found({"rank": here.rank}, word))
    here.check("second", raises(AssertionError("no")))


def raising(here):
    here.check("first", lambda: Found({}))
    raise RuntimeError("between the checks")


def hanging(here):
    here.check("first", lambda: Found({}))
    here.check("second", lambda: signal.pause())


def dying(here):
    here.check("the last one", lambda: os._exit(7) if here.rank == 0 else time.sleep(LONG))


def run(function, *args, allowed=LONG, ranks=1):
    shown = []
    part = runner.Part("part", function, 1.0, args, ranks)
    result = runner.run_part(part, "cpu", True, allowed, shown.append)
    assert result.rows == shown
    return result


def test_a_part_runs_in_a_process_of_its_own():
    rows = run(two_rows, "hello").rows
    assert [(row.name, row.status, row.detail) for row in rows] == [("first", "ok", "hello"), ("second", "wrong", "no")]


def test_a_part_that_raises_is_an_error_beside_its_rows():
    first, last = run(raising).rows
    assert (first.name, first.status) == ("first", "ok")
    assert last.status == "error"
    assert "RuntimeError: between the checks" in last.detail


def test_a_part_that_hangs_is_ended_and_its_rows_are_kept():
    result = run(hanging, allowed=3.0)
    assert result.rows[-1].status == "no time"
    assert 3.0 <= result.seconds < 60.0  # the first process of all takes long to start

    ours, theirs = mp.Pipe(duplex=False)
    rank, rows = runner._Rank(SimpleNamespace(), ours), []
    first = Row("first", "ok", "", {}, 0.0)
    for message in (("begin", "first"), ("row", first), ("begin", "second")):
        theirs.send(message)
    runner._listen([rank], time.monotonic() + 0.1, rows.append)
    assert rows == [first, Row("second", "no time", "rank 0 was ended in it", {}, 0.0)]


def test_a_process_that_nobody_ends_ends_itself():
    context = mp.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    now = time.monotonic()
    process = context.Process(
        target=part.serve, args=(theirs, Orders("cpu", True, 0, now + LONG, now, ""), hanging, ())
    )
    process.start()
    process.join(60.0)
    assert process.exitcode == -signal.SIGALRM
    ours.close()
    theirs.close()


def test_a_rank_that_dies_is_named_and_its_peer_does_not_wait_for_ever():
    result = run(dying, ranks=2)
    assert [(row.name, row.status) for row in result.rows] == [("the last one", "error"), ("the last one", "no time")]
    assert "rank 0 died in it with exit code 7" in result.rows[0].detail
    assert result.seconds < 60.0


def test_what_processes_are_forked_from_does_not_ask_for_cuda():
    """A process that is forked after that cannot use CUDA."""
    asking = "\n".join(
        [
            "import sys, torch",
            "def asked(*args): sys.exit('asked for CUDA')",
            "torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = asked",
            *(f"import {module}" for module in runner.PRELOAD),
        ]
    )
    subprocess.run([sys.executable, "-c", asking], cwd=ROOT, check=True, timeout=100)


def test_one_table_with_every_row():
    rows = [
        Row("ring", "ok", "", {"%": 91.23456, "rounds": 3}, 0.1),
        Row("gather", "error", "Traceback\n  at line 1\nValueError: no", {}, 0.1),
    ]
    text = table.table([runner.Result("b speed", 1.0, rows=rows)])
    assert "ring" in text
    assert "% 91.23, rounds 3" in text
    assert "ValueError: no" in text
    assert "Traceback" not in text
    assert text.endswith("2 rows: 1 ok, 1 error")


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit) as exit_:
        gpu_check.main([])
    assert exit_.value.code == 2
    assert "got none that torch sees; on a CPU pass --device cpu --smoke" in capsys.readouterr().err


@pytest.mark.parametrize("options, said", [(["--budget-s", "0"], "above 0, got 0"), (["--only", "x"], "there are")])
def test_other_options_that_cannot_be(options, said, capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--device", "cpu", *options])
    assert said in capsys.readouterr().err


def test_the_parts_fit_the_time():
    for device in ("cpu", "cuda"):
        parts = plan.plan(device)
        assert len({part.name for part in parts}) == len(parts)
        assert {part.name[0] for part in parts} >= set("abcde")
    wanted = {name for name in KERNELS if name != "sdpa_flash_cpu"}
    assert {part.args[0] for part in parts if part.name.startswith("a ")} == wanted, "every kernel of GPUs"


def test_a_wrong_kernel_is_found(monkeypatch):
    right = exactness.in_process

    def wrong(q, k, v, **options):
        out, lse = right(q, k, v, **{**options, "return_lse": True})
        return (out * 1.1, lse) if options["return_lse"] else out * 1.1

    rows = []
    monkeypatch.setattr(exactness, "in_process", wrong)
    monkeypatch.setattr(exactness, "CASES", exactness.CASES[:3])
    checks = exactness.Exactness(bench_here(rows), "sdpa_flash_cpu")
    checks._bench.check("ring", lambda: checks.one_mode("ring", torch.bfloat16))
    assert rows[0].status == "wrong"
    assert "3 wrong, 0 right" in rows[0].detail
    assert "causal, 4 ranks: out: error" in rows[0].detail


def test_a_wrong_kernel_of_functions_is_found(monkeypatch):
    right = functions.in_process
    monkeypatch.setattr(
        functions, "in_process", lambda *x, mask, **options: right(*x, mask=mask & ringcp.Window(30), **options)
    )
    rows = []
    monkeypatch.setattr(functions, "CASES", functions.CASES[:1])
    functions.functions(bench_here(rows), "sdpa_flash_cpu")
    names = "predicate, exact", "predicate, one call", "tried before a call"
    assert [(row.name, row.status) for row in rows] == list(zip(names, ("wrong", "info", "info"), strict=True))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_what_a_compiler_takes_is_found(monkeypatch):
    """By Dynamo, which comes before what a GPU alone has."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    found = functions.trial(torch.device("cpu"), Flex(backend="eager"))
    assert found.values["again s"] < found.values["first s"] / 10
    assert (found.values["a branch"], found.values["a reduction"]) == ("refused", "compiled")


def test_other_bits_are_found(monkeypatch):
    right, noise = exactness.in_process, iter((0.0, 1e-2))
    monkeypatch.setattr(exactness, "in_process", lambda q, k, v, **options: right(q, k, v, **options) + next(noise))
    checks = exactness.Exactness(bench_here([]), "sdpa_flash_cpu")
    with pytest.raises(AssertionError, match="out have other bits"):
        checks.same_bits("ring", must=True)


@pytest.mark.parametrize("case", exactness.CASES, ids=lambda case: case.name)
def test_what_all_is_held_against_is_itself_right(case):
    given = exactness.tensors(case, 33, torch.float32, torch.device("cpu"))
    want = exactness.expected(case, given)
    for name in exactness.NAMES:
        assert (want.one_call[name] - want.exact[name]).abs().max() < 1e-5, name


@pytest.mark.parametrize("mode", speed.TIMED_MODES)
def test_a_rank_computes_its_share_of_the_flops(mode):
    """Counted in pairs of the calls: as many as the one call that it is held against."""
    shape, pairs = one_rank.Shape(64, 4, 8, 4, 16, torch.float32), 0
    kernel = KERNELS["sdpa_flash_cpu"]

    def counted(q, k, v, *, form, **options):
        nonlocal pairs
        m, n = q.shape[2], k.shape[2]
        pairs += q.shape[1] * (m * n if form == one_rank.Form() else m * (m + 1) // 2)
        return kernel.forward(q, k, v, form=form, **options)

    counting = SimpleNamespace(name="counting", caps=kernel.caps, forward=counted, backward=kernel.backward)
    given = one_rank.Attention.random(shape, torch.device("cpu"))
    for rank in range(4):
        pairs = 0
        work = one_rank.OneRank(mode, shape, rank, counting, given)
        work.wires.fill = True
        grads = work.backward(*work.forward())
        assert [x.shape for x in grads] == [x.shape for x in given[:3]]
        assert 4 * pairs * shape.head_dim == pytest.approx(shape.rank_flops(), rel=1 / 64)
    one = shape.share()
    assert (one.tokens, one.q_heads, one.kv_heads) == (256, 2, 1)
    assert 2 * one.q_heads * one.tokens**2 * one.head_dim == shape.rank_flops()


def test_targets_are_held_against_the_medians():
    def mode(seconds, merge):
        fast, slow = clock.Times(1.0, 2.0, 0.1), clock.Times(seconds / 3, 2 * seconds / 3, 0.1)
        return speed._Mode([fast] * 3, [slow] * 3, merge, 90.0, 90.0)

    rows = []
    speed._targets(bench_here(rows), "sdpa_flash", {"ring": mode(3 / 0.91, 6.0), "ulysses": mode(3 / 0.94, 0.0)})
    assert [(row.name, row.status) for row in rows] == [
        ("target: best mode (ulysses)", "missed"),
        ("target: ring", "ok"),
        ("target: merge in a ring's forward", "missed"),
    ]
    assert rows[1].values["%"] == pytest.approx(91.0)


def test_the_slowest_rank_counts_and_rounds_take_turns():
    fast, slow = clock.Times(1.0, 1.0, 0.0), clock.Times(1.0, 2.0, 0.0)
    assert clock.slowest([[fast, slow], [slow, fast]]) == [slow, slow]
    order = []

    class Work:
        def __init__(self, name):
            self.name = name

        def forward(self):
            order.append(self.name)
            return ()

        def backward(self):
            pass

    times = clock.rounds(clock.Clock(torch.device("cpu")), [Work("a"), Work("b")], 0.0, 2, lambda: 1.0)
    assert order == ["a", "b", "b", "a"]
    assert [len(of) for of in times] == [2, 2]


class FakeCuda:
    """What the check asks of torch.cuda, with a clock that ticks a millisecond an event."""

    def __init__(self, monkeypatch):
        ticks = iter(range(1000))

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = next(ticks)

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return float(end.at - self.at)

        self.synchronized = 0
        properties = SimpleNamespace(name="a GPU", major=9, minor=0, total_memory=1 << 30)
        for name, value in {
            "Event": Event,
            "synchronize": self.synchronize,
            "_sleep": lambda cycles: None,
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda: None,
            "memory_allocated": lambda: 100,
            "max_memory_allocated": lambda: 164,
            "get_device_properties": lambda device: properties,
            "get_device_capability": lambda device: (9, 0),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def synchronize(self):
        self.synchronized += 1


def test_on_cuda_time_is_the_streams_and_memory_the_allocators(monkeypatch):
    fake = FakeCuda(monkeypatch)
    here = SimpleNamespace(forward=lambda: (1,), backward=lambda one: None)
    times = clock.timed(clock.Clock(torch.device("cuda")), here)
    assert (times.forward, times.backward) == (1e-3, 1e-3)
    assert fake.synchronized == 1
    on_cuda = Bench(
        Orders("cuda", False, 0, time.monotonic() + LONG, time.monotonic() + LONG, ""), lambda message: None
    )
    assert peaks._allocated(on_cuda, lambda: None) == 64
    found = machine._device(on_cuda)
    assert (found.detail, found.values["capability"]) == ("a GPU", "9.0")


def test_a_lost_gpu_ends_the_part(monkeypatch):
    FakeCuda(monkeypatch)
    rows = []
    on_cuda = Bench(
        Orders("cuda", False, 0, time.monotonic() + LONG, time.monotonic() + LONG, ""), lambda m: rows.append(m[1])
    )
    on_cuda.check("an error, and the GPU is there", raises(RuntimeError("out of memory")))
    monkeypatch.setattr(torch.cuda, "synchronize", raises(RuntimeError("illegal memory access")))
    with pytest.raises(part.DeviceLost, match="illegal memory access"):
        on_cuda.check("the kernel", lambda: Found({}))
    assert rows[-1].status == "error"


def test_memory_is_counted_where_it_peaks():
    here = bench_here([])

    def two_then_one():
        x = torch.ones(1 << 18)
        y = x + 1
        del x
        return y.sum()

    assert 2 << 20 <= peaks._allocated(here, two_then_one) < (2 << 20) + 4096


def test_facts_of_the_ops_on_stand_ins():
    cpu = torch.device("cpu")
    assert facts._lse_of_blind_rows(SdpaFlash(forward_op=flash_forward), cpu).detail == "lse [inf], out zero"
    assert facts._lse_shape(SdpaCudnn(forward_op=cudnn_forward), cpu).detail == "(1, 2, 67, 1) torch.float32"
    assert facts._lse_shape(SdpaEfficient(forward_op=efficient_forward), cpu).detail == "(1, 2, 96) torch.float32"
    assert set(facts.CONVENTIONS) <= set(KERNELS)


def test_facts_that_hold_on_a_cpu():
    rows = []
    facts.facts(bench_here(rows))
    said = {row.name: (row.status, row.detail) for row in rows}
    assert said["sdpa_flash_cpu: some heads alone, bits"] == ("info", "the same bits")
    assert said["sdpa_flash_cpu: +inf in backward"] == ("ok", "dq of dead rows zero, gradients finite")
    assert "not finite" in said["sdpa_flash_cpu: -inf in backward"][1]


WRITTEN = {
    "a": [
        ("a sdpa_flash_cpu", "usp bf16"),
        ("a reference", "ring two runs, deterministic"),
        *(("a functions", f"{case.name}, {what}") for case in functions.CASES for what in ("exact", "one call")),
        ("a functions", "tried before a call"),
    ],
    "machine b c": [
        ("machine", "device"),
        *(("b speed", f"sdpa_flash_cpu 64 tokens x 2: {mode}") for mode in speed.TIMED_MODES),
        ("c memory", "ring backward, 64 tokens x 4"),
    ],
    "d e": [("d two ranks", "a mismatch raises"), ("e compile", "fullgraph, aot_eager")],
}


@pytest.mark.timeout(175)
@pytest.mark.parametrize("parts", WRITTEN)
def test_the_command_needs_torch_alone(parts, tmp_path):
    """numpy, rich and the like are not there; the JSON has what the table has; the exit status is 0."""
    for module in ("numpy", "einops", "rich", "matplotlib", "pytest", "hypothesis"):
        (tmp_path / f"{module}.py").write_text("raise ModuleNotFoundError('not installed here')\n")
    words = ["--device", "cpu", "--smoke", "--budget-s", "150", "--out", str(tmp_path / "new"), "--only"]
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_check.py", *words, *parts.split()],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=160,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "new" / "gpu_check.json").read_text())
    rows = {(part["name"], row["name"]): row for part in written["parts"] for row in part["rows"]}
    wrong = {name: row["detail"] for name, row in rows.items() if row["status"] not in ("ok", "info", "skipped")}
    assert not wrong
    skipped = [name for (_, name), row in rows.items() if row["status"] == "skipped"]
    assert skipped == (["NCCL alone, ranks meet over the store"] if parts == "d e" else [])
    assert set(WRITTEN[parts]) <= set(rows)
    assert all(done.stdout.count(name) >= 2 for _, name in rows), "as it comes, and in the table"
    for kernel in ("sdpa_flash_cpu", "reference") if parts == "a" else ():
        assert rows[f"a {kernel}", "ring bf16"]["values"]["right"] == len(exactness.CASES)
    assert written["command"].startswith("python benchmarks/gpu_check.py --device cpu --smoke")
    assert written["commit"] == commit(), "with + where the tree differs"
