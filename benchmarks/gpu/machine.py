"""Where it all ran."""

from __future__ import annotations

import os
import platform

import torch
import torch.distributed as dist

from benchmarks.gpu.exactness import refusals
from benchmarks.gpu.part import Bench, Found
from ringcp.kernels.registry import KERNELS


def machine(bench: Bench) -> None:
    """What the numbers belong to, and which kernels run here."""
    bench.check("device", lambda: _device(bench))
    bench.check("kernels", lambda: _kernels(bench))


def _device(bench: Bench) -> Found:
    values: dict[str, float | int | str] = {"torch": torch.__version__, "python": platform.python_version()}
    if not bench.on_cuda:
        return Found(values | {"cores": os.cpu_count() or 0}, platform.machine(), "info")
    properties = torch.cuda.get_device_properties(bench.device)
    values |= {
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none",
        "capability": f"{properties.major}.{properties.minor}",
        "GiB": properties.total_memory / 2**30,
    }
    return Found(values, properties.name, "info")


def _kernels(bench: Bench) -> Found:
    for_all = {name: refusals(name, bench.device) for name in KERNELS}
    runs = [name for name, reasons in for_all.items() if not reasons]
    not_here = [f"{name} ({reasons[-1]})" for name, reasons in for_all.items() if reasons]
    return Found({}, f"{', '.join(runs)}; not {', '.join(not_here)}", "info")
