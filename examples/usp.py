"""Attention on a 2-D mesh: heads are exchanged among neighbours, keys and values go around a ring of the others.

Run: torchrun --standalone --nproc-per-node=4 examples/usp.py
CPUs with gloo, GPUs with NCCL where there are four.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import ringcp

device = "cuda" if torch.cuda.device_count() >= 4 else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("cp", "sp"))  # of a larger one: mesh["cp", "sp"]
torch.manual_seed(0)  # every rank makes the same whole sequence, of 8 query and 4 key heads
whole = [torch.randn(1, heads, 1001, 64, device=device, requires_grad=True) for heads in (8, 4, 4)]
expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
expected.square().sum().backward()

layout = ringcp.HeadTail(1001, mesh.size())  # the same shards in every mode
q, k, v = (ringcp.shard(x.detach(), mesh, dim=2, layout=layout).requires_grad_() for x in whole)
if dist.get_rank() == 0:
    ringcp.explain(q_heads=8, kv_heads=4, head_dim=64, seq_len=1001, mesh=mesh, mask=ringcp.Causal(), dtype=q.dtype)

for mode in ("auto", "usp", "gather"):  # on a 2-D mesh "auto" is "usp"; in "gather" the exchange is followed by one
    out = ringcp.attention(q, k, v, mesh=mesh, mask=ringcp.Causal(), layout=layout, mode=mode)
    shards = (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))
    joined = [ringcp.unshard(x.detach(), mesh, dim=2, layout=layout) for x in shards]
    errors = [(x - y).abs().max().item() for x, y in zip(joined, (expected, *(x.grad for x in whole)), strict=True)]
    if dist.get_rank() == 0:
        words = ", ".join(f"{name} {error:.0e}" for name, error in zip(("out", "dq", "dk", "dv"), errors, strict=True))
        print(f"{mode}: largest differences from one process: {words}", flush=True)
    assert max(errors) < 1e-4, errors
dist.destroy_process_group()
