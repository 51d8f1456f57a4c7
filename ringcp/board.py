"""A host channel for ranks on one node: a page of memory that all of them map, and on which each pins its message.

A vote takes a few microseconds so, where a message takes system calls and the scheduler. Beside every message stands
its round and a checksum, so that what is half written, or of another round, counts as not there, in whatever order a
processor shows the writes of another.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable

from ringcp.channels import Channel, absent
from ringcp.errors import PeerError
from ringcp.page import GONE, LATE, SLOT, Page, meet, slot_at

_HEADER = struct.Struct("=QQII")  # round, tag, length, checksum
_ROOM = SLOT - _HEADER.size


class NodeChannel:
    """Messages on a `Board`, if all ranks can map a page and see each other's processes; which they find out by `far`
    in the first exchange. `far` carries all messages otherwise, and long ones.

    own_timeout: the group's, in seconds.
    page: the one that they share, once they have met there.
    """

    def __init__(self, far: Channel, rank: int, world_size: int, own_timeout: Callable[[], float]) -> None:
        self.page: Page | None = None
        self._far = far
        self._rank, self._world_size = rank, world_size
        self._own_timeout = own_timeout
        self._met = self._left = False
        self._board: Board | None = None
        self._turn = threading.Lock()

    def exchange(self, message: bytes, tag: int, timeout: float | None) -> list[bytes]:
        with self._turn:
            if not self._met:
                self.page = meet(self._far, self._rank, self._world_size, timeout, self._own_timeout)
                self._board = None if self.page is None else Board(self.page)
                self._met = True
                if self._left:  # in another thread, while this one met the others
                    self.leave()
            if self._board is None or len(message) > _ROOM:
                return self._far.exchange(message, tag, timeout)
            return self._board.exchange(message, tag, timeout)

    def leave(self) -> None:
        self._left = True
        self._far.leave()
        if self.page is not None:
            self.page.leave()


class Board:
    """The slots of a page, as one rank has them.

    Two slots a rank take turns: whoever writes in a round has read all of the one before, which all write when they are
    done with the one before that, whose slots are written now.
    """

    def __init__(self, page: Page) -> None:
        self._page = page
        self._round = 0

    def exchange(self, message: bytes, tag: int, timeout: float | None) -> list[bytes]:
        page = self._page
        page.check_process()
        self._round += 1
        self._write(message, tag)
        said: dict[int, tuple[int, bytes]] = {}

        def missing() -> list[int]:
            for peer in range(page.world_size):
                if peer not in said and (theirs := self._read(peer)) is not None:
                    said[peer] = theirs
            return [peer for peer in range(page.world_size) if peer not in said]

        try:
            peers, gone = page.wait(missing, timeout)
            if peers:
                raise absent(page.rank, peers, timeout, GONE if gone else LATE)
        except BaseException:  # whoever comes late must not count on this rank
            self._erase()
            raise
        for peer, (other_tag, _) in sorted(said.items()):
            if other_tag != tag:
                raise PeerError(
                    f"rank {page.rank}: expected rank {peer} in the same exchange, of tag {tag}, got it in one of "
                    f"tag {other_tag}; make the same calls in the same order on all ranks"
                )
        return [said[peer][1] for peer in range(page.world_size)]

    def _erase(self) -> None:
        start = self._slot(self._page.rank)
        self._page.memory[start : start + SLOT] = bytes(SLOT)

    def _write(self, message: bytes, tag: int) -> None:
        head = self._round, tag, len(message)
        written = _HEADER.pack(*head, _checksum(*head, message)) + message
        start = self._slot(self._page.rank)
        self._page.memory[start : start + len(written)] = written

    def _read(self, rank: int) -> tuple[int, bytes] | None:
        start, memory = self._slot(rank), self._page.memory
        round_, tag, length, checksum = _HEADER.unpack_from(memory, start)
        if round_ != self._round or length > _ROOM:
            return None
        message = memory[start + _HEADER.size : start + _HEADER.size + length]
        return (tag, message) if _checksum(round_, tag, length, message) == checksum else None

    def _slot(self, rank: int) -> int:
        return slot_at(rank, self._round % 2, self._page.world_size)


def _checksum(round_: int, tag: int, length: int, message: bytes) -> int:
    return zlib.crc32(_HEADER.pack(round_, tag, length, 0) + message)
