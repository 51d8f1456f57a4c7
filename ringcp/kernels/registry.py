"""The kernels by name, and the choice among them.

A new kernel is one file and one line in `_ALL`, at its place in the order of preference. The place is also the code by
which an op's forward tells its backward which kernel ran.

On a GPU, packages that are installed go first: flash3 (it refuses all but Hopper), flash4 (Blackwell, and Hopper
without flash3), flash2 (the rest, and what these two refuse). Then what torch has built in, then flex for what none of
these takes (masks that functions say, ALiBi, a softcap without a package), and the reference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from ringcp.errors import UnsupportedError
from ringcp.kernels.base import Kernel, Problem
from ringcp.kernels.flash2 import Flash2
from ringcp.kernels.flash3 import Flash3
from ringcp.kernels.flash4 import Flash4
from ringcp.kernels.flex import Flex
from ringcp.kernels.reference import Reference
from ringcp.kernels.refusals import word
from ringcp.kernels.sdpa_cpu import SdpaFlashCpu
from ringcp.kernels.sdpa_cudnn import SdpaCudnn
from ringcp.kernels.sdpa_efficient import SdpaEfficient
from ringcp.kernels.sdpa_flash import SdpaFlash

_log = logging.getLogger(__name__)

_ALL: tuple[Kernel, ...] = (
    Flash3(),
    Flash4(),
    Flash2(),
    SdpaFlash(),
    SdpaCudnn(),
    SdpaEfficient(),
    Flex(),
    SdpaFlashCpu(),
    Reference(),
)

KERNELS: Mapping[str, Kernel] = MappingProxyType({kernel.name: kernel for kernel in _ALL})
"""Every kernel by its name, in order of preference."""

FAMILIES: tuple[str, ...] = tuple(dict.fromkeys(kernel.name.partition("_")[0] for kernel in _ALL))
"""What names share before the first underscore: "sdpa" stands for all kernels of torch's SDPA."""


def kernel_index(name: str) -> int:
    """The code of a kernel; the same on every rank that runs the same version of ringcp."""
    return list(KERNELS).index(name)


def kernel_at(index: int) -> Kernel:
    """The kernel of a code."""
    return _ALL[index]


def choose(kernel: str, problem: Problem) -> Kernel:
    """The kernel for `problem`: the first in order of preference that does not refuse it.

    kernel: "auto" (any), a family such as "sdpa", or the name of one.

    `torch.nn.attention.sdpa_kernel` is respected: a back end that it disables is refused, and so is the reference when
    "math" is disabled, unless it is asked for by name. An order that it sets (`set_priority=True`) goes before ours.

    Raises `UnsupportedError`: an unknown name, or every candidate refuses; it then gives all their reasons.
    """
    rejected: list[str] = []
    for candidate in _candidates(kernel):
        reasons = _switched_off(candidate, kernel) + _unasked(candidate, kernel, problem)
        reasons += candidate.refusals(problem)
        if not reasons:
            for reason in rejected:
                _log.debug("chose %s; rejected %s", candidate.name, reason)
            return candidate
        rejected.append(f"{candidate.name}: {', '.join(reasons)}")
    fix = "Pass tensors of a floating dtype."
    if not Reference().refusals(problem):
        fix = 'Pass kernel="reference" (plain matmuls, memory for the whole score matrix), or change what they refuse.'
    raise UnsupportedError(
        f"kernel={kernel!r}: expected a kernel that can do {_described(problem)}, but every one refuses: "
        f"{'; '.join(rejected)}. {fix}"
    )


def check_kernel_name(asked: str) -> None:
    """Raises UnsupportedError for what is neither "auto", nor a family, nor the name of a kernel."""
    _candidates(asked)


def _candidates(asked: str) -> list[Kernel]:
    if asked in KERNELS:
        return [KERNELS[asked]]
    if asked != "auto" and asked not in FAMILIES:
        names = ", ".join(dict.fromkeys(("auto", *FAMILIES, *KERNELS)))
        raise UnsupportedError(f'kernel={asked!r}: expected one of {names}. Pass kernel="auto" to let ringcp choose.')
    found = [kernel for kernel in _ALL if asked == "auto" or kernel.name.partition("_")[0] == asked]
    order = _users_order()
    return sorted(found, key=lambda kernel: order.index(kernel.switch) if kernel.switch in order else -1)


def _unasked(kernel: Kernel, asked: str, problem: Problem) -> list[str]:
    """Nobody who leaves dropout on by habit should find out by running out of memory, nor wait for a compiler where
    another kernel would do.
    """
    if problem.dropout and kernel.name == "reference" != asked:
        return ["dropout only if asked for by name, for it needs memory for the whole score matrix"]
    special = problem.explicit or problem.alibi or problem.softcap is not None
    if kernel.name == "flex" != asked and not special:
        return ["plain attention only if asked for by name, for it is compiled, which takes its time"]
    return []


_ENABLED: Mapping[str, Callable[[], bool]] = MappingProxyType(
    {
        "flash": torch.backends.cuda.flash_sdp_enabled,
        "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
        "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
        "math": torch.backends.cuda.math_sdp_enabled,
    }
)


def _switched_off(kernel: Kernel, asked: str) -> list[str]:
    if kernel.switch is None or asked == kernel.name == "reference" or _ENABLED[kernel.switch]():
        return []
    return [f"{kernel.switch} is disabled by sdpa_kernel"]


def _users_order() -> list[str]:
    """The order of back ends given to `sdpa_kernel(..., set_priority=True)`; empty if there is none.

    torch itself replaces its first order by one with cuDNN in front when SDPA first runs on some chips. Neither is a
    wish, and following them would make the choice depend on what ran before: both count as none.
    """
    get_order = getattr(torch._C, "_get_sdp_priority_order", None)
    if get_order is None:
        return []
    names = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
    order = [names[code] for code in map(int, get_order()) if code in names]
    torchs_own = (["flash", "efficient", "math", "cudnn"], ["cudnn", "flash", "efficient", "math"])
    return [] if order in torchs_own else order


def _described(problem: Problem) -> str:
    what = f"{problem.device.type} {word(problem.dtype)}, head_dim {problem.head_dim}"
    if problem.value_dim != problem.head_dim:
        what += f", value_dim {problem.value_dim}"
    what += f", {problem.q_heads} query and {problem.kv_heads} key/value heads"
    wants = [
        (problem.needs_band, "windows or other bands"),
        (problem.explicit, "explicit masks (Predicate)"),
        (problem.softcap is not None, "a softcap"),
        (problem.alibi, "ALiBi slopes"),
        (problem.attn_mask is not None, "an attn_mask"),
        (problem.dropout, "dropout"),
        (problem.needs_grad, "gradients"),
        (problem.needs_grad and problem.needs_lse_grad, "a gradient through the lse"),
        (problem.deterministic, "determinism"),
    ]
    return ", ".join([what, *(text for wanted, text in wants if wanted)])
