"""What results are held against: plain attention in fp64, and the bar that errors must stay under."""

from __future__ import annotations

import torch
from torch import Tensor

from ringcp.mask import Mask


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the whole sequence by its definition: fp64, every mask written out, differentiable by autograd.

    Args:
        q: (B, Hq, S, D); k: (B, Hkv, S, D); v: (B, Hkv, S, Dv).
        mask: a ringcp mask, a bool tensor that broadcasts to (B, Hq, S, S) with True where a query attends, or None for
            full.
        scale: factor on the scores; None is ``D ** -0.5``.
        softcap: C of ``C * tanh(score / C)``, on the scaled scores, before they are masked; None leaves them.
        alibi_slopes: (Hq,) or (B, Hq): ``-slope * |i - j|`` is added to the scaled, capped scores.
        attn_mask: broadcasts to (B, Hq, S, S): of bool, True where a query attends, beside `mask`; or numbers that are
            added to the scaled, capped scores, -inf where a query does not attend.

    Returns:
        out (B, Hq, S, Dv) and lse (B, Hq, S), fp64. Rows that attend to nothing have out 0 and lse -inf.
    """
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        i, j = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
        scores = scores - alibi_slopes.to(scores)[..., None, None] * (i[:, None] - j).abs()
    if mask is None:
        allowed = torch.ones((), dtype=torch.bool, device=q.device)
    elif isinstance(mask, Mask):
        at = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
        allowed = mask.dense(*at, batch=q.shape[0], heads=q.shape[1])
    else:
        allowed = mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = allowed & attn_mask
    elif attn_mask is not None:
        scores, allowed = scores + attn_mask.double(), allowed & (attn_mask > -torch.inf)
    scores = scores.masked_fill(~allowed, -torch.inf)
    dead = ~allowed.expand(scores.shape).any(-1)
    lse = torch.logsumexp(scores.masked_fill(dead[..., None], 0.0), -1)
    weights = (scores - lse[..., None]).exp()
    return weights @ v, lse.masked_fill(dead, -torch.inf)


def assert_close(actual: Tensor, expected: Tensor, *, baseline: Tensor | None = None, name: str = "result") -> None:
    """Hold a result against the fp64 reference.

    - fp64: no element is off by more than 1e-10.
    - other dtypes: the largest error is at most twice that of `baseline`, the result of one kernel on one device in the
      same dtype, plus a rounding floor of one unit in the last place of the largest expected magnitude.

    Raises:
        AssertionError: naming `name`, the error, the bound, and where.
        ValueError: no baseline was given for a dtype other than fp64.
    """
    assert actual.shape == expected.shape, f"{name}: expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}"
    if actual.numel() == 0:
        return
    size = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 0.0
    if actual.dtype == torch.float64:
        bound = 1e-10
    elif baseline is None:
        raise ValueError(f"baseline: expected the {actual.dtype} result of one kernel for {name}, got None")
    else:
        bound = 2 * _errors(baseline, expected).max().item() + torch.finfo(actual.dtype).eps * max(size, 1e-3)
    errors = _errors(actual, expected)
    worst = errors.max().item()
    if not worst <= bound:
        at = tuple(int(i) for i in torch.unravel_index(errors.nan_to_num(torch.inf).argmax(), errors.shape))
        raise AssertionError(
            f"{name}: error {worst:.3e} at {at} is above {bound:.3e} (magnitude {size:.3e}, {actual.dtype})"
        )


def _errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Absolute errors; equal infinities are no error."""
    a, b = actual.double(), expected.double()
    return torch.where(a == b, 0.0, (a - b).abs())
