"""Who computes it. A further provider is one function and one entry in `PROVIDERS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ringcp
from benchmarks.cases import DTYPES, Case, document_lengths, parse_mask
from ringcp.groups import neighbours
from ringcp.layout import layout_named
from ringcp.modes import MODES, choose_mode

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Setting:
    """What a provider is told: the case, and how it is to be computed. It takes from this what it knows.

    ulysses_degree: how many neighbouring ranks exchange heads in mode "usp".
    """

    case: Case
    mesh: DeviceMesh
    mode: str
    layout: str
    agree: str
    ulysses_degree: int = 2


@dataclass(frozen=True)
class Prepared:
    """The function that is timed, on this rank's q, k, v, and which of the tokens these hold (None: all of them).

    meant: the mode that "auto" turned out to be; empty if the mode was given.
    """

    attention: Attention
    layout: ringcp.Layout | None
    meant: str = ""


@dataclass(frozen=True)
class Provider:
    """A named way to compute attention.

    prepare: what need not be done per call. It runs on every rank of the mesh, for a single process on rank 0.
    modes: those it knows; other modes are not run.
    single_process: rank 0 computes the whole sequence with all cores, while the other ranks wait.
    """

    prepare: Callable[[Setting], Prepared]
    modes: tuple[str, ...]
    single_process: bool = False


def _ringcp(setting: Setting) -> Prepared:
    mask = parse_mask(setting.case.mask)
    seq_len = setting.case.seq_len
    if setting.layout == "auto":
        layout = ringcp.make_layout(mask, seq_len, setting.mesh)
    else:
        layout = layout_named(setting.layout, seq_len, setting.mesh.size())

    degree = setting.ulysses_degree if setting.mode == "usp" else None

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = ringcp.attention(
            q,
            k,
            v,
            mesh=setting.mesh,
            mask=mask,
            layout=layout,
            mode=setting.mode,
            ulysses_degree=degree,
            agree=setting.agree,
        )
        assert isinstance(out, Tensor)  # and not the lse as well
        return out

    meant = ""
    if setting.mode == "auto":
        ranks = setting.mesh.mesh.flatten().tolist()
        meant = meant_by_auto(setting.case, len(ranks), neighbours(ranks), setting.mesh.device_type)
    return Prepared(attention, layout, meant)


def meant_by_auto(case: Case, world_size: int, ranks_per_node: int, device_type: str) -> str:
    """The mode that ringcp's "auto" is."""
    choice = choose_mode(
        q_heads=case.heads,
        kv_heads=case.kv_heads,
        seq_len=case.seq_len,
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        mask=parse_mask(case.mask),
        device_type=device_type,
    )
    return choice.mode


def _sdpa(setting: Setting) -> Prepared:
    case = setting.case
    lengths = document_lengths(case.mask)
    if lengths:
        return Prepared(lambda q, k, v: _a_call_a_document(q, k, v, lengths, case.heads != case.kv_heads), None)
    if case.mask.startswith("window:"):
        return Prepared(_a_call_a_window(case, setting.mesh.device_type), None)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=case.mask == "causal", enable_gqa=case.heads != case.kv_heads
        )

    return Prepared(attention, None)


def _a_call_a_document(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], enable_gqa: bool) -> Tensor:
    """Causal attention in each document by itself."""
    parts = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    return torch.cat(
        [F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=enable_gqa) for part in parts], 2
    )


def _a_call_a_window(case: Case, device: str) -> Attention:
    """As many queries as the window is long in one call, against the keys that one of them sees, with a mask: a mask of
    the whole sequence would have SDPA compute all of it.
    """
    window = int(case.mask.partition(":")[2])
    calls = []
    for start in range(0, case.seq_len, window):
        rows, keys = range(start, min(start + window, case.seq_len)), max(0, start - window + 1)
        at = (torch.arange(first, rows.stop, device=device) for first in (start, keys))
        hidden = ~parse_mask(case.mask).dense(*at)
        bias = torch.zeros(hidden.shape, dtype=DTYPES[case.dtype], device=device).masked_fill(hidden, -torch.inf)
        calls.append((slice(start, rows.stop), slice(keys, rows.stop), bias))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [
            F.scaled_dot_product_attention(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], attn_mask=bias, enable_gqa=case.heads != case.kv_heads
            )
            for rows, keys, bias in calls
        ]
        return torch.cat(parts, 2)

    return attention


BASELINE = "sdpa"
PROVIDERS = {
    BASELINE: Provider(_sdpa, modes=("single",), single_process=True),
    "ringcp": Provider(_ringcp, modes=("auto", *MODES)),
}
