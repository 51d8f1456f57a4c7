"""Part (e): compiled attention equals eager, and a new mask does not compile anew. On a world of one."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringcp
from benchmarks.gpu.exactness import CASES, graded, tensors
from benchmarks.gpu.part import Bench, Found, deterministic

MASKS = (ringcp.Causal(), ringcp.Window(100), ringcp.Documents([30, 37]) & ringcp.Causal())


def compiled(bench: Bench) -> None:
    """A row for each back end of the compiler."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if bench.on_cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    try:
        mesh = init_device_mesh(bench.device.type, (1,), mesh_dim_names=("cp",))
        for backend in ("aot_eager",) if bench.smoke else ("aot_eager", "inductor"):
            bench.check(f"fullgraph, {backend}", partial(_equal, bench, mesh, backend))
    finally:
        dist.destroy_process_group()


def _equal(bench: Bench, mesh: DeviceMesh, backend: str) -> Found:
    # Seconds to import, and the other parts' processes import this file too.
    import torch._dynamo.testing
    import torch._functorch.config
    import torch._inductor.config

    layout = ringcp.HeadTail(67 if bench.smoke else 1003, 1)
    given = tensors(CASES[0], layout.seq_len, torch.bfloat16, bench.device)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: ringcp.Mask) -> tuple[Tensor, Tensor]:
        out = ringcp.attention(q * 2, k, v, mesh=mesh, mask=mask, layout=layout)
        assert isinstance(out, Tensor)
        return out, out.new_empty(0)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    fast = torch.compile(attend, fullgraph=True, backend=counter)
    frames = []
    # Graphs that an earlier ringcp has left on disk are of no use here. One process compiles: its workers would outlive
    # a part that is ended.
    with (
        deterministic(),
        torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        for mask in MASKS:
            eager, other = (graded(given, partial(f, mask=mask)) for f in (attend, fast))
            for name, want in eager.items():
                assert torch.equal(want, other[name]), f"{mask}: {name} differs from eager code"
            frames.append(counter.frame_count)
    assert frames == [frames[0]] * len(MASKS), f"new masks compile anew: {frames} graphs after each"
    return Found({"masks": len(MASKS), "graphs": frames[-1]}, "bits as eager")
