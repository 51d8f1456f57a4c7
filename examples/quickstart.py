"""Causal attention over a sequence that two ranks share, forward and backward.

Run: torchrun --standalone --nproc-per-node=2 examples/quickstart.py
"""

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import ringcp

device = "cpu"  # "cuda" on GPUs
mesh = init_device_mesh(device, (2,))
torch.manual_seed(0)  # every rank makes the same whole sequence
q, k, v = (torch.randn(1, 8, 1001, 64, device=device, requires_grad=True) for _ in range(3))

with ringcp.context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (1, 8, this rank's tokens, 64)
out.square().sum().backward()
print(f"{out.shape} {q.grad.shape}")  # rank 0: torch.Size([1, 8, 500, 64]) torch.Size([1, 8, 1001, 64])
torch.distributed.destroy_process_group()
