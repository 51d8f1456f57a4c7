"""`ringcp.attention`: exact attention over the ranks of a mesh, on local shards."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringcp.checks import layout_problem, mask_problem, scale_problem, shown
from ringcp.errors import ArgumentError, KeywordError, LayoutError, RingcpError, UnsupportedError
from ringcp.groups import group_name_of
from ringcp.layout import Layout, unsized_spec
from ringcp.mask import Full, Mask
from ringcp.ops import attention_op
from ringcp.sinks import fold_sinks

_FULL = Full()

# A longer wait than a month does not fit what the back ends count in.
_MAX_SECONDS = 2_592_000


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    mask: Mask | None = None,
    layout: Layout | str = "auto",
    seq_len: int | None = None,
    mode: str = "auto",
    ulysses_degree: int | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    sinks: Tensor | None = None,
    return_lse: bool = False,
    agree: str | None = None,
    timeout: float | timedelta | None = None,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of one long sequence whose tokens lie on the ranks of `mesh`: the result equals attention over
    the whole sequence.

    Every rank calls with its own shard, makes the same calls in the same order, and runs backward of each.
    Differentiable once, also through the lse; the gradients are those of the sum over ranks of each rank's loss. Make
    one `Layout` and pass it to `shard`, `attention` and `unshard`: with a name, the length is what came, and shards of
    another layout with the same lengths can't be told apart.

    Args:
        q: (B, Hq, S_local, D), fp32, fp64, bf16 or fp16, any strides.
        k: (B, Hkv, S_local, D); Hkv divides Hq, and query head h uses head ``h // (Hq // Hkv)``, never repeated.
        v: (B, Hkv, S_local, Dv).
        mesh: the `DeviceMesh` over which the sequence is split, such as ``mesh["cp"]`` of a larger one; or a 2-D one,
            ``mesh["cp", "sp"]``, whose second dim exchanges heads. Ranks are counted along the last dim first.
        mask: which positions attend to which; None is full attention.
        layout: which rank owns which tokens: a `Layout`, or "contiguous", "head_tail", "striped" with the length found
            out by the vote. "auto" is head-tail; a name that is not the layout of a `context_parallel` around the call
            on this mesh raises.
        seq_len: length of the whole sequence, if the layout does not say it; the local length is checked against it.
        mode: how queries meet keys; all modes take the same shards and compute the same. "ring": keys and values pass
            from rank to rank, or straight to where a mask needs them. "gather": all that are needed are gathered, some
            heads at a time. "ulysses": tokens are exchanged for heads, each rank computes some heads; the same bits as
            one process. "usp": exchange among neighbours, ring across. "auto" chooses; see `ringcp.explain`.
        ulysses_degree: with "usp" (or "gather", or "auto") on a 1-D mesh: how many neighbouring ranks exchange heads; a
            divisor of the ranks. A 2-D mesh says it itself.
        scale: factor on the scores; None is ``D ** -0.5``.
        kernel: "auto"; a family of kernels, "sdpa"; or one of them: "sdpa_flash", "sdpa_cudnn", "sdpa_efficient",
            "sdpa_flash_cpu", "reference" (plain matmuls, memory for the whole score matrix).
        sinks: (Hq,) logits that take part in each row's softmax without a value (attention sinks), the same on every
            rank; differentiable: each rank gets the gradient of its own rows, as for any parameter.
        return_lse: also return the log-sum-exp of the scaled scores.
        agree: when the ranks vote on their arguments: "call", before each call (default on CPU), or "context" (default
            on CUDA): not in this call, if `seq_len` or a `Layout` says the length. Without a vote the local length is
            still checked before anything is sent, but ranks that disagree in heads, dtype, mask or options are not
            noticed in time: on gloo they run into the timeout, on NCCL they hang or get wrong numbers. A vote is one
            round of small messages. Measured with gloo on 2 cores: 120 us between 2 idle ranks, 800 to 1,400 us where
            the ranks compute and their communication threads wait for a core (call against context, medians);
            3,000 us between 4 ranks on the 2 cores.
        timeout: seconds (or a `timedelta`) to wait for peers; None is the process group's own timeout.

    Returns:
        out (B, Hq, S_local, Dv) in the dtype of q; with `return_lse` also lse (B, Hq, S_local), natural log, fp32
        (fp64 for fp64 inputs), -inf for rows that attend to nothing (their out is 0).

    Under `torch.autocast` q, k and v are cast as `F.scaled_dot_product_attention` casts them.

    Raises:
        ArgumentError: shapes, dtypes or heads that do not fit each other.
        LayoutError: a mesh that is not 1-D or 2-D, or shards whose lengths do not fit the layout.
        UnsupportedError: an unknown mode or kernel, or no kernel that can do this; all reasons are listed.
        AgreementError: the ranks called with different arguments; raised on every rank, and nothing was sent.
        KeywordError: a keyword that this function does not have.
        PeerError: on gloo, a peer died or did not come within `timeout`. The group is unusable afterwards, and says so.
            On NCCL the watchdog decides.
    """
    return attend(
        q,
        k,
        v,
        group_name=group_name_of(mesh),
        mask=mask,
        layout=layout,
        seq_len=seq_len,
        mode=mode,
        ulysses_degree=degree_in(mesh, ulysses_degree),
        scale=scale,
        kernel=kernel,
        sinks=sinks,
        return_lse=return_lse,
        agree=agree,
        timeout=timeout,
        refusal=unknown_keyword(unknown, "attention"),
    )


Refusal = tuple[type[RingcpError], str]
"""Why a rank cannot make a call: the error, and its message."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group_name: str,
    mask: Mask | None,
    layout: Layout | str,
    seq_len: int | None,
    mode: str,
    ulysses_degree: int | None,
    scale: float | None,
    kernel: str,
    sinks: Tensor | None,
    return_lse: bool,
    agree: str | None,
    timeout: float | timedelta | None,
    refusal: Refusal | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` on a group known by name; `refusal` is what the caller already has against the call."""
    if refusal is None:
        refusal = _refusal(q, k, v, mask, layout, seq_len, mode, ulysses_degree, scale, kernel, agree, timeout)
    if refusal is None:
        refusal = _wrong_sinks(q, sinks)
    if agree is None:
        agree = "context" if isinstance(q, Tensor) and q.device.type == "cuda" else "call"
    if refusal is not None:
        silent = agree == "context" and (seq_len is not None or isinstance(layout, Layout))
        if not torch.compiler.is_compiling():
            _vote_against(group_name, silent, *refusal)
        # Traced: the op itself raises when the compiled code runs.
        mask, layout, mode, scale, kernel, timeout, sinks = None, "auto", "auto", None, "auto", None, None
        ulysses_degree = None
        seq_len, agree = (0, "context") if silent else (None, "call")
    q, k, v = as_sdpa_casts(q, k, v)
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    out, lse, _ = attention_op(
        q,
        k,
        v,
        unsized_spec(layout) if isinstance(layout, str) else layout.spec,
        (_FULL if mask is None else mask).spec,
        group_name,
        mode,
        ulysses_degree,
        kernel,
        scale,
        seq_len,
        agree,
        seconds_of(timeout),
        needs_grad,
        needs_grad and (return_lse or sinks is not None),
        f"sinks={None if sinks is None else sinks.dtype}",
        "" if refusal is None else refusal[1],
    )
    if sinks is not None:
        out, lse = fold_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def _refusal(
    q: object,
    k: object,
    v: object,
    mask: object,
    layout: object,
    seq_len: object,
    mode: object,
    ulysses_degree: object,
    scale: object,
    kernel: object,
    agree: object,
    timeout: object,
) -> Refusal | None:
    """What the op cannot even take, or would not see."""
    for name, value in (("q", q), ("k", k), ("v", v)):
        if not isinstance(value, Tensor):
            return ArgumentError, f"{name}: expected a tensor, got {type(value).__name__}; pass the local shard"
        if hasattr(value, "to_local"):
            return UnsupportedError, f"{name}: expected a local tensor, got a DTensor; pass {name}.to_local()"
        if value.layout != torch.strided:
            return UnsupportedError, f"{name}: expected a strided tensor, got layout {value.layout}; make it dense"
        if value.device.type not in ("cpu", "cuda"):
            return UnsupportedError, f"{name}: expected a CPU or CUDA tensor, got one on {value.device}; move it"
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None:
            return UnsupportedError, (
                f"forward mode: ringcp.attention expected tensors without tangents, got a dual tensor as {name}; "
                "use torch.autograd.grad or backward"
            )
    if torch._C._are_functorch_transforms_active():
        return UnsupportedError, (
            "torch.func: ringcp.attention expected torch.autograd alone, got a call under vmap, grad, vjp or jvp; "
            "use torch.autograd.grad or backward, and pass the batch in dim 0"
        )
    wrong = (
        mask_problem(mask)
        or scale_problem(scale)
        or option_problem(seq_len, mode, ulysses_degree, kernel, agree, timeout)
    )
    if wrong:
        return ArgumentError, wrong
    wrong = layout_problem(layout)
    return (LayoutError, wrong) if wrong else None


def option_problem(
    seq_len: object, mode: object, ulysses_degree: object, kernel: object, agree: object, timeout: object
) -> str:
    """Which option is not even of the right type; empty if all are."""
    if seq_len is not None and (isinstance(seq_len, bool) or not isinstance(seq_len, (int, torch.SymInt))):
        return f"seq_len: expected an integer or None, got {seq_len!r}; give the length of the whole sequence"
    if ulysses_degree is not None and (
        isinstance(ulysses_degree, bool) or not isinstance(ulysses_degree, int) or ulysses_degree < 1
    ):
        return f"ulysses_degree: expected a number of ranks or None, got {shown(ulysses_degree)}; give an int"
    if timeout is not None:
        seconds = seconds_of(timeout)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < _MAX_SECONDS:
            return (
                f"timeout: expected seconds above 0 and below {_MAX_SECONDS}, a timedelta or None, got {timeout!r}; "
                "give seconds"
            )
    for name, value in (("mode", mode), ("kernel", kernel), ("agree", "" if agree is None else agree)):
        if not isinstance(value, str):
            return f"{name}: expected a word, got {shown(value)}; help(ringcp.attention) lists the words"
    return ""


def degree_in(mesh: DeviceMesh, given: int | None) -> Any:
    """How many ranks exchange heads, as a 2-D mesh says it, or else as given; a text if the two contradict."""
    if mesh.ndim != 2 or given == mesh.size(1):
        return given if mesh.ndim != 2 else mesh.size(1)
    return mesh.size(1) if given is None else f"{shown(given)} (and mesh has {mesh.size(1)} ranks in its second dim)"


def seconds_of(timeout: Any) -> Any:
    """A timedelta in seconds, anything else as it is."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout


def unknown_keyword(unknown: Mapping[str, object], function: str) -> Refusal | None:
    """The refusal of the first keyword that a function does not have."""
    for name, value in unknown.items():
        fix = _ELSEWHERE.get(name, f"leave it out; help(ringcp.{function}) lists the arguments")
        return KeywordError, f"{name}: expected an argument of ringcp.{function}, got {name}={shown(value)}; {fix}"
    return None


def _wrong_sinks(q: Tensor, sinks: object) -> Refusal | None:
    if sinks is None or (isinstance(sinks, Tensor) and sinks.is_floating_point() and sinks.shape == q.shape[1:2]):
        return None
    return ArgumentError, (
        f"sinks: expected a floating tensor of one logit for each query head, {tuple(q.shape[1:2])}, got "
        f"{shown(sinks)}; pass sinks of shape (Hq,)"
    )


_ELSEWHERE = {
    "is_causal": "pass mask=ringcp.Causal()",
    "attn_mask": "pass mask= a ringcp mask: tensor masks are not supported",
    "dropout_p": "leave it out: dropout is not supported",
    "softcap": "leave it out: no kernel of ringcp takes it yet",
    "alibi_slopes": "leave it out: no kernel of ringcp takes them yet",
    "enable_gqa": "leave it out: the head counts say it",
    "max_seqlen": "leave it out: cu_seqlens says it",
    "group": "pass mesh= a DeviceMesh, such as DeviceMesh.from_group(group, device_type)",
}


def _vote_against(group_name: str, silent: bool, error: type[RingcpError], why: str) -> NoReturn:
    """Raise after the vote, so that no peer waits for this rank; at once where its peers do not vote."""
    if silent:
        raise error(why)
    nothing, spec = torch.empty(0, device="cpu"), unsized_spec("auto")
    with torch._C._DisableFuncTorch():
        try:
            options = ("auto", None, "auto", None, None, "call", None, False, False, "", why)
            attention_op(nothing, nothing, nothing, spec, _FULL.spec, group_name, *options)
        except ArgumentError as voted:
            raise error(why) from voted.__cause__
    raise AssertionError("the op raises what it is told to refuse")


def as_sdpa_casts(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast, the tensors as `F.scaled_dot_product_attention` would see them: all but fp64 are cast."""
    device = q.device.type
    if not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    return cast(q), cast(k), cast(v)
