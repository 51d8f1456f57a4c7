"""The real executor with all ranks in one process, inside one autograd node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringcp.checks import (
    alibi_problem,
    check_layout,
    check_mask,
    check_mode,
    check_save,
    check_tensors,
    default_scale,
    dropout_problem,
    mask_problem,
    refuse_create_graph,
    scale_problem,
    softcap_problem,
)
from ringcp.errors import ArgumentError, LayoutError, UnsupportedError
from ringcp.executor import drive_all
from ringcp.kernels.base import problem_of
from ringcp.kernels.registry import choose
from ringcp.layout import Layout, layout_named
from ringcp.mask import Full, Mask
from ringcp.modes import resolve_mode
from ringcp.options import as_sdpa_casts, draw_seed, sinks_problem
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
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over whole tensors, computed as `world_size` ranks would: same schedule, kernels, merges and messages.

    Args:
        q: (B, Hq, S, D); k: (B, Hkv, S, D); v: (B, Hkv, S, Dv): the whole sequence, on a CPU or one GPU.
        world_size, mask, layout, kv_layout, mode, ulysses_degree, gather_memory, save, kernel, scale, softcap,
            alibi_slopes, dropout_p, sinks, return_lse: as in `ringcp.attention`.

    Returns:
        out (B, Hq, S, Dv) in the order of the sequence, and with `return_lse` lse (B, Hq, S). Differentiable once.

    Raises:
        ArgumentError, LayoutError: tensors that do not fit each other or the layout.
        UnsupportedError: for an unknown mode, one that does not fit the ranks, or if no kernel can do it.
    """
    check_mode(mode, ulysses_degree, world_size)
    check_save(save)
    q, k, v = as_sdpa_casts(q, k, v)
    cross = kv_layout is not None
    check_tensors(q, k, v, cross)
    wrong = mask_problem(mask) or scale_problem(scale) or softcap_problem(softcap) or sinks_problem(q, sinks)
    wrong = wrong or alibi_problem(alibi_slopes, q) or dropout_problem(dropout_p)
    if wrong:
        raise ArgumentError(wrong)
    if cross and alibi_slopes is not None:
        raise UnsupportedError("alibi_slopes: expected None in cross-attention (kv_layout=), got some; leave them out")
    full = Full() if mask is None else mask
    q_layout = _sized("layout", layout, q.shape[2], world_size)
    k_layout = _sized("kv_layout", kv_layout, k.shape[2], world_size) if kv_layout is not None else q_layout
    check_mask(full, q, q_layout, k_layout if cross else None)
    heads = Heads(q.shape[1], k.shape[1])
    chosen = resolve_mode(
        mode, ulysses_degree, heads.q, heads.kv, q.shape[2], world_size, world_size, full, q.device.type
    )
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    factor = default_scale(q) if scale is None else scale
    needs_lse = return_lse or sinks is not None
    needs = full.superset.needs_band, needs_grad, needs_grad and needs_lse
    more = {"alibi": alibi_slopes is not None, "dropout": dropout_p > 0}
    chosen_kernel = choose(kernel, problem_of(q, k, v, factor, softcap, *needs, full.explicit, **more))
    seed = int(draw_seed()) if dropout_p else 0
    extras = Extras(None if alibi_slopes is None else alibi_slopes.to(q.device), dropout_p, seed)

    sizes = sizes_of(k, v, k.shape[2], gather_memory)

    def runs() -> list[Run]:
        transport = InProcess()
        call = chosen, q_layout, k_layout if cross else None, full, heads
        ends = [transport.endpoint(rank) for rank in range(world_size)]
        return [
            make_run(*call, rank, chosen_kernel, factor, end, sizes, softcap=softcap, extras=extras)
            for rank, end in enumerate(ends)
        ]

    out, lse = _InProcess.apply(q, k, v, q_layout, k_layout, runs, needs_grad and save != "local")
    if sinks is not None:
        out, lse = fold_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def _sized(argument: str, layout: Layout | str, seq_len: int, world_size: int) -> Layout:
    check_layout(layout, world_size)
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
