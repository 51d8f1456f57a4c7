"""The registered ops: what autograd, torch.compile and checkpointing see.

`ringcp::attention` checks its arguments, votes, plans and runs, all inside the op, so that compiled code does so too.
Layout and mask arrive as int64 tensors, since a tensor of another content does not recompile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcp.agreement import Told, agree, signature, slopes_text
from ringcp.ambient import ambience, ambient, layout_around
from ringcp.checks import (
    check_agree,
    check_context_layout,
    check_group,
    check_lengths,
    check_mask,
    check_mode,
    check_tensors,
    default_scale,
    known_length,
    refuse_double_backward,
)
from ringcp.errors import ArgumentError, RingcpError
from ringcp.executor import drive
from ringcp.groups import GroupState, group_named, state_of
from ringcp.kernels.base import problem_of
from ringcp.kernels.registry import choose, kernel_at, kernel_index
from ringcp.layout import UNSIZED, Layout, decode_layout
from ringcp.mask import Mask, decode_mask
from ringcp.merge import accumulator_dtype
from ringcp.modes import MODES, Choice, resolve_mode
from ringcp.runs import make_run, sizes_of
from ringcp.schedule import Heads
from ringcp.spec import host_int64
from ringcp.transport import P2P, warm_up
from ringcp.written import Extras

# Inductor's cache on disk does not see what a fake returns: other outputs need another name of the op.
PLAN_VERSION = 3

_log = logging.getLogger(__name__)


@torch.library.custom_op("ringcp::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_spec: Tensor,
    kv_layout_spec: Tensor | None,
    mask_spec: Tensor,
    alibi_slopes: Tensor | None,
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
    timeout: float | None,
    needs_grad: bool,
    needs_lse_grad: bool,
    also: str,
    refused: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and int64 (8,), what backward has to know: lengths of queries and keys, call, kernel, fingerprint, mode
    and degree, and the seed of dropout, which is the one that rank 0 drew.
    """
    group, state = members(group_name)
    with state.turn:
        state.check_usable()
        call = state.next_call()
        cross = kv_layout_spec is not None
        known_len: int | None = None
        known_kv_len: int | None = None
        refusal: RingcpError | None = None
        try:
            if refused:
                raise ArgumentError(refused)
            mask = _decoded_mask(mask_spec)
            check_tensors(q, k, v, cross)
            check_group(q, group)
            check_mode(mode, ulysses_degree, state.world_size)
            check_agree(agree_when)
            code, given_len, given_world, *_ = layout_spec.tolist()
            check_context_layout(code, given_len, None if group is None else layout_around(group.group_name))
            known_len = known_length(given_len, given_world, seq_len, state.world_size)
            if kv_layout_spec is not None:
                _, given_len, given_world, *_ = kv_layout_spec.tolist()
                known_kv_len = known_length(given_len, given_world, None, state.world_size, "kv_layout")
            factor = default_scale(q) if scale is None else scale
            needs = mask.superset.needs_band, needs_grad, needs_lse_grad
            more = {"alibi": alibi_slopes is not None, "dropout": dropout_p > 0}
            chosen = choose(kernel, problem_of(q, k, v, factor, softcap, *needs, mask.explicit, **more))
            if mask.explicit:
                q_len = _at_least(q, layout_spec, known_len, state)
                k_len = q_len if kv_layout_spec is None else _at_least(k, kv_layout_spec, known_kv_len, state)
                mask.probe(q.shape[0], q.shape[1], q_len, k_len, q.device)
        except RingcpError as error:
            refusal = error
        except Exception as error:  # whatever it is, this rank votes before it raises
            refusal = RingcpError(f"{type(error).__name__}: {error}")
            refusal.__cause__ = error

        words = "" if refusal is not None else (
            f"call=attention; q={_facts(q)}; k={_facts(k)}; v={_facts(v)}; layout={_layout_text(layout_spec)}; "
            f"kv_layout={None if kv_layout_spec is None else _layout_text(kv_layout_spec)}; "
            f"mask={mask}; mode={mode}; ulysses_degree={ulysses_degree}; gather_memory={gather_memory}; "
            f"ranks a node={state.ranks_per_node}; kernel={chosen.name}; scale={scale}; softcap={softcap}; "
            f"alibi_slopes={slopes_text(alibi_slopes)}; dropout_p={dropout_p}; seq_len={seq_len}; agree={agree_when}; "
            f"requires_grad={needs_grad}; gradient through lse (return_lse=True)={needs_lse_grad}; {also}; "
            f"plan={PLAN_VERSION}"
        )  # fmt: skip
        own_seed = 0 if dropout_seed is None else int(dropout_seed)
        own = Told(q.shape[2], k.shape[2], own_seed) if q.ndim == k.ndim == 4 else Told(0, 0)
        if agree_when != "context" or known_len is None or (cross and known_kv_len is None) or dropout_p:
            told = agree(state, call, words, own, refusal, timeout)
            ranks = range(state.world_size)
        elif refusal is not None:
            _log.error("rank %d refuses call %d, and its peers do not vote: %s", state.rank, call, refusal)
            raise refusal
        else:
            told, ranks = [own], range(state.rank, state.rank + 1)
        layout = _rest(layout_spec, known_len, [each.q for each in told], ranks, state, "q" if cross else "q, k, v")
        kv_layout = None
        if kv_layout_spec is not None:
            kv_layout = _rest(kv_layout_spec, known_kv_len, [each.kv for each in told], ranks, state, "k, v")
        check_mask(mask, q, layout, kv_layout)
        context = ambient("context")
        if context is not None:
            context.attended()
        fingerprint = signature(words)
        heads = Heads(q.shape[1], k.shape[1])
        around = state.world_size, state.ranks_per_node
        used = resolve_mode(mode, ulysses_degree, heads.q, heads.kv, layout.seq_len, *around, mask, q.device.type)
        lens = layout.seq_len, (kv_layout or layout).seq_len
        code = MODES.index(used.mode)
        seed = told[0].seed
        facts = host_int64([*lens, call, kernel_index(chosen.name), fingerprint, code, used.ulysses_degree, seed])
        if 0 in (q.shape[0], q.shape[1]):
            return _like(q, v.shape[3]).zero_(), _lse_like(q).zero_(), facts
        with running(state, group, q):
            transport = P2P(group, timeout)  # of a rank alone, nothing is ever posted
            sizes = sizes_of(k, v, lens[1], gather_memory)
            tail = transport, sizes, call, fingerprint, softcap, _extras(alibi_slopes, dropout_p, seed, q)
            run = make_run(used, layout, kv_layout, mask, heads, state.rank, chosen, factor, *tail)
            out, lse = drive(run.forward(q, k, v))
        return _stored(out, q.dtype), lse.contiguous(), facts


@attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q, v.shape[-1]), _lse_like(q), torch.empty(8, dtype=torch.int64, device="cpu")


@torch.library.custom_op("ringcp::attention_backward", mutates_args=())
def attention_backward_op(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout_spec: Tensor,
    kv_layout_spec: Tensor | None,
    mask_spec: Tensor,
    alibi_slopes: Tensor | None,
    facts: Tensor,
    group_name: str,
    gather_memory: int | None,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
    timeout: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the local rows."""
    group, state = members(group_name)
    state.check_usable()
    seq_len, kv_len, call, index, fingerprint, mode, degree, seed = facts.tolist()
    if 0 in (q.shape[0], q.shape[1]):
        return _like(q).zero_(), _like(k).zero_(), _like(v).zero_()
    kernel = kernel_at(index)
    layout = _sized(layout_spec, seq_len, [], state).rest
    kv_layout = None if kv_layout_spec is None else _sized(kv_layout_spec, kv_len, [], state).rest
    factor = default_scale(q) if scale is None else scale
    used, heads, mask = Choice(MODES[mode], degree, ""), Heads(q.shape[1], k.shape[1]), _decoded_mask(mask_spec)
    transport = P2P(group, timeout)  # of a rank alone, nothing is ever posted
    extras = _extras(alibi_slopes, dropout_p, seed, q)
    tail = transport, sizes_of(k, v, kv_len, gather_memory), call, fingerprint, softcap, extras
    run = make_run(used, layout, kv_layout, mask, heads, state.rank, kernel, factor, *tail)
    with running(state, group, q):
        grads = drive(run.backward(dout, dlse, q, k, v, out, lse))
    return tuple(_stored(grad, x.dtype) for grad, x in zip(grads, (q, k, v), strict=True))  # type: ignore[return-value]


@attention_backward_op.register_fake
def _(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q), _like(k), _like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, layout_spec, kv_layout_spec, mask_spec, alibi_slopes, _, group_name, *_ = inputs
    memory, scale, softcap, dropout_p, timeout = inputs[11], *inputs[13:16], inputs[18]
    out, lse, facts = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, layout_spec, kv_layout_spec, mask_spec, alibi_slopes, facts)
    ctx.options = (group_name, memory, scale, softcap, dropout_p, timeout)
    ctx.mods = getattr(mask_spec, "mods", ())  # also where hooks keep a copy of the spec


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Any, ...]:
    q, k, v, out, lse, *specs = ctx.saved_tensors
    # Whether a rank has an upstream gradient must not decide whether it takes part.
    dout = torch.zeros_like(out) if dout is None else dout
    grads = attention_backward_op(dout, dlse, q, k, v, out, lse, *specs, *ctx.options)
    return (*grads, *(None,) * 20)


attention_op.register_autograd(_backward, setup_context=_setup_context)


attention_backward_op.register_autograd(refuse_double_backward)


def members(group_name: str) -> tuple[dist.ProcessGroup | None, GroupState]:
    """The group of a name and its state; no name stands for this rank alone, whose calls are nobody else's."""
    if not group_name:
        return None, GroupState(0, 1, None, 1)
    group = group_named(group_name)
    return group, state_of(group)


def _sized(spec: Tensor, known: int | None, lengths: Sequence[int], state: GroupState) -> Layout:
    """The layout of a spec, as long as is known or as the local lengths say."""
    code, _, _, *rest = spec.tolist()
    return decode_layout(code, sum(lengths) if known is None else known, state.world_size, *rest)


def _rest(
    spec: Tensor, known: int | None, lengths: Sequence[int], ranks: Sequence[int], state: GroupState, names: str
) -> Layout:
    """The layout of the rows that the op is given, with their lengths checked: of a joint one, the rest."""
    layout = _sized(spec, known, lengths, state)
    check_lengths([layout.replicated + length for length in lengths], layout, ranks, names)
    return layout.rest


def _at_least(x: Tensor, spec: Tensor, known: int | None, state: GroupState) -> int:
    """How many tokens there are, as far as is known before the vote."""
    return x.shape[2] if known is None else _sized(spec, known, [], state).rest.seq_len


def _decoded_mask(spec: Tensor) -> Mask:
    return decode_mask(tuple(spec.tolist()))


@contextmanager
def running(state: GroupState, group: dist.ProcessGroup | None, q: Tensor) -> Iterator[None]:
    """Around a run: kernels see no autocast and no context, whose attention they are not, and a failure breaks the
    group, since peers wait for its transfers.
    """
    try:
        if group is not None and q.is_cuda and not state.warm and state.world_size > 1:
            warm_up(group, q.device)
            state.warm = True
        with torch.autocast(q.device.type, enabled=False), ambience("context", None):
            yield
    except BaseException as error:
        state.break_off(error)
        raise


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As (B, S, H, D) in memory, the fixed strides that the fakes promise."""
    return x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


def _extras(alibi_slopes: Tensor | None, dropout_p: float, seed: int, q: Tensor) -> Extras:
    return Extras(None if alibi_slopes is None else alibi_slopes.to(q.device), dropout_p, seed)


def _layout_text(spec: Tensor) -> str:
    code, seq_len, world_size, *rest = spec.tolist()
    if rest:
        return repr(decode_layout(code, seq_len, world_size, *rest))
    name = decode_layout(code, 0, 1).name
    return name if seq_len == UNSIZED else f"{name} of {seq_len} tokens"


def _like(x: Tensor, last: int | None = None) -> Tensor:
    if x.ndim != 4:  # in a fake; the real op refuses it
        return torch.empty_like(x)
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3] if last is None else last).transpose(1, 2)


def _lse_like(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=accumulator_dtype(q.dtype))


def _facts(x: Tensor) -> str:
    # The local length is not part of it: lengths are compared with the layout instead.
    shape = (*x.shape[:2], "S", *x.shape[3:])
    return f"{shape} {x.dtype} on {x.device.type}"
