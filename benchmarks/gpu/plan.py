"""Which parts there are, in their order. A further part is one line."""

from __future__ import annotations

from benchmarks.gpu.compiled import compiled
from benchmarks.gpu.exactness import exactness
from benchmarks.gpu.facts import facts
from benchmarks.gpu.functions import functions
from benchmarks.gpu.machine import machine
from benchmarks.gpu.pair import RANKS, pair
from benchmarks.gpu.peaks import peaks
from benchmarks.gpu.runner import Part
from benchmarks.gpu.speed import speed

# What an untried adapter may do to a process, it does to that of its own part.
_CUDA_KERNELS = {
    "flash3": 15.0,
    "flash4": 15.0,
    "flash2": 15.0,
    "sdpa_flash": 35.0,
    "sdpa_cudnn": 25.0,
    "sdpa_efficient": 25.0,
    "reference": 20.0,
}
_OPTIONAL = ("flash3", "flash4", "flash2")
_CPU_KERNELS = {"sdpa_flash_cpu": 20.0, "reference": 20.0}


def plan(device: str) -> list[Part]:
    """What is skipped at once, where it is not installed, comes first, since later parts get its time; then what
    matters most.
    """
    kernels = _CUDA_KERNELS if device == "cuda" else _CPU_KERNELS
    of_kernel = {name: Part(f"a {name}", exactness, seconds, (name,)) for name, seconds in kernels.items()}
    optional = [of_kernel.pop(name) for name in _OPTIONAL if name in of_kernel]
    first, *others = of_kernel.values()
    # Of "flex" only what others do not take: each further mask and mode would be compiled.
    of_functions = Part("a functions", functions, 60.0, ("flex" if device == "cuda" else "sdpa_flash_cpu",))
    return [
        Part("machine", machine, 20.0),  # the processes that all parts are forked from start with it
        *optional,
        first,
        Part("b speed", speed, 80.0),
        Part("c memory", peaks, 12.0),
        Part("d two ranks", pair, 35.0, ranks=RANKS),
        Part("e compile", compiled, 30.0),
        of_functions,
        Part("facts", facts, 15.0),
        *others,
    ]
