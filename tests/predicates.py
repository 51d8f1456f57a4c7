"""Predicates by name, made alike on every rank, and what they allow written out without ringcp."""

from typing import NamedTuple

import torch
from torch import Tensor

import ringcp
from ringcp import Causal, Documents, Padding, Predicate, Window
from ringcp.mask import Mask


class Given(NamedTuple):
    batch: int
    heads: int
    q_len: int
    k_len: int


def random(*shape: int, seed: int = 0, share: float = 0.25) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def documents(given: Given):
    ids = torch.arange(max(given.q_len, given.k_len)) // 5
    return Predicate(lambda b, h, q, k: ids[q] == ids[k], name="documents")


def by_head(given: Given):
    reach = torch.arange(given.heads) * 3
    return Predicate(lambda b, h, q, k: (q - k).abs() <= reach[h], name="by_head")


def by_row(given: Given):
    lengths = torch.arange(given.batch) * 4 + 2
    return Predicate(lambda b, h, q, k: (k < lengths[b]) & (q >= k), name="by_row")


def table(given: Given) -> Tensor:
    """Sparse, with rows of which no head attends to anything, and keys that nobody attends to."""
    allowed = random(*given)
    allowed[:, :, 3::7] = False
    allowed[..., 2::6] = False
    return allowed


def sparse(given: Given):
    allowed = table(given)
    return Predicate(lambda b, h, q, k: allowed[b, h, q, k], name="sparse")


def types(given: Given):
    """Any of a token's types: more than scalars inside, which only vmap gets right."""
    of = random(max(given.q_len, given.k_len), 3)
    return Predicate(lambda b, h, q, k: (of[q] & of[k]).any(), name="types")


def make(name: str, given: Given) -> Mask:
    half = [given.q_len // 2 + row for row in range(given.batch)]
    return {
        "causal": lambda: Predicate(causal),
        "documents": lambda: documents(given),
        "by_head": lambda: by_head(given),
        "by_row": lambda: by_row(given),
        "sparse": lambda: sparse(given),
        "types": lambda: types(given),
        "and causal": lambda: sparse(given) & Causal(),
        "and window": lambda: Window(6, 2) & by_head(given),
        "or window": lambda: by_row(given) | Window(2),
        "and or": lambda: (documents(given) | by_head(given)) & (Causal() | Window(1, 1)),
        "and documents": lambda: sparse(given) & Documents([given.q_len // 3, given.q_len // 3]),
        "and padding": lambda: by_head(given) & Padding(half),
        "or padding": lambda: sparse(given) | Padding(half),
    }[name]()


def written(name: str, given: Given) -> Tensor:
    """(B, H, Sq, Sk)."""
    b, h, q, k = (torch.arange(n).view([-1 if at == dim else 1 for at in range(4)]) for dim, n in enumerate(given))
    half, third = given.q_len // 2 + b, given.q_len // 3
    of = random(max(given.q_len, given.k_len), 3)
    heads, docs, rows = (q - k).abs() <= 3 * h, q // 5 == k // 5, (k < b * 4 + 2) & (q >= k)
    found = {
        "causal": q >= k,
        "documents": docs,
        "by_head": heads,
        "by_row": rows,
        "sparse": table(given),
        "types": (of[q] & of[k]).any(-1),
        "and causal": table(given) & (q >= k),
        "and window": heads & (q - k <= 6) & (q - k >= -2),
        "or window": rows | ((q - k >= 0) & (q - k <= 2)),
        "and or": (docs | heads) & ((q >= k) | (q - k == -1)),
        "and documents": table(given) & ((q < third) == (k < third)) & (q < 2 * third) & (k < 2 * third),
        "and padding": heads & (q < half) & (k < half),
        "or padding": table(given) | ((q < half) & (k < half)),
    }[name]
    return found.expand(given)


NAMES = (
    "causal", "documents", "by_head", "by_row", "sparse", "types", "and causal", "and window", "or window", "and or",
    "and documents", "and padding", "or padding",
)  # fmt: skip
# Without lengths of one sequence: for queries and keys of two.
OF_TWO = NAMES[: NAMES.index("and documents")]
assert ringcp.Predicate is Predicate
