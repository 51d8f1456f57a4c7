"""What is checked before anything is sent: tensors that fit each other, known options, lengths that fit the layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcp.errors import ArgumentError, LayoutError, UnsupportedError
from ringcp.layout import LAYOUT_NAMES, UNSIZED, Layout, layout_named_by
from ringcp.mask import Mask, uncalled
from ringcp.mask_mods import block_mask_type
from ringcp.modes import MODES

AGREE = ("call", "context")
SAVE = ("auto", "exchanged", "local")


def check_tensors(q: Tensor, k: Tensor, v: Tensor, cross: bool) -> None:
    """q, k and v fit each other; keys may have another length than queries in `cross` attention.

    Raises:
        ArgumentError: dims, dtypes, devices, batch sizes, heads or head dims that do not.
        LayoutError: local lengths that do not.
    """

    def shapes() -> str:
        return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"

    if not q.ndim == k.ndim == v.ndim == 4:
        raise ArgumentError(
            f"q, k, v: expected 4 dims (batch, heads, local tokens, head dim), got {shapes()}; add the missing dims"
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
        raise ArgumentError(f"q, k, v: expected equal batch sizes in dim 0, got {shapes()}; expand the smaller one")
    if k.shape[1] != v.shape[1]:
        raise ArgumentError(f"k, v: expected equal head counts in dim 1, got {shapes()}; repeat the fewer heads")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ArgumentError(
            "q, k: expected query heads that are a multiple of the key heads in dim 1, "
            f"got {q.shape[1]} and {k.shape[1]}; repeat key and value heads until they divide"
        )
    if q.shape[3] != k.shape[3]:
        raise ArgumentError(
            f"q, k: expected equal head dims in dim 3, got {shapes()}; "
            "pad the smaller one with zeros, and pass scale= of the unpadded dim"
        )
    if k.shape[2] != v.shape[2] or not (cross or q.shape[2] == k.shape[2]):
        raise LayoutError(
            f"q, k, v: expected equal local lengths in dim 2, got {shapes()}; shard all three with one layout, or pass "
            "that of k and v, which are another sequence, as kv_layout= (a KV cache is not supported)"
        )
    check_no_capture(q)
    if 0 in (q.shape[3], v.shape[3]):
        raise ArgumentError(f"q, k, v: expected head dims of at least 1 in dim 3, got {shapes()}; give each head a dim")


def check_no_capture(q: Tensor) -> None:
    """Raises UnsupportedError where a CUDA graph is captured: what the host decides would be that of the capture."""
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            "CUDA graphs: expected a call outside of capture, since the ranks vote on the host, got one under it; "
            "leave attention out of what is captured"
        )


def check_group(q: Tensor, group: dist.ProcessGroup | None) -> None:
    """The group can move tensors of this device.

    Raises:
        ArgumentError: if it has no back end for them; gloo, which reads a CUDA pointer as a host one, counts as none.
    """
    if group is None:
        return
    has = [device.type for device in group._device_types]
    usable = q.device.type in has and not (q.is_cuda and group._get_backend(q.device).name() == "gloo")
    if not usable:
        raise ArgumentError(
            f"q, k, v: expected a device that the back ends of mesh move ({', '.join(sorted(has))}; CUDA by NCCL), "
            f"got {q.device.type}; move them, or make the mesh with init_device_mesh({q.device.type!r}, ...)"
        )


def check_mode(mode: str, degree: int | None, world_size: int) -> None:
    """The mode is one of ringcp's, and fits the exchanges: of a 2-D mesh, or as `ulysses_degree` says.

    Raises:
        UnsupportedError: for an unknown mode.
        ArgumentError: for a degree that does not fit the mode or the ranks.
    """
    _check_word("mode", mode, ("auto", *MODES))
    given = f"ulysses_degree={degree} (the size of the second dim of a 2-D mesh) on {world_size} ranks"
    if degree is None:
        if mode == "usp":
            raise ArgumentError(
                "ulysses_degree: expected how many neighbouring ranks exchange heads in mode='usp', got None; "
                "give a divisor of the number of ranks, or a 2-D mesh such as mesh['cp', 'sp']"
            )
    elif world_size % degree:
        raise ArgumentError(f"ulysses_degree: expected a divisor of {world_size} ranks, got {degree}; choose one")
    elif mode == "ring" and degree > 1:
        raise ArgumentError(
            f"mode: expected 'usp', 'gather' or 'auto' with {given}, got 'ring'; pass mode='usp', or a "
            "1-D mesh such as mesh['cp']"
        )
    elif mode == "ulysses" and degree != world_size:
        raise ArgumentError(
            f"mode: expected 'usp', 'gather' or 'auto' with {given}, got 'ulysses', which exchanges among all ranks; "
            "pass mode='usp', or a 1-D mesh such as mesh['sp']"
        )


def check_save(save: str) -> None:
    """Raises UnsupportedError for anything but "auto", "exchanged" and "local"."""
    _check_word("save", save, SAVE)


def check_agree(agree: str) -> None:
    """Raises UnsupportedError for anything but "call" and "context"."""
    _check_word("agree", agree, AGREE)


def _check_word(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        names = ", ".join(repr(word) for word in known)
        raise UnsupportedError(f"{name}: expected one of {names}, got {value!r}; choose one of these")


def known_length(
    given_len: int, given_world: int, seq_len: int | None, world_size: int, argument: str = "layout"
) -> int | None:
    """The length of the whole sequence, if the layout or `seq_len` says it.

    Raises:
        LayoutError: if they contradict each other or the number of ranks.
    """
    if given_world not in (UNSIZED, world_size):
        raise LayoutError(
            f"{argument}: expected one for the {world_size} ranks of mesh, got one for {given_world}; "
            "make the layout with mesh.size()"
        )
    if seq_len is not None and given_len not in (UNSIZED, seq_len):
        raise LayoutError(f"seq_len: expected the layout's {given_len}, got {seq_len}; give one of them")
    return seq_len if given_len == UNSIZED else given_len


def check_context_layout(code: int, given_len: int, around: Layout | str | None) -> None:
    """Raises LayoutError if a layout given by name is not the one of the context around the call."""
    if given_len != UNSIZED or around is None:
        return
    given = layout_named_by(code)
    name = around.name if isinstance(around, Layout) else around
    if given != name:
        raise LayoutError(
            f"layout: expected {name}, that of the context_parallel around the call, got {given} (or auto); "
            "pass layout=ringcp.current_context().layout"
        )


def check_lengths(lengths: Sequence[int], layout: Layout, ranks: Sequence[int], names: str = "q, k, v") -> None:
    """Raises LayoutError if the local length of one of `ranks` is not the layout's."""
    wrong = [
        f"{length} on rank {rank} instead of {layout.local_len(rank)}"
        for rank, length in zip(ranks, lengths, strict=True)
        if length != layout.local_len(rank)
    ]
    if wrong:
        whole = all(length == layout.seq_len for length in lengths)
        fix = "cut with ringcp.shard and this layout (torch.chunk cuts elsewhere), or pass the one that was used"
        if whole and layout.world_size > 1:
            fix = "this looks like the whole sequence: cut it with ringcp.shard and this layout"
        raise LayoutError(
            f"{names}: expected the local lengths in dim 2 of (B, H, S, D) that {layout!r} gives, "
            f"got {', '.join(wrong)}; {fix}"
        )


def mask_problem(mask: object) -> str:
    """Why `mask` is neither a mask nor None; empty if it is."""
    name = uncalled(mask)
    if name:
        return f"mask: expected a ringcp mask or None, got ringcp.{name}, not called; write ringcp.{name}(...)"
    if mask is not None and not isinstance(mask, Mask) and (callable(mask) or type(mask) is block_mask_type()):
        return f"mask: expected a ringcp mask or None, got {type(mask).__name__}; write ringcp.Predicate(...) of it"
    if mask is not None and not isinstance(mask, Mask):
        return f"mask: expected a ringcp mask or None, got {shown(mask)}; build one, such as ringcp.Causal()"
    return ""


def scale_problem(scale: object) -> str:
    """Why `scale` is neither a finite number nor None; empty if it is."""
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float, torch.SymFloat))):
        return f"scale: expected a number or None, got {shown(scale)}; pass float(scale)"
    if isinstance(scale, float) and not math.isfinite(scale):
        return f"scale: expected a finite number or None, got {scale!r}; None is head_dim ** -0.5"
    return ""


def softcap_problem(softcap: object) -> str:
    """Why `softcap` is neither a positive number nor None; empty if it is."""
    number = isinstance(softcap, (int, float, torch.SymFloat)) and not isinstance(softcap, bool)
    if softcap is None or (number and 0 < softcap < math.inf):  # type: ignore[operator]
        return ""
    return f"softcap: expected a positive number or None, got {shown(softcap)}; pass None for scores without a cap"


def alibi_problem(slopes: object, q: Any = None) -> str:
    """Why `slopes` are neither those of ALiBi for each head of q (B, Hq, S, D), if it is given, nor None; empty if they
    are.
    """
    if slopes is None:
        return ""
    each, of_rows = ("(Hq,)", "(B, Hq)") if q is None else (tuple(q.shape[:2])[1:], tuple(q.shape[:2]))
    if not isinstance(slopes, Tensor) or slopes.dtype != torch.float32 or slopes.ndim not in (1, 2):
        fits = False
    else:
        fits = q is None or tuple(slopes.shape) in (each, of_rows)
    if not fits:
        return (
            f"alibi_slopes: expected a float32 tensor of one slope for each query head, {each} or {of_rows}, or None, "
            f"got {shown(slopes)}; pass slopes of shape (Hq,) or (B, Hq), .float()"
        )
    assert isinstance(slopes, Tensor)
    if q is not None and slopes.device not in (torch.device("cpu"), q.device):
        return f"alibi_slopes: expected a tensor on cpu or {q.device}, got one on {slopes.device}; move it"
    if slopes.requires_grad and torch.is_grad_enabled():
        return (
            "alibi_slopes: expected slopes that need no gradient, for ringcp computes none, got some that require one; "
            "pass alibi_slopes.detach()"
        )
    return ""


def dropout_problem(dropout_p: object) -> str:
    """Why `dropout_p` is not a probability below 1; empty if it is."""
    number = isinstance(dropout_p, (int, float)) and not isinstance(dropout_p, bool)
    if number and 0 <= dropout_p < 1:  # type: ignore[operator]
        return ""
    return f"dropout_p: expected a number from 0 to below 1, got {shown(dropout_p)}; pass 0.0 for no dropout"


def layout_problem(layout: object, argument: str = "layout") -> str:
    """Why `layout` is neither a layout nor the name of one; empty if it is."""
    if isinstance(layout, Layout) or (isinstance(layout, str) and layout in LAYOUT_NAMES):
        return ""
    if callable(layout):
        name = getattr(layout, "__name__", "")
        return f"{argument}: expected a Layout, got {name}, not called; write ringcp.{name}(seq_len, mesh.size(), ...)"
    names = ", ".join(LAYOUT_NAMES)
    if layout == "balanced":
        return (
            f"{argument}: expected a Layout or one of {names}, got 'balanced', which needs the mask to balance by; "
            f"pass {argument}=ringcp.Balanced(seq_len, mesh.size(), mask)"
        )
    return f"{argument}: expected a Layout or one of {names}, got {shown(layout)}; choose one of these"


def check_mask(mask: Mask, q: Tensor, layout: Layout, kv_layout: Layout | None) -> None:
    """The mask is of this batch and sequence; or of two, where keys have a layout of their own.

    Raises:
        LayoutError: if it is of another one.
        UnsupportedError: for a mask of one sequence in cross-attention, which has two.
    """
    kv_len = None if kv_layout is None else kv_layout.seq_len
    problem = mask.problem(q.shape[0], layout.seq_len, q_heads=q.shape[1], kv_len=kv_len)
    if problem:
        raise LayoutError(problem)
    if kv_layout is not None and mask.of_one_sequence:
        raise UnsupportedError(
            f"mask: expected one of positions alone in cross-attention, got {mask}, whose lengths are of one sequence; "
            "pass mask=None, and leave padded keys out of k and v"
        )


def check_layout(layout: object, world_size: int, argument: str = "layout") -> None:
    """Raises LayoutError for anything but a layout of that many ranks or the name of one."""
    problem = layout_problem(layout, argument)
    if problem:
        raise LayoutError(problem)
    if isinstance(layout, Layout) and world_size != layout.world_size:
        raise LayoutError(
            f"{argument}: expected one for the {world_size} ranks of mesh, got {layout!r}; make it with mesh.size()"
        )


def shown(value: object) -> str:
    """The value in one line: of a tensor, its shape and dtype."""
    return f"a tensor {tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else repr(value)


def default_scale(q: Tensor) -> float:
    """The factor on the scores, as in `F.scaled_dot_product_attention`."""
    return float(q.shape[3] ** -0.5)


def refuse_create_graph(name: str) -> None:
    """In a backward pass that is ours alone: torch would drop the second derivative in silence.

    Raises:
        UnsupportedError: under ``create_graph=True``.
    """
    if torch.is_grad_enabled():
        raise UnsupportedError(
            f"double backward: {name} is differentiable once, got a backward pass with create_graph=True; "
            "call backward without it"
        )


def refuse_double_backward(ctx: object, *grads: object) -> None:
    """As the gradient of a registered backward op.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "double backward: ringcp.attention is differentiable once, got a backward pass through its gradient; "
        "call backward without create_graph=True"
    )
