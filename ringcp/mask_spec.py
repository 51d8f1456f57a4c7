"""How the nodes of masks are written in a spec."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from ringcp.mask_mods import MaskMod, mask_mod_of
from ringcp.mask_nodes import AndNode, CausalNode, ChunkedNode, FullNode, OrNode, WindowNode
from ringcp.node import Node
from ringcp.predicate_node import BlockMaskNode, PredicateNode
from ringcp.row_nodes import BlocksNode, DocumentsNode, PaddingNode, PrefixNode

# The place in this tuple is the node's code in a spec.
_NODES: tuple[type, ...] = (
    FullNode,
    CausalNode,
    WindowNode,
    AndNode,
    OrNode,
    DocumentsNode,
    ChunkedNode,
    PrefixNode,
    PaddingNode,
    PredicateNode,
    BlocksNode,
    BlockMaskNode,
)


def encode(node: Node) -> list[int]:
    """Prefix notation: the code, then the fields; a tuple as its length and its items."""
    return [_NODES.index(type(node)), *(word for value in vars(node).values() for word in _words(value))]


def _words(value: Any) -> list[int]:
    if isinstance(value, int):
        return [value]
    if isinstance(value, MaskMod):
        return value.words()
    if isinstance(value, tuple):
        return [len(value), *(word for item in value for word in _words(item))]
    return encode(value)


def decode(words: Iterator[int]) -> Node:
    """The node that `encode` wrote."""
    cls = _NODES[next(words)]
    return cls(*(_value(field.type, words) for field in fields(cls)))


def _value(kind: Any, words: Iterator[int]) -> Any:
    if kind == "int":
        return next(words)
    if kind.startswith("tuple["):
        item = kind.removeprefix("tuple[").removesuffix(", ...]")
        return tuple(_value(item, words) for _ in range(next(words)))
    return mask_mod_of(words) if kind == "MaskMod" else decode(words)
