"""The registered ops: what autograd, torch.compile and checkpointing see.

`ringcp::attention` checks its arguments, votes, plans and runs, all inside the op, so that compiled code does so too.
Layout and mask arrive as int64 tensors, since a tensor of another content does not recompile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringcp.agreement import Told, agree, signature, slopes_text
from ringcp.ambient import ambience, ambient, layout_around
from ringcp.attn_mask import Fetching, Reading, mask_text, reading_of, whole_mask
from ringcp.checks import (
    check_agree,
    check_context_layout,
    check_group,
    check_lengths,
    check_mask,
    check_mode,
    check_save,
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
PLAN_VERSION = 4

_log = logging.getLogger(__name__)


class Facts(NamedTuple):
    """What backward has to know of a call: lengths of queries and keys, its number, codes of kernel and mode, the
    fingerprint, the ranks of an exchange, the seed of dropout, which is the one that rank 0 drew, whether an exchange
    has kept anything, and how attn_mask is read.
    """

    seq_len: int
    kv_len: int
    call: int
    kernel: int
    fingerprint: int
    mode: int
    degree: int
    seed: int
    keeps: bool
    reading: int


@torch.library.custom_op("ringcp::attention", mutates_args=())
def attention_op(
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
    timeout: float | None,
    needs_grad: bool,
    needs_lse_grad: bool,
    save: str,
    keep: bool,
    also: str,
    refused: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out; lse; int64, `Facts` that backward has to know; and uint8 (bytes,), what an exchange keeps."""
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
            check_save(save)
            code, given_len, given_world, *_ = layout_spec.tolist()
            check_context_layout(code, given_len, None if group is None else layout_around(group.group_name))
            known_len = known_length(given_len, given_world, seq_len, state.world_size)
            if kv_layout_spec is not None:
                _, given_len, given_world, *_ = kv_layout_spec.tolist()
                known_kv_len = known_length(given_len, given_world, None, state.world_size, "kv_layout")
            factor = default_scale(q) if scale is None else scale
            needs = mask.superset.needs_band, needs_grad, needs_lse_grad
            more = {"alibi": alibi_slopes is not None, "attn_mask": attn_mask is not None, "dropout": dropout_p > 0}
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
            f"alibi_slopes={slopes_text(alibi_slopes)}; attn_mask={mask_text(attn_mask)}; dropout_p={dropout_p}; "
            f"seq_len={seq_len}; agree={agree_when}; save={save}; "
            f"requires_grad={needs_grad}; gradient through lse (return_lse=True)={needs_lse_grad}; {also}; "
            f"plan={PLAN_VERSION}"
        )  # fmt: skip
        own_seed = 0 if dropout_seed is None else int(dropout_seed)
        of_mask = () if attn_mask is None else attn_mask.shape[2:]
        own = Told(q.shape[2], k.shape[2], own_seed, keep, *of_mask) if q.ndim == k.ndim == 4 else Told(0, 0)
        unknown = known_len is None or (cross and known_kv_len is None)
        if agree_when != "context" or unknown or dropout_p or attn_mask is not None:
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
        reading = Reading.ALONE if attn_mask is None else reading_of(told, layout, kv_layout or layout)
        context = ambient("context")
        if context is not None:
            context.attended()
        fingerprint = signature(words)
        heads = Heads(q.shape[1], k.shape[1])
        around = state.world_size, state.ranks_per_node
        used = resolve_mode(mode, ulysses_degree, heads.q, heads.kv, layout.seq_len, *around, mask, q.device.type)
        lens = layout.seq_len, (kv_layout or layout).seq_len
        code = MODES.index(used.mode)
        seed, degree = told[0].seed, used.ulysses_degree
        kernel_code, keeps = kernel_index(chosen.name), degree > 1 and needs_grad and all(each.keep for each in told)
        facts = host_int64(Facts(*lens, call, kernel_code, fingerprint, code, degree, seed, keeps, reading))
        if 0 in (q.shape[0], q.shape[1]):
            return _like(q, v.shape[3]).zero_(), _lse_like(q).zero_(), facts, _bytes_like(q, 0)
        with running(state, group, q):
            transport = P2P(group, timeout)  # of a rank alone, nothing is ever posted
            sizes = sizes_of(k, v, lens[1], gather_memory)
            how = Fetching(state.rank, degree, transport, call, fingerprint, "forward")
            given = None if attn_mask is None else whole_mask(attn_mask, reading, layout, kv_layout or layout, how)
            tail = transport, sizes, call, fingerprint, softcap, _extras(alibi_slopes, dropout_p, seed, given, q)
            run = make_run(used, layout, kv_layout, mask, heads, state.rank, chosen, factor, *tail)
            out, lse, kept = drive(run.forward(q, k, v, keeps))
        kept = _bytes_like(q, 0) if kept is None else kept
        return _stored(out, q.dtype), lse.contiguous(), facts, kept


@attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size() if rest[20] else 0
    facts = torch.empty(len(Facts._fields), dtype=torch.int64, device="cpu")
    return _like(q, v.shape[-1]), _lse_like(q), facts, _bytes_like(q, size)


@torch.library.custom_op("ringcp::attention_backward", mutates_args=())
def attention_backward_op(
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
    q, k, v = _inputs(dout, q, k, v, kv_heads, kv_rows, head_dim)
    group, state = members(group_name)
    state.check_usable()
    seq_len, kv_len, call, index, fingerprint, mode, degree, seed, keeps, reading = Facts(*facts.tolist())
    if 0 in (q.shape[0], q.shape[1]):
        return _like(q).zero_(), _like(k).zero_(), _like(v).zero_()
    kernel = kernel_at(index)
    layout = _sized(layout_spec, seq_len, [], state).rest
    kv_layout = None if kv_layout_spec is None else _sized(kv_layout_spec, kv_len, [], state).rest
    factor = default_scale(q) if scale is None else scale
    used, heads, mask = Choice(MODES[mode], degree, ""), Heads(q.shape[1], k.shape[1]), _decoded_mask(mask_spec)
    transport = P2P(group, timeout)  # of a rank alone, nothing is ever posted
    sizes = sizes_of(k, v, kv_len, gather_memory)
    how = Fetching(state.rank, degree, transport, call, fingerprint, "backward")
    with running(state, group, q):
        given = None
        if attn_mask is not None:
            given = whole_mask(attn_mask, Reading(reading), layout, kv_layout or layout, how)
        tail = transport, sizes, call, fingerprint, softcap, _extras(alibi_slopes, dropout_p, seed, given, q)
        run = make_run(used, layout, kv_layout, mask, heads, state.rank, kernel, factor, *tail)
        grads = drive(run.backward(dout, dlse, q, k, v, out, lse, kept if keeps else None))
    return tuple(_stored(grad, x.dtype) for grad, x in zip(grads, (q, k, v), strict=True))  # type: ignore[return-value]


@attention_backward_op.register_fake
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor | None, k: Tensor | None, v: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = _inputs(dout, q, k, v, *rest[9:12])
    return _like(q), _like(k), _like(v)


def _surely_keeps(facts: Tensor, group_name: str, mode: str, degree: int | None) -> bool:
    """Of a call that may keep what an exchange brings, whether it does; while it is traced, nothing has run."""
    if type(facts) is Tensor:
        return bool(facts[Facts._fields.index("keeps")])
    return members(group_name)[1].world_size > 1 and (mode == "ulysses" or (mode == "usp" and degree != 1))


def _inputs(
    dout: Tensor, q: Tensor | None, k: Tensor | None, v: Tensor | None, kv_heads: int, kv_rows: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs; where they are not saved, stand-ins of their shapes and dtypes."""
    if q is not None and k is not None and v is not None:
        return q, k, v
    batch, q_heads, rows, value_dim = dout.shape
    shapes = (q_heads, rows, head_dim), (kv_heads, kv_rows, head_dim), (kv_heads, kv_rows, value_dim)
    q, k, v = (dout.new_empty(()).expand(batch, *shape) for shape in shapes)
    return q, k, v


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, layout_spec, kv_layout_spec, mask_spec, alibi_slopes, attn_mask, _, group_name, *_ = inputs
    memory, scale, softcap, dropout_p, timeout = inputs[12], *inputs[14:17], inputs[19]
    out, lse, facts, kept = output
    ctx.set_materialize_grads(False)
    ctx.of_out = *out.shape, out.dtype, out.device
    keeps = inputs[23] and _surely_keeps(facts, *inputs[9:12])
    saved = (None,) * 5 if keeps else (q, k, v, out, lse)
    ctx.save_for_backward(*saved, kept, layout_spec, kv_layout_spec, mask_spec, alibi_slopes, attn_mask, facts)
    ctx.options = (*k.shape[1:], group_name, memory, scale, softcap, dropout_p, timeout)
    ctx.mods = getattr(mask_spec, "mods", ())  # also where hooks keep a copy of the spec
    # While it is traced, nothing has been written to yet.
    ctx.seen = [(mod, mod.seen()) for mod in ctx.mods] if type(facts) is Tensor else []


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
    return (*grads, *(None,) * 23)


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


def _extras(alibi_slopes: Tensor | None, dropout_p: float, seed: int, attn_mask: Tensor | None, q: Tensor) -> Extras:
    return Extras(None if alibi_slopes is None else alibi_slopes.to(q.device), dropout_p, seed, attn_mask)


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


def _bytes_like(q: Tensor, size: Any) -> Tensor:
    return q.new_empty(size, dtype=torch.uint8)


def _lse_like(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=accumulator_dtype(q.dtype))


def _facts(x: Tensor) -> str:
    # The local length is not part of it: lengths are compared with the layout instead.
    shape = (*x.shape[:2], "S", *x.shape[3:])
    return f"{shape} {x.dtype} on {x.device.type}"
