"""Part (d): two ranks with a process group of their own, on the one GPU where NCCL allows it; with gloo on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringcp
from benchmarks.gpu.exactness import CASES, NAMES, Case, Expected, Tensors, expected, graded, tensors
from benchmarks.gpu.part import Bench, Found, Skipped
from ringcp.layout import Layout
from ringcp.testing import assert_close

RANKS = 2
_TIMEOUT = timedelta(seconds=30)


def pair(bench: Bench) -> None:
    """Exactness of the modes over real messages, votes on groups of both kinds, a mismatch, and a context."""
    # Read by NCCL when the first communicator is made.
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    backend = "cpu:gloo,cuda:nccl" if bench.on_cuda else "gloo"
    store = dist.FileStore(f"{bench.scratch}/store", RANKS)
    dist.init_process_group(backend, store=store, rank=bench.rank, world_size=RANKS, timeout=_TIMEOUT)
    # Nothing is destroyed: that may hang after an error, and the process ends here.
    if bench.check("first collective", partial(_first, bench)) is not None:
        _checks(bench, init_device_mesh(bench.device.type, (RANKS,), mesh_dim_names=("cp",)))


def _first(bench: Bench) -> Found:
    try:
        total = torch.full((1,), float(bench.rank + 1), device=bench.device)
        dist.all_reduce(total)
    except dist.DistBackendError as error:
        raise Skipped(f"NCCL does not take two ranks on one GPU: {str(error).strip().splitlines()[-1]}") from error
    assert total.item() == 3, f"1 + 2 gave {total.item()}"
    return Found({}, "two ranks on one GPU" if bench.on_cuda else "two ranks on gloo")


def _checks(bench: Bench, mesh: DeviceMesh) -> None:
    seq_len = 67 if bench.smoke else 1003
    layout = ringcp.HeadTail(seq_len, RANKS)
    known: dict[str, tuple[Tensors, Expected]] = {}

    def whole(case: Case) -> tuple[Tensors, Expected]:
        if case.name not in known:
            given = tensors(case, seq_len, torch.bfloat16, bench.device)
            known[case.name] = given, expected(case, given)
        return known[case.name]

    def exact(case: Case, on: DeviceMesh, **options: Any) -> Found:
        given, want = whole(case)
        mask = case.mask(seq_len)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            results = ringcp.attention(
                q, k, v, mesh=on, mask=mask, layout=layout, return_lse=case.through_lse, **options
            )
            return results if isinstance(results, tuple) else (results, results.new_empty(0))

        _hold(bench, layout, graded(_local(given, layout, bench.rank), attend), want)
        return Found({})

    causal = CASES[0]
    for mode in ("ring", "gather", "ulysses"):
        for case in CASES[:3] if bench.smoke else CASES[:7]:
            bench.check(f"{mode}: {case.name}", partial(exact, case, mesh, mode=mode))
    bench.check("ring, with a vote", partial(exact, causal, mesh, mode="ring", agree="call"))
    bench.check(
        "a mismatch raises", lambda: _mismatch(bench, mesh, _local(whole(causal)[0], layout, bench.rank), layout)
    )
    bench.check("a call after the mismatch", partial(exact, causal, mesh, mode="ring", agree="call"))
    bench.check("context_parallel", lambda: _in_context(bench, mesh, layout, *whole(causal)))
    bench.check("compiled, fullgraph", lambda: _compiled(mesh, _local(whole(causal)[0], layout, bench.rank), layout))
    bench.check("NCCL alone, ranks meet over the store", lambda: _store_alone(bench, partial(exact, causal)))


def _local(given: Tensors, layout: Layout, rank: int) -> Tensors:
    return Tensors(*(None if x is None else layout.shard(x, rank, 2) for x in given))  # type: ignore[arg-type]


def _hold(bench: Bench, layout: Layout, got: dict[str, Tensor], want: Expected) -> None:
    for name in NAMES:
        exact, one_call = (layout.shard(x[name], bench.rank, 2) for x in want)
        assert_close(got[name], exact, baseline=one_call, name=name)


def _mismatch(bench: Bench, mesh: DeviceMesh, local: Tensors, layout: Layout) -> Found:
    said = ""
    try:
        ringcp.attention(*local[:3], mesh=mesh, layout=layout, scale=0.5 + bench.rank, agree="call")
    except ringcp.AgreementError as error:
        said = str(error)
    assert "scale=1.5, not scale=0.5" in said, f"expected an error about two scales, got {said or 'none'}"
    return Found({}, said)


def _in_context(bench: Bench, mesh: DeviceMesh, layout: Layout, given: Tensors, want: Expected) -> Found:
    leaves = [x.contiguous().requires_grad_() for x in (y.detach().clone() for y in given[:3])]
    with ringcp.context_parallel(mesh, buffers=leaves, buffer_seq_dims=[2, 2, 2]):
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    out.backward(layout.shard(given.dout, bench.rank, 2))
    exact, one_call = (layout.shard(x["out"], bench.rank, 2) for x in want)
    assert_close(out.detach(), exact, baseline=one_call, name="out")
    for name, leaf in zip(NAMES[1:], leaves, strict=True):
        assert leaf.grad is not None, f"{name}: no gradient"
        assert_close(leaf.grad, want.exact[name], baseline=want.one_call[name], name=name)
    return Found({})


def _compiled(mesh: DeviceMesh, local: Tensors, layout: Layout) -> Found:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ringcp.attention(q * 2, k, v, mesh=mesh, mask=ringcp.Causal(), layout=layout)
        assert isinstance(out, Tensor)
        return out

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*local[:3]), attend(*local[:3])), "out differs from eager code"
    return Found({}, "aot_eager, forward")


def _store_alone(bench: Bench, exact: Callable[..., Found]) -> Found:
    if not bench.on_cuda:
        raise Skipped("a gloo group meets over gloo")
    group = dist.new_group(list(range(RANKS)), backend="nccl", timeout=_TIMEOUT)
    return exact(DeviceMesh.from_group(group, "cuda"), mode="ring", agree="call")
