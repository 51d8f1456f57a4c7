"""The pool of ranks: results, errors, deaths, late ranks, and that nothing is left behind."""

import multiprocessing as mp
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ringcp.testing import RankError, world
from ringcp.testing.pool import RankLost


class Odd(Exception):
    """Pickles, but cannot be made again from its message."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def rank_and_args(mesh, *args, **kwargs):
    return mesh.get_local_rank(), mesh.size(), mesh.mesh_dim_names, args, kwargs


def double(mesh, x):
    return {"strided": (2 * x).t(), "grad": x.requires_grad, "threads": torch.get_num_threads()}


def total(mesh, x):
    x = x.clone()
    dist.all_reduce(x, group=mesh.get_group())
    return x


def total_of_column(mesh, late):
    """Ranks {0, 2} and {1, 3} of four, at different times."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    x = torch.tensor([mesh.get_local_rank()])
    if grid.get_local_rank("cp") == 1:
        time.sleep(late)
    dist.all_reduce(x, group=grid.get_group("dp"))
    return x.item()


def fail_on(mesh, ranks):
    if mesh.get_local_rank() in ranks:
        raise ValueError(f"bad luck on {mesh.get_local_rank()}")
    return mesh.get_local_rank()


def fail_oddly(mesh):
    raise Odd(1, 2)


def leave(mesh):
    sys.exit("enough")


def return_lambda(mesh):
    return lambda: None


def warn(mesh):
    warnings.warn("careful", stacklevel=1)


def die(mesh, rank, how):
    if mesh.get_local_rank() == rank:
        how()
    dist.barrier()


def exit_3():
    os._exit(3)


def divide_by_zero():
    os.kill(os.getpid(), signal.SIGFPE)


def sleep_on(mesh, rank):
    if mesh.get_local_rank() == rank:
        time.sleep(60)


def pid(mesh):
    return os.getpid()


def fork_and_die(mesh):
    """A child of the rank keeps the rank's end of the pipe open."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads
        if os.fork() == 0:
            time.sleep(3)
            os._exit(0)
    os._exit(4)


def gone(pids):
    return [not Path(f"/proc/{p}").exists() for p in pids]


def wait_until_gone(pids, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not all(gone(pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return all(gone(pids))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_results_come_by_rank(worlds, size):
    results = worlds(size).run(rank_and_args, 1, "a", b=2)
    assert results == [(rank, size, ("cp",), (1, "a"), {"b": 2}) for rank in range(size)]


def test_arguments_by_rank(worlds):
    results = worlds(2).run_each(rank_and_args, [(1, 2), ()], c=3)
    assert results == [(0, 2, ("cp",), (1, 2), {"c": 3}), (1, 2, ("cp",), (), {"c": 3})]
    with pytest.raises(ValueError, match="args_by_rank: expected one sequence for each of 2 ranks, got 1"):
        worlds(2).run_each(rank_and_args, [()])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tensors_cross_by_value(worlds, dtype):
    x = torch.arange(6.0, dtype=dtype).reshape(2, 3).requires_grad_()
    for result in worlds(2).run(double, x):
        assert torch.equal(result["strided"], 2 * x.t())
        assert result["strided"].stride() == (1, 3)
        assert not result["strided"].is_shared()
        assert result["grad"]


@pytest.mark.parametrize("threads", [1, 2])
def test_threads(worlds, threads):
    results = worlds(2, threads=threads).run(double, torch.ones(300, 300))
    assert [result["threads"] for result in results] == [threads] * 2


def test_collectives(worlds):
    w = worlds(4)
    results = w.run_each(total, [(torch.tensor([10.0**rank]),) for rank in range(4)])
    assert results == [torch.tensor([1111.0])] * 4


def test_subgroups_at_their_own_time(worlds):
    assert worlds(4).run(total_of_column, 0.2) == [2, 4, 2, 4]


def test_errors_name_their_ranks(worlds):
    w = worlds(3)
    with pytest.raises(RankError) as info:
        w.run(fail_on, [0, 2])
    assert sorted(info.value.errors) == [0, 2]
    assert all(type(error) is ValueError for error in info.value.errors.values())
    assert str(info.value.errors[2]) == "bad luck on 2"
    text = str(info.value)
    assert text.startswith("2 of 3 ranks failed in fail_on\n--- rank 0: Traceback")
    assert "--- rank 2: Traceback" in text
    assert text.count("in fail_on\n    raise ValueError") == 2
    assert "ringcp/testing" not in text
    assert str(pickle.loads(pickle.dumps(info.value))) == text


def test_errors_in_place_of_results(worlds):
    results = worlds(3).run(fail_on, [1], return_exceptions=True)
    assert results[0] == 0
    assert results[2] == 2
    assert isinstance(results[1], ValueError)
    assert "raise ValueError" in results[1].__notes__[-1]


def test_a_pool_goes_on_after_an_error(worlds):
    w = worlds(2)
    before = w.run(pid)
    w.run(fail_on, [0, 1], return_exceptions=True)
    assert w.alive
    assert w.failed
    assert w.run(pid) == before


def test_the_fixture_restarts_after_an_error(worlds):
    w = worlds(2)
    before = w.run(pid)
    w.run(fail_on, [1], return_exceptions=True)
    assert worlds(2) is w
    assert not w.failed
    assert not set(w.run(pid)) & set(before)


def test_errors_that_do_not_pickle_keep_their_text(worlds):
    results = worlds(2).run(fail_oddly, return_exceptions=True)
    assert [type(error) for error in results] == [RuntimeError] * 2
    assert "Odd: 1 and 2" in str(results[1])


def test_exit_is_an_error(worlds):
    with pytest.raises(RankError, match="SystemExit: enough"):
        worlds(2).run(leave)


def test_results_that_do_not_pickle(worlds):
    with pytest.raises(RankError, match="return_lambda"):
        worlds(2).run(return_lambda)


def test_functions_that_do_not_pickle(worlds):
    w = worlds(2)
    with pytest.raises(TypeError, match=r"run: expected a module-level function and arguments .*, got .*lambda"):
        w.run(lambda mesh: None)
    with pytest.raises(TypeError, match="got rank_and_args"):
        w.run_each(rank_and_args, [(1,), (lambda: None,)])
    assert w.run(fail_on, []) == [0, 1]


def test_warnings_as_errors(worlds):
    with pytest.raises(RankError, match="UserWarning: careful"):
        worlds(2).run(warn)
    with world(1) as lenient:
        assert lenient.run(warn) == [None]


@pytest.mark.parametrize(("how", "words"), [(exit_3, "exit code 3"), (divide_by_zero, "SIGFPE")])
def test_death_is_reported_by_rank(worlds, how, words):
    w = worlds(3)
    results = w.run(die, 1, how, return_exceptions=True)
    assert isinstance(results[1], RankLost)
    assert f"rank 1 died ({words})" in str(results[1])
    assert str(results[1]).endswith("in die")
    if how is divide_by_zero:
        assert "in divide_by_zero" in results[1].__notes__[0]
    assert [type(results[rank]) for rank in (0, 2)] == [RuntimeError] * 2  # the barrier broke
    assert not w.alive
    with pytest.raises(RuntimeError, match=r"expected a living pool; call restart\(\) first"):
        w.run(pid)
    assert worlds(3).run(fail_on, []) == [0, 1, 2]


def test_death_with_the_pipe_held_open(worlds):
    started = time.monotonic()
    with pytest.raises(RankError, match="exit code 4"):
        worlds(1).run(fork_and_die)
    assert time.monotonic() - started < 2


def test_death_between_runs(worlds):
    w = worlds(2)
    pids = w.run(pid)
    os.kill(pids[1], signal.SIGKILL)
    assert wait_until_gone(pids[1:])
    with pytest.raises(RankError, match=r"rank 1 died \(SIGKILL\)"):
        w.run(pid)


def test_late_ranks_are_named_with_their_stack(worlds):
    w = worlds(3)
    pids = w.run(pid)
    with pytest.raises(RankError) as info:
        w.run(sleep_on, 1, timeout=0.5)
    assert list(info.value.errors) == [1]
    text = str(info.value)
    assert "rank 1 was killed: sleep_on had not returned after 0.5 s; all others answered" in text
    assert "in sleep_on" in text
    assert "multiprocessing" not in text
    assert not w.alive
    assert all(gone(pids))


def test_an_interrupted_run_ends_the_pool(worlds):
    """As by the time limit of a test: what the ranks still answer would be taken for the next run's results."""
    w = worlds(2)

    def interrupt(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGUSR2, interrupt)
    try:
        timer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -USR2 {os.getpid()}"])
        with pytest.raises(KeyboardInterrupt):
            w.run(sleep_on, 1)
    finally:
        timer.wait()
        signal.signal(signal.SIGUSR2, previous)
    assert not w.alive
    assert worlds(2).run(fail_on, []) == [0, 1]


def test_size_is_checked():
    with pytest.raises(ValueError, match="size: expected at least one rank, got 0"):
        world(0)


def test_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    children = set(mp.active_children())
    with world(2):  # the fork server and its pipes stay
        pass
    files = len(os.listdir("/proc/self/fd"))
    with world(2) as w:
        pids = w.run(pid)
        w.restart()
        pids += w.run(pid)
        w.run(die, 0, exit_3, return_exceptions=True)
        w.restart()
        pids += w.run(pid)
        assert len(list(tmp_path.iterdir())) == 1
    w.close()
    assert all(gone(pids))
    assert set(mp.active_children()) == children
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("end", ["return", "kill"])
def test_ranks_end_with_their_parent(tmp_path, end):
    """A program that forgets to close, and one that is killed while a rank waits for another."""
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, time
            import torch.distributed as dist
            from ringcp.testing import world

            def pid(mesh):
                return os.getpid()

            def wait(mesh):
                if mesh.get_local_rank() == 0:
                    dist.barrier()
                time.sleep(60)

            if __name__ == "__main__":
                w = world(2)
                print(*w.run(pid), flush=True)
                if sys.argv[1] == "kill":
                    w.run(wait)
            """
        )
    )
    program = subprocess.Popen(
        [sys.executable, "-W", "error", str(script), end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert program.stdout is not None
    pids = [int(p) for p in program.stdout.readline().split()]
    if end == "kill":
        time.sleep(0.2)
        program.kill()
    _, stderr = program.communicate(timeout=30)
    assert stderr == ""
    assert program.returncode == (0 if end == "return" else -signal.SIGKILL)
    assert len(pids) == 2
    assert wait_until_gone(pids)
    if end == "return":
        assert [p.name for p in tmp_path.iterdir()] == ["program.py"]
