"""Specs: the int64 tensors on the host in which layouts, masks and votes are written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def host_int64(words: Sequence[int]) -> Tensor:
    """The words as an int64 CPU tensor, whatever default device or inference mode holds around the caller.

    A spec on "meta" would send the whole op to its fake, and an inference tensor cannot be saved for backward.
    """
    with torch.inference_mode(False):
        return torch.tensor(words, dtype=torch.int64, device="cpu")
