"""The executor with all ranks in one process, on plans that no mode makes yet: some heads of a rank, two layouts."""

from collections.abc import Callable, Sequence

import torch
from cases import Tensors
from torch import Tensor

from ringcp.executor import Job, backward, drive_all, forward
from ringcp.kernels.base import Kernel
from ringcp.lower import Plan
from ringcp.transport import InProcess


def executed(plans: Sequence[Plan], kernel: Kernel, local: Sequence[Sequence[Tensor | None]], scale: float):
    """For each rank out, lse, dq, dk, dv, from its local q, k, v, dout, dlse."""
    transport = InProcess()
    jobs = [Job(plan, kernel, scale, transport.endpoint(rank)) for rank, plan in enumerate(plans)]
    ahead = drive_all([forward(job, *of[:3]) for job, of in zip(jobs, local, strict=True)])
    runs = [
        backward(job, dout, dlse, q, k, v, out, lse)
        for job, (q, k, v, dout, dlse), (out, lse) in zip(jobs, local, ahead, strict=True)
    ]
    grads = drive_all(runs)
    assert not any(transport._boxes.values())
    return [(*results, *of) for results, of in zip(ahead, grads, strict=True)]


def in_order(
    plan_of: Callable[[int], Plan], kernel: Kernel, layout, tensors: Tensors, upstream: str = "both", kv_layout=None
) -> dict[str, Tensor]:
    """out, lse, dq, dk and dv of the whole sequences; as `cases.differentiated`, whose words `upstream` takes."""
    kv_layout = layout if kv_layout is None else kv_layout
    ranks = range(layout.world_size)
    q, k, v, dout, dlse = tensors
    dout = torch.zeros_like(dout) if upstream == "lse" else dout
    local = [
        (
            layout.shard(q, rank, 2),
            kv_layout.shard(k, rank, 2),
            kv_layout.shard(v, rank, 2),
            layout.shard(dout, rank, 2),
            layout.shard(dlse, rank, 2) if upstream in ("both", "lse") else None,
        )
        for rank in ranks
    ]
    by_rank = executed([plan_of(rank) for rank in ranks], kernel, local, q.shape[-1] ** -0.5)
    out, lse, dq, dk, dv = zip(*by_rank, strict=True)
    results = {name: layout.unshard(parts, 2) for name, parts in (("out", out), ("lse", lse), ("dq", dq))}
    results |= {name: kv_layout.unshard(parts, 2) for name, parts in (("dk", dk), ("dv", dv))}
    if upstream == "out":
        del results["lse"]
    return results
