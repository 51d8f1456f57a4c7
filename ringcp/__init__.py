"""ringcp: exact attention over one long sequence that is split over the ranks of a mesh."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringcp.attention import attention
from ringcp.balance import Balanced
from ringcp.context import context_parallel, context_parallel_unshard, current_context
from ringcp.errors import (
    AgreementError,
    ArgumentError,
    KeywordError,
    LayoutError,
    PeerError,
    RingcpError,
    UnsupportedError,
)
from ringcp.explain import explain
from ringcp.interception import local_attention
from ringcp.layout import Contiguous, HeadTail, Joint, Layout, Striped
from ringcp.mask import Causal, Chunked, Documents, Full, Mask, Padding, Predicate, Prefix, Window
from ringcp.record import record
from ringcp.rotate import set_rotate_method
from ringcp.sharding import all_gather, make_layout, shard, unshard
from ringcp.varlen import attention_varlen

if TYPE_CHECKING:
    from ringcp import testing as testing
    from ringcp.module import ContextParallel

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "ArgumentError",
    "Balanced",
    "Causal",
    "Chunked",
    "ContextParallel",
    "Contiguous",
    "Documents",
    "Full",
    "HeadTail",
    "Joint",
    "KeywordError",
    "Layout",
    "LayoutError",
    "Mask",
    "Padding",
    "PeerError",
    "Predicate",
    "Prefix",
    "RingcpError",
    "Striped",
    "UnsupportedError",
    "Window",
    "all_gather",
    "attention",
    "attention_varlen",
    "context_parallel",
    "context_parallel_unshard",
    "current_context",
    "explain",
    "local_attention",
    "make_layout",
    "record",
    "set_rotate_method",
    "shard",
    "unshard",
]


def __getattr__(name: str) -> Any:
    # Not imported before: needed by tests only, and by way of torch's DTensor, which takes a while.
    if name == "testing":
        return import_module("ringcp.testing")
    if name == "ContextParallel":
        return import_module("ringcp.module").ContextParallel
    raise AttributeError(f"module 'ringcp' has no attribute {name!r}")
