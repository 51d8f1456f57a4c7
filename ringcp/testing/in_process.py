"""The real executor with all ranks in one process, inside one autograd node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringcp.attention import as_sdpa_casts
from ringcp.checks import (
    check_layout,
    check_mask,
    check_mode,
    check_tensors,
    default_scale,
    mask_problem,
    refuse_create_graph,
    scale_problem,
)
from ringcp.errors import ArgumentError, LayoutError
from ringcp.executor import drive_all
from ringcp.kernels.base import problem_of
from ringcp.kernels.registry import choose
from ringcp.layout import Layout, layout_named
from ringcp.mask import Full, Mask
from ringcp.modes import Mode, mode_of
from ringcp.runs import Run, make_run
from ringcp.schedule import Heads
from ringcp.transport import InProcess


def in_process(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    world_size: int,
    mask: Mask | None = None,
    layout: Layout | str = "auto",
    mode: str = "auto",
    ulysses_degree: int | None = None,
    kernel: str = "auto",
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over whole tensors, computed as `world_size` ranks would: same schedule, kernels, merges and messages.

    Args:
        q: (B, Hq, S, D); k: (B, Hkv, S, D); v: (B, Hkv, S, Dv): the whole sequence, on a CPU or one GPU.
        world_size, mask, layout, mode, ulysses_degree, kernel, scale, return_lse: as in `ringcp.attention`.

    Returns:
        out (B, Hq, S, Dv) in the order of the sequence, and with `return_lse` lse (B, Hq, S). Differentiable once.

    Raises:
        ArgumentError, LayoutError: tensors that do not fit each other or the layout.
        UnsupportedError: for an unknown mode, one that does not fit the ranks, or if no kernel can do it.
    """
    check_mode(mode, ulysses_degree, world_size)
    q, k, v = as_sdpa_casts(q, k, v)
    check_tensors(q, k, v)
    check_layout(layout, world_size)
    wrong = mask_problem(mask) or scale_problem(scale)
    if wrong:
        raise ArgumentError(wrong)
    seq_len = q.shape[2]
    lay = layout_named(layout, seq_len, world_size) if isinstance(layout, str) else layout
    if (lay.seq_len, lay.world_size) != (seq_len, world_size):
        raise LayoutError(
            f"layout: expected one for {seq_len} tokens on {world_size} ranks, got {lay!r}; make it with these numbers"
        )
    check_mask(Full() if mask is None else mask, q, lay)
    full = Full() if mask is None else mask
    chosen = mode_of(
        mode, ulysses_degree, Heads(q.shape[1], k.shape[1]), seq_len, world_size, world_size, full, q.device.type
    )
    out, lse = _InProcess.apply(q, k, v, lay, full, chosen, kernel, scale, return_lse)
    return (out, lse) if return_lse else out


class _InProcess(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        mask: Mask,
        mode: Mode,
        kernel_name: str,
        scale: float | None,
        lse_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        needs_grad = any(ctx.needs_input_grad)
        factor = default_scale(q) if scale is None else scale
        kernel = choose(kernel_name, problem_of(q, k, v, factor, mask.needs_band, needs_grad, needs_grad and lse_grad))

        heads = Heads(q.shape[1], k.shape[1])

        def run_all(start: Callable[..., Any], *tensors: Tensor | None) -> list[Any]:
            transport = InProcess()
            runs = []
            for rank in range(layout.world_size):
                run = make_run(mode, layout, mask, heads, rank, kernel, factor, transport.endpoint(rank))
                runs.append(start(run, *(None if x is None else layout.shard(x, rank, 2) for x in tensors)))
            with torch.autocast(q.device.type, enabled=False):
                results = drive_all(runs)
            return [layout.unshard(parts, 2) for parts in zip(*results, strict=True)]

        out, lse = run_all(Run.forward, q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.run_all = run_all
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        refuse_create_graph("in_process")
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        grads = ctx.run_all(Run.backward, dout, dlse, q, k, v, out, lse)
        return *(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True)), *(None,) * 6
