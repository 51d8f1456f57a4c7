"""Operands as fused kernels want them: padded head dims, aligned strides, masks, and the gradient of the lse.

Shapes: B batch, H query heads, M query rows, N keys, D head dim of q and k, Dv of v, W padded head dim.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ringcp.kernels.base import Form

HALF = (torch.float16, torch.bfloat16)
_ROW_BYTES = 16
CACHED_ELEMENTS = 1 << 22
"""Masks of more elements are made anew for each call: sixteen cached ones stay below 256 MiB in fp32."""


def round_up(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def padded(x_BHSD: Tensor, width: int) -> Tensor:
    """Zeros appended to the last dim. Zero columns of q and k change no score, those of v no other column of out."""
    missing = width - x_BHSD.shape[-1]
    assert missing >= 0, f"a head dim of {x_BHSD.shape[-1]} cannot be padded to {width}"
    return F.pad(x_BHSD, (0, missing)) if missing else x_BHSD


def unit_stride(x: Tensor) -> Tensor:
    """`x`, copied if need be so that its last dim is dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def aligned(x_BHSD: Tensor) -> Tensor:
    """`x`, copied if need be so that each row starts at a multiple of 16 bytes; expanded dims are copied too."""
    step = _ROW_BYTES // x_BHSD.element_size()
    rows = list(zip(x_BHSD.shape[:-1], x_BHSD.stride()[:-1], strict=True))
    good = (
        x_BHSD.stride(-1) == 1
        and x_BHSD.data_ptr() % _ROW_BYTES == 0
        and all(stride % step == 0 and (stride > 0 or size == 1) for size, stride in rows)
    )
    # Not .contiguous(): it returns odd strides of dims of size 1 and odd offsets as they are.
    return x_BHSD if good else x_BHSD.clone(memory_format=torch.contiguous_format)


def num_lse_columns(dtype: torch.dtype) -> int:
    """Columns that carry the gradient through the lse: in half precision two, so that it is not rounded to 8 bits."""
    return 2 if dtype in HALF else 1


def shared_width(dim: int, value_dim: int, dlse: Tensor | None, dtype: torch.dtype, *, multiple: int = 8) -> int:
    """One head dim for q, k and v, with room for the gradient through the lse."""
    return round_up(max(dim, value_dim + (0 if dlse is None else num_lse_columns(dtype))), multiple)


def with_lse_grad(
    dout_BHMD: Tensor, out_BHMD: Tensor, dlse_BHM: Tensor | None, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """dout and out as (B, H, M, W) in `dtype`, with dlse in appended columns.

    Kernels compute delta = rowsum(dout * out), and ringcp needs rowsum(dout * out) - dlse. A column with dout = -dlse
    and out = 1 gives that, exactly; v has zeros there, so that nothing else changes. The caller drops the column of
    dv, and passes the scale of the original head dim.
    """
    dim = dout_BHMD.shape[-1]
    dout_BHMW, out_BHMW = padded(dout_BHMD.to(dtype), width), padded(out_BHMD.to(dtype), width)
    if dlse_BHM is None:
        return dout_BHMW, out_BHMW
    columns = num_lse_columns(dtype)
    assert dim + columns <= width, f"the gradient of the lse needs {columns} of {width - dim} columns"
    rest_BHM = -dlse_BHM
    for column in range(dim, dim + columns):
        dout_BHMW[..., column] = rest_BHM
        rest_BHM = rest_BHM - dout_BHMW[..., column]
    out_BHMW[..., dim : dim + columns] = 1
    return dout_BHMW, out_BHMW


def allowed(m: int, n: int, form: Form, device: torch.device) -> Tensor:
    """(M, N) of bool: whether row i and key j attend."""
    mask_MN = torch.ones(m, n, dtype=torch.bool, device=device)
    if form.lo is not None:
        mask_MN = mask_MN.tril(-form.lo)
    if form.hi is not None:
        mask_MN = mask_MN.triu(-form.hi)
    return mask_MN


def attending(m: int, n: int, form: Form, allowed_BHMN: Tensor) -> Tensor:
    """The allowed pairs of a form, with the dims of `allowed_BHMN`, of which the last two are whole."""
    allowed_BHMN = allowed_BHMN.expand(*allowed_BHMN.shape[:2], m, n)
    return allowed_BHMN if form == Form() else allowed_BHMN & allowed(m, n, form, allowed_BHMN.device)


def additive_mask(
    m: int, n: int, form: Form, *, dtype: torch.dtype, device: torch.device, row_multiple: int = 1
) -> Tensor:
    """(M, N): 0 where row i and key j attend, -inf elsewhere; rows lie a multiple of `row_multiple` elements apart.

    The result is shared between calls: never write to it.
    """
    # On CUDA a mask belongs to the stream that made it.
    cached = device.type == "cpu" and m * n <= CACHED_ELEMENTS
    make = _additive_mask if cached else _additive_mask.__wrapped__
    return make(m, n, form, dtype, device, row_multiple)


@lru_cache(maxsize=16)
def _additive_mask(m: int, n: int, form: Form, dtype: torch.dtype, device: torch.device, row_multiple: int) -> Tensor:
    # A cached tensor outlives the call, and an inference tensor would be refused by later calls outside that mode.
    with torch.inference_mode(False), torch.no_grad():
        mask_MN = torch.zeros(m, round_up(n, row_multiple), dtype=dtype, device=device)[:, :n]
        return mask_MN.masked_fill_(~allowed(m, n, form, device), float("-inf"))
