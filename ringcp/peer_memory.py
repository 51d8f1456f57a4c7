"""Messages between ranks of one node: whoever receives one copies it from the sender's memory, once.

The sender shows on the page that they share where a message lies, and waits until it has been taken. Through gloo the
same message goes by way of the kernel's TCP stack: ten times the processor time, on cores that should compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ringcp.errors import PeerError
from ringcp.page import GONE, LATE, Page, read_memory
from ringcp.transport import Parcel, Pending, not_through


class PeerMemory:
    """A transport for tensors on CPUs, over a page of ranks that can read each other's memory. Messages are matched by
    tag; of several with the same tag, under way from one rank to another at once, any comes first.

    timeout: seconds to wait for one step's transfers; None for the group's own timeout.
    """

    def __init__(self, page: Page, timeout: float | None = None) -> None:
        self._page = page
        self._timeout = timeout

    def post(self, sends: Sequence[Parcel], recvs: Sequence[Parcel], where: str) -> Pending:
        self._page.check_process()
        return _Reads(self._page, self._timeout, sends, recvs, where)


# The words of an entry. The sender writes the number last, and the receiver reads it first, and frees the entry.
_NUMBER, _TAG, _ADDRESS, _LENGTH = range(4)
# Instead of the number of a message.
_FREE, _WRITING = 0, 1


class _Shown(NamedTuple):
    """A message that a peer has been shown. Its entry has another number when it has been taken: perhaps that of a
    later message.
    """

    parcel: Parcel
    entry: int
    number: int


class _Reads:
    def __init__(
        self, page: Page, timeout: float | None, sends: Sequence[Parcel], recvs: Sequence[Parcel], where: str
    ) -> None:
        self._page, self._timeout, self._where = page, timeout, where
        self._recvs = list(recvs)
        self._shown = [self._show(parcel) for parcel in sends]
        self.go_on()

    def go_on(self) -> None:
        """Take what is there, so that its sender need not wait for what this rank computes next."""
        self._recvs = [parcel for parcel in self._recvs if not self._take(parcel)]

    def wait(self) -> None:
        peers, gone = self._page.wait(self._missing, self._timeout)
        # Receives first: a missing message is the better clue.
        for parcel in self._recvs:
            if parcel.peer in peers:
                raise self._error("receiving from", parcel, GONE if gone else LATE)
        for shown in self._shown:
            if shown.parcel.peer in peers:
                raise self._error("sending to", shown.parcel, GONE if gone else "it has not taken it")

    def _missing(self) -> set[int]:
        """Peers of whom, or for whom, there are messages, after a look."""
        self.go_on()
        self._shown = [shown for shown in self._shown if self._waits(shown)]
        return {parcel.peer for parcel in self._recvs} | {shown.parcel.peer for shown in self._shown}

    def _show(self, parcel: Parcel) -> _Shown:
        page, words = self._page, self._page.words
        entry = self._reserved(parcel)
        words[entry + _TAG] = parcel.tag
        words[entry + _ADDRESS], words[entry + _LENGTH] = _memory(parcel.tensor)
        number = next(page.numbers)
        page.shown[number] = parcel.tensor
        page.fence()
        words[entry + _NUMBER] = number
        return _Shown(parcel, entry, number)

    def _reserved(self, parcel: Parcel) -> int:
        """A free entry, which is this message's now."""
        page, words = self._page, self._page.words
        entries = page.entries(page.rank, parcel.peer)
        found: list[int] = []

        def missing() -> set[int]:
            with page.turn:
                for entry in entries:
                    if words[entry + _NUMBER] == _FREE:
                        words[entry + _NUMBER] = _WRITING
                        found.append(entry)
                        return set()
            self.go_on()  # the peer may wait for an entry of its own
            return {parcel.peer}

        peers, gone = page.wait(missing, self._timeout)
        if peers:
            raise self._error("sending to", parcel, GONE if gone else f"it has not taken {len(entries)} before it")
        return found[0]

    def _waits(self, shown: _Shown) -> bool:
        """Whether a message has not been taken yet."""
        if self._page.words[shown.entry + _NUMBER] == shown.number:
            return True
        self._page.shown.pop(shown.number, None)
        return False

    def _take(self, parcel: Parcel) -> bool:
        """Whether a message was there; then it is where it belongs."""
        page = self._page
        with page.taking:
            entry = self._found(parcel)
            if entry is None:
                return False
            source, length = page.words[entry + _ADDRESS], page.words[entry + _LENGTH]
            target, expected = _memory(parcel.tensor)
            if length != expected:
                raise PeerError(
                    f"rank {page.rank}, {self._where}: expected {parcel.what} of {expected} bytes from rank "
                    f"{parcel.peer}, got {length}; make the same calls in the same order on all ranks"
                )
            try:
                read_memory(page.processes[parcel.peer], source, target, length)
            except OSError as error:
                raise self._error("receiving from", parcel, f"its memory cannot be read: {error}") from error
            page.fence()
            # Otherwise it may have let go of that memory meanwhile, or another process may have its number.
            if page.gone(parcel.peer):
                raise self._error("receiving from", parcel, GONE)
            page.words[entry + _NUMBER] = _FREE
            return True

    def _found(self, parcel: Parcel) -> int | None:
        """The entry of a message that has been shown."""
        page, words = self._page, self._page.words
        for entry in page.entries(parcel.peer, page.rank):
            if words[entry + _NUMBER] not in (_FREE, _WRITING):
                page.fence()
                if words[entry + _TAG] == parcel.tag:
                    return entry
        return None

    def _error(self, verb: str, parcel: Parcel, why: str) -> PeerError:
        return not_through(self._page.rank, self._where, verb, parcel, self._timeout, why)


def _memory(x: Tensor) -> tuple[int, int]:
    """Where a tensor lies, and its bytes."""
    assert x.is_contiguous(), "what travels is one run of elements"
    return x.data_ptr(), x.nbytes
