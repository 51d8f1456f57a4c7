"""One attention call on one rank: checked, agreed on, planned and run, inside the registered ops."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ringcp.agreement import Told, agree, signature, slopes_text
from ringcp.ambient import ambient, around_kernels, layout_around
from ringcp.arguments import Arguments, BackwardArguments, Facts, Result
from ringcp.attn_mask import Fetching, Reading, mask_text, reading_of, whole_mask
from ringcp.checks import (
    check_agree,
    check_context_layout,
    check_group,
    check_lengths,
    check_mask,
    check_mode,
    check_no_capture,
    check_save,
    check_tensors,
    default_scale,
    known_length,
)
from ringcp.errors import ArgumentError, RingcpError
from ringcp.executor import drive
from ringcp.groups import GroupState, group_named, state_of, transport_of
from ringcp.kernels.base import Kernel, problem_of
from ringcp.kernels.registry import choose, kernel_at, kernel_index
from ringcp.layout import UNSIZED, Layout, decode_layout
from ringcp.mask import Mask, decode_mask
from ringcp.merge import accumulator_dtype
from ringcp.modes import MODES, Choice, resolve_mode
from ringcp.runs import Run, make_run, sizes_of
from ringcp.schedule import Heads
from ringcp.transport import Transport, warm_up
from ringcp.trial import try_functions
from ringcp.written import Extras

PLAN_VERSION = 6
"""Ranks with other plans or messages for the same call have another number."""

_log = logging.getLogger(__name__)


class _Layouts(NamedTuple):
    """Of queries, and of keys and values if these are another sequence; of a joint one, the rest."""

    q: Layout
    kv: Layout | None

    @property
    def keys(self) -> Layout:
        return self.kv or self.q


class _Prepared(NamedTuple):
    """What one rank makes of its arguments alone. q_len, kv_len: of the whole sequences, if it knows them."""

    mask: Mask
    kernel: Kernel
    q_len: int | None
    kv_len: int | None


def attend(a: Arguments) -> tuple[Result | None, Facts]:
    """The results, None if there are no heads or no batch rows.

    Raises:
        RingcpError: after the vote, if there is one; and nothing was sent.
    """
    group, state = members(a.group_name)
    with state.turn:
        state.check_usable()
        call = state.next_call()
        prepared = _prepared(a, group, state)
        refusal = prepared if isinstance(prepared, RingcpError) else None
        words = "" if isinstance(prepared, RingcpError) else _words(a, prepared, state)
        if a.votes:
            told, ranks = agree(state, call, words, _told(a), refusal, a.timeout), range(state.world_size)
        else:
            told, ranks = [_told(a)], range(state.rank, state.rank + 1)
        if isinstance(prepared, RingcpError):
            _log.error("rank %d refuses call %d, and its peers do not vote: %s", state.rank, call, prepared)
            raise prepared
        layouts = _layouts(a, prepared, told, ranks, state)
        check_mask(prepared.mask, a.q, *layouts)
        reading = Reading.ALONE if a.attn_mask is None else reading_of(told, layouts.q, layouts.keys)
        context = ambient("context")
        if context is not None:
            context.attended()
        heads = Heads(a.q.shape[1], a.k.shape[1])
        around = layouts.q.seq_len, state.world_size, state.ranks_per_node, prepared.mask, a.q.device.type
        used = resolve_mode(a.mode, a.ulysses_degree, heads.q, heads.kv, *around)
        facts = Facts(
            layouts.q.seq_len,
            layouts.keys.seq_len,
            call,
            kernel_index(prepared.kernel.name),
            signature(words),
            MODES.index(used.mode),
            used.ulysses_degree,
            told[0].seed,
            used.ulysses_degree > 1 and a.needs_grad and all(each.keep for each in told),
            reading,
            state.reads(a.q.device),
            a.needs_lse_grad,
        )
        if 0 in (a.q.shape[0], a.q.shape[1]):
            return None, facts
        transport = transport_of(group, state, a.timeout, facts.by_memory)
        with running(state, group, a.q):
            run = _run(a, (a.q, a.k, a.v), facts, layouts, prepared.mask, transport, state, "forward")
            return Result(*drive(run.forward(a.q, a.k, a.v, facts.keeps))), facts


def differentiate(a: BackwardArguments) -> tuple[Tensor, Tensor, Tensor] | None:
    """dq, dk and dv in any floating dtype; None if there are no heads or no batch rows."""
    group, state = members(a.group_name)
    state.check_usable()
    q, k, v = a.inputs
    check_no_capture(q)
    if 0 in (q.shape[0], q.shape[1]):
        return None
    facts = Facts.decoded(a.facts.tolist())
    of_kv = None if a.kv_layout_spec is None else _sized(a.kv_layout_spec, facts.kv_len, [], state).rest
    layouts = _Layouts(_sized(a.layout_spec, facts.seq_len, [], state).rest, of_kv)
    transport = transport_of(group, state, a.timeout, bool(facts.by_memory))
    with running(state, group, q):
        run = _run(a, (q, k, v), facts, layouts, _decoded(a.mask_spec), transport, state, "backward")
        kept = a.kept if facts.keeps else None
        dlse = a.dlse
        if dlse is None and facts.lse_grad and facts.degree > 1:  # that of other ranks travels with dout
            dlse = q.new_zeros(q.shape[:3], dtype=accumulator_dtype(q.dtype))
        dq, dk, dv = drive(run.backward(a.dout, dlse, q, k, v, a.out, a.lse, kept))
    return dq, dk, dv


def members(group_name: str) -> tuple[dist.ProcessGroup | None, GroupState]:
    """The group of a name and its state; no name stands for this rank alone, whose calls are nobody else's."""
    if not group_name:
        return None, GroupState(0, 1, None, 1)
    group = group_named(group_name)
    return group, state_of(group)


@contextmanager
def running(state: GroupState, group: dist.ProcessGroup | None, q: Tensor) -> Iterator[None]:
    """Around a run: kernels see no autocast and no context, and a failure breaks the group, since peers wait for its
    transfers.
    """
    try:
        if group is not None and q.is_cuda and not state.warm and state.world_size > 1:
            warm_up(group, q.device)
            state.warm = True
        with around_kernels(q.device):
            yield
    except BaseException as error:
        state.break_off(error)
        raise


def _prepared(a: Arguments, group: dist.ProcessGroup | None, state: GroupState) -> _Prepared | RingcpError:
    """The arguments checked, as far as one rank can; or why it refuses them."""
    try:
        if a.refused:
            raise ArgumentError(a.refused)
        mask, cross = _decoded(a.mask_spec), a.kv_layout_spec is not None
        check_tensors(a.q, a.k, a.v, cross)
        check_group(a.q, group)
        check_mode(a.mode, a.ulysses_degree, state.world_size)
        check_agree(a.agree_when)
        check_save(a.save)
        code, given_len, given_world, *_ = a.layout_spec.tolist()
        check_context_layout(code, given_len, None if group is None else layout_around(group.group_name))
        q_len = kv_len = known_length(given_len, given_world, a.seq_len, state.world_size)
        if a.kv_layout_spec is not None:
            _, given_len, given_world, *_ = a.kv_layout_spec.tolist()
            kv_len = known_length(given_len, given_world, None, state.world_size, "kv_layout")
        needs = mask.superset.needs_band, a.needs_grad, a.needs_lse_grad
        more = {"alibi": a.alibi_slopes is not None, "dropout": a.dropout_p > 0}
        scale, given = _scale(a, a.q), a.attn_mask
        problem = problem_of(a.q, a.k, a.v, scale, a.softcap, *needs, mask.explicit, attn_mask=given, **more)
        kernel = choose(a.kernel, problem)
        if mask.explicit:
            of_kv = a.layout_spec if a.kv_layout_spec is None else a.kv_layout_spec
            lens = _at_least(a.q, a.layout_spec, q_len, state), _at_least(a.k, of_kv, kv_len, state)
            mask.probe(a.q.shape[0], a.q.shape[1], *lens, a.q.device)
            try_functions(kernel, problem, mask, a.q.shape[0], a.q.shape[1], *lens)
    except RingcpError as error:
        return error
    except Exception as error:  # whatever it is, this rank votes before it raises
        refusal = RingcpError(f"{type(error).__name__}: {error}")
        refusal.__cause__ = error
        return refusal
    return _Prepared(mask, kernel, q_len, kv_len)


def _words(a: Arguments, prepared: _Prepared, state: GroupState) -> str:
    """All on which the ranks must agree."""
    return (
        f"call=attention; q={_shown(a.q)}; k={_shown(a.k)}; v={_shown(a.v)}; layout={_layout_text(a.layout_spec)}; "
        f"kv_layout={None if a.kv_layout_spec is None else _layout_text(a.kv_layout_spec)}; "
        f"mask={prepared.mask}; mode={a.mode}; ulysses_degree={a.ulysses_degree}; gather_memory={a.gather_memory}; "
        f"ranks a node={state.ranks_per_node}; kernel={prepared.kernel.name}; scale={a.scale}; softcap={a.softcap}; "
        f"alibi_slopes={slopes_text(a.alibi_slopes)}; attn_mask={mask_text(a.attn_mask)}; dropout_p={a.dropout_p}; "
        f"seq_len={a.seq_len}; agree={a.agree_when}; save={a.save}; requires_grad={a.needs_grad}; "
        f"gradient through lse (return_lse=True)={a.needs_lse_grad}; {a.also}; plan={PLAN_VERSION}"
    )


def _told(a: Arguments) -> Told:
    if not a.q.ndim == a.k.ndim == 4:
        return Told(0, 0)
    seed = 0 if a.dropout_seed is None else int(a.dropout_seed)
    return Told(a.q.shape[2], a.k.shape[2], seed, a.keep, *(() if a.attn_mask is None else a.attn_mask.shape[2:]))


def _layouts(
    a: Arguments, prepared: _Prepared, told: Sequence[Told], ranks: Sequence[int], state: GroupState
) -> _Layouts:
    """Those of the rows that the op is given, with their lengths checked."""

    def checked(spec: Tensor, known: int | None, lengths: Sequence[int], names: str) -> Layout:
        layout = _sized(spec, known, lengths, state)
        check_lengths([layout.replicated + length for length in lengths], layout, ranks, names)
        return layout.rest

    cross = a.kv_layout_spec is not None
    of_q = checked(a.layout_spec, prepared.q_len, [each.q for each in told], "q" if cross else "q, k, v")
    if a.kv_layout_spec is None:
        return _Layouts(of_q, None)
    return _Layouts(of_q, checked(a.kv_layout_spec, prepared.kv_len, [each.kv for each in told], "k, v"))


def _run(
    a: Arguments | BackwardArguments,
    inputs: tuple[Tensor, Tensor, Tensor],
    facts: Facts,
    layouts: _Layouts,
    mask: Mask,
    transport: Transport,
    state: GroupState,
    direction: Literal["forward", "backward"],
) -> Run:
    q, k, v = inputs
    attn_mask = a.attn_mask
    if attn_mask is not None:
        how = Fetching(state.rank, facts.degree, transport, facts.call, facts.fingerprint, direction)
        attn_mask = whole_mask(attn_mask, Reading(facts.reading), layouts.q, layouts.keys, how)
    slopes = None if a.alibi_slopes is None else a.alibi_slopes.to(q.device)
    return make_run(
        Choice(MODES[facts.mode], facts.degree, ""),
        *layouts,
        mask,
        Heads(q.shape[1], k.shape[1]),
        state.rank,
        kernel_at(facts.kernel),
        _scale(a, q),
        transport,
        sizes_of(k, v, facts.kv_len, a.gather_memory),
        facts.call,
        facts.fingerprint,
        a.softcap,
        Extras(slopes, a.dropout_p, facts.seed, attn_mask),
    )


def _scale(a: Arguments | BackwardArguments, q: Tensor) -> float:
    return default_scale(q) if a.scale is None else a.scale


def _sized(spec: Tensor, known: int | None, lengths: Sequence[int], state: GroupState) -> Layout:
    """The layout of a spec, as long as is known or as the local lengths say."""
    code, _, _, *rest = spec.tolist()
    return decode_layout(code, sum(lengths) if known is None else known, state.world_size, *rest)


def _at_least(x: Tensor, spec: Tensor, known: int | None, state: GroupState) -> int:
    """How many tokens there are, as far as is known before the vote."""
    return x.shape[2] if known is None else _sized(spec, known, [], state).rest.seq_len


def _decoded(mask_spec: Tensor) -> Mask:
    return decode_mask(tuple(mask_spec.tolist()))


def _layout_text(spec: Tensor) -> str:
    code, seq_len, world_size, *rest = spec.tolist()
    if rest:
        return repr(decode_layout(code, seq_len, world_size, *rest))
    name = decode_layout(code, 0, 1).name
    return name if seq_len == UNSIZED else f"{name} of {seq_len} tokens"


def _shown(x: Tensor) -> str:
    # The local length is not part of it: lengths are compared with the layout instead.
    batch, heads, _, dim = x.shape
    return f"(B={batch}, H={heads}, S, D={dim}) {x.dtype} on {x.device.type}"
