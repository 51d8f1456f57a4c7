"""The functions of a mask, tried before anything is sent by the kernel that will compile them.

What a compiler does not take, it says when it meets it: else in the first call of the kernel, when peers wait for this
rank's messages.
"""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import torch

from ringcp.ambient import around_kernels
from ringcp.errors import UnsupportedError
from ringcp.kernels.base import Kernel, Problem, TakesFunctions
from ringcp.kernels.pairwise import Allowed
from ringcp.mask import Mask, decode_mask
from ringcp.written import fused

# Rows and keys of what is tried: for fewer, a kernel may have other code.
_TOKENS = 128


def try_functions(
    kernel: Kernel, problem: Problem, mask: Mask, batch: int, q_heads: int, q_len: int, k_len: int
) -> None:
    """Let `kernel` compile the functions in `mask`, as far as it takes them, and run that on a few pairs; once for each
    mask and problem.

    q_len, k_len: how many tokens there are at least.

    Raises:
        UnsupportedError: if it cannot.
    """
    if kernel.caps.functions and mask.explicit and 0 not in (batch, q_heads, q_len, k_len):
        words = tuple(mask.spec.tolist())
        _try(kernel, problem, words, min(q_len, _TOKENS), min(k_len, _TOKENS))  # type: ignore[arg-type]  # hashable


# By the words of a spec, which tell functions apart by handles and hold none.
@lru_cache(maxsize=256)
def _try(kernel: Kernel, problem: Problem, words: tuple[int, ...], q_len: int, k_len: int) -> None:
    mask = decode_mask(words)
    with around_kernels(problem.device):
        allowed = _few_pairs(mask, problem, q_len, k_len)
        if allowed is None:
            return
        try:
            cast(TakesFunctions, kernel).probe(problem, allowed)
        except Exception as error:
            raise UnsupportedError(
                f"mask: expected functions that kernel {kernel.name!r} can compile in {mask}, got "
                f"{type(error).__name__}: {_first_words(error)}; write them with pointwise operations and look-ups in "
                'tensors, of what is computed before, or pass kernel="reference"'
            ) from error


def _few_pairs(mask: Mask, problem: Problem, q_len: int, k_len: int) -> Allowed | None:
    """Of one batch row and the query heads of one key/value head; None if there are none, or masks are written out."""
    found = fused(mask, problem.device)
    if found is None:
        return None
    heads = problem.q_heads // problem.kv_heads
    sizes = 1, heads, q_len, k_len
    for mod in mask.conjunction:
        sizes = mod.within(sizes)
    if 0 in sizes:
        return None
    numbers = zip((1, heads, _TOKENS, _TOKENS), sizes, strict=True)
    # Where there are fewer, the last one again: no function is asked for what there is not.
    return Allowed(*found, *(torch.arange(n, device=problem.device).clamp_(max=size - 1) for n, size in numbers))


def _first_words(error: Exception) -> str:
    """What is wrong and why, as torch's compilers begin: each in one line."""
    lines = [line.strip() for line in str(error).strip().split("\n")]
    return ". ".join(line.rstrip(".:") for line in lines[:2] if line)
