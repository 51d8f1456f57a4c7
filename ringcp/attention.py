"""`ringcp.attention`: exact attention over the ranks of a mesh, on local shards."""

from __future__ import annotations

from datetime import timedelta
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringcp.errors import ArgumentError, RingcpError
from ringcp.groups import group_name_of
from ringcp.joint import joint_attention
from ringcp.layout import Layout
from ringcp.mask import Mask
from ringcp.opcall import call_op
from ringcp.options import Options, Refusal, as_sdpa_casts, degree_in, refusal_of, unknown_keyword
from ringcp.sinks import fold_sinks


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    mask: Mask | None = None,
    layout: Layout | str = "auto",
    kv_layout: Layout | str | None = None,
    seq_len: int | None = None,
    mode: str = "auto",
    ulysses_degree: int | None = None,
    gather_memory: int | None = None,
    save: str = "auto",
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
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
        k: (B, Hkv, S_local, D), or this rank's rows in `kv_layout`; Hkv divides Hq, and query head h uses head
            ``h // (Hq // Hkv)``, never repeated.
        v: (B, Hkv, S_local, Dv), as k.
        mesh: the `DeviceMesh` over which the sequence is split, such as ``mesh["cp"]`` of a larger one; or a 2-D one,
            ``mesh["cp", "sp"]``, whose second dim exchanges heads. Ranks are counted along the last dim first.
        mask: which positions attend to which; None is full attention.
        layout: which rank owns which tokens: a `Layout`, or "contiguous", "head_tail", "striped" with the length found
            out by the vote. "auto" is head-tail; a name that is not the layout of a `context_parallel` around the call
            on this mesh raises.
        kv_layout: of keys and values that are another sequence than the queries (cross-attention); None is `layout`.
            Both count their positions from 0.
        seq_len: length of the whole sequence of queries, if the layout does not say it; the local length is checked
            against it.
        mode: how queries meet keys; all modes take the same shards and compute the same. "ring": keys and values pass
            from rank to rank, or straight to where a mask needs them. "gather": all that are needed are gathered, some
            heads at a time. "ulysses": tokens are exchanged for heads, each rank computes some heads; on CPU mostly the
            same bits as one process (`ringcp.explain` says for what). "usp": exchange among neighbours, ring across.
            "auto" chooses by the rule that `ringcp.explain` explains.
        ulysses_degree: with "usp" (or "gather", or "auto") on a 1-D mesh: how many neighbouring ranks exchange heads; a
            divisor of the ranks. A 2-D mesh says it itself.
        gather_memory: with "gather", the bytes that the keys and values in hand may take on a rank, and as many are
            under way; at least one head is gathered at a time. None: half of the heads at a time, at most 1 GiB.
        save: what "ulysses" and "usp" save for backward. "exchanged": queries, keys, values and results as each rank
            has them for its heads, so that backward exchanges gradients alone, a third fewer bytes in all; the local
            result, which the next layer mostly saves too, comes on top. "local": the local rows, which backward
            exchanges once more; for selective checkpointing that saves the results of attention, which would save the
            exchanged ones as well. "auto" is "exchanged"; but unless `mode` names one of them, "local" in compiled
            code and in calls without a vote.
        scale: factor on the scores; None is ``D ** -0.5``.
        softcap: a positive C: scaled scores become ``C * tanh(score / C)`` before they are masked (Gemma 2); None is no
            cap. Few kernels can: on a CPU "reference", which "auto" then takes without a word, with memory for the
            score matrix of each launch; on a GPU "flash2", "flash3" and "flash4", if installed, and "flex".
        alibi_slopes: (Hq,) or (B, Hq), fp32, the same on every rank: ``-slope * |i - j|`` is added to the scaled
            (and capped) score of query i and key j, positions of the whole sequence (ALiBi, Press et al. 2022, as
            flash-attn has it for queries and keys of one length). No gradient. Kernels: "reference", on a CPU
            "sdpa_flash_cpu", which makes the bias of some rows at a time, and on a GPU "flex", which compiles it in.
        dropout_p: the probability with which a weight is dropped after the softmax, the others divided by 1 - p; 0.0 in
            evaluation is the caller's to say. The lse does not see it. The seed is drawn from torch's generator of the
            CPU; that of rank 0 counts, so a call with dropout always votes. What is dropped depends on the seed, batch
            row, head and positions alone: every mode, layout and number of ranks drops the same. Only
            ``kernel="reference"`` can, and has to be named: it needs memory for the score matrix of each launch.
        kernel: "auto"; a family of kernels, "sdpa"; or one of them: "flash3", "flash4", "flash2" (the packages, if
            installed), "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_flash_cpu" (built into torch), "flex"
            (FlexAttention, compiled at the first call of a kind, with one forward more in backward; "auto" takes it on
            a GPU for a `Predicate`, ALiBi or a softcap), "reference" (plain matmuls, memory for the whole score
            matrix).
        sinks: (Hq,) logits that take part in each row's softmax without a value (attention sinks), not capped, the
            same on every rank (values are not compared); differentiable: each rank gets the gradient of its own rows,
            as for any parameter.
        return_lse: also return the log-sum-exp of the scaled (and capped, and biased) scores.
        agree: when the ranks vote on their arguments: "call", before each call (default on CPU), or "context" (default
            on CUDA): not in this call, if `seq_len` or a `Layout` says the length and nothing is dropped. Without a
            vote the local length is still checked before anything is sent, but ranks that disagree in heads, dtype,
            mask or options are not noticed in time: on CPUs they run into the timeout, on NCCL they hang or get wrong
            numbers. Ranks of one node vote on a page of memory that they share (on Linux, where they see /dev/shm and
            one another's processes), other groups by one round of small messages. Measured on 2 cores, medians: 10 us
            between 2 idle ranks, 80 us between 4; with messages 100 and 650 us. Where 4 ranks compute on the 2 cores,
            2 and 7 ms, most of it waiting for a core.
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
        PeerError: on CPUs, a peer died or did not come within `timeout`. The group is unusable afterwards, and says so.
            On NCCL the watchdog decides.
    """
    options = Options(
        mask=mask,
        layout=layout,
        kv_layout=kv_layout,
        seq_len=seq_len,
        mode=mode,
        ulysses_degree=degree_in(mesh, ulysses_degree),
        gather_memory=gather_memory,
        save=save,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        kernel=kernel,
        sinks=sinks,
        agree=agree,
        timeout=timeout,
    )
    refusal = unknown_keyword(unknown, "attention")
    return attend(q, k, v, options, group_name=group_name_of(mesh), return_lse=return_lse, refusal=refusal)


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, *, group_name: str, return_lse: bool, refusal: Refusal | None
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` on a group known by name; `refusal` is what the caller already has against the call."""
    refusal = refusal or refusal_of(q, k, v, options)
    options = options.with_agree(q.device.type if isinstance(q, Tensor) else "cpu")
    if refusal is not None:
        silent = not options.votes
        if not torch.compiler.is_compiling():
            _vote_against(group_name, silent, *refusal)
        # Traced: the op itself raises when the compiled code runs.
        agree = "context" if silent else "call"
        options = Options(seq_len=0 if silent else None, agree=agree)
    q, k, v = as_sdpa_casts(q, k, v)
    sinks = options.sinks
    needs_lse = return_lse or sinks is not None
    if refusal is None and options.joint and q.ndim == k.ndim == v.ndim == 4:  # of other dims, the op refuses them
        out, lse = joint_attention(q, k, v, options, group_name)
    else:
        out, lse = call_op(q, k, v, options, group_name, needs_lse, refused="" if refusal is None else refusal[1])
        if sinks is not None:
            out, lse = fold_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def _vote_against(group_name: str, silent: bool, error: type[RingcpError], why: str) -> NoReturn:
    """Raise after the vote, so that no peer waits for this rank; at once where its peers do not vote."""
    if silent:
        raise error(why)
    nothing = torch.empty(0, device="cpu")
    with torch._C._DisableFuncTorch():
        try:
            call_op(nothing, nothing, nothing, Options(agree="call"), group_name, False, refused=why)
        except ArgumentError as voted:
            raise error(why) from voted.__cause__
    raise AssertionError("the op raises what it is told to refuse")
