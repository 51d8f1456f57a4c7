"""Kernel "flex": FlexAttention, torch's attention that is compiled for a mask and a bias said by functions.

Of torch it takes the public function alone (torch.nn.attention.flex_attention, read in torch 2.13, where `AuxRequest`
replaces what was to go in 2.10): the lse is natural; a row that sees nothing has out 0 and lse -inf, and no gradient;
out and lse are both differentiable, by kernels without atomics. The Triton kernels take head dims from 16 on.

Its own backward knows the rows of this call alone, and ours has to use the final lse and delta. So the tile is computed
again, and gradients are put in that are those of its own out and lse: with w = exp(lse of the tile - final lse), what
it calls P is P / w here, so that with dout * w its dS is P * (dout v^T - delta of the tile), and a gradient of its lse
of w * (delta of the tile - delta) makes that P * (dout v^T - delta). The price is one more forward for each tile.

A mask becomes a `BlockMask`: blocks of 128 by 128 where nothing attends are not computed. It is made anew for each
call, since what functions capture may have changed, and by compiled code, so that only its blocks are written out.
What does not compile is refused before anything is sent: see `probe`.

Not yet run on a GPU. Tests run torch's own function on the CPU, which computes by matmuls what the kernels compute, and
a stand-in that reads blocks as these do.

Shapes: B batch, H query heads, M query rows, N keys, D head dim of q and k, E of v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ringcp.cutting import Caps
from ringcp.dispatch import from_the_top
from ringcp.kernels import refusals
from ringcp.kernels.base import Form, Problem
from ringcp.kernels.operands import HALF, padded
from ringcp.kernels.pairwise import Alibi, Allowed

_LEAST_DIM, _LARGEST_DIM = 16, 256

Mod = Callable[..., Any]
"""Of single indices of a call, row i and key j: ``mask_mod(b, h, i, j)`` or ``score_mod(score, b, h, i, j)``."""


@dataclass(frozen=True)
class Flex:
    """fp32, fp16 and bf16; any band, explicit masks, softcap, ALiBi; GQA without repeats; deterministic.

    attend: in place of torch's function, for tests. backend: of torch.compile; None leaves it eager. trial: whether
        what it compiles is for no call.
    """

    attend: Callable[..., Any] | None = None
    backend: str | None = "inductor"
    trial: bool = False

    name = "flex"
    caps = Caps(causal="bottom_right", band="any", functions=True)
    switch = None

    def refusals(self, problem: Problem) -> list[str]:
        takes = {"softcap": True, "explicit": True, "alibi": True}
        dtypes = (torch.float32, *HALF)
        reasons = refusals.shared(problem, self.caps, device="cuda", dtypes=dtypes, max_dim=None, multiple=1, **takes)
        dims = (("head_dim", problem.head_dim), ("value_dim", problem.value_dim))
        reasons += [f"{name} {dim} > {_LARGEST_DIM}" for name, dim in dims if dim > _LARGEST_DIM]
        return reasons + _without_triton(problem)

    def probe(self, problem: Problem, allowed: Allowed) -> None:
        # Not with the compiled code of calls: their lengths would be its second ones, which are variables.
        kernel = replace(self, trial=True)
        batch, heads, m, n = (len(x) for x in (allowed.batch, allowed.heads, allowed.rows, allowed.keys))
        of_q, of_k, of_v = (heads, m, problem.head_dim), (1, n, problem.head_dim), (1, n, problem.value_dim)
        q, k, v = (torch.zeros(batch, *of, dtype=problem.dtype, device=problem.device) for of in (of_q, of_k, of_v))
        lse = torch.zeros(batch, heads, m, device=problem.device)
        alibi = Alibi(lse[:, :, 0], allowed.rows, allowed.keys) if problem.alibi else None
        how: dict[str, Any] = {"form": Form(), "scale": problem.scale, "softcap": problem.softcap}
        how |= {"allowed": allowed, "alibi": alibi}
        if problem.needs_grad:  # which computes the tile as well
            out = v.new_zeros(batch, heads, m, problem.value_dim)
            kernel.backward(out, q, k, v, out, lse, None, **how)
        else:
            kernel.forward(q, k, v, **how)

    @torch.no_grad()
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        form: Form,
        scale: float,
        softcap: float | None = None,
        allowed: Tensor | Allowed | None = None,
        alibi: Alibi | None = None,
    ) -> tuple[Tensor, Tensor]:
        with from_the_top():
            out, lse = self._run((_operand(q), _operand(k), _operand(v)), form, scale, softcap, allowed, alibi)
        return out[..., : v.shape[-1]], lse

    @torch.no_grad()
    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dlse: Tensor | None,
        *,
        form: Form,
        scale: float,
        softcap: float | None = None,
        allowed: Tensor | Allowed | None = None,
        alibi: Alibi | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with from_the_top(), torch.enable_grad():
            leaves = _leaf(q), _leaf(k), _leaf(v)
            own_out, own_lse = self._run(leaves, form, scale, softcap, allowed, alibi)
        # 0 where the tile's is -inf and where the final one is +inf: neither is ever both.
        weight_BHM = (own_lse.detach() - lse).exp()
        delta_BHM = _row_sums(dout, out) - (0.0 if dlse is None else dlse)
        own_dout = padded((dout * weight_BHM.unsqueeze(-1)).to(own_out.dtype), own_out.shape[-1])
        # Of the rounded gradient: torch subtracts the same sum.
        own_dlse = _row_sums(own_dout, own_out.detach()) - weight_BHM * delta_BHM
        with from_the_top():
            dq, dk, dv = torch.autograd.grad((own_out, own_lse), leaves, (own_dout, own_dlse.to(own_lse.dtype)))
        return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]

    def _run(
        self,
        operands: tuple[Tensor, Tensor, Tensor],
        form: Form,
        scale: float,
        softcap: float | None,
        allowed: Tensor | Allowed | None,
        alibi: Alibi | None,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = operands
        mask_mod, score_mod = _mask_mod(form, allowed, q.device), _score_mod(softcap, alibi)
        # Kinds hold all but the lengths: what varies among calls of one becomes a variable, and not everything can be.
        masks, block_mask = (*_masks(q, allowed), q.device), None
        kind = self.trial, *_codes(mask_mod), *masks
        if mask_mod is not None:
            with torch.no_grad():
                block_mask = self._compiled(_blocks, kind)(mask_mod, q.shape[2], k.shape[2], *masks)
        shapes = q.dtype, *q.shape[:2], q.shape[3], k.shape[1], v.shape[3], torch.is_grad_enabled()
        attend = self._compiled(_attend, (*kind, *_codes(score_mod), scale, softcap, shapes))
        return attend(self.attend or _flex().flex_attention, q, k, v, score_mod, block_mask, scale)

    def _compiled(self, function: Callable[..., Any], kind: tuple[Any, ...]) -> Callable[..., Any]:
        return function if self.backend is None else _compiled(function, kind, self.backend)


def _flex() -> Any:
    """torch's module, imported when it is needed: it takes a while."""
    from torch.nn.attention import flex_attention

    return flex_attention


def _attend(
    flex_attention: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Mod | None,
    block_mask: Any,
    scale: float,
) -> tuple[Tensor, Tensor]:
    out, aux = flex_attention(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=True,
        return_aux=_flex().AuxRequest(lse=True),
    )
    return out, aux.lse


def _blocks(mask_mod: Mod, m: int, n: int, batch: int, heads: int, device: torch.device) -> Any:
    return _flex().create_block_mask(mask_mod, batch, heads, m, n, device)


@lru_cache(maxsize=256)
def _compiled(function: Callable[..., Any], kind: tuple[Any, ...], backend: str) -> Callable[..., Any]:
    """The function, compiled for calls of one kind: whatever tensors mods capture, it is the same code.

    torch keeps eight compiled forms of a function, and notes by its name what has varied. So each kind has a copy under
    a name of its own, to have the forms for lengths: the first are taken as they are (where 128 divides them, no block
    is checked for its end), others as variables.
    """
    assert isinstance(function, FunctionType)
    name = f"{function.__name__}_{hash(kind) & 0xFFFFFFFFFFFF:x}"
    copy = FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)
    return torch.compile(copy, backend=backend, fullgraph=True)


def _codes(mod: Any) -> Iterator[Any]:
    """What tells functions apart to the compiler: their code and that of the functions that they capture."""
    yield getattr(mod, "__code__", type(mod))
    for cell in getattr(mod, "__closure__", None) or ():
        captured = cell.cell_contents
        for each in captured if isinstance(captured, tuple) else (captured,):
            if isinstance(each, FunctionType) and each is not mod:
                yield from _codes(each)


def _mask_mod(form: Form, allowed: Tensor | Allowed | None, device: torch.device) -> Mod | None:
    mods = []
    if form.lo is not None:
        mods.append(_from(torch.full((), form.lo, device=device)))
    if form.hi is not None:
        mods.append(_up_to(torch.full((), form.hi, device=device)))
    if isinstance(allowed, Allowed):
        mods += [_at_positions(function, allowed) for function in allowed.functions]
    elif allowed is not None:
        mods.append(_looked_up(allowed))
    return _flex().and_masks(*mods) if mods else None


def _masks(q: Tensor, allowed: Tensor | Allowed | None) -> tuple[int, int]:
    """For how many batch rows and query heads masks differ."""
    if isinstance(allowed, Allowed):
        return q.shape[0] if allowed.by_row else 1, q.shape[1] if allowed.by_head else 1
    return (1, 1) if allowed is None else (allowed.shape[0], allowed.shape[1])


# Numbers that differ from call to call are tensors, made by the device without waiting for it: captured as Python's
# they would compile anew.


def _from(lo: Tensor) -> Mod:
    return lambda b, h, i, j: i - j >= lo


def _up_to(hi: Tensor) -> Mod:
    return lambda b, h, i, j: i - j <= hi


def _at_positions(function: Mod, allowed: Allowed) -> Mod:
    batch, heads, rows, keys = allowed.batch, allowed.heads, allowed.rows, allowed.keys
    return lambda b, h, i, j: function(batch[b], heads[h], rows[i], keys[j])


def _looked_up(allowed_BHMN: Tensor) -> Mod:
    by_row, by_head = (size > 1 for size in allowed_BHMN.shape[:2])
    table = allowed_BHMN[(slice(None) if by_row else 0, slice(None) if by_head else 0)]
    if by_row and by_head:
        return lambda b, h, i, j: table[b, h, i, j]
    if by_row:
        return lambda b, h, i, j: table[b, i, j]
    if by_head:
        return lambda b, h, i, j: table[h, i, j]
    return lambda b, h, i, j: table[i, j]


def _score_mod(softcap: float | None, alibi: Alibi | None) -> Mod | None:
    if alibi is None:
        return None if softcap is None else _capped(softcap)
    biased = _biased(alibi)
    if softcap is None:
        return biased
    capped = _capped(softcap)
    return lambda score, b, h, i, j: biased(capped(score, b, h, i, j), b, h, i, j)


def _capped(softcap: float) -> Mod:
    return lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)


def _biased(alibi: Alibi) -> Mod:
    each_row, rows, keys = alibi.slopes.shape[0] > 1, alibi.rows, alibi.keys
    slopes = alibi.slopes if each_row else alibi.slopes[0]

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        wide = torch.promote_types(score.dtype, torch.float32)
        slope = slopes[b, h] if each_row else slopes[h]
        return score - slope.to(wide) * (rows[i] - keys[j]).abs().to(wide)

    return biased


def _operand(x_BHSD: Tensor) -> Tensor:
    """A head dim that the kernels take, dense in it; expanded dims are copied, since gradients get the same strides."""
    x = padded(x_BHSD, max(x_BHSD.shape[-1], _LEAST_DIM))
    dense = x.stride(-1) == 1 and all(stride > 0 or size == 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x if dense else x.clone(memory_format=torch.contiguous_format)


def _leaf(x_BHSD: Tensor) -> Tensor:
    return _operand(x_BHSD).detach().requires_grad_()


def _row_sums(a: Tensor, b: Tensor) -> Tensor:
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.to(wide) * b.to(wide)).sum(-1)


def _without_triton(problem: Problem) -> list[str]:
    if problem.device.type != "cuda":
        return []
    reasons = [] if find_spec("triton") else ["triton is not installed"]
    least = (8, 0) if problem.dtype == torch.bfloat16 else (7, 0)
    major, minor = torch.cuda.get_device_capability(problem.device)
    if torch.version.hip is None and (major, minor) < least:
        reasons.append(f"compute capability {major}.{minor} < {least[0]}.{least[1]}")
    return reasons
