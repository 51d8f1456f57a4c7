"""The registered ops: what autograd, torch.compile and checkpointing see.

All of a call is inside the op, checks and vote too (see `call.py`), so that compiled code does it as well. Layout and
mask arrive as int64 tensors, since a tensor of another content does not recompile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ringcp.arguments import FACTS_WORDS, Arguments, BackwardArguments, Facts
from ringcp.call import attend, differentiate, members
from ringcp.checks import refuse_double_backward
from ringcp.errors import ArgumentError
from ringcp.merge import accumulator_dtype
from ringcp.spec import host_int64
from ringcp.untraced import skip_alone


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_spec: Tensor,
    kv_layout_spec: Tensor | None,
    mask_spec: Tensor,
    alibi_slopes: Tensor | None,
    attn_mask: Tensor | None,
    dropout_seed: Tensor | None,
    group_name: str,
    mode: str,
    ulysses_degree: int | None,
    gather_memory: int | None,
    kernel: str,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
    seq_len: int | None,
    agree_when: str,
    votes: bool,
    timeout: float | None,
    needs_grad: bool,
    needs_lse_grad: bool,
    save: str,
    keep: bool,
    also: str,
    refused: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out; lse; int64, `Facts` that backward has to know; and uint8 (bytes,), what an exchange keeps."""
    result, facts = attend(Arguments(
        q, k, v, layout_spec, kv_layout_spec, mask_spec, alibi_slopes, attn_mask, dropout_seed, group_name,
        mode, ulysses_degree, gather_memory, kernel, scale, softcap, dropout_p, seq_len, agree_when, votes, timeout,
        needs_grad, needs_lse_grad, save, keep, also, refused,
    ))  # fmt: skip
    if result is None:
        return _like(q, v.shape[3]).zero_(), _lse_like(q).zero_(), host_int64(facts.encoded()), _bytes_like(q, 0)
    kept = _bytes_like(q, 0) if result.kept is None else result.kept
    return _stored(result.out, q.dtype), result.lse.contiguous(), host_int64(facts.encoded()), kept


def _fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a = Arguments(*args)
    size = torch.library.get_ctx().new_dynamic_size() if a.keep else 0
    facts = torch.empty(FACTS_WORDS, dtype=torch.int64, device="cpu")
    return _like(a.q, a.v.shape[-1]), _lse_like(a.q), facts, _bytes_like(a.q, size)


def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
    kept: Tensor,
    layout_spec: Tensor,
    kv_layout_spec: Tensor | None,
    mask_spec: Tensor,
    alibi_slopes: Tensor | None,
    attn_mask: Tensor | None,
    facts: Tensor,
    kv_heads: int,
    kv_rows: int,
    head_dim: int,
    group_name: str,
    gather_memory: int | None,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
    timeout: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the local rows. q, k, v, out and lse may be None if what an exchange brought is kept."""
    a = BackwardArguments(
        dout, dlse, q, k, v, out, lse, kept, layout_spec, kv_layout_spec, mask_spec, alibi_slopes, attn_mask,
        facts, kv_heads, kv_rows, head_dim, group_name, gather_memory, scale, softcap, dropout_p, timeout,
    )  # fmt: skip
    grads = differentiate(a)
    if grads is None:
        dq, dk, dv = (_like(x).zero_() for x in a.inputs)
    else:
        dq, dk, dv = (_stored(grad, dout.dtype) for grad in grads)
    return dq, dk, dv


def _fake_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (_like(x) for x in BackwardArguments(*args).inputs)
    return dq, dk, dv


@skip_alone
def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a = Arguments(*inputs)
    out, lse, facts, kept = output
    ctx.set_materialize_grads(False)
    ctx.of_out = *out.shape, out.dtype, out.device
    saved = (None,) * 5 if _surely_kept(a, facts) else (a.q, a.k, a.v, out, lse)
    specs = a.layout_spec, a.kv_layout_spec, a.mask_spec, a.alibi_slopes, a.attn_mask
    ctx.save_for_backward(*saved, kept, *specs, facts)
    ctx.options = (*a.k.shape[1:], a.group_name, a.gather_memory, a.scale, a.softcap, a.dropout_p, a.timeout)
    ctx.mods = getattr(a.mask_spec, "mods", ())  # also where hooks keep a copy of the spec
    # While it is traced, nothing has been written to yet.
    ctx.seen = [(mod, mod.seen()) for mod in ctx.mods] if type(facts) is Tensor else []


def _surely_kept(a: Arguments, facts: Tensor) -> bool:
    """Whether what an exchange has brought is kept; while it is traced, nothing has run, and the mode must say it."""
    if not a.keep:
        return False
    if type(facts) is Tensor:
        return bool(facts[Facts._fields.index("keeps")])
    exchanges = a.mode == "ulysses" or (a.mode == "usp" and a.ulysses_degree != 1)
    return exchanges and members(a.group_name)[1].world_size > 1


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
    for mod, seen in ctx.seen:
        if any(x._version != version for x, version in seen):
            raise ArgumentError(
                f"mask: expected the tensors that {mod} captures as they were in forward, got one that was written to "
                "in place since; write to a copy, and make a mask of it"
            )
    # Whether a rank has an upstream gradient must not decide whether it takes part.
    if dout is None:
        *shape, dtype, device = ctx.of_out
        dout = torch.zeros(shape, dtype=dtype, device=device)
    if torch.is_grad_enabled():  # create_graph=True, and perhaps no input that is saved: what is refused has a gradient
        dout = dout if dout.requires_grad else dout.detach().requires_grad_()
    grads = attention_backward_op(dout, dlse, *ctx.saved_tensors, *ctx.options)
    return (*grads, *(None,) * (len(Arguments._fields) - 3))


class RingCP(torch.autograd.Function):
    """What autograd records of a call. Without "attention" in its name, for which `foreign.ATTENTION` looks."""

    @staticmethod
    @skip_alone
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        output = _below_autograd(attention_op, args)
        _setup_context(ctx, args, output)
        return output

    backward = staticmethod(_backward)


class RingCPBackward(torch.autograd.Function):
    """What autograd records of a backward pass under `create_graph=True`: that it has no gradient."""

    @staticmethod
    @skip_alone
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        return _below_autograd(attention_backward_op, args)

    backward = staticmethod(refuse_double_backward)


@skip_alone
def _below_autograd(op: Any, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


_LIBRARY = torch.library.Library("ringcp", "FRAGMENT")


def _registered(function: Any, fake: Any, recorded: type[torch.autograd.Function]) -> Any:
    """The op `ringcp::<name of the function>`; calls that need a gradient are `recorded`.

    Not by `custom_op`: its `register_autograd` looks each of the n arguments up in a list that it makes anew, and its
    wrappers take their time too: up to 0.3 ms a call.
    """
    name = function.__name__
    # In a CUDA graph the host's part would not run again.
    tags = torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()), tags=tags)
    op = getattr(torch.ops.ringcp, name).default

    @skip_alone
    def with_autograd(*args: Any) -> tuple[Tensor, ...]:
        needs_grad = torch.is_grad_enabled() and torch._C._any_requires_grad(*args)
        return recorded.apply(*args) if needs_grad else _below_autograd(op, args)

    _LIBRARY.impl(name, torch.compiler.disable(function), "CompositeExplicitAutograd")
    _LIBRARY.impl(name, with_autograd, "Autograd")
    torch.library.register_fake(f"ringcp::{name}", fake, lib=_LIBRARY)
    return op


attention_op = _registered(attention, _fake, RingCP)
attention_backward_op = _registered(attention_backward, _fake_backward, RingCPBackward)


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As (B, S, H, D) in memory, the fixed strides that the fakes promise."""
    return x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


def _like(x: Tensor, last: int | None = None) -> Tensor:
    if x.ndim != 4:  # in a fake; the real op refuses it
        return torch.empty_like(x)
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3] if last is None else last).transpose(1, 2)


def _bytes_like(q: Tensor, size: Any) -> Tensor:
    return q.new_empty(size, dtype=torch.uint8)


def _lse_like(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=accumulator_dtype(q.dtype))
