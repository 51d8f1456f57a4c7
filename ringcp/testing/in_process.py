"""The real executor with all ranks in one process, inside one autograd node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringcp.agreement import Told
from ringcp.attn_mask import as_BHMN, mask_refusal, reading_of
from ringcp.checks import (
    check_layout,
    check_mask,
    check_mode,
    check_save,
    check_tensors,
    default_scale,
    refuse_create_graph,
)
from ringcp.errors import LayoutError, UnsupportedError
from ringcp.executor import drive_all
from ringcp.grouped import Grid, grouped
from ringcp.kernels.base import problem_of
from ringcp.kernels.registry import choose
from ringcp.layout import Layout, layout_named
from ringcp.mask import Full, Mask
from ringcp.modes import resolve_mode
from ringcp.options import Options, Refusal, as_sdpa_casts, draw_seed, refusal_of
from ringcp.runs import Run, make_run, sizes_of
from ringcp.schedule import Heads
from ringcp.sinks import fold_sinks
from ringcp.transport import InProcess
from ringcp.written import Extras


def in_process(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    world_size: int,
    mask: Mask | None = None,
    layout: Layout | str = "auto",
    kv_layout: Layout | str | None = None,
    mode: str = "auto",
    ulysses_degree: int | None = None,
    gather_memory: int | None = None,
    save: str = "auto",
    kernel: str = "auto",
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over whole tensors, computed as `world_size` ranks would: same schedule, kernels, merges and messages.

    Args:
        q: (B, Hq, S, D); k: (B, Hkv, S, D); v: (B, Hkv, S, Dv): the whole sequence, on a CPU or one GPU.
        world_size, mask, layout, kv_layout, mode, ulysses_degree, gather_memory, save, kernel, scale, softcap,
            alibi_slopes, dropout_p, sinks, return_lse: as in `ringcp.attention`.
        attn_mask: (B | 1, Hq | 1, S | 1, S | 1), or less dims in front, of all rows and keys in their order: beside
            `mask`, as that of a call in a `ringcp.context_parallel`. Each rank is given its rows of it; that ranks
            fetch what others hold of it is left out here.

    Returns:
        out (B, Hq, S, Dv) in the order of the sequence, and with `return_lse` lse (B, Hq, S). Differentiable once.

    Raises:
        ArgumentError, LayoutError: tensors that do not fit each other or the layout.
        UnsupportedError: for an unknown mode, one that does not fit the ranks, or if no kernel can do it.
    """
    options = Options(
        mask=mask,
        layout=layout,
        kv_layout=kv_layout,
        mode=mode,
        ulysses_degree=ulysses_degree,
        gather_memory=gather_memory,
        save=save,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p,
        kernel=kernel,
        sinks=sinks,
    )
    _check(refusal_of(q, k, v, options))
    q, k, v = as_sdpa_casts(q, k, v)
    cross = kv_layout is not None
    check_tensors(q, k, v, cross)
    check_mode(mode, ulysses_degree, world_size)
    check_save(save)
    full = Full() if mask is None else mask
    q_layout = _sized("layout", layout, q.shape[2], world_size)
    k_layout = _sized("kv_layout", kv_layout, k.shape[2], world_size) if kv_layout is not None else q_layout
    check_mask(full, q, q_layout, k_layout if cross else None)
    added = None if attn_mask is None else _whole_mask(attn_mask, q, k, q_layout, k_layout)
    heads = Heads(q.shape[1], k.shape[1])
    chosen = resolve_mode(
        mode, ulysses_degree, heads.q, heads.kv, q.shape[2], world_size, world_size, full, q.device.type
    )
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    factor = default_scale(q) if scale is None else scale
    needs_lse = return_lse or sinks is not None
    needs = full.superset.needs_band, needs_grad, needs_grad and needs_lse
    more = {"alibi": alibi_slopes is not None, "dropout": dropout_p > 0}
    problem = problem_of(q, k, v, factor, softcap, *needs, full.explicit, attn_mask=added, **more)
    chosen_kernel = choose(kernel, problem)
    seed = int(draw_seed()) if dropout_p else 0
    slopes = None if alibi_slopes is None else alibi_slopes.to(q.device)
    sizes = sizes_of(k, v, k.shape[2], gather_memory)

    def runs() -> list[Run]:
        transport = InProcess()
        call = chosen, q_layout, k_layout if cross else None, full, heads
        ends = [transport.endpoint(rank) for rank in range(world_size)]
        masks = [_rows(added, q_layout, chosen.ulysses_degree, rank) for rank in range(world_size)]
        extras = [Extras(slopes, dropout_p, seed, rows) for rows in masks]
        return [
            make_run(*call, rank, chosen_kernel, factor, end, sizes, softcap=softcap, extras=extras[rank])
            for rank, end in enumerate(ends)
        ]

    out, lse = _InProcess.apply(q, k, v, q_layout, k_layout, runs, needs_grad and save != "local")
    if sinks is not None:
        out, lse = fold_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def _check(refusal: Refusal | None) -> None:
    if refusal is not None:
        error, why = refusal
        raise error(why)


def _whole_mask(attn_mask: Tensor, q: Tensor, k: Tensor, layout: Layout, kv_layout: Layout) -> Tensor:
    """(B | 1, Hq | 1, S | 1, S): as one rank alone would have it."""
    mask = as_sdpa_casts(attn_mask)[0] if isinstance(attn_mask, Tensor) else attn_mask
    _check(mask_refusal(mask, q, is_causal=False))
    mask_BHMN = as_BHMN(mask, q).detach()
    reading_of([Told(q.shape[2], k.shape[2], 0, False, *mask_BHMN.shape[2:])], layout, kv_layout)
    return mask_BHMN.expand(*mask_BHMN.shape[:3], k.shape[2])


def _rows(mask_BHMN: Tensor | None, layout: Layout, degree: int, rank: int) -> Tensor | None:
    """Those that a rank computes, in its order: its own, or those of its exchange; or the one for all."""
    if mask_BHMN is None or mask_BHMN.shape[2] == 1:
        return mask_BHMN
    spans = layout.spans(rank)
    if degree > 1:
        spans = grouped(layout, degree).spans(Grid(layout.world_size, degree).ring_rank(rank))
    return mask_BHMN[:, :, [row for span in spans for row in range(*span)]]


def _sized(argument: str, layout: Layout | str, seq_len: int, world_size: int) -> Layout:
    check_layout(layout, world_size, argument)
    sized = layout_named(layout, seq_len, world_size) if isinstance(layout, str) else layout
    if sized.replicated:
        raise UnsupportedError(
            f"{argument}: expected one without replicated tokens, got {sized!r}; use ringcp.attention"
        )
    if (sized.seq_len, sized.world_size) != (seq_len, world_size):
        raise LayoutError(
            f"{argument}: expected one for {seq_len} tokens on {world_size} ranks, got {sized!r}; "
            "make it with these numbers"
        )
    return sized


class _InProcess(torch.autograd.Function):
    """Every rank's run of `runs()`, on its shards of whole tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        kv_layout: Layout,
        runs: Callable[[], list[Run]],
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        of_q, of_kv = _Sharded(layout), _Sharded(kv_layout)
        with torch.autocast(q.device.type, enabled=False):
            shards = zip(runs(), of_q(q), of_kv(k), of_kv(v), strict=True)
            each = [run.forward(q_local, k_local, v_local, keep) for run, q_local, k_local, v_local in shards]
            *results, kept = zip(*drive_all(each), strict=True)
        out, lse = (layout.unshard(parts, 2) for parts in results)
        ctx.save_for_backward(q, k, v, out, lse, *kept)
        ctx.how = of_q, of_kv, runs
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        refuse_create_graph("in_process")
        q, k, v, out, lse, *kept = ctx.saved_tensors
        of_q, of_kv, runs = ctx.how
        dout = torch.zeros_like(out) if dout is None else dout
        shards = of_q(dout), of_q(dlse), of_q(q), of_kv(k), of_kv(v), of_q(out), of_q(lse), kept
        with torch.autocast(q.device.type, enabled=False):
            results = drive_all([run.backward(*args) for run, *args in zip(runs(), *shards, strict=True)])
        grads = zip(zip(*results, strict=True), (of_q, of_kv, of_kv), (q, k, v), strict=True)
        return *(of.layout.unshard([part.to(x.dtype) for part in parts], 2) for parts, of, x in grads), *(None,) * 4


class _Sharded:
    """Cuts whole tensors (B, H, S, ...) by a layout, into one a rank; of None, gives None for each."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def __call__(self, x: Tensor | None) -> list[Any]:
        return [None if x is None else self.layout.shard(x, rank, 2) for rank in range(self.layout.world_size)]
