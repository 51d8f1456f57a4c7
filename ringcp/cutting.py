"""What one launch of a kernel can do, and bands cut into parts that are one launch each. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from ringcp.band import Band, Range, crop
from ringcp.errors import UnsupportedError

# A wider rectangle under a mask is cut into a masked edge, a full middle and a masked edge.
_MASKED_KEYS = 2048


class Strips(NamedTuple):
    """How a band is cut for a kernel that takes it under a dense mask.

    rows: of one strip, or some more. Enough for kernel speed, few enough that the two corners of a strip that the mask
        wastes stay small beside a window.
    triangles: a window that is so many tokens wide, or wider, becomes triangles below its lower edge and above its
        upper one, which waste nothing: the kernel takes ``Form(hi=m - n)`` as fast as a causal one. None is never.
    """

    rows: int = 256
    triangles: int | None = None


_STRIPS = Strips()


@dataclass(frozen=True)
class Caps:
    """What one launch of a kernel can do.

    causal: the bands ``i - j >= lo`` it takes: "square" (as many rows as keys, aligned to the diagonal),
        "top_left" (row 0 sees key 0 only), "bottom_right" (the last row sees every key), or "none".
    band: how it takes other bands: "any" at the price of the pairs, "mask" through a dense mask at the price
        of the whole rectangle, or "none".
    varlen: whether one launch takes many sequences, each of its own length (see `ringcp.kernels.packed.Packing`).
    functions: whether it takes masks that functions say as these functions (see `ringcp.kernels.pairwise.Allowed`).
    forward, backward: what suits it best then.
    half: the caps for dtypes of two bytes, where they are others.
    """

    causal: Literal["square", "top_left", "bottom_right", "none"]
    band: Literal["any", "mask", "none"]
    varlen: bool = False
    functions: bool = False
    forward: Strips = _STRIPS
    backward: Strips = _STRIPS
    half: Caps | None = None

    def of(self, itemsize: int) -> Caps:
        """The caps for a dtype of so many bytes."""
        return self.half if self.half is not None and itemsize == 2 else self


def takes(band: Band, caps: Caps) -> bool:
    """Whether the kernel can take a band, whole or in parts."""
    return band.is_full or caps.band != "none" or not (band.cuts_high or caps.causal == "none")


def cut(band: Band, caps: Caps, strips: Strips) -> Iterator[Band]:
    """Disjoint parts of a band, each of which is one launch."""
    if not takes(band, caps):
        wanted = "windows" if band.cuts_high else "causal masks"
        raise UnsupportedError(
            f'kernel: expected one that takes {wanted}, got one that takes {caps}, for {band}; pass kernel="auto"'
        )
    if band.is_full or caps.band == "any":
        yield band
    elif band.cuts_high or caps.causal == "none":
        yield from _strips(band, caps, strips)
    else:
        yield from _causal(band, caps)


def _causal(band: Band, caps: Caps) -> Iterator[Band]:
    """A band with a lower edge only, as full rectangles and one aligned causal call."""
    (q0, q1), (k0, k1), lo, _ = band
    # The band is trimmed, so row q0 sees keys up to q0 - lo >= k0, and row k1 - 1 + lo is the first to see all.
    see_all = k1 - 1 + lo
    if caps.causal == "bottom_right":
        parts = [((q0, see_all + 1), (k0, k1)), ((see_all + 1, q1), (k0, k1))]
    else:
        seen_by_all = q0 - lo
        parts = [((q0, q1), (k0, seen_by_all)), ((q0, q1), (seen_by_all, k1))]
        if caps.causal == "square":
            parts[1:] = [((q0, see_all + 1), (seen_by_all, k1)), ((see_all + 1, q1), (seen_by_all, k1))]
    cropped = (crop(band, q, k) for q, k in parts)
    yield from (part for part in cropped if part is not None)


def _strips(band: Band, caps: Caps, strips: Strips) -> Iterator[Band]:
    """Any band as strips of rows, each a rectangle under a mask, or an edge, a full middle and an edge."""
    width = min(band.num_q, band.num_k, band.hi - band.lo + 1)
    if strips.triangles is not None and band.cuts_high and width >= strips.triangles:
        yield from _triangles(band, caps, strips)
        return
    # Even strips: a leftover of a few rows would be slow, and its bits vary with the number of threads in fp64.
    num_strips = max(1, band.num_q // strips.rows)
    edges = [band.q[0] + i * band.num_q // num_strips for i in range(num_strips + 1)]
    for rows in pairwise(edges):
        strip = _rows_of(band, rows)
        if strip.num_k <= _MASKED_KEYS or strip.is_full:
            yield strip
        else:
            yield from _edges_and_middle(strip)


def _triangles(band: Band, caps: Caps, strips: Strips) -> Iterator[Band]:
    """A wide window: what its upper edge does not reach, then strips of triangles, then what is left of the rows."""
    below = min(band.k[0] + band.hi + 1, band.q[1])
    if below > band.q[0]:
        yield from cut(_rows_of(band, (band.q[0], below)), caps, strips)
    # Between two triangles that have one row less than the strip, nothing is left.
    height = band.hi - band.lo + 2
    for start in range(below, band.q[1], height):
        strip = _rows_of(band, (start, min(start + height, band.q[1])))
        if strip.num_q < (strips.triangles or 0):
            yield from _strips(strip, caps, strips)
        else:
            yield from _edges_and_middle(strip)


def _rows_of(band: Band, rows: Range) -> Band:
    part = crop(band, rows, band.k)
    assert part is not None, "a trimmed band has no dead rows"
    return part


def _edges_and_middle(strip: Band) -> Iterator[Band]:
    # Every row of the strip sees the keys from (last row - hi) to (first row - lo).
    middle = (max(strip.k[0], strip.q[1] - 1 - strip.hi), min(strip.k[1], strip.q[0] - strip.lo + 1))
    for k in (middle, (strip.k[0], middle[0]), (middle[1], strip.k[1])):
        part = crop(strip, strip.q, k)
        if part is not None:
            yield part
