"""`ringcp.ContextParallel`: a module that is attention, made context parallel by `parallelize_module`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ringcp.checks import shown
from ringcp.context import check_options
from ringcp.errors import ArgumentError, KeywordError, UnsupportedError
from ringcp.groups import group_of
from ringcp.layout import Layout
from ringcp.mask import Mask
from ringcp.options import Options, Refusal, degree_in
from ringcp.probe import HONOURED, Meaning, probed, unprobed
from ringcp.sdpa import Context, make_context, sdpa

# What q, k and v are called.
_NAMES = (
    frozenset({"q", "xq", "query", "queries", "query_states"}),
    frozenset({"k", "xk", "key", "keys", "key_states"}),
    frozenset({"v", "xv", "value", "values", "value_states"}),
)
_SDPA = frozenset({"dropout_p", *HONOURED})
_ALONE = (
    "make softmax(q k^T) v a module of its own (help(ringcp.ContextParallel) shows one), or use "
    "`with ringcp.context_parallel(...)`"
)


class ContextParallel(ParallelStyle):
    """A style for `torch.distributed.tensor.parallel.parallelize_module`: the named module, which computes attention
    and nothing else, attends over the whole sequence, whose tokens lie on the ranks of the mesh.

        class Attend(nn.Module):
            def forward(self, q, k, v, is_causal=False):  # (B, H, S_local, D)
                return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

        parallelize_module(block, mesh["cp"], {"attention.attend": ringcp.ContextParallel()})

    The forward of that instance is replaced: nothing is intercepted, names of modules and the state dict stay, and each
    module has its own mask and mode. It takes q, k and v first, (..., H, S_local, D) under names such as q, query, xq,
    and any keywords of `F.scaled_dot_product_attention`, by position or name, with its own defaults. Every rank passes
    its own shard, as to `ringcp.attention`; what q and k are computed from needs this rank's positions
    (`Layout.positions`).

    Nothing that the forward does is dropped in silence. A module with parameters, buffers or submodules is refused, and
    so is one whose outputs are not those of attention: its forward is tried, when it is applied, on random tensors of
    the CPU, and is found to be full or causal attention, to take grouped heads, and to honour `is_causal`, `scale`,
    `enable_gqa` and `attn_mask`, or not; in a call, whatever else is not its default raises. What shows only beyond
    1,031 tokens (a longer window) is not seen, nor an attribute of the module that is changed later.

    q, k and v may be DTensors over a tensor-parallel mesh without this mesh's ranks, all three sharded alike over heads
    that it divides evenly, or replicated; the output is one too.

    Args:
        mode, ulysses_degree, gather_memory, save, layout, kv_layout, softcap, alibi_slopes, sinks, kernel, agree,
            timeout: as in `ringcp.attention`. Of heads that are sharded, slopes and sinks are those of this rank.
        mask: which positions attend to which; a causal forward, ``is_causal=True``, or an ``attn_mask`` (see
            `ringcp.context_parallel`) is intersected with it.
        probe: whether the forward is tried. False says that it is `F.scaled_dot_product_attention` of its q, k, v and
            those of its keywords that it has, with grouped heads if `enable_gqa` is none of them.

    Raises (when it is applied; a call raises as `ringcp.attention`, on every rank wherever the ranks vote):
        UnsupportedError: a module that does something else; a mode or kernel that ringcp does not have.
        ArgumentError, LayoutError: an option that does not fit; a module to which a style was applied before.
    """

    def __init__(
        self,
        *,
        mode: str = "auto",
        layout: Layout | str = "auto",
        kv_layout: Layout | str | None = None,
        mask: Mask | None = None,
        kernel: str = "auto",
        ulysses_degree: int | None = None,
        gather_memory: int | None = None,
        save: str = "auto",
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        agree: str | None = None,
        timeout: float | timedelta | None = None,
        probe: bool = True,
    ) -> None:
        self.options = Options(
            mask=mask,
            layout=layout,
            kv_layout=kv_layout,
            mode=mode,
            ulysses_degree=ulysses_degree,
            gather_memory=gather_memory,
            save=save,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            kernel=kernel,
            agree=agree,
            timeout=timeout,
        )
        self.probe = probe

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = group_of(device_mesh)
        degree = degree_in(device_mesh, self.options.ulysses_degree)
        options = self.options._replace(ulysses_degree=degree).with_agree(device_mesh.device_type)
        check_options(options, group.size())
        form = _form(module)
        if self.probe:
            scale: Any = form.defaults.get("scale")
            meaning = probed(module, form.takes, scale, options.mask)
        else:
            meaning = unprobed(form.takes)
        context = make_context(device_mesh, group.group_name, group.rank(), options)
        ranks = frozenset(dist.get_process_group_ranks(group))
        forward = _attending(form, meaning, context, ranks)
        forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]
        module.forward = forward
        return module


class _Form(NamedTuple):
    """How a forward is called: the names it takes by position, all names, defaults, and whether it takes any other."""

    places: tuple[str, ...]
    names: frozenset[str]
    defaults: Mapping[str, object]
    any_keyword: bool
    text: str

    def takes(self, name: str) -> bool:
        return self.any_keyword or name in self.names


def _form(module: nn.Module) -> _Form:
    """How the forward of `module` is called.

    Raises:
        ArgumentError: if it is ringcp's already.
        UnsupportedError: if it cannot be attention of q, k and v alone.
    """
    kind = type(module).__name__
    if _is_ours(vars(module).get("forward")):
        raise ArgumentError(
            f"module: expected one to which ContextParallel was not applied yet, got a {kind} to which it was; "
            "name each module once"
        )
    if isinstance(module, torch.jit.ScriptModule) or type(module).__call__ is not nn.Module.__call__:
        raise UnsupportedError(
            f"module: expected one whose call runs its forward in Python, got a {kind}, which has a way of its own; "
            "apply the style to an nn.Module, before it is scripted"
        )
    owned = [
        *(f"parameter {name}" for name, _ in module.named_parameters()),
        *(f"buffer {name}" for name, _ in module.named_buffers()),
        *(f"submodule {name}" for name, _ in module.named_children()),
    ]
    if owned:
        raise UnsupportedError(
            f"module: expected one that is attention of q, k, v alone, got a {kind} with {', '.join(owned[:3])}"
            f"{', ...' * (len(owned) > 3)}, whose work would be dropped; {_ALONE}"
        )
    signature = inspect.signature(module.forward)
    parameters = signature.parameters.values()
    places = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(places) < 3 or not all(name in known for name, known in zip(places, _NAMES, strict=False)):
        raise UnsupportedError(
            f"{kind}.forward: expected q, k, v first (or query, key, value and the like), got {signature}; {_ALONE}"
        )
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = [p.name for p in named if p.default is p.empty and p.name not in places[:3]]
    if needed:
        raise UnsupportedError(
            f"{kind}.forward: expected defaults for all arguments behind q, k, v, got none for {', '.join(needed)}; "
            f"give them one, or {_ALONE}"
        )
    return _Form(
        tuple(places),
        frozenset(p.name for p in named),
        {p.name: p.default for p in named if p.name not in places[:3]},
        any(p.kind is p.VAR_KEYWORD for p in parameters),
        str(signature),
    )


def _is_ours(forward: object) -> bool:
    return isinstance(forward, FunctionType) and forward.__module__ == __name__


def _attending(form: _Form, meaning: Meaning, context: Context, ranks: frozenset[int]) -> Callable[..., Tensor]:
    """The forward in place of one of that form and meaning. A function, so that a copy of the module shares it."""

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        values = {**form.defaults, **dict(zip(form.places, args, strict=False)), **kwargs}
        refusal = _call_refusal(form, meaning, args, kwargs, values)
        qkv: list[Any] = [values.get(name) for name in form.places[:3]]
        placed = [x for x in qkv if isinstance(x, DTensor)]
        if placed:
            refusal = refusal or _placement_refusal(qkv, ranks)
            qkv = [x.to_local() if isinstance(x, DTensor) else x for x in qkv]
        is_causal = values.get("is_causal") if "is_causal" in meaning.keywords else None
        attn_mask = values.get("attn_mask")
        causal = meaning.causal[None if is_causal is None else bool(is_causal)] if attn_mask is None else is_causal
        grouped = values.get("enable_gqa", meaning.grouped) if "enable_gqa" in meaning.keywords else meaning.grouped
        out = sdpa(
            context,
            qkv[0],
            qkv[1],
            qkv[2],
            attn_mask=attn_mask,
            is_causal=bool(causal),
            scale=values.get("scale"),
            enable_gqa=grouped,
            refusal=refusal,
        )
        if placed:
            return DTensor.from_local(out, placed[0].device_mesh, placed[0].placements, run_check=False)
        return out

    return forward


def _call_refusal(
    form: _Form, meaning: Meaning, args: tuple[Any, ...], kwargs: Mapping[str, Any], values: Mapping[str, Any]
) -> Refusal | None:
    """What a call has that attention would not see."""
    if len(args) > len(form.places):
        return KeywordError, (
            f"forward: expected at most {len(form.places)} arguments by position, got {len(args)}; {form.text} is "
            "what it takes"
        )
    for name in form.places[: len(args)]:
        if name in kwargs:
            return KeywordError, f"{name}: expected it once, got it by position and by name; leave one out"
    for name, value in values.items():
        if name in form.places[:3]:
            continue
        if not form.takes(name):
            return KeywordError, (
                f"{name}: expected an argument of the module's forward{form.text}, got {name}={shown(value)}; "
                "leave it out"
            )
        if name == "attn_mask" and value is not None and name not in meaning.keywords:
            return UnsupportedError, (
                f"attn_mask: expected None under ringcp.ContextParallel, got {shown(value)}, whose effect is not that "
                "on F.scaled_dot_product_attention; pass mask= a ringcp mask to ContextParallel"
            )
        if name == "dropout_p" and value:
            return UnsupportedError, (
                f"dropout_p: expected 0.0 under ringcp.ContextParallel, got {shown(value)}; set the module's attention "
                'dropout to 0, or call ringcp.attention(..., dropout_p=..., kernel="reference") in its place'
            )
        if name not in meaning.keywords | {"attn_mask", "dropout_p"} and not (
            name in form.defaults and _same(value, form.defaults[name])
        ):
            known = "whose effect the probe could not tell" if name in _SDPA else "which ringcp does not know"
            return KeywordError, (
                f"{name}: expected its default under ringcp.ContextParallel, got {name}={shown(value)}, {known}; leave "
                "it out, or do what it does outside of the module"
            )
    return None


def _same(value: object, default: object) -> bool:
    return value is default or (
        type(value) is type(default) and isinstance(value, (int, float, str)) and value == default
    )


def _placement_refusal(qkv: list[Any], ranks: frozenset[int]) -> Refusal | None:
    """Why q, k and v, some of which are DTensors, are not the heads of this rank."""
    if not all(isinstance(x, DTensor) for x in qkv):
        kinds = ", ".join(type(x).__name__ for x in qkv)
        return UnsupportedError, f"q, k, v: expected DTensors or tensors, all three, got {kinds}; convert the others"
    mesh, placements = qkv[0].device_mesh, qkv[0].placements
    places = ", ".join(f"{name} {x.placements}" for name, x in zip("qkv", qkv, strict=True))
    if not all(x.device_mesh == mesh and x.placements == placements for x in qkv):
        return UnsupportedError, (
            f"q, k, v: expected DTensors of one mesh, placed alike, got {places}; redistribute them"
        )
    pieces = 1
    for size, placement in zip(mesh.shape, placements, strict=True):
        if placement == Shard(qkv[0].ndim - 3):
            pieces *= size
        elif placement != Replicate():
            return UnsupportedError, (
                f"q, k, v: expected DTensors sharded over heads, Shard({qkv[0].ndim - 3}), or replicated, got "
                f"{places}; redistribute them"
            )
    heads = [x.shape[-3] if x.ndim > 2 else 1 for x in qkv]
    if any(n % pieces for n in heads):
        return UnsupportedError, (
            f"q, k, v: expected heads that {pieces} tensor-parallel ranks divide evenly, got {heads}; use fewer of "
            "these ranks, or repeat the key and value heads"
        )
    shared = _shared_ranks(mesh, ranks)
    if shared > 1:
        return UnsupportedError, (
            f"q, k, v: expected DTensors on a mesh apart from that of ContextParallel, got one with {shared} of "
            'its ranks; use slices of one mesh, such as mesh["tp"] and mesh["cp"]'
        )
    return None


def _shared_ranks(mesh: DeviceMesh, ranks: frozenset[int]) -> int:
    return len(ranks.intersection(mesh.mesh.flatten().tolist()))


# As torch.compiler.assume_constant_result does, which would import Dynamo.
_shared_ranks._dynamo_marked_constant = True  # type: ignore[attr-defined]
