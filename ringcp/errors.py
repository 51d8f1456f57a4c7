"""The errors that ringcp raises.

    RingcpError
    ├── ArgumentError (ValueError)            an argument that does not fit the others
    │   ├── LayoutError                       a mesh, a length or a shard that does not fit the layout
    │   └── KeywordError (TypeError)          a keyword that the function does not have
    ├── UnsupportedError (NotImplementedError)  what ringcp, or the chosen kernel, cannot do
    ├── AgreementError (RuntimeError)         the ranks of a group called with different arguments
    └── PeerError (RuntimeError)              a peer died, or did not come in time

A message about an argument says what was expected, what came, and the fix; one about a peer, which it was and where
it did not come.
"""


class RingcpError(Exception):
    """Base of all errors that ringcp raises on purpose."""


class ArgumentError(RingcpError, ValueError):
    """An argument does not fit the others (dtypes, heads, shapes)."""


class LayoutError(ArgumentError):
    """A mesh, a length or a shard does not fit the layout."""


class KeywordError(ArgumentError, TypeError):
    """A keyword that the function does not have."""


class UnsupportedError(RingcpError, NotImplementedError):
    """The request is understood, and ringcp or the chosen kernel cannot do it."""


class AgreementError(RingcpError, RuntimeError):
    """The ranks of one group made different calls. Raised on every rank; the next valid call works."""


class PeerError(RingcpError, RuntimeError):
    """A peer died, or did not come within the timeout. The group cannot be used afterwards."""
