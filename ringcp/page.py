"""A page of memory that the ranks of one node map, and what they need to use it: who has gone, how to wait.

What lies where: a byte of each rank, 1 when it is gone; two slots of each rank for votes (`board`); and entries of each
pair of ranks, in which the one shows the other where its messages lie (`peer_memory`), 512 bytes a pair.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import mmap
import os
import select
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from ringcp.channels import Channel
from ringcp.errors import PeerError
from ringcp.transport import give_way

SLOT = 512  # bytes: of a vote, its header included
GONE = "it failed, has ended, or has destroyed its group"
LATE = "nothing is on the page that the ranks share"

_log = logging.getLogger(__name__)

_ENTRIES = 16  # of messages from one rank to another
_ENTRY = 4  # words of 8 bytes
_MEET_TAG = (1 << 30) + 3  # beside those of votes
_PLACE = "/dev/shm"
_NAME = 64  # bytes for that of the page
# Seconds for which a rank that waits only gives way to others, and then, for which it sleeps a little at a time.
_EAGER, _PATIENT, _NAP = 2e-4, 2e-2, 3e-5
_LOOK = 1  # ms: how often it then looks, and whether its peers live


class _Introduction(NamedTuple):
    """The process, the namespace that it is counted in, the boot of the system that both are of, and where in the
    memory of the process stands the secret.
    """

    process: int
    namespace: int
    boot: bytes
    address: int
    secret: bytes


_MEETING = struct.Struct("=QQ16sQ16s")


class Page:
    """The page of one group, as one rank has it.

    reads: whether all ranks can read each other's memory; found out by `meet`.
    own_timeout: the group's, in seconds.
    turn: of threads of this rank that write to the page. taking: of those that take messages from it.
    shown: what lies where peers may read it, by the number of the message. numbers: those to come.
    """

    def __init__(
        self, memory: mmap.mmap, rank: int, processes: Sequence[int], own_timeout: Callable[[], float]
    ) -> None:
        self.memory = memory
        self.words = memoryview(memory).cast("Q")
        self.rank, self.world_size = rank, len(processes)
        self.processes = tuple(processes)
        self.reads = False
        self.turn, self.taking = threading.Lock(), threading.Lock()
        self.shown: dict[int, Tensor] = {}
        self.numbers = itertools.count(2)
        self._fence = threading.Lock()
        self._own_timeout = own_timeout
        self._watches: dict[int, int] = {}
        weakref.finalize(self, _leave, memory, rank, self._watches, os.getpid())
        for peer, process in enumerate(processes):
            if peer != rank:
                self._watches[peer] = os.pidfd_open(process)

    def entries(self, sender: int, receiver: int) -> range:
        """The first words of those of a pair."""
        start = _entries_at(sender, receiver, self.world_size)
        return range(start, start + _ENTRIES * _ENTRY, _ENTRY)

    def leave(self) -> None:
        """Say that nothing more comes of this rank."""
        if os.getpid() == self.processes[self.rank]:
            self.memory[self.rank] = 1
            self.fence()
            self.shown.clear()

    def gone(self, rank: int) -> bool:
        """Whether a peer has said so, or has ended."""
        return rank in self._gone([rank], 0)

    def check_process(self) -> None:
        """Raises PeerError in a fork of the rank: what its peers see and read is the rank's."""
        if os.getpid() != self.processes[self.rank]:
            raise PeerError(
                f"rank {self.rank}: expected a call of process {self.processes[self.rank]}, which the group is of, got "
                f"one of its fork {os.getpid()}; fork before the process group is made, or start processes by spawn"
            )

    def wait(self, missing: Callable[[], Collection[int]], timeout: float | None) -> tuple[list[int], bool]:
        """Look until no rank is missing. Otherwise those that are gone, or did not come in time, and whether it is that
        they are gone.

        timeout: seconds; None for the group's own.
        """
        began = time.monotonic()
        gone: set[int] = set()
        while peers := missing():
            if lost := gone.intersection(peers):  # seen before the last look at what is written
                return sorted(lost), True
            waited = time.monotonic() - began
            if waited < _EAGER:
                give_way()
            elif waited < _PATIENT:
                time.sleep(_NAP)
            elif waited < (self._own_timeout() if timeout is None else timeout):
                gone = self._gone(peers, _LOOK)
            else:
                return sorted(peers), False
        return [], False

    def fence(self) -> None:
        """What was written or read before is so for other ranks before what follows, on any processor."""
        for _ in range(2):  # to let a lock go orders what precedes, to take one what follows
            with self._fence:
                pass

    def _gone(self, peers: Collection[int], ms: int) -> set[int]:
        """Those of some peers that write no more, as seen in so many milliseconds."""
        alive = select.poll()  # of this thread alone
        by_watch = {self._watches[peer]: peer for peer in peers}
        for watch in by_watch:
            alive.register(watch, select.POLLIN)
        return {by_watch[watch] for watch, _ in alive.poll(ms)} | {peer for peer in peers if self.memory[peer]}


def slot_at(rank: int, half: int, world_size: int) -> int:
    """Where one of the two slots of a rank begins: bytes."""
    return -(-world_size // SLOT) * SLOT + SLOT * (2 * rank + half)


def _entries_at(sender: int, receiver: int, world_size: int) -> int:
    """Where the entries of a pair begin: words."""
    return slot_at(world_size, 0, world_size) // 8 + (sender * world_size + receiver) * _ENTRIES * _ENTRY


def _page_size(world_size: int) -> int:
    """Bytes."""
    return 8 * _entries_at(world_size, 0, world_size)


def meet(
    far: Channel, rank: int, world_size: int, timeout: float | None, own_timeout: Callable[[], float]
) -> Page | None:
    """A page that all ranks have mapped, or None on all of them. timeout: of each of three messages.

    Raises:
        PeerError: if a rank does not come.
    """
    secret = ctypes.create_string_buffer(os.urandom(16), 16)
    said = far.exchange(_introduction(secret), _MEET_TAG, timeout)
    told = [_Introduction(*_MEETING.unpack(each)) for each in said]
    same = len({(each.namespace, each.boot) for each in told}) == 1
    # Not before all have come: whoever is killed while it waits deletes no file.
    name = _new_page(world_size) if rank == 0 and same else ""
    try:
        shared = far.exchange(name.encode().ljust(_NAME), _MEET_TAG, timeout)[0].decode().rstrip()
        page = _opened(shared, rank, [each.process for each in told], own_timeout) if shared else None
        reads = page is not None and all(_can_read(each) for each in told)
        try:
            able = far.exchange(bytes([page is not None, reads]), _MEET_TAG, timeout)
        except BaseException:
            if page is not None:  # others may wait there already
                page.leave()
            raise
    finally:
        if name:
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(_PLACE, name))
    page = page if all(mapped for mapped, _ in able) else None
    if page is not None:
        page.reads = all(can for _, can in able)
    how = "are copied from memory to memory" if page is not None and page.reads else "go by gloo: not all may be read"
    _log.debug("rank %d of %d: messages on CPUs %s", rank, world_size, how)
    return page


def read_memory(process: int, address: int, target: int, num_bytes: int) -> None:
    """Copy from the memory of a process to an address of this one.

    Raises:
        OSError: if the process is not there or must not be read.
        AttributeError: where there is no such call.
    """
    done = 0
    while done < num_bytes:  # a call moves 2 GiB at most
        ranges = (ctypes.c_uint64 * 4)(target + done, num_bytes - done, address + done, num_bytes - done)
        here = ctypes.addressof(ranges)
        moved = _process_vm_readv()(process, here, 1, here + 16, 1, 0)
        if moved <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        done += moved


@cache
def _process_vm_readv() -> Any:
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.argtypes = ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong
    read.restype = ctypes.c_ssize_t
    return read


def _introduction(secret: ctypes.Array[ctypes.c_char]) -> bytes:
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = bytes.fromhex(file.read().strip().replace("-", ""))
    except (OSError, ValueError):
        namespace, boot = 0, b""
    return _MEETING.pack(os.getpid(), namespace, boot, ctypes.addressof(secret), secret.raw)


def _can_read(peer: _Introduction) -> bool:
    """Whether its memory can be read; a system or container may forbid it."""
    found = ctypes.create_string_buffer(len(peer.secret))
    try:
        read_memory(peer.process, peer.address, ctypes.addressof(found), len(peer.secret))
    except (OSError, AttributeError):
        return False
    return found.raw == peer.secret


def _new_page(world_size: int) -> str:
    """The name of a new file for it; empty if there is no place for one."""
    try:
        handle, path = tempfile.mkstemp(prefix="ringcp-", dir=_PLACE)
    except OSError:
        return ""
    try:
        with open(handle, "wb") as file:
            file.write(bytes(_page_size(world_size)))
    except OSError:  # it is full
        os.unlink(path)
        return ""
    return os.path.basename(path)


def _opened(name: str, rank: int, processes: Sequence[int], own_timeout: Callable[[], float]) -> Page | None:
    """The page of that name, if it is on this node, and the processes can be watched."""
    try:
        with open(os.path.join(_PLACE, name), "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        return Page(memory, rank, processes, own_timeout)
    except (OSError, AttributeError, ValueError):  # another node; or no Linux, which has no pidfd_open
        return None


def _leave(memory: mmap.mmap, rank: int, watches: dict[int, int], process: int) -> None:
    """At the end of a page: say so, but not in a fork."""
    if os.getpid() == process:
        memory[rank] = 1
    for watch in watches.values():
        os.close(watch)
