"""Layouts: which rank owns which tokens of the one long sequence.

A layout is the single coordinate system of a sharded sequence: ids, labels, positions, masks and rope tables are
all cut, gathered and checked through it. Chunk boundaries are ``floor(i * S / n)``: any length lies on any number
of ranks, local lengths differ by a token or two, nothing is padded, and a rank may own no token at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringcp.errors import LayoutError
from ringcp.integers import is_int
from ringcp.spec import host_int64

_PRINTED_RANKS = 16
_PRINTED_TOKENS = 64
_PRINTED_RUNS = 8


class Span(NamedTuple):
    """The global positions ``range(start, stop, step)``."""

    start: int
    stop: int
    step: int = 1

    @property
    def length(self) -> int:
        return len(range(self.start, self.stop, self.step))


def _contiguous(seq_len: int, world_size: int, rank: int) -> list[Span]:
    return [_chunk(seq_len, world_size, rank)]


def _head_tail(seq_len: int, world_size: int, rank: int) -> list[Span]:
    num_chunks = 2 * world_size
    return [_chunk(seq_len, num_chunks, rank), _chunk(seq_len, num_chunks, num_chunks - 1 - rank)]


def _striped(seq_len: int, world_size: int, rank: int) -> list[Span]:
    return [Span(rank, seq_len, world_size)]


def _chunk(seq_len: int, num_chunks: int, i: int) -> Span:
    return Span(i * seq_len // num_chunks, (i + 1) * seq_len // num_chunks)


def chunks(seq_len: int, num_chunks: int) -> list[Span]:
    """The chunks of a sequence, whose edges are ``floor(i * S / n)``; some are empty if there are more than tokens."""
    return [_chunk(seq_len, num_chunks, i) for i in range(num_chunks)]


class _Kind(NamedTuple):
    name: str
    cls: str
    spans: Callable[[int, int, int], list[Span]]


# The place in this tuple is the layout's code in a spec.
_KINDS = (
    _Kind("contiguous", "Contiguous", _contiguous),
    _Kind("head_tail", "HeadTail", _head_tail),
    _Kind("striped", "Striped", _striped),
)
_CODES = {kind.name: code for code, kind in enumerate(_KINDS)}
_CODES["auto"] = _CODES["head_tail"]
LAYOUT_NAMES = tuple(_CODES)
# The codes after those, of layouts that are not told by a name: whose spec says who owns which chunk, and of `Joint`.
DEALT = len(_KINDS)
_JOINT = DEALT + 1

UNSIZED = -1


class Layout:
    """Which rank owns which tokens. Make one with `Contiguous`, `HeadTail`, `Striped`, `Balanced` or `Joint`.

    Attributes:
        seq_len: number of tokens of the whole sequence.
        world_size: number of ranks.
        owners: of a `Balanced` layout, the rank that owns each chunk; otherwise empty.
        replicated: of a `Joint` layout, how many tokens every rank has; otherwise 0.
        rest: of a `Joint` layout, that of the others; otherwise the layout itself.
        spec: int64 (3 + chunks,) CPU tensor that encodes the layout; all that traced code touches.
    """

    def __init__(self, code: int, seq_len: int, world_size: int, owners: tuple[int, ...] = ()) -> None:
        for name, value, least in (("seq_len", seq_len, 0), ("world_size", world_size, 1)):
            if not is_int(value, least):
                raise LayoutError(f"{name}: expected an integer of at least {least}, got {value!r}; give an int")
        self.seq_len = seq_len
        self.world_size = world_size
        self.owners = owners
        self.replicated = 0
        self._code = code
        self._dealt = _dealt(seq_len, world_size, owners)
        self.spec = host_int64(self.key)
        if len(self.key) > 3:
            torch._dynamo.maybe_mark_dynamic(self.spec, 0)

    @property
    def rest(self) -> Layout:
        return self

    @property
    def name(self) -> str:
        """The word that `layout=` takes for a layout of this kind; "balanced" is none, since it needs a mask."""
        return "balanced" if self.owners else _KINDS[self._code].name

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The runs of positions that `rank` owns, in local order; none of them is empty."""
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise LayoutError(
                f"rank: expected 0 <= rank < world_size = {self.world_size}, got {rank}; pass mesh.get_local_rank()"
            )
        if self.owners:
            return self._dealt[rank]
        find = _spans.__wrapped__ if torch.compiler.is_compiling() else _spans  # Dynamo warns of caches
        return find(self._code, self.seq_len, self.world_size, rank)

    def local_len(self, rank: int) -> int:
        """Number of tokens that `rank` owns."""
        return sum(span.length for span in self.spans(rank))

    def positions(self, rank: int) -> Tensor:
        """Global positions of the rank's tokens: int64 (local_len,), on the CPU, the same for all batch rows."""
        runs = [torch.arange(*span, dtype=torch.int64, device="cpu") for span in self.spans(rank)]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device="cpu")

    def shard(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """The rows of `x` along `dim` (of length seq_len) that `rank` owns; a copy, differentiable.

        Raises:
            LayoutError: if `x` is not seq_len long in `dim`.
        """
        dim = self._checked_dim(x, dim, self.seq_len, "x")
        rows = [x[(slice(None),) * dim + (slice(*span),)] for span in self.spans(rank)]
        return torch.cat(rows, dim) if rows else x.narrow(dim, 0, 0).clone()

    def unshard(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole sequence from the shards of all ranks, in rank order; differentiable.

        Raises:
            LayoutError: if there is not one part a rank, or a part does not have its rank's length in `dim`.
        """
        if len(parts) != self.world_size:
            raise LayoutError(
                f"parts: expected one per rank, {self.world_size}, got {len(parts)}; pass every rank's shard"
            )
        for rank, part in enumerate(parts):
            dim = self._checked_dim(part, dim, self.local_len(rank), f"parts[{rank}]")
        return self._whole(parts, dim)

    def _whole(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        order = torch.cat([self.positions(rank) for rank in range(self.world_size)]).argsort()
        return torch.cat(tuple(parts), dim).index_select(dim, order.to(parts[0].device))

    def whole_gradient(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The gradient of the whole sequence, from those of the shards: what every rank has is summed."""
        return self.unshard(parts, dim)

    def _checked_dim(self, x: Tensor, dim: int, length: int, name: str) -> int:
        if not -x.ndim <= dim < x.ndim:
            raise LayoutError(f"dim: expected a dim of {name} with {x.ndim} dims, got {dim}; give the sequence dim")
        dim %= x.ndim
        if x.shape[dim] != length:
            raise LayoutError(
                f"{name}: expected {length} tokens in dim {dim} for {self!r}, got {x.shape[dim]}; check dim and layout"
            )
        return dim

    @property
    def key(self) -> tuple[int, ...]:
        """The spec as a tuple: equal for equal layouts."""
        return (self._code, self.seq_len, self.world_size, *self.owners)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.key == other.key)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        """Short, and different for different layouts: what ranks compare in a vote."""
        return self._text

    @cached_property
    def _text(self) -> str:
        if not self.owners:
            return f"{_KINDS[self._code].cls}({self.seq_len}, {self.world_size})"
        digest = blake2b(repr(self.owners).encode(), digest_size=8).hexdigest()
        return f"Balanced({self.seq_len}, {self.world_size}, {len(self.owners)} chunks #{digest})"

    def __str__(self) -> str:
        """Who owns what: a line a rank, and a letter a token where the sequence is short."""
        lines = [f"{self!r}"]
        for rank in range(min(self.world_size, _PRINTED_RANKS)):
            spans = self.spans(rank)
            runs = " ".join(
                f"[{s.start}, {s.stop})" + (f" step {s.step}" if s.step > 1 else "") for s in spans[:_PRINTED_RUNS]
            )
            if len(spans) > _PRINTED_RUNS:
                runs += f" and {len(spans) - _PRINTED_RUNS} more"
            line = f"  rank {rank}: {self.local_len(rank)} token{'s' * (self.local_len(rank) != 1)}  {runs or 'none'}"
            if self.seq_len <= _PRINTED_TOKENS:
                owned = {p for span in self.spans(rank) for p in range(*span)}
                line = f"{line:<48}" + "".join("#" if p in owned else "." for p in range(self.seq_len))
            lines.append(line.rstrip())
        if self.world_size > _PRINTED_RANKS:
            lines.append(f"  ... {self.world_size - _PRINTED_RANKS} more ranks")
        return "\n".join(lines)


def _dealt(seq_len: int, world_size: int, owners: Sequence[int]) -> tuple[tuple[Span, ...], ...]:
    """The spans of every rank, from one look at the owners of chunks; none without owners."""
    if not owners:
        return ()
    spans: list[list[Span]] = [[] for _ in range(world_size)]
    for owner, chunk in zip(owners, chunks(seq_len, len(owners)), strict=True):
        spans[owner].append(chunk)
    return tuple(map(joined, spans))


@lru_cache(maxsize=4096)
def _spans(code: int, seq_len: int, world_size: int, rank: int) -> tuple[Span, ...]:
    return joined(_KINDS[code].spans(seq_len, world_size, rank))


def joined(given: Sequence[Span]) -> tuple[Span, ...]:
    """The spans without empty ones, neighbours in one."""
    spans: list[Span] = []
    for span in given:
        if spans and span.step == 1 == spans[-1].step and spans[-1].stop == span.start:
            spans[-1] = Span(spans[-1].start, span.stop)
        elif span.length:
            spans.append(span)
    return tuple(spans)


class _FirstOfAlike(torch.autograd.Function):
    """The first of copies, to the bit; they get equal shares of its gradient."""

    @staticmethod
    def forward(ctx: Any, *copies: Tensor) -> Tensor:
        ctx.num_copies = len(copies)
        return copies[0].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return (grad / ctx.num_copies,) * ctx.num_copies


class _Joint(Layout):
    """See `Joint`."""

    def __init__(self, replicated: int, rest: Layout) -> None:
        if not is_int(replicated, 0):
            raise LayoutError(f"replicated: expected a number of tokens of at least 0, got {replicated!r}; give an int")
        if not isinstance(rest, Layout) or isinstance(rest, _Joint):
            raise LayoutError(
                f"rest: expected the layout of the tokens that are not on every rank, got {rest!r}; pass one such as "
                "ringcp.HeadTail(seq_len, mesh.size())"
            )
        self._rest = rest
        self._num = replicated
        super().__init__(_JOINT, replicated + rest.seq_len, rest.world_size)
        self.replicated = replicated

    @property
    def name(self) -> str:
        return "joint"

    @property
    def rest(self) -> Layout:
        return self._rest

    @property
    def key(self) -> tuple[int, ...]:
        return (_JOINT, self._num + self._rest.seq_len, self._rest.world_size, self._num, *self._rest.key)

    def spans(self, rank: int) -> tuple[Span, ...]:
        own = [Span(s.start + self._num, s.stop + self._num, s.step) for s in self._rest.spans(rank)]
        return joined([Span(0, self._num), *own])

    def _whole(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        first = _FirstOfAlike.apply(*(part.narrow(dim, 0, self._num) for part in parts))
        rests = [part.narrow(dim, self._num, part.shape[dim] - self._num) for part in parts]
        return torch.cat([first, self._rest.unshard(rests, dim)], dim)

    def whole_gradient(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        dim %= parts[0].ndim
        whole = self.unshard(parts, dim)
        wide = torch.promote_types(whole.dtype, torch.float32)
        total = parts[0].narrow(dim, 0, self._num).to(wide, copy=True)
        for part in parts[1:]:
            total += part.narrow(dim, 0, self._num)
        whole.narrow(dim, 0, self._num).copy_(total)
        return whole

    @cached_property
    def _text(self) -> str:
        return f"Joint({self._num}, {self._rest!r})"


def Joint(*, replicated: int, rest: Layout) -> Layout:
    """`replicated` tokens on every rank, in front of its rows in `rest`: text beside a long video, in both ways.

    In attention, all tokens attend to the replicated ones and they to all; the mask holds among the rest, whose
    positions it counts from 0. Replicated keys count once, and replicated queries get the same result on every rank, to
    the bit. The copies of a replicated tensor count as one value: each gets an equal share of its gradient, the same on
    every rank, and the sum over ranks is the whole, as it is for every parameter. (With the whole on every rank, each
    layer would multiply it by the number of ranks.)

    As `kv_layout=` of cross-attention, ``Joint(replicated=n, rest=Contiguous(0, mesh.size()))`` is an encoder memory of
    n tokens that every rank holds; every query attends to all of it, and a mask is refused.

    Raises:
        LayoutError: a `replicated` or `rest` that is none.
    """
    return _Joint(replicated, rest)


def Contiguous(seq_len: int, world_size: int) -> Layout:
    """Rank r owns chunk r of `world_size`. Simple, good for windows; a causal mask leaves the first ranks idle."""
    return Layout(_CODES["contiguous"], seq_len, world_size)


def HeadTail(seq_len: int, world_size: int) -> Layout:
    """Rank r owns chunks r and ``2 * world_size - 1 - r`` of ``2 * world_size`` (zigzag): causal work is even."""
    return Layout(_CODES["head_tail"], seq_len, world_size)


def Striped(seq_len: int, world_size: int) -> Layout:
    """Rank r owns tokens r, r + world_size, ...: causal work is nearly even, windows touch every rank."""
    return Layout(_CODES["striped"], seq_len, world_size)


def layout_named(name: str, seq_len: int, world_size: int) -> Layout:
    """The layout that `layout=name` means; "auto" is head-tail."""
    return Layout(_CODES[name], seq_len, world_size)


def layout_named_by(code: int) -> str:
    """The name of the kind of layout with this code."""
    return _KINDS[code].name


def unsized_spec(name: str) -> Tensor:
    """The spec of a layout of this name whose length is not known yet."""
    return _UNSIZED_SPECS[name]


_UNSIZED_SPECS = {name: host_int64([code, UNSIZED, UNSIZED]) for name, code in _CODES.items()}


@lru_cache(maxsize=1024)
def decode_layout(code: int, seq_len: int, world_size: int, *owners: int) -> Layout:
    """The layout of a spec, its length and world size filled in."""
    if code == _JOINT:
        return _Joint(owners[0], decode_layout(*owners[1:]))
    return Layout(code, seq_len, world_size, owners)
