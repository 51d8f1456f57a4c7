"""ALiBi and dropout by their definitions, and what of them several files share."""

import math

import torch
from cases import SHAPES, Case
from torch import Tensor

import ringcp
from ringcp.kernels.pairwise import Dropout
from ringcp.options import draw_seed

NAMES = ("out", "lse", "dq", "dk", "dv")
P = 0.3


def slopes_of(case: Case, *, each_row: bool = False) -> Tensor:
    """Slopes that no two heads share, of either sign, fp32: (Hq,), or (B, Hq)."""
    shape = SHAPES[case.heads]
    slopes = torch.linspace(-0.07, 0.9, shape.batch * shape.q_heads).view(shape.batch, shape.q_heads)
    return slopes if each_row else slopes[0].clone()


def seed_of(number: int) -> int:
    """What a rank draws after `torch.manual_seed(number)`."""
    torch.manual_seed(number)
    return int(draw_seed())


def factors(q: Tensor, k: Tensor, seed: int) -> Tensor:
    """What the weights of the whole sequence are multiplied by."""
    counted = (torch.arange(n) for n in (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    return Dropout(P, seed, *counted).factors(torch.float64)


def oracle(q: Tensor, k: Tensor, v: Tensor, mask, *, slopes=None, softcap=None, kept=None) -> tuple[Tensor, Tensor]:
    """Full attention: the bias as flash-attn's README has it, and dropout as torch's SDPA has it, after the softmax."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        i, j = (torch.arange(x.shape[2], dtype=torch.float64) for x in (q, k))
        scores = scores + slopes.double()[..., None, None] * -(i[:, None] - j).abs()
    dense = (ringcp.Full() if mask is None else mask).dense(*(torch.arange(x.shape[2]) for x in (q, k)))
    dead = ~dense.expand(scores.shape).any(-1)
    scores = scores.masked_fill(~dense, -math.inf).masked_fill(dead[..., None], 0.0)
    probs = scores.softmax(-1).masked_fill(dead[..., None], 0.0)
    return (probs if kept is None else probs * kept) @ v, scores.logsumexp(-1).masked_fill(dead, -math.inf)


def results(tensors, attend) -> dict[str, Tensor]:
    """out, lse, dq, dk and dv of ``attend(q, k, v)``."""
    q, k, v, dout, dlse = tensors
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = attend(*leaves)
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))
