"""Why a kernel cannot do a problem: the reasons that several kernels share, in one wording.

The text is part of the API: people read it when no kernel is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ringcp.cutting import Caps
from ringcp.kernels.base import Problem
from ringcp.kernels.operands import num_lse_columns, round_up


def word(dtype: torch.dtype) -> str:
    """``"float32"``."""
    return str(dtype).removeprefix("torch.")


def shared(
    problem: Problem,
    caps: Caps,
    *,
    device: str,
    dtypes: Sequence[torch.dtype],
    max_dim: int | None,
    multiple: int,
    softcap: bool = False,
    explicit: bool = False,
    alibi: bool = False,
    attn_mask: bool = False,
) -> list[str]:
    """Refusals by dtype, bands, written masks, softcap, ALiBi, attn_mask, dropout and head dims; or by device alone,
    since most kernels are for another one, and every call asks all.
    """
    if problem.device.type != device:
        return [f"device {problem.device.type} is not {device}"]
    reasons = []
    if problem.dtype not in dtypes:
        reasons.append(f"dtype {word(problem.dtype)} is not {' or '.join(map(word, dtypes))}")
    if problem.scale <= 0:
        reasons.append(f"scale {problem.scale:g} <= 0, which turns masked scores of -inf around")
    if problem.needs_band and caps.band == "none":
        reasons.append("cannot mask a window or another band")
    if problem.explicit and not explicit:
        reasons.append("no explicit masks (Predicate)")
    if problem.softcap is not None and not softcap:
        reasons.append("no softcap")
    if problem.alibi and not alibi:
        reasons.append("no ALiBi slopes")
    if problem.attn_mask is not None and not attn_mask:
        reasons.append("no attn_mask")
    if problem.dropout:
        reasons.append("no dropout")
    if max_dim is not None:
        reasons += _head_dims(problem, max_dim, multiple)
    return reasons


def padded_dim(problem: Problem, multiple: int) -> int:
    """The one head dim that q, k and v are padded to in backward (in forward it may be smaller)."""
    return round_up(max(problem.head_dim, problem.value_dim) + _columns(problem), multiple)


def _columns(problem: Problem) -> int:
    return num_lse_columns(problem.dtype) if problem.needs_grad and problem.needs_lse_grad else 0


def _head_dims(problem: Problem, max_dim: int, multiple: int) -> Iterator[str]:
    dims = (("head_dim", problem.head_dim), ("value_dim", problem.value_dim))
    over = [f"{name} {dim} > {max_dim}" for name, dim in dims if dim > max_dim]
    if over:
        yield from over
    elif padded_dim(problem, multiple) > max_dim:
        dim = max(problem.head_dim, problem.value_dim)
        yield f"head_dim {dim} > {max_dim - _columns(problem)}, which a gradient through the lse needs"


def cuda_build(problem: Problem, *, back_end: str) -> list[str]:
    """Refusals by what this torch and this GPU have; nothing to ask if the problem is not on CUDA."""
    if problem.device.type != "cuda":
        return []
    if torch.version.hip is not None:
        return [f"{back_end} attention of ROCm builds has other conventions, which ringcp does not know"]
    reasons = []
    if back_end == "flash" and not torch.backends.cuda.is_flash_attention_available():
        reasons.append("this torch was built without flash attention")
    if back_end == "cudnn" and (torch.backends.cudnn.version() or 0) < 90000:
        reasons.append(f"cuDNN {torch.backends.cudnn.version()} is older than 9.0")
    major, minor = torch.cuda.get_device_capability(problem.device)
    if (back_end in ("flash", "cudnn") or problem.dtype == torch.bfloat16) and major < 8:
        reasons.append(f"compute capability {major}.{minor} < 8.0")
    # FlashAttention 2's backward needs more shared memory than these chips have.
    small = (8, 6) <= (major, minor) <= (8, 9) or major == 12
    if back_end == "flash" and small and problem.needs_grad and 192 < padded_dim(problem, 8) <= 224:
        reasons.append(f"head dims from 193 to 224 have no backward on compute capability {major}.{minor}")
    return reasons
