"""ringcp: exact attention over one long sequence that is split over the ranks of a mesh."""

from ringcp.attention import attention
from ringcp.errors import AgreementError, ArgumentError, LayoutError, PeerError, RingcpError, UnsupportedError
from ringcp.layout import Contiguous, HeadTail, Layout, Striped
from ringcp.mask import Causal, Full, Mask, Window
from ringcp.record import record
from ringcp.sharding import all_gather, shard, unshard

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "ArgumentError",
    "Causal",
    "Contiguous",
    "Full",
    "HeadTail",
    "Layout",
    "LayoutError",
    "Mask",
    "PeerError",
    "RingcpError",
    "Striped",
    "UnsupportedError",
    "Window",
    "all_gather",
    "attention",
    "record",
    "shard",
    "unshard",
]
