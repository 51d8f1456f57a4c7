"""A block whose attention module alone is context parallel: nothing is intercepted.

Run: torchrun --standalone --nproc-per-node=2 examples/module.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import ringcp


class Attend(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Attention(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attend = Attend()

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


device = "cpu"  # "cuda" on GPUs
mesh = init_device_mesh(device, (2,))
torch.manual_seed(0)  # every rank makes the same model and sequence
block = Attention().to(device)
parallelize_module(block, mesh, {"attend": ringcp.ContextParallel(mask=ringcp.Documents([400, 601]))})

x = ringcp.shard(torch.randn(1, 1001, 64, device=device), mesh, dim=1)
out = block(x)  # (1, local tokens, 64)
print(ringcp.unshard(out, mesh, dim=1).shape)  # torch.Size([1, 1001, 64])
torch.distributed.destroy_process_group()
