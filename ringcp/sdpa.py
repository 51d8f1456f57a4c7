"""What `F.scaled_dot_product_attention` means inside `context_parallel`: its arguments, onto ringcp's attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringcp.attention import attend
from ringcp.attn_mask import as_BHMN, mask_refusal
from ringcp.checks import shown
from ringcp.errors import ArgumentError, LayoutError
from ringcp.layout import Layout
from ringcp.mask import Causal, Full, Mask
from ringcp.options import Options, Refusal, as_sdpa_casts

LOCAL = "wrap what is to stay local (an encoder, a cross-attention) in `with ringcp.local_attention():`"


@dataclass(frozen=True, eq=False)
class Context:
    """What holds inside a `context_parallel`, as `current_context` tells it.

    Attributes:
        mesh: the mesh over which the sequence is split.
        layout: the `Layout`; or its name, if nothing (buffers, or a `Layout`) has said how long the sequence is.
        mask: the mask of every attention call, or None: as each call says.
        mode: how queries meet keys.
        options: all keywords, with the defaults filled in.
        group_name, rank, local_len, kv_local_len, unmasked, causal: what follows from these: the process group, this
            rank in it, its numbers of tokens and of keys, and the masks of calls without and with ``is_causal=True``.
    """

    mesh: DeviceMesh
    options: Options
    group_name: str
    rank: int
    local_len: int | None
    kv_local_len: int | None
    unmasked: Mask
    causal: Mask

    @property
    def layout(self) -> Layout | str:
        return self.options.layout

    @property
    def mask(self) -> Mask | None:
        return self.options.mask

    @property
    def mode(self) -> str:
        return self.options.mode

    @property
    def positions(self) -> Tensor:
        """Global positions of this rank's tokens: int64 (local_len,), on the device of the mesh.

        Raises:
            LayoutError: nothing has said how long the sequence is.
        """
        if not isinstance(self.layout, Layout):
            raise LayoutError(
                f"positions: expected a context that knows the length of its sequence, got layout={self.layout!r} and "
                "no buffers; pass buffers= to context_parallel, or layout= a Layout"
            )
        return self.layout.positions(self.rank).to(self.mesh.device_type)


def make_context(mesh: DeviceMesh, group_name: str, rank: int, options: Options) -> Context:
    """A context from checked options."""
    layout, mask = options.layout, options.mask
    kv_layout = layout if options.kv_layout is None else options.kv_layout
    return Context(
        mesh=mesh,
        options=options,
        group_name=group_name,
        rank=rank,
        local_len=layout.local_len(rank) if isinstance(layout, Layout) else None,
        kv_local_len=kv_layout.local_len(rank) if isinstance(kv_layout, Layout) else None,
        unmasked=Full() if mask is None else mask,
        causal=Causal() if mask is None or mask == Causal() else mask & Causal(),
    )


def sdpa(
    context: Context,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    refusal: Refusal | None = None,
) -> Tensor:
    """`F.scaled_dot_product_attention` over the whole sequence of `context`; tensors (..., H, S_local, D).

    attn_mask: beside the context's mask, what `ringcp.context_parallel` says that it may be.
    `refusal` is what the caller already has against the call.
    """
    refusal = refusal or _refusal(context, query, key, value, enable_gqa)
    q, k, v = query, key, value
    if refusal is None and attn_mask is not None:
        q, k, v = as_sdpa_casts(q, k, v)
        attn_mask = as_sdpa_casts(q, attn_mask)[1] if isinstance(attn_mask, Tensor) else attn_mask
        refusal = mask_refusal(attn_mask, q, is_causal)
        attn_mask = as_BHMN(attn_mask, q).detach() if refusal is None else attn_mask
    if refusal is None and query.ndim != 4:
        q, k, v = (_as_BHSD(x) for x in (q, k, v))
    mask = context.causal if is_causal else context.unmasked
    options = context.options._replace(mask=mask, scale=scale, dropout_p=dropout_p, attn_mask=attn_mask)
    out = attend(q, k, v, options, group_name=context.group_name, return_lse=False, refusal=refusal)
    assert isinstance(out, Tensor), "no lse was asked for"
    return out if query.ndim == 4 else out.reshape(*query.shape[:-1], value.shape[-1])


def _as_BHSD(x: Tensor) -> Tensor:
    while x.ndim < 4:
        x = x.unsqueeze(0)
    return x.flatten(0, -4)


def _refusal(
    context: Context,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    enable_gqa: object,
) -> Refusal | None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.is_nested or x.ndim < 2:
            return ArgumentError, (
                f"{name}: expected a dense tensor (..., tokens, head dim) inside context_parallel, "
                f"got {_kind(x)}; pass the local shard"
            )
    if not query.ndim == key.ndim == value.ndim:
        return ArgumentError, (
            f"query, key, value: expected equal numbers of dims, got {query.ndim}, {key.ndim}, {value.ndim}; "
            "add the missing dims"
        )
    lengths = query.shape[-2], key.shape[-2], value.shape[-2]
    # In compiled code the op checks them: here, every length would compile anew. A DTensor is refused as such.
    sized = not torch.compiler.is_compiling() and not hasattr(query, "to_local")
    expected = context.local_len, context.kv_local_len, context.kv_local_len
    if sized and any(n is not None and n != length for n, length in zip(expected, lengths, strict=True)):
        layouts = [context.layout] if context.options.kv_layout is None else [context.layout, context.options.kv_layout]
        return LayoutError, (
            f"query, key, value: expected this rank's tokens of {' and '.join(map(repr, layouts))} in dim -2, "
            f"{', '.join('any number' if n is None else str(n) for n in expected)}, got {lengths[0]}, {lengths[1]} and "
            f"{lengths[2]}; give what they are computed from as buffers, with its sequence dims, or {LOCAL}"
            f"{' (a KV cache is not supported)' if lengths[0] < lengths[1] else ''}"
        )
    if query.ndim > 2 and query.shape[-3] != key.shape[-3] and not enable_gqa:
        return ArgumentError, (
            f"enable_gqa: expected True for {query.shape[-3]} query and {key.shape[-3]} key heads, got {enable_gqa}; "
            "pass enable_gqa=True, or repeat the key and value heads"
        )
    return None


def _kind(x: object) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    return "a NestedTensor" if x.is_nested else shown(x)
