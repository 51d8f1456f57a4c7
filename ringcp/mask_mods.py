"""Functions of pairs of positions, as FlexAttention takes them for masks, and how an op finds them.

A spec holds numbers only. A function has a handle in it, by which it is found as long as someone holds the mask, its
spec, or a graph that has saved that.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, groupby
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

from ringcp.band import Range
from ringcp.errors import ArgumentError
from ringcp.vectorize import is_pointwise, vectorized

# As many pairs are evaluated at a time: a function makes a few int64 tensors of them.
_PAIRS = 1 << 24
# Bytes of a name in one word of a spec, so that no word of a name is negative.
_NAME_BYTES = 7


class MaskMod:
    """A function ``fn(b, h, q_idx, kv_idx)`` and its name.

    shape: (B, H, Q_LEN, KV_LEN) for which alone it holds; None if it holds for any. handle: negative, as no other word
    of a spec.
    """

    def __init__(self, fn: Callable[..., Any], name: str, shape: tuple[int, ...] | None = None) -> None:
        self.fn, self.name, self.shape = fn, name, shape
        with _lock:
            self.handle = -next(_handles)
            _mods[self.handle] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return MaskMod, (self.fn, self.name, self.shape)  # in another process, it has another handle

    def __str__(self) -> str:
        sizes = "" if self.shape is None else f", {' x '.join(map(str, self.shape))}"
        return f"Predicate({self.name}{sizes})"

    def __call__(self, batch: Range, heads: Range, q: Tensor, k: Tensor) -> Tensor:
        """For some batch rows, query heads and 1-D positions: bool (B, H, M, N), B or H 1 where it depends on none.

        Raises:
            ArgumentError: if the function raises, or gives something else.
        """
        b, h = (torch.arange(*each, device=q.device) for each in (batch, heads))
        rows = max(1, _PAIRS // max(1, len(k)))
        parts = [self._evaluated(b, h, some, k) for some in q.split(rows)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def depends(self, device: torch.device) -> tuple[bool, bool]:
        """Whether it depends on the batch row, and on the query head."""
        one, two = (torch.zeros(n, dtype=torch.int64, device=device) for n in (1, 2))
        sizes = self._evaluated(two, two, one, one).shape
        return sizes[0] > 1, sizes[1] > 1

    def pointwise(self, device: torch.device) -> bool:
        """Whether a kernel that is compiled for it can evaluate it."""
        with torch.no_grad():
            return is_pointwise(self.fn, device)

    def probe(self, batch: int, heads: int, q_len: int, k_len: int, device: torch.device) -> None:
        """Evaluate it at the corners of a call.

        Raises:
            ArgumentError: if the function raises, or gives something else than a bool tensor on this device.
        """
        sizes = self.within((batch, heads, q_len, k_len))
        if 0 not in sizes:
            ends = [torch.tensor(sorted({0, size - 1}), dtype=torch.int64, device=device) for size in sizes]
            self._evaluated(*ends)

    def within(self, sizes: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        """Of a call of (B, H, Q_LEN, KV_LEN), those for which it can be asked: lengths that it holds for."""
        if self.shape is None:
            return sizes
        batch, heads, *lens = sizes
        q_len, k_len = map(min, lens, self.shape[2:])
        return batch, heads, q_len, k_len

    def _evaluated(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        try:
            with torch.no_grad():
                found = vectorized(self.fn, b, h, q, k)
        except Exception as error:
            raise ArgumentError(
                f"mask: expected {self} to say of pairs on {q.device} whether they attend, got {type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}; write it as a mask_mod of FlexAttention, with captured tensors "
                "of the whole sequence on that device"
            ) from error
        if found.dtype != torch.bool or found.ndim != 4:
            one = f"{found.dtype} of shape {tuple(found.shape[4:])}"
            raise ArgumentError(f"mask: expected one bool from {self} for each pair, got {one}; return a comparison")
        if found.device != q.device:
            raise ArgumentError(
                f"mask: expected {self} to give tensors on {q.device}, where q is, got one on {found.device}; "
                "move the tensors that it captures"
            )
        return found

    def seen(self) -> list[tuple[Tensor, int]]:
        """The tensors that it captures, with how often each has been written to, as far as they are found."""
        return [(x, x._version) for x in _captured(self.fn) if not x.is_inference()]

    def words(self) -> list[int]:
        """The handle and the name, as a spec holds them."""
        data = self.name.encode()
        chunks = [data[at : at + _NAME_BYTES] for at in range(0, len(data), _NAME_BYTES)]
        return [self.handle, len(chunks), *(int.from_bytes(chunk, "big") for chunk in chunks)]


_mods: weakref.WeakValueDictionary[int, MaskMod] = weakref.WeakValueDictionary()
_handles = count(1)
_lock = threading.Lock()


def mask_mod_of(words: Iterator[int]) -> MaskMod:
    """The function of a handle and a name.

    Raises:
        ArgumentError: if nobody holds it any more.
    """
    handle, num_words = next(words), next(words)
    chunks = [next(words) for _ in range(num_words)]
    with _lock:
        mod = _mods.get(handle)
    if mod is None:
        name = b"".join(chunk.to_bytes(_NAME_BYTES, "big").lstrip(b"\0") for chunk in chunks).decode()
        raise ArgumentError(
            f"mask: expected the function of Predicate({name}), got one that is gone; keep the mask until backward is "
            "done"
        )
    return mod


def _captured(fn: object) -> list[Tensor]:
    """Tensors in closures, defaults, bound arguments and objects, and globals by name, of it and of what it calls."""
    found: list[Tensor] = []
    known, left = set(), [fn]
    while left:
        x = left.pop()
        if id(x) in known:
            continue
        known.add(id(x))
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, FunctionType):
            names = (x.__globals__.get(name) for name in x.__code__.co_names)
            left += [value for value in names if isinstance(value, (Tensor, FunctionType))]
            left += [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
            left += map(_content, x.__closure__ or ())
        elif isinstance(x, partial):
            left += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, MethodType):
            left += [x.__func__, x.__self__]
        elif isinstance(x, (list, tuple)):
            left += x
        elif isinstance(x, dict):
            left += x.values()
        elif not isinstance(x, (type, ModuleType)):
            left += getattr(x, "__dict__", {}).values()
    return found


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return None


def named(fn: Any, name: object) -> MaskMod:
    """What `ringcp.Predicate` is made of: see there."""
    block_mask = block_mask_type()
    is_blocks = block_mask is not None and isinstance(fn, block_mask)
    if not is_blocks and (not callable(fn) or isinstance(fn, type)):
        what = f"a tensor {tuple(fn.shape)}" if isinstance(fn, Tensor) else repr(fn)
        raise ArgumentError(
            f"fn: expected a function of (b, h, q_idx, kv_idx) or a BlockMask, got {what}; of a dense mask, pass "
            'lambda b, h, q, k: mask[q, k] and name="..."'
        )
    given = getattr(fn.mask_mod if is_blocks else fn, "__name__", "<unnamed>") if name is None else name
    if not isinstance(given, str) or not given.isprintable() or not given or set(given) & set("<>=;"):
        raise ArgumentError(
            f"name: expected one by which ranks know {fn!r} as the same, printable and without any of <>=;, got "
            f'{given!r}; pass name="..."'
        )
    if is_blocks:
        *around, q_len, k_len = fn.shape
        return MaskMod(_of_blocks(fn), given, (*(1,) * (2 - len(around)), *around, q_len, k_len))
    return MaskMod(fn, given)


def block_mask_type() -> type | None:
    """torch's BlockMask, if anyone can have one: what defines it takes a while to import."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return None if module is None else module.BlockMask  # type: ignore[no-any-return]


def rectangles(fn: Any) -> list[tuple[tuple[int, ...], ...]] | None:
    """Of a BlockMask, for each batch row, what some head may attend to: (first query, query after the last, first key,
    key after the last) of each run of blocks, where block rows that are alike are one. None for another function.
    """
    block_mask = block_mask_type()
    return _runs(fn) if block_mask is not None and isinstance(fn, block_mask) else None


def _runs(blocks: Any) -> list[tuple[tuple[int, ...], ...]]:
    (q_size, k_size), (q_len, k_len) = blocks.BLOCK_SIZE, blocks.seq_lengths
    found: list[tuple[tuple[int, ...], ...]] = []
    for of_row in (_kinds(blocks) > 0).any(1).tolist():
        row, rects = 0, []
        for listed, alike in groupby(of_row):
            first_row, row = row, row + len(list(alike))
            column = 0
            for is_listed, run in groupby(listed):
                first, column = column, column + len(list(run))
                if is_listed:
                    keys = first * k_size, min(column * k_size, k_len)
                    rects.append((first_row * q_size, min(row * q_size, q_len), *keys))
        found.append(tuple(rects))
    return found


def _kinds(blocks: Any) -> Tensor:
    """(B, H, rows, columns): 0 for a block where nothing attends, 1 where its mask_mod says what, 2 where all does."""
    num_k = -(-blocks.seq_lengths[1] // blocks.BLOCK_SIZE[1])
    kinds = _marked(blocks.kv_num_blocks, blocks.kv_indices, num_k)
    if blocks.full_kv_num_blocks is not None:
        kinds += 2 * _marked(blocks.full_kv_num_blocks, blocks.full_kv_indices, num_k)
    return kinds.view(*(1,) * (4 - kinds.ndim), *kinds.shape)


def _of_blocks(blocks: Any) -> Callable[..., Any]:
    """What compiled FlexAttention does with a BlockMask: its mask_mod holds in partial blocks, in full ones all do."""
    (q_size, k_size), kinds = blocks.BLOCK_SIZE, _kinds(blocks)
    by_row, by_head = (size > 1 for size in kinds.shape[:2])
    table = kinds[(slice(None) if by_row else 0, slice(None) if by_head else 0)]
    mask_mod = blocks.mask_mod

    def of_blocks(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
        around = [index for index, varies in ((b, by_row), (h, by_head)) if varies]
        kind = table[(*around, q // q_size, k // k_size)]
        return (kind >= 2) | ((kind == 1) & mask_mod(b, h, q, k))

    return of_blocks


def _marked(num_blocks: Tensor, indices: Tensor, num_columns: int) -> Tensor:
    """(..., rows, columns): 1 for the first `num_blocks` of a row's `indices`."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
    at = torch.where(listed, indices, num_columns).long()
    return at.new_zeros(*at.shape[:-1], num_columns + 1).scatter_(-1, at, 1)[..., :num_columns]
