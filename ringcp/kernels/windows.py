"""Bands as FlashAttention's windows, which count from the last row and the last key.

FlashAttention lets row i (of m) see key j (of n) if ``-left <= j - i - (n - m) <= right``. Two quirks of it, read in
flash_api.cpp and mask.h and the same in every release of version 2, are wrong for a call of more rows than keys:
a right edge of n or more is taken for none, and no right edge beside a left one is taken for a right edge of n.
`split` cuts the few bands that would meet them.
"""

from __future__ import annotations

from typing import NamedTuple

from ringcp.band import Band, trim
from ringcp.kernels.base import Form


class Window(NamedTuple):
    """Arguments of a FlashAttention call; None is an edge that cuts nothing off."""

    is_causal: bool
    left: int | None
    right: int | None


def window(m: int, n: int, form: Form) -> Window:
    """The arguments for `form` on m rows and n keys."""
    left, right = form.from_the_end(m, n)
    # Both hold in a trimmed band; a negative edge would be taken for none.
    assert left is None or left >= 0, f"key {n - 1} of {m} x {n} {form} meets no row"
    assert right is None or right >= 0, f"row {m - 1} of {m} x {n} {form} meets no key"
    return Window(True, None, None) if left is None and right == 0 else Window(False, left, right)


def split(m: int, n: int, form: Form) -> list[Band]:
    """Bands, disjoint in their rows and in order, that together are `form` and that FlashAttention takes rightly."""
    band = band_of(m, n, form)
    assert (band.q, band.k) == ((0, m), (0, n)), f"a row or a key of {m} x {n} {form} takes part in no pair"
    return list(_split(band))


def band_of(m: int, n: int, form: Form) -> Band:
    """The pairs of `form` on m rows and n keys."""
    band = trim((0, m), (0, n), 1 - n if form.lo is None else form.lo, m - 1 if form.hi is None else form.hi)
    assert band is not None, f"{m} x {n} {form} holds no pair"
    return band


def form_of(band: Band) -> Form:
    """The form of a band, counted from its own first row and key."""
    here = band.shift(q=-band.q[0], k=-band.k[0])
    return Form(here.lo if here.cuts_low else None, here.hi if here.cuts_high else None)


def _split(band: Band) -> list[Band]:
    m, n = band.num_q, band.num_k
    _, left, right = window(m, n, form_of(band))
    if right is not None and right >= n:
        row = band.k[1] + band.lo  # The first row after one that sees the last key: from here on only `hi` cuts.
    elif right is None and left is not None and m > n + 1:
        row = band.k[0] + band.hi + 1  # The first row that does not see the first key: above it nothing cuts.
    else:
        return [band]
    parts = (trim((band.q[0], row), band.k, band.lo, band.hi), trim((row, band.q[1]), band.k, band.lo, band.hi))
    return [piece for part in parts if part is not None for piece in _split(part)]
