"""Attention over a sequence that two ranks share.

Run: torchrun --standalone --nproc-per-node=2 examples/attention.py
"""

import torch
from torch.distributed.device_mesh import init_device_mesh

import ringcp

device = "cpu"  # "cuda" on GPUs
mesh = init_device_mesh(device, (2,))
torch.manual_seed(0)  # every rank makes the same whole sequence, and keeps its share
whole = torch.randn(3, 1, 8, 1001, 64, device=device)
q, k, v = (ringcp.shard(x, mesh, dim=2).requires_grad_() for x in whole)

out = ringcp.attention(q, k, v, mesh=mesh, mask=ringcp.Causal())  # (1, 8, local tokens, 64)
out.square().sum().backward()  # q.grad, k.grad, v.grad: as if one process had done it all
print(ringcp.unshard(out, mesh, dim=2).shape)  # torch.Size([1, 8, 1001, 64])
torch.distributed.destroy_process_group()
