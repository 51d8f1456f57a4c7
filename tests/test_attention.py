"""`ringcp.attention` over gloo, exact in fp64: out, lse, dq, dk and dv, each on its own and on every rank."""

import itertools

import pytest
import torch
from cases import (
    LAYOUTS,
    MASKS,
    MASKS_OF,
    Case,
    allowed,
    assert_none,
    check_cases,
    differences,
    differentiated,
    expected,
    mask_of,
    matrix,
    run_case,
    whole,
)
from torch import Tensor

import ringcp
from ringcp.layout import layout_named
from ringcp.testing import reference_attention


def layout_cases(*names: str, **fields) -> list[Case]:
    masks = names or (*MASKS, *MASKS_OF)
    return [Case(layout=layout, mask=mask, **fields) for layout, mask in itertools.product(LAYOUTS, masks)]


@pytest.mark.parametrize(
    ("world_size", "reads"), [(1, False), (2, True), (2, False), (3, False), (4, True), (5, False)]
)
@pytest.mark.report("1.3")
@pytest.mark.report("1.4")
@pytest.mark.report("1.5")
@pytest.mark.report("1.9")
@pytest.mark.report("1.13")
@pytest.mark.report("1.14")
@pytest.mark.report("1.26")
@pytest.mark.report("1.69")
@pytest.mark.report("1.71")
@pytest.mark.report("1.2")
@pytest.mark.report("1.24")
@pytest.mark.report("1.I7")
@pytest.mark.report("5.TE #1552")
@pytest.mark.report("7.36")
def test_exact(worlds, world_size, reads):
    assert_none(worlds(world_size, reads=reads).run(check_cases, list(matrix(world_size)), timeout=110))


def check_poisoned(mesh, cases):
    """`check_cases` with every fresh buffer full of NaN, and how many of two were."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        fresh = torch.empty(64, dtype=torch.float64), torch.ones(1).new_empty(64, dtype=torch.float32)
        return sum(bool(x.isnan().all()) for x in fresh), check_cases(mesh, cases)
    finally:
        torch.use_deterministic_algorithms(False)


def test_receive_buffers_full_of_nan(worlds):
    cases = [case for kernel in ("auto", "reference") for case in layout_cases(seq_len=37, kernel=kernel)]
    poisoned, found = zip(*worlds(4).run(check_poisoned, [*cases, Case(1), Case(3, "window_3")]), strict=True)
    assert poisoned == (2, 2, 2, 2)
    assert_none(found)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.report("1.1")
def test_loss_of_the_last_rank_reaches_keys_of_the_first(worlds, world_size):
    assert_none(worlds(world_size).run(check_last_ranks_loss))


def check_last_ranks_loss(mesh):
    rank, world_size = mesh.get_local_rank(), mesh.size()
    found = []
    for mask, name in itertools.product(("full", "causal"), LAYOUTS):
        case = Case(8 * world_size, mask, name, upstream="out")
        layout = layout_named(name, case.seq_len, world_size)
        tensors = whole(case, world_size)
        last = torch.zeros(case.seq_len, 1).index_fill_(0, layout.positions(world_size - 1), 1.0)
        tensors = tensors._replace(dout=tensors.dout * last)
        local = type(tensors)(*(layout.shard(x, rank, 2) for x in tensors))

        def attend(q: Tensor, k: Tensor, v: Tensor, return_lse: bool, mask: str = mask, layout=layout) -> object:
            return ringcp.attention(q, k, v, mesh=mesh, mask=MASKS[mask], layout=layout, return_lse=return_lse)

        got = differentiated(case, local, attend)
        want = {name: layout.shard(x, rank, 2) for name, x in expected(case, tensors).items()}
        found += differences(f"rank {rank}, {mask}, {name}", got, want)
        if rank == 0 and not all(got[grad].abs().max() > 1e-3 for grad in ("dk", "dv")):
            found.append(f"{mask}, {name}: the keys of rank 0 got no gradient")
    return found


def inputs_of_rank(mesh, case):
    """This rank's leaves, its upstream gradient of out, and its shards of the right gradients."""
    layout = layout_named(case.layout, case.seq_len, mesh.size())
    tensors = whole(case, mesh.size())
    q, k, v, dout, _ = (layout.shard(x, mesh.get_local_rank(), 2) for x in tensors)
    right = expected(case._replace(upstream="out"), tensors)
    grads = {name: layout.shard(right[name], mesh.get_local_rank(), 2) for name in ("dq", "dk", "dv")}
    leaves = [x.requires_grad_() for x in (q, k, v)]
    return leaves, dout, grads, {"mesh": mesh, "mask": mask_of(case), "layout": layout}


def named(grads):
    return dict(zip(("dq", "dk", "dv"), grads, strict=True))


def check_backward_twice(mesh):
    found = []
    for case in layout_cases("causal", "window_8", seq_len=33):
        leaves, dout, right, options = inputs_of_rank(mesh, case)
        out = ringcp.attention(*leaves, **options)
        first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        second = torch.autograd.grad(out, leaves, dout)
        found += differences(f"{case}", named(first), right)
        if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
            found.append(f"{case}: the second backward gave other bits")
    return found


def test_backward_twice(worlds):
    assert_none(worlds(3).run(check_backward_twice))


def check_backward_on_another_thread(mesh):
    from threading import Thread

    leaves, dout, right, options = inputs_of_rank(mesh, Case(37))
    out = ringcp.attention(*leaves, **options)
    grads: list[Tensor] = []
    thread = Thread(target=lambda: grads.extend(torch.autograd.grad(out, leaves, dout)))
    thread.start()
    thread.join()
    return differences("on another thread", named(grads), right)


def test_backward_on_another_thread(worlds):
    assert_none(worlds(3).run(check_backward_on_another_thread))


def check_two_models(mesh):
    """Calls of two models between one another, their backwards in the order of the calls and not in reverse."""
    cases = [Case(33, heads="gqa"), Case(24, "window_3", "contiguous", "narrow_v"), Case(37, "full", "striped", "mqa")]
    calls = [inputs_of_rank(mesh, case) for case in cases]
    outs = [ringcp.attention(*leaves, **options) for leaves, _, _, options in calls]
    found = []
    for out, (leaves, dout, right, _) in zip(outs, calls, strict=True):
        found += differences("two models", named(torch.autograd.grad(out, leaves, dout)), right)
    return found


def test_two_models_on_one_mesh(worlds):
    assert_none(worlds(4).run(check_two_models))


def check_without_need_of_all_gradients(mesh):
    """Only v is trained; then nothing is, under no_grad."""
    (q, k, v), dout, right, options = inputs_of_rank(mesh, Case(33))
    out = ringcp.attention(q.detach(), k.detach(), v, **options)
    (dv,) = torch.autograd.grad(out, [v], dout)
    found = differences("only v", {"dv": dv}, {"dv": right["dv"]})
    with torch.no_grad():
        silent, lse = ringcp.attention(q, k, v, return_lse=True, **options)
    if silent.requires_grad or lse.requires_grad or not torch.equal(silent, out):
        found.append("no_grad changed the result")
    return found


def test_some_or_no_inputs_need_gradients(worlds):
    assert_none(worlds(2).run(check_without_need_of_all_gradients))


def check_empty(mesh):
    """No batch rows, then no tokens: results of the right shape, gradients too, and the group still works."""
    for batch, seq_len in ((0, 13), (2, 0), (0, 0)):
        layout = ringcp.HeadTail(seq_len, mesh.size())
        q, k, v = (
            torch.ones(batch, heads, layout.local_len(mesh.get_local_rank()), dim, requires_grad=True)
            for heads, dim in ((4, 5), (2, 5), (2, 6))
        )
        out, lse = ringcp.attention(q, k, v, mesh=mesh, mask=ringcp.Causal(), layout=layout, return_lse=True)
        assert (out.shape, lse.shape) == ((*q.shape[:3], 6), q.shape[:3])
        grads = torch.autograd.grad((out, lse), (q, k, v), (out, lse))
        assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
    return check_cases(mesh, [Case(13)])


@pytest.mark.parametrize("world_size", [1, 3])
def test_no_batch_rows_and_no_tokens(worlds, world_size):
    assert_none(worlds(world_size).run(check_empty))


def whole_results(mesh, cases):
    """out, lse and gradients in the order of the sequence, of tensors that do not depend on the world."""
    results = []
    for case in cases:
        layout = layout_named(case.layout, case.seq_len, mesh.size())
        tensors = whole(case, 1)
        local = type(tensors)(*(layout.shard(x, mesh.get_local_rank(), 2) for x in tensors))

        def attend(q: Tensor, k: Tensor, v: Tensor, return_lse: bool, case=case, layout=layout) -> object:
            return ringcp.attention(q, k, v, mesh=mesh, mask=mask_of(case), layout=layout, return_lse=return_lse)

        got = differentiated(case, local, attend)
        results.append({name: ringcp.unshard(x, mesh, dim=2, layout=layout) for name, x in got.items()})
    return results


def test_results_do_not_depend_on_the_number_of_ranks(worlds):
    cases = [Case(37), Case(24, "window_8", "striped", inputs="dominating_key"), Case(33, "full", "contiguous")]
    one = worlds(1).run(whole_results, cases)[0]
    for world_size in (2, 5):
        for got in worlds(world_size).run(whole_results, cases):
            torch.testing.assert_close(got, one, rtol=1e-12, atol=1e-12)


def moved(mesh, probes, seq_len):
    """For each probe, the global positions whose output changed in some bit when one key and its value did."""
    rank, positions = mesh.get_local_rank(), []
    q, k, v = whole(Case(seq_len), 1)[:3]
    for mask, layout_name, key in probes:
        layout = layout_named(layout_name, seq_len, mesh.size())
        other_k, other_v = k.clone(), v.clone()
        other_k[:, :, key] += 1.5
        other_v[:, :, key] *= -3.0

        made = mask_of(Case(seq_len, mask, heads="mha"))  # for one batch row, so that it holds for both of q

        def attend(k: Tensor, v: Tensor, mask=made, layout=layout) -> Tensor:
            local = (layout.shard(x, rank, 2) for x in (q, k, v))
            return ringcp.attention(*local, mesh=mesh, mask=mask, layout=layout)

        changed = (attend(k, v) != attend(other_k, other_v)).any(3).flatten(0, 1)
        assert (changed.all(0) == changed.any(0)).all(), "a head or a batch row of its own"
        positions.append(layout.positions(rank)[changed.any(0)].tolist())
    return positions


@pytest.mark.report("1.26")
@pytest.mark.report("1.27")
@pytest.mark.report("5.Bridge #2667")
def test_a_key_moves_the_outputs_of_the_queries_that_see_it_and_no_others(worlds):
    masks = ("causal", "window_8", "two_sided", "or", "full", "chunked", *MASKS_OF)
    probes = list(itertools.product(masks, LAYOUTS, (0, 13, 36)))
    by_rank = worlds(4).run(moved, probes, 37)
    for (mask, layout, key), *positions in zip(probes, *by_rank, strict=True):
        seen = allowed(mask, 37).reshape(37, 37)[:, key]
        assert sorted(itertools.chain(*positions)) == seen.nonzero().flatten().tolist(), (mask, layout, key)


def test_the_oracle_is_torchs_attention():
    """What everything is held against, held against something else."""
    q, k, v, _, _ = whole(Case(24, heads="gqa"), 1)
    out, lse = reference_attention(q, k, v, mask=ringcp.Causal())
    k, v = (x.repeat_interleave(4, 1) for x in (k, v))
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    scores = (q @ k.mT / 5**0.5).masked_fill(~torch.ones(24, 24, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_run_case_can_fail(worlds):
    """The comparison sees an error of 1e-9 in each of the five results."""
    for found in worlds(2).run(spoiled):
        assert [text.split(": ")[1] for text in found] == ["out", "dq", "dk", "dv", "lse"]


def spoiled(mesh):
    got, want = run_case(mesh, Case(24))
    return differences("spoiled", {name: x + 1e-9 * x.abs().max().clamp(min=1) for name, x in got.items()}, want)
