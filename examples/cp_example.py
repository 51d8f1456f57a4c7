"""Full attention on two ranks, by changing one import: `torch`'s own context_parallel fails on this program.

Run: torchrun --standalone --nproc-per-node=2 examples/cp_example.py
CPUs with gloo, GPUs with NCCL where there are any.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringcp import HeadTail, context_parallel, context_parallel_unshard

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("cp",))
torch.manual_seed(0)  # every rank holds the same whole sequence
qkv = [torch.randn(1, 4, 4096, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

with sdpa_kernel(SDPBackend.FLASH_ATTENTION), context_parallel(mesh, buffers=tuple(qkv), buffer_seq_dims=(2, 2, 2)):
    output = F.scaled_dot_product_attention(*qkv, is_causal=True)
output.float().square().mean().backward()

# The same without ranks, in fp32. The loss of the program is the sum over ranks of each rank's mean.
layout = HeadTail(4096, mesh.size())
whole = [x.detach().float().requires_grad_() for x in qkv]
expected = F.scaled_dot_product_attention(*whole, is_causal=True)
sum(expected[:, :, layout.positions(rank)].square().mean() for rank in range(mesh.size())).backward()


def error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, in L2."""
    return ((actual.float() - wanted).norm() / wanted.norm()).item()


(joined,) = context_parallel_unshard(mesh, [output.detach()], [2])
errors = {"output": error(joined, expected)}
errors |= {f"d{name}": error(x.grad, y.grad) for name, x, y in zip("qkv", qkv, whole, strict=True)}
print(f"rank {dist.get_rank()}: {output.shape[2]} of {joined.shape[2]} tokens in the context", flush=True)
dist.barrier()
if dist.get_rank() == 0:
    print(f"output {tuple(joined.shape)}, gradients {', '.join(str(tuple(x.grad.shape)) for x in qkv)}")
    print("relative error against full attention:", ", ".join(f"{name} {e:.1e}" for name, e in errors.items()))
assert max(errors.values()) < 1e-2, errors
dist.destroy_process_group()
