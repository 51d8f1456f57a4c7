"""Whole numbers among arguments, where Python takes a bool for one."""

from __future__ import annotations

from typing import TypeGuard


def is_int(value: object, least: int | None = None) -> TypeGuard[int]:
    """Whether it is an int, no bool, and at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)
