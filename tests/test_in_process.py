"""`ringcp.testing.in_process`: the real executor with all ranks in one process, and what it says when it is stuck."""

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from cases import (
    HEADS,
    INPUTS,
    LAYOUTS,
    MASKS,
    MASKS_OF,
    STRIDES,
    UPSTREAMS,
    Case,
    Tensors,
    assert_none,
    differences,
    differentiated,
    expected,
    mask_of,
    restride,
    whole,
)
from torch import Tensor

import ringcp
from ringcp.executor import Job, drive, drive_all, forward
from ringcp.kernels.registry import KERNELS
from ringcp.layout import layout_named
from ringcp.lower import lower
from ringcp.merge import accumulator_dtype
from ringcp.schedule import build
from ringcp.testing import in_process, reference_attention, world
from ringcp.topology import ring
from ringcp.transport import InProcess

# Small tensors are no work for more threads, and bits are compared with those of ranks, which have one.
pytestmark = pytest.mark.usefixtures("one_thread")


def results(case: Case, world_size: int, tensors: Tensors) -> dict[str, Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> object:
        options = {"mask": mask_of(case), "layout": case.layout, "kernel": case.kernel}
        return in_process(q, k, v, world_size=world_size, return_lse=return_lse, **options)

    return differentiated(case, tensors, attend)


def cases(world_size: int) -> Iterator[Case]:
    lengths = (1, world_size + 1, 33, 4 * world_size + 5)
    kinds = itertools.cycle(itertools.product(UPSTREAMS, ("auto", "reference"), HEADS, INPUTS, STRIDES))
    step = 7  # coprime to the number of kinds: neighbours differ in most things
    drawn = itertools.islice(kinds, 0, None, step)
    for layout, mask, seq_len in itertools.product(LAYOUTS, MASKS, lengths):
        upstream, kernel, heads, inputs, strides = next(drawn)
        yield Case(seq_len, mask, layout, heads, inputs, strides, upstream, kernel)
    for layout, mask, seq_len in itertools.product(LAYOUTS, MASKS_OF, (world_size + 1, 33)):
        upstream, kernel, _, inputs, strides = next(drawn)
        yield Case(seq_len, mask, layout, "gqa", inputs, strides, upstream, kernel)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.report("1.9")
def test_exact(world_size):
    found = []
    for case in cases(world_size):
        tensors = whole(case, world_size)
        given = Tensors(*(restride(x, case.strides) for x in tensors))
        found += differences(f"{case}", results(case, world_size, given), expected(case, tensors))
    assert_none([found])


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("mask", ["full", "causal", "window_3", "two_sided", "documents", "prefix"])
@pytest.mark.report("1.15")
def test_gradcheck(mask, kernel):
    generator = torch.Generator().manual_seed(0)
    for layout, world_size in itertools.product(LAYOUTS, (2, 3)):
        q, k, v = (
            torch.randn(1, heads, 5, dim, generator=generator, dtype=torch.float64, requires_grad=True)
            for heads, dim in ((2, 3), (1, 3), (1, 2))
        )

        def attend(q: Tensor, k: Tensor, v: Tensor, world_size=world_size, layout=layout) -> object:
            options = {"mask": mask_of(Case(5, mask, heads="mha")), "layout": layout, "kernel": kernel, "scale": 0.7}
            return in_process(q, k, v, world_size=world_size, return_lse=True, **options)

        whole_jacobian = (layout, world_size, kernel) == ("head_tail", 3, "auto")
        assert torch.autograd.gradcheck(attend, (q, k, v), rtol=1e-5, atol=1e-7, fast_mode=not whole_jacobian)


def cast(case: Case, world_size: int, dtype: torch.dtype) -> Tensors:
    """The case's tensors in a dtype, the gradient of the lse in the accumulator's."""
    tensors = whole(case, world_size, dtype)
    return tensors._replace(dlse=tensors.dlse.to(accumulator_dtype(dtype)))


def gathered(mesh, jobs):
    """out, lse, dq, dk, dv of each job over gloo, in the order of the sequence."""
    rank, world_size = mesh.get_local_rank(), mesh.size()
    found = []
    for case, dtype in jobs:
        layout = layout_named(case.layout, case.seq_len, world_size)
        tensors = cast(case, world_size, dtype)
        local = Tensors(*(layout.shard(x, rank, 2) for x in tensors))

        def attend(q: Tensor, k: Tensor, v: Tensor, return_lse: bool, case=case, layout=layout) -> object:
            return ringcp.attention(q, k, v, mesh=mesh, mask=mask_of(case), layout=layout, return_lse=return_lse)

        got = differentiated(case, local, attend)
        found.append({name: ringcp.unshard(x, mesh, dim=2, layout=layout) for name, x in got.items()})
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_same_bits_as_over_gloo(worlds, world_size):
    jobs = [
        (Case(seq_len, mask, layout), dtype)
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
        for layout, mask in itertools.product(LAYOUTS, ("full", "causal", "window_8"))
        for seq_len in (33, 130)
    ]
    over_gloo = worlds(world_size).run(gathered, jobs)
    for (case, dtype), *by_rank in zip(jobs, *over_gloo, strict=True):
        here = results(case, world_size, cast(case, world_size, dtype))
        for got in by_rank:
            assert got.keys() == here.keys()
            for name, x in got.items():
                assert torch.equal(x, here[name]), (case, dtype, name)


def test_without_lse_and_without_gradients():
    q, k, v = whole(Case(13), 1)[:3]
    out = in_process(q, k, v, world_size=3)
    assert isinstance(out, Tensor)
    assert not out.requires_grad
    assert torch.equal(out, in_process(q, k, v, world_size=3, return_lse=True)[0])


def test_double_backward_is_refused():
    """Also where the penalty on a gradient is one term of many, and would be dropped without a word."""
    q, k, v = (x.requires_grad_() for x in whole(Case(13), 1)[:3])
    with pytest.raises(ringcp.UnsupportedError, match="double backward"):  # noqa: PT012
        (dq,) = torch.autograd.grad(in_process(q, k, v, world_size=2).sum(), q, create_graph=True)
        (dq.square().sum() + q.sum()).backward()


def test_scale():
    case = Case(21)
    tensors = whole(case, 3)
    for scale, mask in itertools.product((0.07, 1, -1.5), (None, ringcp.Causal(), ringcp.Window(4, 2))):

        def oracle(q: Tensor, k: Tensor, v: Tensor, return_lse: bool, scale=scale, mask=mask) -> object:
            return reference_attention(q, k, v, mask=mask, scale=scale)

        def attend(q: Tensor, k: Tensor, v: Tensor, return_lse: bool, scale=scale, mask=mask) -> object:
            return in_process(q, k, v, world_size=3, mask=mask, scale=scale, return_lse=return_lse)

        want = differentiated(case, tensors, oracle)
        assert_none([differences(f"{scale}, {mask}", differentiated(case, tensors, attend), want)])


def test_autocast_casts_as_sdpa_does():
    q, k, v = whole(Case(13, heads="mha"), 1)[:3]
    given = ((q.float(), k.float(), v.float()), (q.bfloat16(), k.half(), v.float()), (q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        for tensors in given:
            want = F.scaled_dot_product_attention(*tensors)
            got = in_process(*tensors, world_size=2)
            assert got.dtype == want.dtype
            assert (got - want).abs().max() <= torch.finfo(want.dtype).eps * 4
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ringcp.ArgumentError, match="expected one dtype"):
        in_process(q, k.float(), v, world_size=2)  # fp64 is never cast


REFUSED = {
    "heads": ({"q": (1, 4, 13, 8)}, ringcp.ArgumentError, r"^q, k: expected query heads.*multiple.*got 4 and 3;"),
    "batch": ({"q": (2, 3, 13, 8)}, ringcp.ArgumentError, r"^q, k, v: expected equal batch sizes in dim 0, got q \(2,"),
    "dims": ({"v": (3, 13, 8)}, ringcp.ArgumentError, r"^q, k, v: expected 4 dims .* v \(3, 13, 8\);"),
    "head_dim": ({"k": (1, 3, 13, 4)}, ringcp.ArgumentError, r"^q, k: expected equal head dims in dim 3"),
    "cross": ({"q": (1, 3, 7, 8)}, ringcp.LayoutError, r"^q, k, v: expected equal local lengths in dim 2"),
    "dtypes": (
        {"k": torch.float16},
        ringcp.ArgumentError,
        r"^q, k, v: expected one dtype, got torch.float32, torch.float16, torch.float32;",
    ),
    "mask": (
        {"mask": torch.ones(13, 13, dtype=torch.bool)},
        ringcp.ArgumentError,
        r"^mask: expected a ringcp mask or None, got a tensor \(13, 13\) of torch.bool;",
    ),
    "layout": (
        {"layout": "zigzag"},
        ringcp.LayoutError,
        r"^layout: expected a Layout or one of .*, auto, got 'zigzag'; choose one of these",
    ),
    "layout_class": (
        {"layout": ringcp.HeadTail},
        ringcp.LayoutError,
        r"^layout: expected .*, got HeadTail, not called; ",
    ),
    "length": (
        {"layout": ringcp.HeadTail(12, 2)},
        ringcp.LayoutError,
        r"^layout: expected one for 13 tokens on 2 ranks, got HeadTail\(1",
    ),
    "ranks": (
        {"layout": ringcp.HeadTail(13, 3)},
        ringcp.LayoutError,
        r"^layout: expected one for the 2 ranks of mesh, got HeadTail\(1",
    ),
    "mode": (
        {"mode": "spiral"},
        ringcp.UnsupportedError,
        r"^mode: expected one of 'auto', 'ring', 'gather', 'ulysses', 'usp', got 'spiral';",
    ),
    "kernel": ({"kernel": "lightning"}, ringcp.UnsupportedError, r"kernel='lightning'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    changed, error, words = REFUSED[what]
    call = {name: torch.randn(1, 3, 13, 8) for name in "qkv"}
    for name, value in changed.items():
        if isinstance(value, tuple):
            call[name] = torch.randn(value)
        else:
            call[name] = call[name].to(value) if isinstance(value, torch.dtype) else value
    with pytest.raises(error, match=words):
        in_process(**call, world_size=2)


def test_testing_is_an_attribute_of_ringcp():
    assert ringcp.testing.world is world
    assert ringcp.__getattr__("testing") is ringcp.testing  # what answers before anything has imported it
    with pytest.raises(AttributeError, match="'ringcp' has no attribute 'testings'"):
        _ = ringcp.testings


def job(rank: int, world_size: int, transport: InProcess, mask=None) -> Job:
    layout = ringcp.Contiguous(12, world_size)
    plan = lower(
        build(layout, ringcp.Full() if mask is None else mask, ring(world_size), rank), KERNELS["reference"].caps
    )
    return Job(plan, KERNELS["reference"], 1.0, transport.endpoint(rank), 7)


def block(world_size: int) -> list[Tensor]:
    return [torch.ones(1, 1, 12 // world_size, 4)] * 3


def test_drive_all_says_who_waits_where():
    transport = InProcess()
    with pytest.raises(RuntimeError, match=r"no rank can go on.*\{0: 'call 7, forward step 0', 1: '.*step 0'\}"):
        drive_all([forward(job(rank, 3, transport), *block(3)) for rank in (0, 1)])


def test_one_rank_alone_cannot_be_waited_for():
    with pytest.raises(RuntimeError, match=r"rank 1, call 7, forward step 0: .* use drive_all"):
        drive(forward(job(1, 2, InProcess()), *block(2)))


def test_nothing_stays_in_the_mail():
    transport = InProcess()
    drive_all([forward(job(rank, 4, transport, ringcp.Window(3)), *block(4)) for rank in range(4)])
    assert transport._boxes
    assert not any(transport._boxes.values())


def test_a_transfer_that_brings_nothing_shows_in_poisoned_buffers():
    """What NaN in fresh buffers is for: a receive that never fills its buffer reaches the output."""

    def out_of_both(lossy: bool) -> Tensor:
        transport = InProcess()
        runs = [forward(job(rank, 2, transport), *block(2)) for rank in range(2)]
        pendings = [next(run) for run in runs]  # both have posted, and computed their own blocks
        if lossy:
            for pending in pendings:
                pending._recvs = [p._replace(tensor=torch.empty_like(p.tensor)) for p in pending._recvs]
        while not all(done := [pending.ready() for pending in pendings]):  # a list: each is asked each time
            assert len(done) == 2
        return torch.stack([out for out, _ in drive_all(runs)])

    torch.use_deterministic_algorithms(True)
    try:
        assert not out_of_both(lossy=False).isnan().any()
        assert out_of_both(lossy=True).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
