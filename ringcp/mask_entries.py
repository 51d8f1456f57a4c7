"""What callers say of batch rows, as lists or tensors of numbers, read for the nodes of `row_nodes.py`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from ringcp.errors import ArgumentError
from ringcp.integers import is_int


def items(name: str, value: Any) -> list[Any]:
    """The entries of an argument: of one number, that number."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, int):
        return [value]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ArgumentError(f"{name}: expected integers, got {type(value).__name__}; pass a list or a tensor of them")
    return list(value)


def counts(name: str, values: Sequence[Any]) -> list[int]:
    """The values, which have to be numbers of tokens."""
    for value in values:
        if not is_int(value, 0):
            raise ArgumentError(f"{name}: expected integers of at least 0, got {value!r}; pass numbers of tokens")
    return list(values)


def shared(per_row: Sequence[Any]) -> tuple[Any, ...]:
    """Once for all batch rows, if they are all alike."""
    if not per_row:
        raise ArgumentError("mask: expected an entry, for all batch rows or for each, got none; give the lengths")
    return tuple(per_row) if any(entry != per_row[0] for entry in per_row) else (per_row[0],)


def edges_of_lengths(lengths: list[int]) -> tuple[int, ...]:
    """Where documents start and where all end, from how long they are."""
    return tuple(dict.fromkeys(accumulate(lengths, initial=0)))


def edges_of_sums(sums: list[int]) -> tuple[int, ...]:
    """The same from cumulative lengths."""
    if not sums or sums[0] != 0 or sums != sorted(sums):
        raise ArgumentError(
            f"cu_seqlens: expected sums that start at 0 and never fall, got {sums}; pass lengths instead"
        )
    return tuple(dict.fromkeys(sums))


def edges_of_positions(positions: list[int]) -> tuple[int, ...]:
    """The same from position ids that start anew in each."""
    for before, at, position in zip(positions, range(1, len(positions)), positions[1:], strict=False):
        if position not in (0, before + 1):
            raise ArgumentError(
                f"position_ids: expected 0, 1, 2, ... anew in each document, got {position} after {before} at {at}; "
                "pass lengths or cu_seqlens instead"
            )
    first = positions[0] if positions else 0
    if first != 0:
        raise ArgumentError(f"position_ids: expected the whole sequence, from 0 on, got {first} first; unshard them")
    starts = [at for at, position in enumerate(positions) if position == 0]
    return (*starts, len(positions)) if positions else (0,)
