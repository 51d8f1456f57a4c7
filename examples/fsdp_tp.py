"""FSDP2, context and tensor parallelism on one mesh: the gradients are those of one process.

Run: torchrun --standalone --nproc-per-node=4 examples/fsdp_tp.py
CPUs with gloo, GPUs with NCCL where there are four. Two ranks share the sequence, and each has half of the heads.
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ringcp


class Attention(nn.Module):
    def __init__(self, width=32, head_dim=8):
        super().__init__()
        self.head_dim = head_dim
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (of(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for of in (self.q, self.k, self.v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


device = "cuda" if torch.cuda.device_count() >= 4 else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh(device, (1, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
shards = mesh["dp", "cp"]._flatten("dp_cp")

torch.manual_seed(0)  # every rank makes the same weights and data
model = Attention().to(device)
alone = copy.deepcopy(model)
x = torch.randn(1, 1001, 32, device=device)
alone(x).square().sum().backward()

plan = {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "out": RowwiseParallel()}
parallelize_module(model, mesh["tp"], plan)
fully_shard(model, mesh=shards)
with ringcp.context_parallel(mesh["cp"], buffers=[x], buffer_seq_dims=[1]):
    loss = model(x).square().sum()
    (loss * shards.size()).backward()  # FSDP takes the mean over its ranks, but the gradient is the sum

pairs = [(p.grad.full_tensor(), q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True)]
error = max(((x - y).abs().max() / y.abs().max()).item() for x, y in pairs)
if dist.get_rank() == 0:
    print(f"largest relative difference of a gradient: {error:.0e}")
assert error < 1e-4
dist.destroy_process_group()
