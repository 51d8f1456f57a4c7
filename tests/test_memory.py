"""Memory of the executor: what one rank allocates beside inputs and results, against the formula in its docstring.

No tracker sees inside a registered op, so the executor runs here without one: one rank at a time, over a transport on
which every message has come at once.
"""

import gc
import itertools
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ringcp
from benchmarks.memory import Layer
from ringcp.executor import Job, backward, drive, forward
from ringcp.kernels.registry import KERNELS
from ringcp.lower import lower
from ringcp.merge import accumulator_dtype
from ringcp.schedule import Heads, build
from ringcp.topology import ring
from ringcp.transport import Parcel

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, BATCH, Q_HEADS, KV_HEADS, DIM, VALUE_DIM = 64, 2, 4, 2, 8, 8
ROW = BATCH * KV_HEADS * (DIM + VALUE_DIM)  # R of the docstring: elements of one row of keys and values


class Allocations(TorchDispatchMode):
    """Bytes of the tensors made in the body that are alive: now, and at most. `only`: of these ops alone."""

    def __init__(self, *only: str) -> None:
        super().__init__()
        self._only = only
        self._known: set[int] = set()
        self.made = self.alive = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {self._key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        if not self._only or func._schema.name.removeprefix("aten::") in self._only:
            for x in tree_leaves(result):
                if isinstance(x, Tensor) and self._key(x) not in before | self._known:
                    self._count(x)
        return result

    @staticmethod
    def _key(x: Tensor) -> int:
        return x.untyped_storage()._cdata

    def _count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.made += 1
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


class AtOnce:
    """A transport on which every message is there when it is asked for: zeros. It keeps what it was given."""

    def __init__(self) -> None:
        self.received: set[int] = set()

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], where: str):
        for parcel in recvs:
            parcel.tensor.zero_()
            if parcel.what == "keys and values":
                self.received.add(parcel.tensor.untyped_storage().data_ptr())
        return self

    def go_on(self) -> None:
        pass

    def wait(self) -> None:
        pass


def job(world_size: int, mask: ringcp.Mask, layout=ringcp.Contiguous, rank: int | None = None, **gather: int) -> Job:
    kernel = KERNELS["reference"]
    rank = world_size - 1 if rank is None else rank
    heads = Heads(Q_HEADS, KV_HEADS)
    schedule = build(layout(ROWS * world_size, world_size), mask, ring(world_size), rank, heads, **gather)
    plan = lower(schedule, kernel.caps)
    return Job(plan, kernel, DIM**-0.5, AtOnce(), 1)


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(
        torch.ones(BATCH, heads, ROWS, dim, dtype=dtype)
        for heads, dim in ((Q_HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    )


def allocated(run_job: Job, direction: str, dtype: torch.dtype, *only: str) -> Allocations:
    q, k, v = tensors(dtype)
    out, lse = torch.ones_like(q), torch.ones(q.shape[:3], dtype=accumulator_dtype(dtype))
    gc.collect()
    with Allocations(*only) as seen:
        if direction == "forward":
            drive(forward(run_job, q, k, v))
        else:
            drive(backward(run_job, out, None, q, k, v, out, lse))
    return seen


def test_the_measure_counts():
    """A tensor, a view and a tensor that has gone, by hand."""
    with Allocations() as every, Allocations("new_empty") as fresh:
        x = torch.ones(8)
        y = x.new_empty(100)
        z = y[:50].view(25, 2)
        z.zero_()
        assert (every.alive, fresh.alive) == (432, 400)
        del y
        assert fresh.alive == 400, "a view keeps the memory"
        del z
        assert (every.alive, fresh.alive) == (32, 0)
    assert (every.peak, fresh.peak) == (432, 400)
    assert (every.made, fresh.made) == (2, 1)


@pytest.mark.parametrize("mask", [ringcp.Full(), ringcp.Causal()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_two_receive_buffers_whatever_the_number_of_ranks(mask, dtype):
    """The formula to the byte, but for out and lse: those are the first call's own results here."""
    size, acc = dtype.itemsize, accumulator_dtype(dtype).itemsize
    buffers, dq = ROWS * ROW, BATCH * Q_HEADS * ROWS * DIM
    formulas = {"forward": 2 * buffers * size, "backward": 2 * buffers * size + (3 * buffers + dq) * acc}
    # Two ranks send less than whole blocks under a causal mask.
    worlds = (2, 4, 8) if mask == ringcp.Full() else (3, 4, 8)
    for world_size, (direction, formula) in itertools.product(worlds, formulas.items()):
        run = job(world_size, mask, ringcp.HeadTail, rank=1)
        seen = allocated(run, direction, dtype, "new_empty")
        assert seen.made > 0
        assert seen.peak == formula, (world_size, direction, seen.peak / formula)
        if acc == 4:  # what the table of the README is made of
            layer = Layer(ROWS * world_size, Q_HEADS, KV_HEADS, DIM, BATCH, size)
            sums = BATCH * Q_HEADS * ROWS * (DIM + 1) * acc
            assert (
                formula
                == {
                    "forward": layer.forward_buffers(world_size) - sums,
                    "backward": layer.backward_buffers(world_size),
                }[direction]
            )
        assert len(run.transport.received) == min(2, world_size - 1)


class Watching:
    """The reference kernel; at each call it notes how many results of the second and later calls are still there."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Tensor]] = []
        self.there: list[int] = []
        self.caps = KERNELS["reference"].caps

    def _watched(self, compute, *args, **kwargs):
        self.there.append(sum(made() is not None for made in self.made))
        results = compute(*args, **kwargs)
        if len(self.there) > 1:  # the first ones may be the sums
            self.made += [weakref.ref(x) for x in results]
        return results

    def forward(self, *args, **kwargs):
        return self._watched(KERNELS["reference"].forward, *args, **kwargs)

    def backward(self, *args, **kwargs):
        return self._watched(KERNELS["reference"].backward, *args, **kwargs)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_a_call_has_given_is_gone_when_the_next_one_computes(direction):
    kernel = Watching()
    allocated(job(4, ringcp.Full())._replace(kernel=kernel), direction, torch.float32)
    assert len(kernel.there) >= 4
    assert not any(kernel.there)


def test_a_rank_alone_has_no_buffers():
    assert allocated(job(1, ringcp.Full()), "forward", torch.float32, "new_empty").peak == 0
    assert allocated(job(1, ringcp.Full()), "backward", torch.float32, "new_empty").peak == 0


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_all_memory_of_a_rank_is_the_same_for_any_number_of_ranks(direction):
    """Everything that is alive at once: the kernels' temporaries and results as well."""
    peaks = [allocated(job(p, ringcp.Full()), direction, torch.float32).peak for p in (3, 4, 8, 16)]
    assert peaks[0] > 4 * ROWS * ROW * 4
    assert set(peaks) == {peaks[0]}


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_window_has_buffers_for_the_rows_that_come(direction):
    """A direct plan over one border: 7 rows come and 7 go, in one buffer each, whatever the number of ranks."""
    for world_size in (4, 8, 16):
        run = job(world_size, ringcp.Window(7), rank=2)
        seen = allocated(run, direction, torch.float32, "new_empty")
        passing, own = 2 * 7 * ROW, ROWS * ROW + BATCH * Q_HEADS * ROWS * DIM
        assert seen.peak == 4 * (passing if direction == "forward" else 2 * passing + own)
        assert len(run.transport.received) == 1


def gathered(dtype: torch.dtype, num_kv: int, block: int, come: int, gone: int, back: int) -> dict[str, int]:
    """The docstring's formula for a gather plan, in bytes, from rows."""
    group, acc = BATCH * num_kv * (DIM + VALUE_DIM), accumulator_dtype(dtype).itemsize
    forward = (block + come + gone) * group * dtype.itemsize
    sums = (block + come + back) * group + ROWS * ROW + BATCH * Q_HEADS * ROWS * DIM
    return {"forward": forward, "backward": forward + sums * acc}


def first_results(num_kv: int, dtype: torch.dtype) -> int:
    """Bytes of out and lse, which several groups of heads write in turn; one alone is its own result."""
    several = num_kv < KV_HEADS
    return several * BATCH * Q_HEADS * ROWS * (VALUE_DIM + 1) * accumulator_dtype(dtype).itemsize


@pytest.mark.parametrize("num_kv", [1, KV_HEADS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_gather_holds_one_block_and_what_comes_and_goes(dtype, num_kv):
    """To the byte: with a full mask each rank lends all its rows to all, once packed; back come P - 1 gradients."""
    for world_size in (2, 4, 8):
        everything, others = ROWS * world_size, ROWS * (world_size - 1)
        formulas = gathered(dtype, num_kv, everything, others, ROWS, others)
        for direction, formula in formulas.items():
            seen = allocated(job(world_size, ringcp.Full(), rank=1, gather=num_kv), direction, dtype, "new_empty")
            results = first_results(num_kv, dtype) if direction == "forward" else 0
            dq_is_the_result = direction == "backward" and num_kv == KV_HEADS
            unmade = BATCH * Q_HEADS * ROWS * DIM * accumulator_dtype(dtype).itemsize if dq_is_the_result else 0
            assert seen.peak == formula + results - unmade, (world_size, direction)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_gathered_window_has_buffers_for_its_rows_alone(direction):
    """7 rows come and 7 go over one border, whatever the number of ranks."""
    for world_size in (4, 8, 16):
        run = job(world_size, ringcp.Window(7), rank=2, gather=1)
        formula = gathered(torch.float32, 1, ROWS + 7, 7, 7, 7)[direction]
        seen = allocated(run, direction, torch.float32, "new_empty")
        assert seen.peak == formula + (first_results(1, torch.float32) if direction == "forward" else 0)
