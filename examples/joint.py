"""A diffusion transformer in small: text on every rank, a video that the ranks share, and a memory that it looks up.

Run: torchrun --standalone --nproc-per-node=4 examples/joint.py
CPUs with gloo, GPUs with NCCL where every rank has one. Two steps of training, each compared with one process.
"""

import copy
import os
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ringcp

DIM, HEADS, TEXT, VIDEO, MEMORY = 64, 4, 13, 501, 17


class Block(nn.Module):
    """Text and video attend to each other, with weights of their own; then the video attends to the memory."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.ModuleDict({name: nn.Linear(DIM, 3 * DIM) for name in ("text", "video")})
        self.out = nn.ModuleDict({name: nn.Linear(DIM, DIM) for name in ("text", "video", "cross")})
        self.cross_q, self.cross_kv = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM)

    def forward(self, text, video, memory, joint, cross):
        parts = [heads(self.qkv[name](F.layer_norm(x, x.shape[-1:]))) for name, x in (("text", text), ("video", video))]
        y = joint(*torch.cat(parts, 2).chunk(3, 1)).transpose(1, 2).flatten(2)  # text first, in q, k and v alike
        text = text + self.out["text"](y[:, : text.shape[1]])
        video = video + self.out["video"](y[:, text.shape[1] :])
        y = cross(heads(self.cross_q(video)), *heads(self.cross_kv(memory)).chunk(2, 1))
        return text, video + self.out["cross"](y.transpose(1, 2).flatten(2))


def heads(x):
    """(B, S, n * DIM) as (B, n * HEADS, S, DIM / HEADS)."""
    return x.unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)


def gradients(blocks, text, video, memory, noise, num_ranks, joint, cross):
    """This rank's part of the loss, and its gradients: the sums over ranks are those of one process."""
    tokens = text
    for block in blocks:
        tokens, video = block(tokens, video, memory, joint, cross)
    # Every rank has all of the text, so each counts its part of that loss; and of the video its own tokens.
    loss = (tokens - text).square().mean() / num_ranks + (video - noise).square().sum() / (VIDEO * DIM)
    return [loss.detach(), *torch.autograd.grad(loss, list(blocks.parameters()))]


num_ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
device = "cuda" if torch.cuda.device_count() >= num_ranks else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh(device, (num_ranks,))
layout = ringcp.Contiguous(VIDEO, num_ranks)
both = ringcp.Joint(replicated=TEXT, rest=layout)
looked_up = ringcp.Joint(replicated=MEMORY, rest=ringcp.Contiguous(0, num_ranks))  # on every rank, and nothing else
joint = partial(ringcp.attention, mesh=mesh, layout=both)
cross = partial(ringcp.attention, mesh=mesh, layout=layout, kv_layout=looked_up)
sdpa = F.scaled_dot_product_attention

torch.manual_seed(0)  # every rank makes the same weights and data
blocks = nn.ModuleList([Block(), Block()]).to(device)
alone = copy.deepcopy(blocks)
for step in range(2):
    text, memory, video, noise = (torch.randn(1, n, DIM, device=device) for n in (TEXT, MEMORY, VIDEO, VIDEO))
    mine = [ringcp.shard(x, mesh, dim=1, layout=layout) for x in (video, noise)]
    summed = gradients(blocks, text, mine[0], memory, mine[1], num_ranks, joint, cross)
    for x in summed:
        dist.all_reduce(x)
    wanted = gradients(alone, text, video, memory, noise, 1, sdpa, sdpa)
    error = max((x - y).abs().max().item() / y.abs().max().item() for x, y in zip(summed, wanted, strict=True))
    if rank == 0:
        print(f"step {step + 1}: loss {summed[0]:.6f}, of one process {wanted[0]:.6f};", end=" ")
        print(f"largest relative difference, gradients included: {error:.0e}", flush=True)
    assert error < 1e-4
    with torch.no_grad():
        for model, grads in ((blocks, summed), (alone, wanted)):
            for weight, grad in zip(model.parameters(), grads[1:], strict=True):
                weight -= 0.1 * grad
dist.destroy_process_group()
