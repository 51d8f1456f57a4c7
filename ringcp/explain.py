"""`ringcp.explain()`: which mode "auto" is, how many bytes each mode sends, and why the others are not taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from ringcp.balance import choose_layout
from ringcp.band import length_of, union
from ringcp.checks import mask_problem, shown
from ringcp.errors import ArgumentError
from ringcp.grouped import grouped
from ringcp.groups import GRID, neighbours
from ringcp.integers import is_int
from ringcp.kernels.registry import KERNELS
from ringcp.layout import Contiguous
from ringcp.lower import plan
from ringcp.mask import Full, Mask
from ringcp.modes import (
    Choice,
    Mode,
    Rows,
    Traffic,
    Weight,
    choose_mode,
    divisors,
    gathered,
    head_shares,
    most,
    replicates,
    usp_bytes,
)
from ringcp.schedule import Heads, Schedule, build
from ringcp.steps import length
from ringcp.topology import ring

# In fp64, products of matrices with fewer rows depend on the number of heads.
_FEW_ROWS = 64

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, repr=False)
class Explanation:
    """What `explain` found; `str` of it is the text that it prints.

    Attributes:
        heading: what was asked.
        choice: the mode, the ranks in an exchange, and why.
        bytes_sent: for each mode that these ranks can use, the bytes of the rank that sends most in one attention call,
            forward and backward.
        degrees: for each of them, the ranks in an exchange.
        reasons: for each mode, why it is taken or why it is not.
        same_bits: for each of them, which of out, lse, dq, dk and dv have the same bits as in one process, as far as
            that has been measured: on the CPU's flash kernel.
    """

    heading: str
    choice: Choice
    bytes_sent: dict[Mode, Traffic]
    degrees: dict[Mode, int]
    reasons: dict[Mode, str]
    same_bits: dict[Mode, tuple[str, ...]]

    def __repr__(self) -> str:
        return f"<Explanation: {self.choice.mode}, exchanges of {self.choice.ulysses_degree}; print it>"

    def __str__(self) -> str:
        head = ("", "mode", "exchange", "forward MB", "backward MB", "together MB", "  same bits")
        table = [
            (
                "*" if mode == self.choice.mode else "", mode, str(self.degrees[mode]),
                *(f"{n / 1e6:,.3f}" for n in (sent.forward, sent.backward, sent.total)),
                "  " + (", ".join(self.same_bits[mode]) or "none known"),
            )
            for mode, sent in self.bytes_sent.items()
        ]  # fmt: skip
        widths = [max(len(row[i]) for row in (head, *table)) for i in range(len(head))]
        rows = [
            "  ".join(f"{cell:{'>' if 2 <= i <= 5 else '<'}{widths[i]}}" for i, cell in enumerate(row)).rstrip()
            for row in (head, *table)
        ]
        against = [f"  {mode}: {why}" for mode, why in self.reasons.items() if mode != self.choice.mode]
        return "\n".join(
            [
                self.heading,
                f"{self.choice.mode}: {self.choice.why}",
                "sent by the rank that sends most, in one call; and what has the same bits as in one process:",
                *rows,
                "not taken:",
                *against,
            ]
        )


def explain(
    *,
    q_heads: int,
    kv_heads: int,
    seq_len: int,
    mesh: DeviceMesh | None = None,
    world_size: int | None = None,
    ranks_per_node: int | None = None,
    mask: Mask | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    batch: int = 1,
    ulysses_degree: int | None = None,
) -> Explanation:
    """Which mode ``mode="auto"`` takes for an attention call, and why; printed and returned. Nothing is sent.

    The bytes are those of the layout that suits the mask (see `make_layout`), exact for every mask and length.
    `ringcp.modes.choose_mode` has the rule.

    Args:
        q_heads, kv_heads: query heads, and key and value heads.
        seq_len: number of tokens of the whole sequence.
        mesh: the mesh over which it is split: 1-D, or 2-D ("cp", "sp"), whose second axis is the exchange. Or
            world_size: the number of ranks, without any process group. Exactly one of them.
        ranks_per_node: neighbours of the group that share a node. None: with a mesh, by torchrun's numbering and
            LOCAL_WORLD_SIZE; without either, all of them.
        mask: None is full attention.
        device: "cpu" or "cuda". None is the mesh's, else "cpu".
        dtype: of q, k and v.
        head_dim: of q, k and v.
        batch: sequences in a call.
        ulysses_degree: ranks in an exchange, if that is not left to the rule.

    Raises:
        ArgumentError: what does not fit.
    """
    _check_call(q_heads, kv_heads, seq_len, head_dim, batch, dtype)
    ranks = _ranks(mesh, world_size, ranks_per_node, ulysses_degree)
    device_type = _device_type(device, mesh)
    wrong = mask_problem(mask)
    mask = Full() if mask is None or wrong else mask
    wrong = wrong or mask.problem(batch, seq_len, q_heads=q_heads)
    if wrong:
        raise ArgumentError(wrong)
    choice = choose_mode(
        q_heads=q_heads,
        kv_heads=kv_heads,
        seq_len=seq_len,
        world_size=ranks.num,
        ranks_per_node=ranks.per_node,
        mask=mask,
        device_type=device_type,
        ulysses_degree=ranks.exchange,
    )
    weight = Weight(q_heads, kv_heads, head_dim, dtype.itemsize, batch)
    degrees = _degrees(choice, ranks)
    reasons = {choice.mode: choice.why, **dict(choice.not_taken)}
    if "usp" not in degrees:
        reasons["usp"] = f"nothing lies between exchanges of 1 and of all of {_some(ranks.num, 'rank')}"
    heads = f"{_some(q_heads, 'query head')} and {_some(kv_heads, 'key head')} of {head_dim}"
    explanation = Explanation(
        f"{_some(ranks.num, 'rank')}, {ranks.per_node} a node, on {device_type}: {mask!r} over "
        f"{_some(seq_len, 'token')}, batch {batch}, {heads}, {str(dtype).removeprefix('torch.')}",
        choice,
        {mode: _sent(mode, degree, mask, seq_len, ranks.num, weight) for mode, degree in degrees.items()},
        degrees,
        reasons,
        {mode: _same_bits(mode, mask, seq_len, ranks.num, weight, device_type, dtype) for mode in degrees},
    )
    print(explanation)
    return explanation


class _Ranks(NamedTuple):
    """The ranks, how many of them share a node, and how many are to be in an exchange, if that is said."""

    num: int
    per_node: int
    exchange: int | None


def _ranks(
    mesh: DeviceMesh | None, world_size: int | None, ranks_per_node: int | None, ulysses_degree: int | None
) -> _Ranks:
    if (mesh is None) == (world_size is None):
        given = "neither" if mesh is None else "both"
        raise ArgumentError(f"mesh, world_size: expected exactly one of them, got {given}; give one")
    if ulysses_degree is not None:
        _check_count("ulysses_degree", ulysses_degree, 1)
    if mesh is not None:
        axis = _exchange_axis(mesh)
        if axis is not None and ulysses_degree not in (None, axis):
            raise ArgumentError(
                f"ulysses_degree: expected {axis}, the mesh's second axis, got {ulysses_degree}; leave it out"
            )
        ulysses_degree = axis if ulysses_degree is None else ulysses_degree
        world_size = mesh.size()
        ranks_per_node = neighbours(mesh.mesh.flatten().tolist()) if ranks_per_node is None else ranks_per_node
    assert world_size is not None, "one of them is given"
    _check_count("world_size", world_size, 1)
    ranks_per_node = world_size if ranks_per_node is None else ranks_per_node
    _check_count("ranks_per_node", ranks_per_node, 1)
    if ranks_per_node < world_size and world_size % ranks_per_node:
        raise ArgumentError(
            f"ranks_per_node: expected a divisor of the {world_size} ranks, or at least as many, got {ranks_per_node}; "
            "give the neighbours that always share a node"
        )
    return _Ranks(world_size, min(ranks_per_node, world_size), ulysses_degree)


def _check_call(q_heads: int, kv_heads: int, seq_len: int, head_dim: int, batch: int, dtype: torch.dtype) -> None:
    counts = {"q_heads": q_heads, "kv_heads": kv_heads, "seq_len": seq_len, "head_dim": head_dim, "batch": batch}
    for name, value in counts.items():
        _check_count(name, value, 0 if name == "seq_len" else 1)
    if q_heads % kv_heads:
        raise ArgumentError(
            f"q_heads, kv_heads: expected query heads that are a multiple of the key heads, got {q_heads} and "
            f"{kv_heads}; give those of the model"
        )
    if dtype not in _DTYPES:
        raise ArgumentError(f"dtype: expected one of {', '.join(map(str, _DTYPES))}, got {shown(dtype)}; choose one")


def _exchange_axis(mesh: Any) -> int | None:
    """The size of the second axis of a 2-D mesh; None for a 1-D one."""
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(
            f"mesh: expected a DeviceMesh, got {shown(mesh)}; make one with init_device_mesh, or pass world_size="
        )
    if mesh.ndim == 1:
        return None
    if mesh.mesh_dim_names != GRID:
        raise ArgumentError(
            f"mesh: expected a mesh of 1 dim, or of the dims {GRID}, in this order, got {mesh.ndim} dims "
            f'{mesh.mesh_dim_names}; take the slice over which the sequence is split, such as mesh["cp"]'
        )
    return mesh.size(1)


def _device_type(device: object, mesh: DeviceMesh | None) -> str:
    if device is None:
        device = "cpu" if mesh is None else mesh.device_type
    kind = device.type if isinstance(device, torch.device) else device
    kind = kind.partition(":")[0] if isinstance(kind, str) else kind
    if kind not in ("cpu", "cuda"):
        raise ArgumentError(f"device: expected 'cpu' or 'cuda', got {device!r}; choose one of these")
    assert isinstance(kind, str), "compared above"
    return kind


def _check_count(name: str, value: object, least: int) -> None:
    if not is_int(value, least):
        raise ArgumentError(f"{name}: expected an integer of at least {least}, got {shown(value)}; give an int")


def _some(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _degrees(choice: Choice, ranks: _Ranks) -> dict[Mode, int]:
    """The modes that there are on so many ranks, with the exchange of each."""
    degrees: dict[Mode, int] = {"ring": 1, "gather": 1, "ulysses": ranks.num}
    # The chosen one; else the largest that a node holds, or that there is.
    held = [d for d in divisors(ranks.per_node) if 1 < d < ranks.num]
    between = held or divisors(ranks.num)[1:-1]
    if between:
        degrees["usp"] = choice.ulysses_degree if choice.mode == "usp" else between[-1]
    return degrees


def _sent(mode: Mode, degree: int, mask: Mask, seq_len: int, world_size: int, weight: Weight) -> Traffic:
    layout = choose_layout(mask, seq_len, world_size)
    rows = grouped(layout, degree)
    schedules = [build(rows, mask.superset, ring(rows.world_size), rank) for rank in range(rows.world_size)]
    moved = gathered([_needed(s) for s in schedules]) if mode == "gather" else tuple(map(_planned, schedules))
    lengths = [layout.local_len(rank) for rank in range(world_size)]
    return most(usp_bytes(lengths, degree, moved, weight))  # the others are its extremes


def _planned(schedule: Schedule) -> Rows:
    return Rows(schedule.rows_sent("kv"), schedule.rows_sent("dkv", schedule.backward))


def _needed(schedule: Schedule) -> Sequence[int]:
    """Of each rank, the rows that this one's queries attend to."""
    needed = [0] * schedule.world_size
    for step in schedule.forward:
        assert step.source is not None, "a ring or direct step has one owner"
        needed[step.source] = length(union(tile.band.k for tile in step.tiles))
    return needed


def _same_bits(
    mode: Mode, mask: Mask, seq_len: int, world_size: int, weight: Weight, device_type: str, dtype: torch.dtype
) -> tuple[str, ...]:
    everything = ("out", "lse", "dq", "dk", "dv")
    if world_size == 1:
        return everything
    if device_type != "cpu":
        return ()
    if mode == "ulysses" and _alone_as_together(mask, seq_len, weight, dtype):
        # Whole heads give the same bits alone; the parts of a replicated head's gradients are added afterwards.
        whole = not replicates(head_shares(weight.q_heads, weight.kv_heads, world_size))
        return everything if whole else everything[:3]
    single = dtype in (torch.float32, torch.bfloat16)
    if mode == "gather" and mask == Full() and single and seq_len in (1024, 2048, 4096):
        return ("out", "dq")  # only where the kernel's blocks of queries fall alike
    return ()


def _alone_as_together(mask: Mask, seq_len: int, weight: Weight, dtype: torch.dtype) -> bool:
    """Whether the CPU's flash kernel gives a head the same bits alone as among others."""
    if dtype == torch.float16:
        return False  # not measured
    # The products of matrices depend on how their operands are aligned, but for bf16, which is packed first.
    if dtype != torch.bfloat16 and weight.head_dim * dtype.itemsize % 16:
        return False
    caps = KERNELS["sdpa_flash_cpu"].caps.of(dtype.itemsize)
    whole = plan(Contiguous(seq_len, 1), mask.superset, ring(1), 0, Heads(1, 1), caps)
    calls = [call for step in whole.forward.steps for call in step.calls]
    if any(not call.fresh for call in calls):
        return False  # merging computes the last elements of a tensor otherwise than those before
    small = any(min(map(length_of, (call.q, call.k))) < _FEW_ROWS for call in calls)
    return dtype != torch.float64 or not small
