"""Masks: which pairs of global positions attend. A small algebra, closed under ``&`` and ``|``.

The one question to a mask is `Mask.pieces`: the disjoint bands of one rectangle of the score matrix. The answer is
as long as the number of pieces, never as the area. What masks are made of is in `mask_nodes.py` and `row_nodes.py`; how
the lists of documents and paddings are read, in `mask_entries.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ringcp.band import Band, Range, count
from ringcp.errors import ArgumentError
from ringcp.integers import is_int
from ringcp.layout import Span
from ringcp.mask_entries import counts, edges_of_lengths, edges_of_positions, edges_of_sums, items, shared
from ringcp.mask_mods import MaskMod, named, rectangles
from ringcp.mask_nodes import AndNode, CausalNode, ChunkedNode, FullNode, OrNode, WindowNode
from ringcp.mask_spec import decode, encode
from ringcp.node import Indices, Node, Pair, Sizes
from ringcp.predicate_node import BlockMaskNode, PredicateNode
from ringcp.row_nodes import BlocksNode, DocumentsNode, PaddingNode, PrefixNode
from ringcp.spec import host_int64

# Specs are padded to a multiple of this, so that different masks have specs of one shape and compile once.
_SPEC_WORDS = 32


class Pieces(Hashable, Protocol):
    """What a schedule needs to know of a mask. Implementations are hashable: schedules are memoised by them."""

    rows: int | None
    """How many rows of the batch have masks of their own; None if all rows share one."""

    reach: int | None
    """No pair further apart than this attends; None if there is no such bound."""

    def pieces(self, q_span: Span, k_span: Span, row: int = 0) -> list[Band]:
        """Disjoint trimmed bands, counted in elements of the two spans, that hold exactly the allowed pairs."""
        ...


class Mask:
    """Which query positions attend to which key positions. Make one with `Causal`, `Documents` and so on, ``&``, ``|``.

    Attributes:
        spec: int64 CPU tensor that encodes the mask; all that traced code touches.
        rows, reach: see `Pieces`.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        words = encode(node)
        words += [0] * (-len(words) % _SPEC_WORDS)
        self.spec = host_int64(words)
        if len(words) > _SPEC_WORDS:
            torch._dynamo.maybe_mark_dynamic(self.spec, 0)
        if node.mods:  # backward may have the spec alone
            self.spec.mods = node.mods  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:
        return Mask, (self._node,)

    @property
    def rows(self) -> int | None:
        return self._node.rows

    @cached_property
    def reach(self) -> int | None:
        return self._node.reach

    @property
    def needs_band(self) -> bool:
        """Whether a kernel must take more than full and causal rectangles."""
        return self._node.needs_band

    @property
    def of_one_sequence(self) -> bool:
        """Whether it has no meaning between two sequences: it says where documents or padding end."""
        return self._node.of_one_sequence

    @property
    def explicit(self) -> bool:
        """Whether `pieces` hold more than the allowed pairs, since functions say which of them are."""
        return bool(self._node.mods)

    @cached_property
    def conjunction(self) -> tuple[MaskMod, ...]:
        """The functions that all have to allow a pair of its pieces, if that is the mask; none of what ``|`` makes."""
        return _conjunction(self._node)

    @cached_property
    def superset(self) -> Mask:
        """A mask without functions, of the same pieces: what may be remembered without holding what they capture."""
        return Mask(self._node.superset()) if self.explicit else self

    def pieces(self, q_span: Span, k_span: Span, row: int = 0) -> list[Band]:
        """The disjoint bands of allowed pairs, or of those that could be; see `Pieces.pieces` and `explicit`."""
        if q_span.step == k_span.step or min(q_span.length, k_span.length) <= 1:
            step = q_span.step if q_span.length > 1 else k_span.step
            return self._node.pieces(Pair(q_span.start, q_span.length, k_span.start, k_span.length, step), row)
        # Bands need a common step: take the shorter span element by element.
        if q_span.length <= k_span.length:
            one_by_one = [(i, 0, Span(p, p + 1), k_span) for i, p in enumerate(range(*q_span))]
        else:
            one_by_one = [(0, j, q_span, Span(p, p + 1)) for j, p in enumerate(range(*k_span))]
        return [band.shift(i, j) for i, j, q, k in one_by_one for band in self.pieces(q, k, row)]

    def within(self, other: Mask, seq_len: int) -> bool:
        """Whether it allows no pair that `other` forbids, in sequences of this length. Functions count as the same if
        they are the same object.

        Raises:
            ArgumentError: if both have masks for each batch row, of different numbers.
        """
        if set(_parts(other._node)) <= set(_parts(self._node)):  # needs no look at the pairs, of which there are many
            return True
        if other.explicit and not (other.conjunction and set(other.conjunction) <= set(self.conjunction)):
            return False
        return _within(self.superset, other.superset, seq_len)

    def problem(self, batch: int | None, seq_len: int, *, q_heads: int | None = None, kv_len: int | None = None) -> str:
        """Why the mask does not fit a batch of sequences of this length; empty if it does.

        batch, q_heads: None if not known. kv_len: of keys if these are another sequence.
        """
        wrong = self._node.problem(Sizes(batch, q_heads, seq_len, seq_len if kv_len is None else kv_len))
        return f"mask: expected {wrong} in {self}; give what this batch holds" if wrong else ""

    def probe(self, batch: int, q_heads: int, q_len: int, k_len: int, device: torch.device) -> None:
        """Try the functions in it on a few pairs.

        Raises:
            ArgumentError: if one of them raises, or gives something else than a bool tensor on this device.
        """
        for mod in self._node.mods:
            mod.probe(batch, q_heads, q_len, k_len, device)

    def dense(
        self, q_positions: Tensor, k_positions: Tensor, *, batch: int | None = None, heads: int | None = None
    ) -> Tensor:
        """The mask written out, True where the query attends to the key; for checks and small cases.

        Bool (Sq, Sk), or (B, 1, Sq, Sk) where batch rows have masks of their own, (1, H, Sq, Sk) or (B, H, Sq, Sk)
        where a function looks at the query head.

        batch, heads: how many there are; only of use where a function looks at them.

        Raises:
            ArgumentError: if a function looks at them, and they are not given.
        """
        looks = [mod.depends(q_positions.device) for mod in self._node.mods]
        for dim, (name, given) in enumerate((("batch", batch), ("heads", heads))):
            if given is None and any(look[dim] for look in looks):
                raise ArgumentError(f"{name}: expected how many there are, for {self}, got None; give the number")
        written = self.written(q_positions, k_positions, (0, self.rows or batch or 1), (0, heads or 1))
        return written[0, 0] if self.rows is None and written.shape[:2] == (1, 1) else written

    def written(self, q_positions: Tensor, k_positions: Tensor, batch: Range, heads: Range) -> Tensor:
        """The mask written out for batch rows and query heads: bool (B, H, Sq, Sk), B or H 1 where all share one."""

        def of(row: int, batch: Range) -> Tensor:
            allowed = self._node.allows(Indices(q_positions[:, None], k_positions[None, :], batch, heads), row)
            return allowed if allowed.ndim == 4 else allowed[None, None]

        if self.rows is None:
            return of(0, batch)
        return torch.cat([of(row, (row, row + 1)) for row in range(*batch)])

    def __and__(self, other: Mask) -> Mask:
        _check_called(other)
        return Mask(AndNode(self._node, other._node)) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        _check_called(other)
        return Mask(OrNode(self._node, other._node)) if isinstance(other, Mask) else NotImplemented

    def __bool__(self) -> bool:
        raise TypeError(
            "mask: expected & or | between masks, got and, or, not or if; write a & b, or compare with None"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self._node == other._node

    def __hash__(self) -> int:
        return hash(self._node)

    def __repr__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        return str(self._node)


def Full() -> Mask:
    """Every query attends to every key."""
    return Mask(FullNode())


def Causal() -> Mask:
    """A query attends to itself and to everything before it."""
    return Mask(CausalNode())


def Window(left: int, right: int = 0) -> Mask:
    """A query attends to `left` tokens before itself, itself, and `right` after: ``-right <= q_pos - k_pos <= left``.

    ``Window(w - 1)`` is the causal sliding window of w tokens of most models.

    Raises:
        ArgumentError: if `left` or `right` is not an integer of at least 0.
    """
    for name, value in (("left", left), ("right", right)):
        if not is_int(value, 0):
            raise ArgumentError(
                f"{name}: expected a number of tokens of at least 0, got {value!r}; "
                "for an unbounded side use Causal() or Full()"
            )
    return Mask(WindowNode(left, right))


def Chunked(size: int) -> Mask:
    """Positions attend within their chunk of `size`: ``q_pos // size == k_pos // size``.

    ``Chunked(8192) & Causal()`` is the chunked-local attention of some models.

    Raises:
        ArgumentError: if `size` is not an integer of at least 1.
    """
    if not is_int(size, 1):
        raise ArgumentError(f"size: expected a number of tokens of at least 1, got {size!r}; give the chunk's length")
    return Mask(ChunkedNode(size))


def Prefix(n: int | Sequence[int] | Tensor) -> Mask:
    """Prefix language modelling: everything attends to the first `n` positions, and causally beyond them.

    n: one length, or one for each batch row.

    Raises:
        ArgumentError: if a length is not an integer of at least 0.
    """
    lengths = counts("n", items("n", n))
    return Mask(PrefixNode(shared(lengths), len(lengths)))


def Padding(lengths: Sequence[int] | Tensor, *, side: str = "right", seq_len: int | None = None) -> Mask:
    """Only valid tokens attend, and only to valid tokens; the out of padded queries is 0, and all their gradients.

    lengths: the number of valid tokens of each batch row.
    side: where the padding is, "right" or "left".
    seq_len: length of the padded sequence, the whole one; needed for the left side.

    Raises:
        ArgumentError: lengths that are not integers of at least 0, or longer than `seq_len`; another side.
    """
    given = items("lengths", lengths)
    if any(isinstance(value, list) for value in given):
        raise ArgumentError(
            "lengths: expected one number of tokens for each batch row, got lists; of an attention mask, pass "
            'mask.sum(-1), and where the padding is on the left side="left", seq_len=mask.shape[-1]'
        )
    valid = counts("lengths", given)
    if side not in ("right", "left"):
        raise ArgumentError(f'side: expected "right" or "left", got {side!r}; say where the padding is')
    if side == "left" and seq_len is None:
        raise ArgumentError("seq_len: expected the length of the padded sequence for side='left', got None; give it")
    if seq_len is not None and max(valid, default=0) > seq_len:
        raise ArgumentError(f"lengths: expected at most seq_len = {seq_len}, got {max(valid)}; check both")
    whole = () if seq_len is None else (seq_len,)
    if side == "left":
        assert seq_len is not None, "checked above"
        return Mask(PaddingNode(shared([(seq_len - n, seq_len) for n in valid]), len(valid), whole))
    return Mask(PaddingNode(shared([(0, n) for n in valid]), len(valid), whole))


def Documents(
    lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor | None = None,
    *,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    position_ids: Sequence[int] | Tensor | None = None,
) -> Mask:
    """Packed documents: a position attends within its own document. Combine it, ``Documents(...) & Causal()``.

    Exactly one of the arguments. What lies after the last document is padding: it attends to nothing.

    Args:
        lengths: tokens of each document, in order; or one list for each batch row. Zero-length ones are no documents.
        cu_seqlens: their cumulative sums from 0 on, as flash-attn takes them.
        position_ids: (S,) or (B, S), of the whole sequence, 0, 1, 2, ... anew in each document.

    Raises:
        ArgumentError: not exactly one argument, or one that is none of these.
    """
    given = {"lengths": lengths, "cu_seqlens": cu_seqlens, "position_ids": position_ids}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise ArgumentError(
            f"Documents: expected one of lengths, cu_seqlens, position_ids, got {', '.join(names) or 'none'}; give one"
        )
    (name,) = names
    values = items(name, given[name])
    rows = [items(name, row) for row in values] if values and not isinstance(values[0], int) else [values]
    counted = [counts(name, row) for row in rows]
    edges = {"lengths": edges_of_lengths, "cu_seqlens": edges_of_sums, "position_ids": edges_of_positions}[name]
    whole = tuple(sorted({len(row) for row in counted})) if name == "position_ids" else ()
    return Mask(DocumentsNode(shared([edges(row) for row in counted]), len(counted), whole))


def Predicate(fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | Any, *, name: str | None = None) -> Mask:
    """Any mask: a pair attends where ``fn(b, h, q_idx, kv_idx)`` is True, as a mask_mod of FlexAttention says it.

    The indices are scalar tensors: batch row, query head, and positions in the whole sequences, wherever their tokens
    are. Tensors that `fn` captures are whole ones too (not sharded buffers of a context), on the device of q.

    Work is planned, moved and balanced for what it is combined with: ``Predicate(fn) & Causal()`` computes as much as
    ``Causal()``, alone it is as dear as full attention, but for a `BlockMask`, whose empty blocks are neither computed
    nor moved. Each kernel call gets its part written out, evaluated anew in forward and backward, rows times keys of
    bools (times heads and batch if `fn` looks at them); but kernel "flex", on a GPU, compiles `fn` in and skips blocks
    where nothing attends, if `fn` computes pointwise and looks up in tensors, and if ``&`` combines it; there, one that
    does not compile (it prints, branches on what a tensor holds, or sums one up) is refused before anything is sent.
    Tensors that `fn` captures stay as they are until backward is done; one that is seen to have been written to raises
    there.

    Make it outside of compiled code. Ranks agree on the name alone: give different functions different names.

    Args:
        fn: the function, or a `BlockMask`: then as compiled FlexAttention reads it, for its sizes alone.
        name: how the ranks know it as the same; None is the function's own name, which a lambda has not.

    Raises:
        ArgumentError: for what cannot be called, or has no name.
    """
    mod, blocks = named(fn, name), rectangles(fn)
    return Mask(PredicateNode(mod) if blocks is None else BlockMaskNode(mod, BlocksNode(shared(blocks))))


def _conjunction(node: Node) -> tuple[MaskMod, ...]:
    if isinstance(node, AndNode):
        sides = [_conjunction(side) for side in (node.a, node.b) if side.mods]
        return tuple(mod for side in sides for mod in side) if all(sides) else ()
    return node.mods if isinstance(node, (PredicateNode, BlockMaskNode)) else ()


def _parts(node: Node) -> list[Node]:
    """Nodes that all have to allow a pair."""
    return [*_parts(node.a), *_parts(node.b)] if isinstance(node, AndNode) else [node]


@lru_cache(maxsize=64)
def _within(mask: Mask, other: Mask, seq_len: int) -> bool:
    both, whole = mask & other, Span(0, seq_len)

    def num_pairs(of: Mask, row: int) -> int:
        return sum(map(count, of.pieces(whole, whole, row)))

    return all(num_pairs(both, row) == num_pairs(mask, row) for row in range(both.rows or 1))


def uncalled(value: object) -> str:
    """The name of a function that makes masks, if it was passed in place of what it makes; else empty."""
    makers = (Full, Causal, Window, Documents, Prefix, Padding, Chunked, Predicate)
    return next((make.__name__ for make in makers if value is make), "")


def _check_called(other: object) -> None:
    name = uncalled(other)
    if name:
        raise ArgumentError(f"mask: expected a mask on either side, got ringcp.{name}, not called; write {name}(...)")


def decode_mask(words: tuple[int, ...]) -> Mask:
    """The mask of a spec."""
    # Only handles are negative. What functions capture must not live on in a memo.
    return Mask(decode(iter(words))) if min(words) < 0 else _decoded(words)


@lru_cache(maxsize=256)
def _decoded(words: tuple[int, ...]) -> Mask:
    return Mask(decode(iter(words)))
