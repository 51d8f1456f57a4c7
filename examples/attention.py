"""Attention over a sequence that two ranks share.

Run: torchrun --standalone --nproc-per-node=2 examples/attention.py
"""

import torch
from torch.distributed.device_mesh import init_device_mesh

import ringcp

mesh = init_device_mesh("cpu", (2,))  # "cuda" on GPUs
torch.manual_seed(0)  # every rank makes the same whole sequence, and keeps its share
q, k, v = (ringcp.shard(torch.randn(1, 8, 1001, 64), mesh, dim=2).requires_grad_() for _ in range(3))

out = ringcp.attention(q, k, v, mesh=mesh, mask=ringcp.Causal())  # (1, 8, local tokens, 64)
out.square().sum().backward()  # q.grad, k.grad, v.grad: as if one process had done it all
print(ringcp.unshard(out, mesh, dim=2).shape)  # torch.Size([1, 8, 1001, 64])
torch.distributed.destroy_process_group()
