"""What tests of context-parallel code need: a pool of ranks, an oracle, a bar, and many ranks in one process."""

from ringcp.testing.in_process import in_process
from ringcp.testing.oracle import assert_close, reference_attention
from ringcp.testing.pool import RankError, world

__all__ = ["RankError", "assert_close", "in_process", "reference_attention", "world"]
