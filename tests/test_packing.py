"""Calls of one launch side by side, by each kernel that takes sequences: the results of each call alone."""

import functools

import kernel_standins as ops
import package_standins as packages
import pytest
import torch
from test_lower import VARLEN, schedule_of

import ringcp
from ringcp import lower, packing
from ringcp.band import trim
from ringcp.buffers import part
from ringcp.kernels.reference import Reference
from ringcp.kernels.registry import KERNELS
from ringcp.kernels.sdpa_flash import SdpaFlash
from ringcp.schedule import Tile
from ringcp.testing import assert_close

TAKE_SEQUENCES = {
    "flash2": KERNELS["flash2"],
    "flash3": KERNELS["flash3"],
    "flash4": KERNELS["flash4"],
    "sdpa_flash": SdpaFlash(ops.flash_forward, ops.flash_backward),
}
pytestmark = pytest.mark.usefixtures("one_thread")
ROWS, KEYS, SCALE = 14, 17, 0.4
every_kernel = pytest.mark.parametrize("name", TAKE_SEQUENCES)


@pytest.fixture
def kernel(monkeypatch, name):
    packages.install(monkeypatch)
    return TAKE_SEQUENCES[name]


def full(q, k):
    return trim(q, k, -KEYS, ROWS)


def causal(q, k):
    """The last row sees every key."""
    return trim(q, k, q[1] - k[1], ROWS)


def window(q, k, left, right):
    return trim(q, k, q[1] - k[1] - right, q[1] - k[1] + left)


KINDS = {
    "full": lambda row: [full((0, 3), (5, 6)), full((3, 9), (6, 10)), full((10, 11 + row), (0, 5))],
    "causal": lambda row: [causal((0, 3), (0, 3)), causal((3, 5), (3, 8)), causal((6 + row, 12), (9, 17))],
    "causal window": lambda row: [window((0, 5), (0, 5), 2, 0), window((5, 9 + row), (5, 12), 2, 0)],
    "window": lambda row: [window((0, 6), (0, 6), 2, 1), window((6, 12 + row), (6, 14), 2, 1)],
    "one row each": lambda row: [causal((i, i + 1), (i, i + 2)) for i in range(0, 8 + row, 2)],
}


def launch_of(kind, where):
    """The one launch of these tiles. where: of all batch rows, or with tiles of its own for each of the last two."""
    if where == "all":
        tiles = [Tile(band, None, (0, 4), (0, 2)) for band in KINDS[kind](0)]
    else:
        tiles = [Tile(band, (row, row + 1), (2, 4), (1, 2)) for row in (1, 2) for band in KINDS[kind](row)]
    (step,) = lower.lower(schedule_of([tuple(tiles)]), VARLEN).forward.steps
    (launch,) = step.launches
    assert len(launch.calls) == len(tiles) > 1
    return launch


@functools.lru_cache(maxsize=1)
def operands():
    generator = torch.Generator().manual_seed(1)
    shapes = (
        (3, 4, ROWS, 6),
        (3, 2, KEYS, 6),
        (3, 2, KEYS, 5),
        (3, 4, ROWS, 5),
        (3, 4, ROWS, 5),
        (3, 4, ROWS),
        (3, 4, ROWS),
    )
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def placed(like, results):
    """Results of calls where they belong, NaN where no call is."""
    whole = torch.full_like(like, torch.nan)
    for place, value in results:
        target = part(whole, *place)
        assert target.isnan().all(), "two results for one place"
        target.copy_(value)
    return whole


@every_kernel
@pytest.mark.parametrize("where", ["all", "two batch rows"])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_each_call(kernel, name, kind, where):
    launch = launch_of(kind, where)
    q, k, v, dout, out, lse, dlse = operands()
    for softcap in (None,) if name == "sdpa_flash" else (None, 1.5):
        want_f, want_q, want_k = [], [], []
        for call in launch.calls:
            on_q, on_k = (call.batch, call.q_heads, call.q), (call.batch, call.kv_heads, call.k)
            on_both = part(q, *on_q), part(k, *on_k), part(v, *on_k)
            how = {"form": call.form, "scale": SCALE, "softcap": softcap}
            want_f.append((on_q, Reference().forward(*on_both, **how)))
            dq, *dkv = Reference().backward(
                part(dout, *on_q), *on_both, part(out, *on_q), part(lse, *on_q), part(dlse, *on_q), **how
            )
            want_q.append((on_q, dq))
            want_k.append((on_k, dkv))
        got_f = [
            ((call.batch, call.q_heads, call.q), results)
            for call, *results in packing.forward(kernel, launch, q, k, v, SCALE, softcap)
        ]
        dqs, dkvs = packing.backward(kernel, launch, dout, q, k, v, out, lse, dlse, SCALE, softcap)
        got_q = [((call.batch, call.q_heads, call.q), dq) for call, dq in dqs]
        got_k = [((call.batch, call.kv_heads, call.k), dkv) for call, *dkv in dkvs]
        for what, like, got, want in (
            ("out", out, *(nth(0, of) for of in (got_f, want_f))),
            ("lse", lse, *(nth(1, of) for of in (got_f, want_f))),
            ("dq", q, got_q, want_q),
            ("dk", k, *(nth(0, of) for of in (got_k, want_k))),
            ("dv", v, *(nth(1, of) for of in (got_k, want_k))),
        ):
            a, b = placed(like, got), placed(like, want)
            assert torch.equal(a.isnan(), b.isnan())
            assert_close(a.nan_to_num(), b.nan_to_num(), name=f"{name} {kind} {what}")


def nth(i, results):
    return [(place, values[i]) for place, values in results]


@every_kernel
def test_without_a_gradient_of_the_lse(kernel, name):
    q, k, v, dout, out, lse, dlse = operands()
    launch = launch_of("causal", "all")
    got, want = (
        packing.backward(kernel, launch, dout, q, k, v, out, lse, upstream, SCALE, None)
        for upstream in (None, torch.zeros_like(dlse))
    )
    for ours, theirs in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        assert_close(ours[1], theirs[1])


def test_rows_that_are_all_of_a_tensor_are_packed_as_a_view():
    mask = ringcp.Documents([5, 4, 5]) & ringcp.Causal()
    (step,) = lower.plan(ringcp.Contiguous(14, 1), mask, ringcp.topology.ring(1), 0, None, VARLEN).forward.steps
    x = torch.randn(2, 14, 4, 8)
    ((launch,), rows) = step.launches, packing._rows(step.launches[0])
    packed = packing._packed(x.transpose(1, 2), rows)
    assert packed.shape == (28, 4, 8)
    assert packed.data_ptr() == x.data_ptr()
    (back,) = packing._unpacked(packed, rows, x)
    assert torch.equal(back, x.transpose(1, 2))
    assert len(launch.calls) == 3
