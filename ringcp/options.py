"""The options of an attention call, as its callers collect them, and what is wrong with them.

Here is what an op cannot take, or would not see; what is about numbers, it checks itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringcp.checks import (
    alibi_problem,
    dropout_problem,
    layout_problem,
    mask_problem,
    scale_problem,
    shown,
    softcap_problem,
)
from ringcp.errors import ArgumentError, KeywordError, LayoutError, RingcpError, UnsupportedError
from ringcp.integers import is_int
from ringcp.layout import Layout
from ringcp.mask import Full, Mask

# A longer wait than a month does not fit what the back ends count in.
_MAX_SECONDS = 2_592_000


class Options(NamedTuple):
    """The keywords of `attention` that say what to compute and how, and the `attn_mask` of a call in a context, as
    (B | 1, Hq | 1, rows, keys).
    """

    mask: Mask | None = None
    layout: Layout | str = "auto"
    kv_layout: Layout | str | None = None
    seq_len: int | None = None
    mode: str = "auto"
    ulysses_degree: int | None = None
    gather_memory: int | None = None
    save: str = "auto"
    scale: float | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    kernel: str = "auto"
    sinks: Tensor | None = None
    agree: str | None = None
    timeout: float | timedelta | None = None

    def with_agree(self, device_type: str) -> Options:
        """With when the ranks vote, if that is not said: before each call, but on CUDA once a context."""
        return self if self.agree is not None else self._replace(agree="context" if device_type == "cuda" else "call")

    def inside(self, outer: Options) -> Options:
        """With what those of a context around this one say, where these say nothing."""
        # A degree, and memory for a gather, are of the mode beside which they are said.
        names = ["mask", "save", "softcap", "alibi_slopes", "kernel", "agree", "timeout"]
        names += ["mode", "ulysses_degree", "gather_memory"] if self.mode == "auto" else []
        return self._replace(**{name: getattr(outer, name) for name in names if getattr(self, name) in (None, "auto")})

    @property
    def joint(self) -> bool:
        """Whether some tokens are on every rank."""
        return any(isinstance(lay, Layout) and lay.replicated > 0 for lay in (self.layout, self.kv_layout))

    @property
    def votes(self) -> bool:
        """Whether the ranks vote on this call; with dropout always, for they share its seed that way, and with an
        attn_mask, whose shapes on all ranks say how it is read.
        """
        dropped = bool(dropout_problem(self.dropout_p)) or self.dropout_p > 0
        return self.agree != "context" or not self.knows_length or dropped or self.attn_mask is not None

    @property
    def knows_length(self) -> bool:
        """Whether it says how long the whole sequences are, so that no vote need find out."""
        known = self.seq_len is not None or isinstance(self.layout, Layout)
        return known and (self.kv_layout is None or isinstance(self.kv_layout, Layout))


Refusal = tuple[type[RingcpError], str]
"""Why a rank cannot make a call: the error, and its message."""


def refusal_of(q: object, k: object, v: object, options: Options) -> Refusal | None:
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
    wrong = options_problem(options) or sinks_problem(q, options.sinks) or alibi_problem(options.alibi_slopes, q)
    if wrong:
        return ArgumentError, wrong
    kv_layout = options.kv_layout
    wrong = layout_problem(options.layout) or ("" if kv_layout is None else layout_problem(kv_layout, "kv_layout"))
    wrong = wrong or _replicated_problem(q, k, v, options)
    return (LayoutError, wrong) if wrong else _two_sequences_refusal(q, k, options)


def _two_sequences_refusal(q: Any, k: Any, options: Options) -> Refusal | None:
    """What has a meaning for the positions of one sequence alone, or, a mask, for tokens that are not on every rank."""
    kv_layout = options.kv_layout
    everywhere = isinstance(kv_layout, Layout) and kv_layout.replicated > 0 and kv_layout.rest.seq_len == 0
    if everywhere and options.mask is not None and options.mask != Full():
        return UnsupportedError, (
            f"mask: expected None or Full() where all keys are on every rank, in {kv_layout!r}, since a mask holds "
            f"among the tokens that are not, got {options.mask}; shard the keys, or leave the mask out"
        )
    mask, keys = options.attn_mask, options.layout if kv_layout is None else kv_layout
    if mask is not None and options.joint:
        on_every_rank = isinstance(keys, Layout) and keys.rest.seq_len == 0
        num_rows = (1, q.shape[-2]) if on_every_rank else (1,)
        if mask.shape[2] not in num_rows or mask.shape[3] != k.shape[-2]:
            return UnsupportedError, (
                f"attn_mask: expected a key mask in joint attention, {' or '.join(map(str, num_rows))} row and this "
                f"rank's {k.shape[-2]} keys in the last two dims, got {shown(mask)}; give one of that shape, leave it "
                "out, or wrap what is to stay local in `with ringcp.local_attention():`"
            )
    if options.alibi_slopes is not None and (options.kv_layout is not None or options.joint):
        return UnsupportedError, (
            "alibi_slopes: expected None in cross-attention (kv_layout=) and joint attention, where distances between "
            "the two sequences have no one meaning, got slopes; leave them out"
        )
    if options.dropout_p and options.joint:
        return UnsupportedError, (
            f"dropout_p: expected 0.0 in joint attention, whose parts would not drop alike, got {options.dropout_p}; "
            "leave it out"
        )
    return None


def _replicated_problem(q: Any, k: Any, v: Any, options: Options) -> str:
    """Whether the tokens that every rank has are missing; the lengths of the others are the op's to check."""
    kv_layout = options.layout if options.kv_layout is None else options.kv_layout
    for name, x, layout in (("q", q, options.layout), ("k", k, kv_layout), ("v", v, kv_layout)):
        if isinstance(layout, Layout) and layout.replicated and x.ndim == 4 and x.shape[2] < layout.replicated:
            return (
                f"{name}: expected at least the {layout.replicated} tokens that every rank has in {layout!r} in dim 2 "
                f"of (B, H, S, D), got {x.shape[2]}; put them in front of this rank's rows of the rest"
            )
    return ""


def options_problem(options: Options) -> str:
    """Which option, but layouts and sinks, is not even of the right type; empty if all are."""
    seq_len, ulysses_degree, timeout = options.seq_len, options.ulysses_degree, options.timeout
    wrong = mask_problem(options.mask) or scale_problem(options.scale) or softcap_problem(options.softcap)
    wrong = wrong or alibi_problem(options.alibi_slopes) or dropout_problem(options.dropout_p)
    if wrong:
        return wrong
    if seq_len is not None and not is_int(seq_len) and not isinstance(seq_len, torch.SymInt):
        return f"seq_len: expected an integer or None, got {seq_len!r}; give the length of the whole sequence"
    if isinstance(ulysses_degree, _Contradiction):
        return (
            f"ulysses_degree: expected {ulysses_degree.of_mesh}, the size of the second dim of mesh, or None, got "
            f"{shown(ulysses_degree.given)}; leave it out"
        )
    for name, what, number in (
        ("ulysses_degree", "a number of ranks", ulysses_degree),
        ("gather_memory", "a number of bytes", options.gather_memory),
    ):
        if number is not None and not is_int(number, 1):
            return f"{name}: expected {what} of at least 1 or None, got {shown(number)}; give an int"
    if options.gather_memory is not None and options.mode not in ("auto", "gather"):
        return (
            f"gather_memory: expected None beside mode={shown(options.mode)}, which does not gather, got "
            f'{options.gather_memory}; pass mode="gather", or leave it out'
        )
    if timeout is not None:
        seconds = seconds_of(timeout)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < _MAX_SECONDS:
            return (
                f"timeout: expected seconds above 0 and below {_MAX_SECONDS}, a timedelta or None, got {timeout!r}; "
                "give seconds"
            )
    agree = "" if options.agree is None else options.agree
    for name, value in (("mode", options.mode), ("save", options.save), ("kernel", options.kernel), ("agree", agree)):
        if not isinstance(value, str):
            return f"{name}: expected a word, got {shown(value)}; help(ringcp.attention) lists the words"
    return ""


class _Contradiction(NamedTuple):
    """A degree that is not the one that a 2-D mesh has."""

    given: object
    of_mesh: int


def degree_in(mesh: Any, given: object) -> Any:
    """How many ranks exchange heads, as a 2-D mesh says it, or else as given."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
        return given
    degree = mesh.size(1)
    return degree if given is None or (type(given) is int and given == degree) else _Contradiction(given, degree)


def seconds_of(timeout: Any) -> Any:
    """A timedelta in seconds, anything else as it is."""
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout


def unknown_keyword(unknown: Mapping[str, object], function: str) -> Refusal | None:
    """The refusal of the first keyword that a function does not have."""
    for name, value in unknown.items():
        fix = _ELSEWHERE.get(name, f"leave it out; help(ringcp.{function}) lists the arguments")
        return KeywordError, f"{name}: expected an argument of ringcp.{function}, got {name}={shown(value)}; {fix}"
    return None


def draw_seed() -> Tensor:
    """A seed for dropout: int64 (), from torch's default generator of the CPU, so that activation checkpointing, which
    replays its state, recomputes with the same one.
    """
    return torch.randint(1 << 62, (), dtype=torch.int64, device="cpu")


def sinks_problem(q: Any, sinks: object) -> str:
    """Why `sinks` are neither a logit for each query head nor None; empty if they are."""
    if sinks is None or (isinstance(sinks, Tensor) and sinks.is_floating_point() and sinks.shape == q.shape[1:2]):
        return ""
    return (
        f"sinks: expected a floating tensor of one logit for each query head, {tuple(q.shape[1:2])}, got "
        f"{shown(sinks)}; pass sinks of shape (Hq,)"
    )


# Words of F.scaled_dot_product_attention, flash-attn and transformers.
_ELSEWHERE = {
    "is_causal": "pass mask=ringcp.Causal()",
    "causal": "pass mask=ringcp.Causal()",
    "window_size": "pass mask=ringcp.Window(left, right), with & ringcp.Causal() for a causal one",
    "sliding_window": "pass mask=ringcp.Window(sliding_window - 1)",
    "softmax_scale": "pass scale=",
    "scaling": "pass scale=",
    "dropout": "pass dropout_p=",
    "s_aux": "pass sinks=",
    "attn_mask": "pass mask= a ringcp mask, such as ringcp.Predicate(...); a tensor goes to SDPA in a context_parallel",
    "enable_gqa": "leave it out: the head counts say it",
    "attention_mask": "pass mask= a ringcp mask: ringcp.Padding(attention_mask.sum(-1)), where the padding is on "
    'the left with side="left", seq_len=attention_mask.shape[-1]',
    "key_padding_mask": "pass mask= a ringcp mask, such as ringcp.Padding(lengths)",
    "position_ids": "if they start anew in each document, pass mask=ringcp.Documents(position_ids=...)",
    "cu_seqlens": "pass mask=ringcp.Documents(cu_seqlens=...), or call ringcp.attention_varlen",
    "cu_seqlens_q": "pass cu_seqlens= of the whole packed row to ringcp.attention_varlen",
    "cu_seqlens_k": "pass cu_seqlens= of the whole packed row to ringcp.attention_varlen",
    "max_seqlen": "leave it out: cu_seqlens says it",
    "max_seqlen_q": "leave it out: cu_seqlens says it",
    "max_seqlen_k": "leave it out: cu_seqlens says it",
    "return_attn_probs": "pass return_lse=True for the log-sum-exp",
    "group": "pass mesh= a DeviceMesh, such as DeviceMesh.from_group(group, device_type)",
}


def as_sdpa_casts(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, the tensors as `F.scaled_dot_product_attention` would see them: all but fp64 are cast."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x

    return tuple(cast(x) for x in tensors)
