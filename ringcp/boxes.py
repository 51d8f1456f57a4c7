"""Several tensors in one buffer of bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

Spec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


def num_bytes(specs: Sequence[Spec], align: int = 1) -> int:
    """What a buffer for them takes. align: a multiple of every element size, or 1: then nothing lies between them."""
    return sum(_size(spec, align) for spec in specs)


def views(buffer: Tensor, specs: Sequence[Spec], align: int = 1) -> list[Tensor]:
    """The tensors in a buffer (bytes,) of uint8."""
    # The widest first: then all are aligned to their elements, if the buffer is.
    order = sorted(range(len(specs)), key=lambda i: -specs[i][1].itemsize)
    starts = accumulate((_size(specs[i], align) for i in order), initial=0)
    found = {
        i: buffer[at : at + _size(specs[i], 1)].view(specs[i][1]).view(specs[i][0])
        for i, at in zip(order, starts, strict=False)
    }
    return [found[i] for i in range(len(specs))]


def _size(spec: Spec, align: int) -> int:
    shape, dtype = spec
    return -(-math.prod(shape) * dtype.itemsize // align) * align
