"""The registered ops: what autograd, torch.compile and checkpointing see.

`ringcp::attention` checks its arguments, votes, plans and runs, all inside the op, so that compiled code does so too.
Layout and mask arrive as int64 tensors, since a tensor of another content does not recompile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcp.agreement import agree
from ringcp.errors import ArgumentError, LayoutError, RingcpError, UnsupportedError
from ringcp.executor import Job, Run, backward, drive, forward
from ringcp.groups import GroupState, state_of
from ringcp.kernels.base import Kernel, problem_of
from ringcp.kernels.registry import choose, kernel_at, kernel_index
from ringcp.layout import UNSIZED, Layout, decode_layout
from ringcp.lower import plan
from ringcp.mask import Mask, decode_mask
from ringcp.merge import accumulator_dtype
from ringcp.schedule import Heads
from ringcp.topology import ring
from ringcp.transport import P2P, warm_up

PLAN_VERSION = 1
MODES = ("auto", "ring")
AGREE = ("call", "context")


@torch.library.custom_op("ringcp::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout_spec: Tensor,
    mask_spec: Tensor,
    group_name: str,
    mode: str,
    kernel: str,
    scale: float | None,
    seq_len: int | None,
    agree_when: str,
    timeout: float | None,
    needs_grad: bool,
    needs_lse_grad: bool,
    refused: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, lse, and what backward has to know: int64 (3,) of sequence length, call number and kernel."""
    group = _group(group_name)
    state = state_of(group)
    state.check_usable()
    call = state.next_call()
    mask = _decoded_mask(mask_spec)
    code, given_len, given_world = layout_spec.tolist()
    refusal: RingcpError | None = None
    known_len: int | None = None
    chosen: Kernel | None = None
    try:
        if refused:
            raise ArgumentError(refused)
        _check_tensors(q, k, v)
        _check_options(mode, agree_when)
        known_len = _known_length(given_len, given_world, seq_len, state)
        chosen = choose(kernel, problem_of(q, k, v, mask.needs_band, needs_grad, needs_lse_grad))
    except RingcpError as error:
        refusal = error

    def describe() -> str:
        return (
            f"q={_facts(q)}; k={_facts(k)}; v={_facts(v)}; layout={(code, given_len, given_world)}; mask={mask}; "
            f"mode={mode}; kernel={chosen and chosen.name}; scale={scale}; seq_len={seq_len}; agree={agree_when}; "
            f"needs_grad={needs_grad, needs_lse_grad}; plan_version={PLAN_VERSION}"
        )

    if votes_on(agree_when, given_len, seq_len):
        lengths = agree(state, describe, q.shape[2] if q.ndim == 4 else 0, refusal, timeout)
        known_len = sum(lengths) if known_len is None else known_len
        layout = decode_layout(code, known_len, state.world_size)
        _check_lengths(lengths, layout, range(state.world_size))
    elif refusal is not None:
        raise refusal
    else:
        assert known_len is not None, "without it the ranks vote"
        layout = decode_layout(code, known_len, state.world_size)
        _check_lengths([q.shape[2]], layout, [state.rank])
    assert chosen is not None, "agree() raises what was refused"
    facts = torch.tensor([known_len, call, kernel_index(chosen.name)], dtype=torch.int64)
    shape = q.shape[0], q.shape[2], q.shape[1], v.shape[3]
    if 0 in shape[:1] + shape[2:3]:
        return q.new_zeros(shape).transpose(1, 2), _lse_like(q).zero_(), facts
    job = _job(group, state, layout, mask, chosen, scale, timeout, call, q, k)
    out, lse = _run(state, forward(job, q, k, v))
    return _stored(out, q.dtype), lse.contiguous(), facts


@attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
    return out, _lse_like(q), torch.empty(3, dtype=torch.int64)


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
    mask_spec: Tensor,
    facts: Tensor,
    group_name: str,
    scale: float | None,
    timeout: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the local rows."""
    group = _group(group_name)
    state = state_of(group)
    state.check_usable()
    seq_len, call, index = facts.tolist()
    if 0 in (q.shape[0], q.shape[1]):
        return tuple(_stored(x.new_zeros(x.shape), x.dtype) for x in (q, k, v))  # type: ignore[return-value]
    layout = decode_layout(int(layout_spec[0]), seq_len, state.world_size)
    job = _job(group, state, layout, _decoded_mask(mask_spec), kernel_at(index), scale, timeout, call, q, k)
    grads = _run(state, backward(job, dout, dlse, q, k, v, out, lse))
    return tuple(_stored(grad, x.dtype) for grad, x in zip(grads, (q, k, v), strict=True))  # type: ignore[return-value]


@attention_backward_op.register_fake
def _(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    def like(x: Tensor) -> Tensor:
        return x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)

    return like(q), like(k), like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, layout_spec, mask_spec, group_name, _, _, scale, _, _, timeout, *_ = inputs
    out, lse, facts = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, layout_spec, mask_spec, facts)
    ctx.options = (group_name, scale, timeout)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Any, ...]:
    q, k, v, out, lse, layout_spec, mask_spec, facts = ctx.saved_tensors
    # Whether a rank has an upstream gradient must not decide whether it takes part.
    dout = torch.zeros_like(out) if dout is None else dout
    grads = attention_backward_op(dout, dlse, q, k, v, out, lse, layout_spec, mask_spec, facts, *ctx.options)
    return (*grads, *(None,) * 12)


attention_op.register_autograd(_backward, setup_context=_setup_context)


def _refuse_double_backward(ctx: Any, *grads: Any) -> None:
    raise UnsupportedError(
        "double backward: ringcp.attention is differentiable once, got a backward pass through its gradient; "
        "call backward without create_graph=True"
    )


attention_backward_op.register_autograd(_refuse_double_backward)


def votes_on(agree_when: str, layout_len: int, seq_len: int | None) -> bool:
    """Whether the ranks vote on a call: the same on all ranks, whatever one of them refuses."""
    return agree_when != "context" or (layout_len == UNSIZED and seq_len is None)


def _group(group_name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]


def _decoded_mask(spec: Tensor) -> Mask:
    return decode_mask(tuple(spec.tolist()))


def _job(
    group: dist.ProcessGroup,
    state: GroupState,
    layout: Layout,
    mask: Mask,
    kernel: Kernel,
    scale: float | None,
    timeout: float | None,
    call: int,
    q: Tensor,
    k: Tensor,
) -> Job:
    heads = Heads(q.shape[1], k.shape[1])
    steps = plan(layout, mask, _ring(state.world_size), state.rank, heads, kernel.caps)
    if q.is_cuda and not state.warm and state.world_size > 1:
        warm_up(group, q.device)
        state.warm = True
    scale = q.shape[3] ** -0.5 if scale is None else scale
    return Job(steps, kernel, scale, P2P(group, timeout), call)


_ring = lru_cache(maxsize=64)(ring)


def _run(state: GroupState, run: Run) -> Any:
    """Drive one run; a failure leaves transfers without their peers, so the group is broken."""
    try:
        return drive(run)
    except BaseException as error:
        if state.world_size > 1:
            state.broken = str(error)
        raise


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As (B, S, H, D) in memory, the fixed strides that the fakes promise."""
    return x.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


def _lse_like(q: Tensor) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], q.shape[2]), dtype=accumulator_dtype(q.dtype))


def _facts(x: Tensor) -> str:
    # The local length is not part of it: lengths are compared with the layout instead.
    shape = (*x.shape[:2], "S", *x.shape[3:])
    return f"{shape} {x.dtype} on {x.device.type}"


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ArgumentError(
            f"q, k, v: expected 4 dims (batch, heads, local tokens, head dim), got {shapes}; add the missing dims"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ArgumentError(
            f"q, k, v: expected one dtype, got {q.dtype}, {k.dtype}, {v.dtype}; cast them, or run under torch.autocast"
        )
    if not q.is_floating_point():
        raise ArgumentError(f"q, k, v: expected a floating dtype, got {q.dtype}; cast them")
    if not q.device == k.device == v.device:
        raise ArgumentError(f"q, k, v: expected one device, got {q.device}, {k.device}, {v.device}; move them")
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ArgumentError(f"q, k, v: expected equal batch sizes in dim 0, got {shapes}; expand the smaller one")
    if k.shape[1] != v.shape[1]:
        raise ArgumentError(f"k, v: expected equal head counts in dim 1, got {shapes}; repeat the fewer heads")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ArgumentError(
            "q, k: expected query heads that are a multiple of the key heads in dim 1, "
            f"got {q.shape[1]} and {k.shape[1]}; repeat key and value heads until they divide"
        )
    if q.shape[3] != k.shape[3]:
        raise ArgumentError(f"q, k: expected equal head dims in dim 3, got {shapes}; pad the smaller one with zeros")
    if not q.shape[2] == k.shape[2] == v.shape[2]:
        raise LayoutError(
            f"q, k, v: expected equal local lengths in dim 2, got {shapes}; "
            "shard all three with ringcp.shard and one layout"
        )
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "CUDA graphs: the vote is on the host, got a call under capture; capture around attention only"
        )


def _check_options(mode: str, agree_when: str) -> None:
    for name, value, known in (("mode", mode, MODES), ("agree", agree_when, AGREE)):
        if value not in known:
            names = ", ".join(repr(n) for n in known)
            raise UnsupportedError(f"{name}: expected one of {names}, got {value!r}; choose one of these")


def _known_length(given_len: int, given_world: int, seq_len: int | None, state: GroupState) -> int | None:
    if given_world not in (UNSIZED, state.world_size):
        raise LayoutError(
            f"layout: expected one for the {state.world_size} ranks of mesh, got one for {given_world}; "
            "make the layout with mesh.size()"
        )
    if seq_len is not None and given_len not in (UNSIZED, seq_len):
        raise LayoutError(f"seq_len: expected the layout's {given_len}, got {seq_len}; give one of them")
    return seq_len if given_len == UNSIZED else given_len


def _check_lengths(lengths: list[int], layout: Layout, ranks: Sequence[int]) -> None:
    wrong = [
        f"{length} on rank {rank} instead of {layout.local_len(rank)}"
        for rank, length in zip(ranks, lengths, strict=True)
        if length != layout.local_len(rank)
    ]
    if wrong:
        raise LayoutError(
            f"q, k, v: expected local lengths in dim 2 that {layout!r} gives, got {', '.join(wrong)}; "
            "shard with ringcp.shard and this layout, or pass the layout that the shards were made with"
        )
