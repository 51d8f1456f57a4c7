"""A host channel for ranks on one node: a page of memory that all of them map, and on which each pins its message.

A vote takes a few microseconds so, where a message takes system calls and the scheduler. Beside every message stands
its round and a checksum, so that what is half written, or of another round, counts as not there, in whatever order a
processor shows the writes of another.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress

from ringcp.channels import Channel, absent
from ringcp.errors import PeerError
from ringcp.transport import give_way

_MEET_TAG = (1 << 30) + 3  # beside those of votes
_PLACE = "/dev/shm"
_SLOT = 512  # bytes: a header and a message
_HEADER = struct.Struct("=QQII")  # round, tag, length, checksum
_ROOM = _SLOT - _HEADER.size
_MEETING = struct.Struct("=QQ")  # the process, and the namespace that it is counted in
_NAME = 64  # bytes for that of the page
# Seconds for which a rank that waits only gives way to others, and then, for which it sleeps a little at a time.
_EAGER, _PATIENT, _NAP = 2e-4, 2e-2, 3e-5
_LOOK = 1  # ms: how often it then looks, and whether its peers live


class NodeChannel:
    """Messages on a `Board`, if all ranks can map it and see each other's processes; which they find out by `far` in
    the first exchange. `far` carries all messages otherwise, and long ones.

    own_timeout: the group's, in seconds.
    """

    def __init__(self, far: Channel, rank: int, world_size: int, own_timeout: Callable[[], float]) -> None:
        self._far = far
        self._rank, self._world_size = rank, world_size
        self._own_timeout = own_timeout
        self._met = False
        self._board: Board | None = None
        self._turn = threading.Lock()

    def exchange(self, message: bytes, tag: int, timeout: float | None) -> list[bytes]:
        with self._turn:
            if not self._met:
                self._board = meet(self._far, self._rank, self._world_size, timeout)
                self._met = True
            if self._board is None or len(message) > _ROOM:
                return self._far.exchange(message, tag, timeout)
            return self._board.exchange(message, tag, timeout, self._own_timeout)

    def leave(self) -> None:
        self._far.leave()
        if self._board is not None:
            self._board.leave()


def meet(far: Channel, rank: int, world_size: int, timeout: float | None) -> Board | None:
    """A page that all ranks have mapped, or None on all of them. timeout: of each of three messages.

    Raises:
        PeerError: if a rank does not come.
    """
    told = [_MEETING.unpack(said) for said in far.exchange(_introduction(), _MEET_TAG, timeout)]
    same = len({namespace for _, namespace in told}) == 1
    # Not before all have come: whoever is killed while it waits deletes no file.
    name = _new_page(world_size) if rank == 0 and same else ""
    try:
        page = far.exchange(name.encode().ljust(_NAME), _MEET_TAG, timeout)[0].decode().rstrip()
        board = _opened(page, rank, [process for process, _ in told]) if page else None
        try:
            able = far.exchange(bytes([board is not None]), _MEET_TAG, timeout)
        except BaseException:
            if board is not None:  # others may wait there already
                board.leave()
            raise
    finally:
        if name:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(_PLACE, name))
    return board if all(said == b"\1" for said in able) else None


class Board:
    """The page of one group, as one rank has it.

    Two slots a rank take turns: whoever writes in a round has read all of the one before, which all write when they are
    done with the one before that, whose slots are written now.
    """

    def __init__(self, page: mmap.mmap, rank: int, processes: Sequence[int]) -> None:
        self._page = page
        self._rank, self._world_size = rank, len(processes)
        self._round = 0
        self._alive = select.poll()
        self._watched: dict[int, int] = {}
        self._ended: set[int] = set()
        weakref.finalize(self, _leave, page, rank, self._watched, os.getpid())
        for peer, process in enumerate(processes):
            if peer != rank:
                watch = os.pidfd_open(process)
                self._watched[watch] = peer
                self._alive.register(watch, select.POLLIN)

    def exchange(
        self, message: bytes, tag: int, timeout: float | None, own_timeout: Callable[[], float]
    ) -> list[bytes]:
        self._round += 1
        self._write(message, tag)
        try:
            said = self._gathered(timeout, own_timeout)
        except BaseException:  # whoever comes late must not count on this rank
            self._erase()
            raise
        for peer, (other_tag, _) in enumerate(said):
            if other_tag != tag:
                raise PeerError(
                    f"rank {self._rank}: expected rank {peer} in the same exchange, of tag {tag}, got it in one of "
                    f"tag {other_tag}; make the same calls in the same order on all ranks"
                )
        return [theirs for _, theirs in said]

    def leave(self) -> None:
        """Say that nothing more comes of this rank."""
        self._page[self._rank] = 1

    def _gathered(self, timeout: float | None, own_timeout: Callable[[], float]) -> list[tuple[int, bytes]]:
        """Tag and message of each rank in this round."""
        said: dict[int, tuple[int, bytes]] = {}
        began = time.monotonic()
        gone: set[int] = set()
        while True:
            for peer in range(self._world_size):
                if peer not in said and (theirs := self._read(peer)) is not None:
                    said[peer] = theirs
            missing = [peer for peer in range(self._world_size) if peer not in said]
            if not missing:
                return [said[peer] for peer in range(self._world_size)]
            if lost := gone.intersection(missing):  # seen before the last look at what is written
                raise absent(self._rank, sorted(lost), timeout, "it failed, has ended, or has destroyed its group")
            waited = time.monotonic() - began
            if waited < _EAGER:
                give_way()
            elif waited < _PATIENT:
                time.sleep(_NAP)
            elif waited < (own_timeout() if timeout is None else timeout):
                gone = self._gone()
            else:
                raise absent(self._rank, missing, timeout, "nothing is on the page that the ranks share")

    def _erase(self) -> None:
        start = self._slot(self._rank)
        self._page[start : start + _SLOT] = bytes(_SLOT)

    def _write(self, message: bytes, tag: int) -> None:
        head = self._round, tag, len(message)
        written = _HEADER.pack(*head, _checksum(*head, message)) + message
        start = self._slot(self._rank)
        self._page[start : start + len(written)] = written

    def _read(self, rank: int) -> tuple[int, bytes] | None:
        start = self._slot(rank)
        round_, tag, length, checksum = _HEADER.unpack_from(self._page, start)
        if round_ != self._round or length > _ROOM:
            return None
        message = self._page[start + _HEADER.size : start + _HEADER.size + length]
        return (tag, message) if _checksum(round_, tag, length, message) == checksum else None

    def _gone(self) -> set[int]:
        """Peers that write no more, as seen in the next moment."""
        for watch, _ in self._alive.poll(_LOOK):
            self._alive.unregister(watch)  # it would end every wait at once
            self._ended.add(self._watched[watch])
        return self._ended | {peer for peer in range(self._world_size) if self._page[peer]}

    def _slot(self, rank: int) -> int:
        return _flags_size(self._world_size) + _SLOT * (2 * rank + self._round % 2)


def _flags_size(world_size: int) -> int:
    """A page begins with a byte of each rank, which is 1 when it is gone; slots follow."""
    return -(-world_size // _SLOT) * _SLOT


def _checksum(round_: int, tag: int, length: int, message: bytes) -> int:
    return zlib.crc32(_HEADER.pack(round_, tag, length, 0) + message)


def _introduction() -> bytes:
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return _MEETING.pack(os.getpid(), namespace)


def _new_page(world_size: int) -> str:
    """The name of a new file for it; empty if there is no place for one."""
    try:
        handle, path = tempfile.mkstemp(prefix="ringcp-", dir=_PLACE)
    except OSError:
        return ""
    try:
        with open(handle, "wb") as file:
            file.write(bytes(_flags_size(world_size) + 2 * world_size * _SLOT))
    except OSError:  # it is full
        os.unlink(path)
        return ""
    return os.path.basename(path)


def _opened(name: str, rank: int, processes: Sequence[int]) -> Board | None:
    """The page of that name, if it is on this node, and the processes can be watched."""
    try:
        with open(os.path.join(_PLACE, name), "r+b") as file:
            page = mmap.mmap(file.fileno(), 0)
        return Board(page, rank, processes)
    except (OSError, AttributeError, ValueError):  # another node; or no Linux, which has no pidfd_open
        return None


def _leave(page: mmap.mmap, rank: int, watched: dict[int, int], process: int) -> None:
    """At the end of a board: say so, but not in a fork."""
    if os.getpid() == process:
        page[rank] = 1
    for watch in watched:
        os.close(watch)
