"""Data and context parallelism with FSDP2: the gradients are those of one process.

Run: torchrun --standalone --nproc-per-node=4 examples/fsdp.py
CPUs with gloo, GPUs with NCCL where there are four. Two sequences, each on two ranks, one of them half without labels.
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import Decoder
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ringcp

IGNORED = -100
device = "cuda" if torch.cuda.device_count() >= 4 else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "cp"))

torch.manual_seed(0)  # every rank makes the same weights and data
model = Decoder(dim=64).to(device)
alone = copy.deepcopy(model)
text = torch.randint(256, (2, 1002), device=device)
all_ids, all_labels = text[:, :-1].clone(), text[:, 1:].clone()
all_labels[1, :500] = IGNORED
num_label_tokens = (all_labels != IGNORED).sum()  # in a training loop, an all_reduce over mesh["dp"]
all_positions = torch.arange(1001, device=device)[None]

for part in (*model.blocks, model):
    fully_shard(part)  # over all ranks
row = mesh["dp"].get_local_rank()  # ranks of one mesh["cp"] have the same sequence
ids, labels, positions = all_ids[[row]], all_labels[[row]], all_positions.clone()
with ringcp.context_parallel(mesh["cp"], buffers=[ids, labels, positions], buffer_seq_dims=[1, 1, 1]):
    logits = model(ids, positions)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)
    loss = loss / num_label_tokens  # of all sequences of the step, counted before they are sharded
    (loss * mesh.size()).backward()  # FSDP and DDP take the mean over ranks, but the gradient is the sum

grads = [p.grad.full_tensor() for p in model.parameters()]
total = ringcp.all_gather(ringcp.all_gather(loss.detach()[None], mesh["cp"], dim=0), mesh["dp"], dim=0).sum()
logits = alone(all_ids, all_positions)
wanted = F.cross_entropy(logits.flatten(0, 1), all_labels.flatten(), ignore_index=IGNORED)
wanted.backward()
pairs = zip(grads, (p.grad for p in alone.parameters()), strict=True)
error = max(((x - y).abs().max() / y.abs().max()).item() for x, y in pairs)
if dist.get_rank() == 0:
    print(f"loss {total:.6f}, of one process {wanted:.6f}; largest relative difference of a gradient: {error:.0e}")
assert error < 1e-4
dist.destroy_process_group()
