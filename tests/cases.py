"""Cases of exact attention that several files share: what goes in, what must come out, and how they are held together.

A case names everything by words and numbers, so that it pickles, prints and makes the same tensors on every rank.
"""

import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import ringcp
from ringcp.layout import Layout, layout_named
from ringcp.mask import Mask
from ringcp.testing import assert_close, in_process, reference_attention


class Shape(NamedTuple):
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


HEADS = {
    "mha": Shape(1, 3, 3, 5, 5),
    "gqa": Shape(2, 8, 2, 5, 5),
    "mqa": Shape(2, 4, 1, 6, 6),
    "wide_v": Shape(1, 4, 2, 5, 7),
    "narrow_v": Shape(2, 3, 3, 7, 4),
}

# Head counts that no number of ranks divides, and fewer heads than ranks.
UNEVEN = {
    "28_4": Shape(1, 28, 4, 5, 5),
    "40_8": Shape(1, 40, 8, 4, 6),
    "12_3": Shape(2, 12, 3, 5, 5),
    "3_3": Shape(2, 3, 3, 6, 5),
    "7_1": Shape(1, 7, 1, 5, 5),
}
SHAPES = HEADS | UNEVEN

MASKS = {
    "full": None,
    "causal": ringcp.Causal(),
    "window_1": ringcp.Window(0),
    "window_3": ringcp.Window(2),
    "window_8": ringcp.Window(7),
    "window_17": ringcp.Window(16),
    "two_sided": ringcp.Window(4, 2),
    "and": ringcp.Window(9, 9) & ringcp.Causal(),
    "or": ringcp.Window(1, 3) | (ringcp.Window(6, 0) & ringcp.Window(11, 5)),
    "chunked": ringcp.Chunked(8) & ringcp.Causal(),
}

# The same, written out once more without ringcp's masks: which query positions attend to which key positions.
ALLOWED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "full": lambda q, k: q - k == q - k,
    "causal": lambda q, k: q >= k,
    "window_1": lambda q, k: q == k,
    "window_3": lambda q, k: (q >= k) & (q < k + 3),
    "window_8": lambda q, k: (q >= k) & (q < k + 8),
    "window_17": lambda q, k: (q >= k) & (q < k + 17),
    "two_sided": lambda q, k: (q >= k - 2) & (q <= k + 4),
    "and": lambda q, k: (q >= k) & (q <= k + 9),
    "or": lambda q, k: (q >= k - 3) & (q <= k + 6),
    "chunked": lambda q, k: (q >= k) & (q // 8 == k // 8),
}


def packed(seq_len: int, row: int = 0) -> list[int]:
    """Documents of few and of many tokens, some of none, in most of a sequence; other ones in each batch row."""
    draw = random.Random(31 * seq_len + row)
    lengths, left = [], seq_len - seq_len // 8
    while left:
        lengths.append(min(left, draw.choice((0, 1, 1, 2, 5, 9, 17))))
        left -= lengths[-1]
    return lengths


def valid(seq_len: int, row: int = 0) -> int:
    """Valid tokens of a padded row: most of them, but none in a third row."""
    return seq_len * (row + 3) // 5 if row < 2 else 0


# Masks that depend on the length of the sequence and have an entry for each batch row: made of both.
MASKS_OF: dict[str, Callable[[int, int], Mask]] = {
    "documents": lambda n, rows: ringcp.Documents([packed(n, r) for r in range(rows)]) & ringcp.Causal(),
    "documents_shared": lambda n, rows: ringcp.Causal() & ringcp.Documents(packed(n)),
    "documents_full": lambda n, rows: ringcp.Documents([packed(n, r) for r in range(rows)]),
    "documents_window": lambda n, rows: ringcp.Window(4, 1) & ringcp.Documents([packed(n, r) for r in range(rows)]),
    "prefix": lambda n, rows: ringcp.Prefix([n * (r + 1) // 4 for r in range(rows)]),
    "padding": lambda n, rows: ringcp.Padding([valid(n, r) for r in range(rows)]) & ringcp.Causal(),
    "left_padding": lambda n, rows: ringcp.Padding([valid(n, r) for r in range(rows)], side="left", seq_len=n),
    "documents_or_window": lambda n, rows: ringcp.Documents([packed(n, r) for r in range(rows)]) | ringcp.Window(3),
}


def _document(lengths: list[int], positions: Tensor) -> Tensor:
    """How many documents end at or before each position."""
    return sum((positions >= sum(lengths[: n + 1])).long() for n in range(len(lengths)))


def _same_document(q: Tensor, k: Tensor, n: int, row: int) -> Tensor:
    lengths = packed(n, row)
    return (_document(lengths, q) == _document(lengths, k)) & (q < sum(lengths)) & (k < sum(lengths))


# Written out, for one batch row: (q, k, seq_len, row).
ALLOWED_OF: dict[str, Callable[[Tensor, Tensor, int, int], Tensor]] = {
    "documents": lambda q, k, n, row: _same_document(q, k, n, row) & (q >= k),
    "documents_shared": lambda q, k, n, row: _same_document(q, k, n, 0) & (q >= k),
    "documents_full": _same_document,
    "documents_window": lambda q, k, n, row: _same_document(q, k, n, row) & (q >= k - 1) & (q <= k + 4),
    "prefix": lambda q, k, n, row: (k < n * (row + 1) // 4) | (k <= q),
    "padding": lambda q, k, n, row: (q < valid(n, row)) & (k <= q),
    "left_padding": lambda q, k, n, row: (q >= n - valid(n, row)) & (k >= n - valid(n, row)),
    "documents_or_window": lambda q, k, n, row: _same_document(q, k, n, row) | ((q >= k) & (q <= k + 3)),
}

LAYOUTS = ("contiguous", "head_tail", "striped")


def layout_of(case: "Case", world_size: int) -> Layout:
    """The layout of a case, by its name; "balanced" by the case's mask."""
    if case.layout != "balanced":
        return layout_named(case.layout, case.seq_len, world_size)
    mask = mask_of(case)
    return ringcp.Balanced(case.seq_len, world_size, ringcp.Full() if mask is None else mask)


# gaussian, then what training sees: a channel far above the others, tokens that repeat, one key that takes all, and
# ranks whose scores lie near -300, 0 and +300.
INPUTS = ("gaussian", "outlier_channel", "repeated_tokens", "dominating_key", "far_scores")

# How the local tensors and the upstream gradients lie in memory.
STRIDES = ("dense", "as_BSHD", "every_other", "as_BHDS", "expanded_batch", "expanded_heads")

# What has an upstream gradient. "out": the lse is not even returned; "out_of_both": it is, and gets none.
UPSTREAMS = ("both", "out", "out_of_both", "lse")

KERNELS = ("auto", "reference")


class Case(NamedTuple):
    seq_len: int
    mask: str = "causal"
    layout: str = "head_tail"
    heads: str = "gqa"
    inputs: str = "gaussian"
    strides: str = "dense"
    upstream: str = "both"
    kernel: str = "auto"
    mode: str = "ring"
    degree: int | None = None
    gather_memory: int | None = None
    save: str = "auto"

    @property
    def way(self) -> dict[str, object]:
        """How queries meet keys, as keywords."""
        return {
            "mode": self.mode,
            "ulysses_degree": self.degree,
            "gather_memory": self.gather_memory,
            "save": self.save,
        }


class Tensors(NamedTuple):
    """q, k, v and the upstream gradients of out and lse."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor


def lengths(world_size: int) -> list[int]:
    """One token, fewer tokens than ranks or chunks, and lengths that divide evenly or do not."""
    return sorted({1, 2, world_size, 2 * world_size - 1, 24, 33, 37})


def matrix(world_size: int) -> Iterator[Case]:
    """Every layout, mask and length; all heads, strides and upstream gradients; all inputs; the rest drawn."""
    draw = random.Random(world_size).choice
    for layout, mask, seq_len in itertools.product(LAYOUTS, MASKS, lengths(world_size)):
        rest = (draw(list(HEADS)), draw(INPUTS), draw(STRIDES), draw(UPSTREAMS), draw(KERNELS))
        yield Case(seq_len, mask, layout, *rest)
    for layout, mask, seq_len in itertools.product(LAYOUTS, MASKS_OF, (1, world_size, 33, 37)):
        # In batches of two, whose rows differ.
        rest = (draw(("gqa", "mqa", "narrow_v")), draw(INPUTS), draw(STRIDES), draw(UPSTREAMS), draw(KERNELS))
        yield Case(seq_len, mask, layout, *rest)
    for heads, strides, upstream in itertools.product(HEADS, STRIDES, UPSTREAMS):
        seq_len, mask, layout = draw((24, 33, 37)), draw(list(MASKS)), draw(LAYOUTS)
        yield Case(seq_len, mask, layout, heads, draw(INPUTS), strides, upstream, draw(KERNELS))
    for inputs, mask in itertools.product(INPUTS, MASKS):
        yield Case(33, mask, draw(LAYOUTS), draw(list(HEADS)), inputs, kernel=draw(KERNELS))


def normal(*shape: int, seed: object) -> Tensor:
    """fp64, the same for the same seed, which may be anything that prints."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def gradients(
    outputs: Sequence[Tensor], upstream: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Those of the leaves, through the outputs that have an upstream gradient."""
    used, given = zip(*((x, dx) for x, dx in zip(outputs, upstream, strict=True) if dx is not None), strict=True)
    return torch.autograd.grad(used, leaves, given, allow_unused=True, materialize_grads=True)


def whole(case: Case, world_size: int, dtype: torch.dtype = torch.float64) -> Tensors:
    """The tensors of the whole sequence, the same wherever they are made, and in every mode."""
    shape, seq_len = SHAPES[case.heads], case.seq_len
    number = zlib.crc32(repr((case[: Case._fields.index("mode")], world_size)).encode())
    generator = torch.Generator().manual_seed(number)

    def normal(heads: int, *last: int) -> Tensor:
        x = torch.randn(shape.batch, heads, seq_len, *last, generator=generator, dtype=torch.float64)
        if case.strides == "expanded_batch":
            return x[:1].expand_as(x)
        return x[:, :1].expand_as(x) if case.strides == "expanded_heads" else x

    q, k, v = (
        normal(shape.q_heads, shape.head_dim),
        normal(shape.kv_heads, shape.head_dim),
        normal(shape.kv_heads, shape.value_dim),
    )
    if case.inputs == "outlier_channel":
        factor = torch.ones(shape.head_dim).index_fill_(0, torch.tensor(1), 12.0)
        q, k = q * factor, k * factor
    elif case.inputs == "repeated_tokens":
        source = torch.arange(seq_len) // 3 * 3
        q, k, v = (x[:, :, source] for x in (q, k, v))
    elif case.inputs == "dominating_key":
        k = k * torch.ones(seq_len, 1).index_fill_(0, torch.tensor(seq_len // 3), 15.0)
    elif case.inputs == "far_scores":
        # Half in q, half in k: with all of it in k, dq is a difference of numbers near 1000, and fp64 is short.
        layout, root = layout_of(case, world_size), 300.0**0.5
        offset = torch.cat([torch.full((layout.local_len(r),), (r % 3 - 1) * root) for r in range(world_size)])
        order = torch.cat([layout.positions(r) for r in range(world_size)])
        aimed = torch.zeros(shape.head_dim).index_fill_(0, torch.tensor(0), 1.0)
        place = torch.zeros(seq_len, dtype=torch.float64).index_copy_(0, order, offset.double())
        q, k = (
            q * (1 - aimed) + aimed * root,
            k * (1 - aimed + aimed / root) + place[:, None] * aimed * shape.head_dim**0.5,
        )
    upstream = normal(shape.q_heads, shape.value_dim), normal(shape.q_heads)
    return Tensors(*(x.to(dtype) for x in (q, k, v, *upstream)))


def restride(x: Tensor, kind: str) -> Tensor:
    """The same numbers, laid out in memory as `kind` says (see STRIDES). `x` must hold what an expansion repeats."""
    if kind == "as_BSHD":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "every_other":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    if kind == "as_BHDS":
        return x.transpose(2, -1).contiguous().transpose(2, -1)
    if kind == "expanded_batch":
        return x[:1].contiguous().expand(x.shape)
    return x[:, :1].contiguous().expand(x.shape) if kind == "expanded_heads" else x.contiguous()


def differentiated(case: Case, tensors: Tensors, attend: Callable[..., object]) -> dict[str, Tensor]:
    """out, lse, dq, dk and dv of ``attend(q, k, v, return_lse=...)``."""
    q, k, v = leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    if case.upstream == "out":
        out, lse = attend(q, k, v, return_lse=False), None
    else:
        out, lse = attend(q, k, v, return_lse=True)
    on_both = {"both": [(out, tensors.dout), (lse, tensors.dlse)], "lse": [(lse, tensors.dlse)]}
    results, upstream = zip(*on_both.get(case.upstream, [(out, tensors.dout)]), strict=True)
    grads = torch.autograd.grad(results, leaves, upstream, allow_unused=True, materialize_grads=True)
    named = {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    return named if lse is None else {**named, "lse": lse.detach()}


def mask_of(case: Case) -> Mask | None:
    """The mask of a case, by its name."""
    if case.mask in MASKS_OF:
        return MASKS_OF[case.mask](case.seq_len, SHAPES[case.heads].batch)
    return MASKS[case.mask]


def allowed(mask: str, seq_len: int, batch: int = 1) -> Tensor:
    """The mask as a bool tensor (S, S): True where the query of the row attends to the key of the column.

    One of MASKS_OF is (B, 1, S, S).
    """
    k = torch.arange(seq_len)
    q = k[:, None]
    if mask in ALLOWED:
        return ALLOWED[mask](q, k)
    return torch.stack([ALLOWED_OF[mask](q, k, seq_len, row) for row in range(batch)])[:, None]


def expected(case: Case, tensors: Tensors) -> dict[str, Tensor]:
    """What the definition of attention gives, in fp64."""

    def attend(q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> object:
        out, lse = reference_attention(q, k, v, mask=allowed(case.mask, case.seq_len, len(q)))
        return (out, lse) if return_lse else out

    return differentiated(case, Tensors(*(x.double() for x in tensors)), attend)


def in_process_case(case: Case, world_size: int, tensors: Tensors) -> dict[str, Tensor]:
    """The results of `in_process` on whole tensors."""

    def attend(q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> object:
        options = {"mask": mask_of(case), "layout": layout_of(case, world_size), "kernel": case.kernel}
        return in_process(q, k, v, world_size=world_size, return_lse=return_lse, **options, **case.way)

    return differentiated(case, tensors, attend)


def differences(what: str, got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> list[str]:
    """Every result that is off, each held against its own bound: text, so that one rank's does not stop its peers."""
    found = []
    assert got.keys() == want.keys(), (got.keys(), want.keys())
    for name in got:
        try:
            assert_close(got[name], want[name], name=name)
        except AssertionError as error:
            found.append(f"{what}: {error}")
    return found


def rank_in(mesh) -> int:
    """This rank's number in a mesh of one or two dims."""
    return mesh.mesh.flatten().tolist().index(mesh.get_rank())


def run_case(mesh, case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This rank's results of `ringcp.attention`, and its shards of what they must be."""
    rank, world_size = rank_in(mesh), mesh.size()
    layout = layout_of(case, world_size)
    tensors = whole(case, world_size)
    local = Tensors(*(restride(layout.shard(x, rank, 2), case.strides) for x in tensors))

    def attend(q: Tensor, k: Tensor, v: Tensor, return_lse: bool) -> object:
        # Odd lengths come with a layout that knows them, even ones with its name, for the vote to find out.
        given = layout if case.seq_len % 2 or case.layout not in LAYOUTS else case.layout
        options = {"mask": mask_of(case), "layout": given, "kernel": case.kernel, "return_lse": return_lse}
        return ringcp.attention(q, k, v, mesh=mesh, **options, **case.way)

    got = differentiated(case, local, attend)
    return got, {name: layout.shard(x, rank, 2) for name, x in expected(case, tensors).items()}


def check_cases(mesh, cases: list[Case]) -> list[str]:
    """Runs the cases on this rank and says what is off."""
    found = []
    for case in cases:
        found += differences(f"rank {rank_in(mesh)} of {mesh.size()}, {case}", *run_case(mesh, case))
    return found


def assert_none(found_by_rank: list[list[str]]) -> None:
    """No rank found anything off."""
    found = [text for texts in found_by_rank for text in texts]
    assert not found, f"{len(found)} results are off:\n" + "\n".join(found[:20])
