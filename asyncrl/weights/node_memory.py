"""The block of memory in which a version is staged. All replicas of a node that belong to one run share it.

A block is an anonymous file that each of its replicas has open, so it disappears with the last one, also if all of them
are killed. A small file, the pointer, has the path of the block, by which a replica that starts finds it. Each replica
writes its own path to the block into the pointer before it stages a version. So the pointer may be removed at any time,
and the replica that wrote it last may end: at worst, a replica that starts then makes a second block, and the others
join it when they stage their next version.

A replica that changes the block holds it alone, and one that loads from it holds it together with others. The kernel
releases what a replica holds when its process ends. The block counts its changes, so a replica knows whether the bytes
that it has verified are still in it.
"""

import contextlib
import errno
import fcntl
import logging
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asyncrl.common.version import Version
from asyncrl.weights.manifest import Bytes, aligned
from asyncrl.weights.memory_file import NOTHING, MemoryFile, try_lock

logger = logging.getLogger(__name__)

POINTER_S = 60.0
"""Longest time that a replica waits while another one makes a block, seconds. The kernel clears about 4 GB in a
second."""
ROOM_S = 2.0
"""Longest time that a broadcast waits while replicas of the node load other weights from the block, seconds. All
members of the broadcast wait meanwhile. Most engines load faster."""
POLL_S = 0.01
TOKEN_BYTES = 16
TAIL_BYTES = 64
"""Bytes after those of the weights: the block's random token, the number of its changes, and the broadcast that a
replica puts into it."""


class Address(NamedTuple):
    """The place of a block of `nbytes` bytes. A later file may have the same path, but not the same token."""

    path: str
    token: str
    nbytes: int


class Block:
    """A block for `nbytes` bytes of weights: a new one, or the one at an address. Raises OSError if there is no memory
    for it, and OSError or ValueError if there is no such block at the address."""

    def __init__(self, nbytes: int, *, at: Address | None = None) -> None:
        start = aligned(nbytes)
        self._file = MemoryFile(start + TAIL_BYTES, of=None if at is None else at.path)
        token, numbers = np.split(self._file.data[start : start + TOKEN_BYTES + 16], [TOKEN_BYTES])
        if at is None:
            token[:] = np.frombuffer(uuid.uuid4().bytes, dtype=np.uint8)
        self._numbers = numbers.view(np.uint64)
        self._is_open = True
        self.address = Address(self._file.path, token.tobytes().hex(), nbytes)
        self.flat: Bytes = self._file.data[:nbytes]
        if at is not None and at.token != self.address.token:
            self.close()
            raise OSError(errno.ESTALE, "another block has this path by now", at.path)

    @property
    def changes(self) -> int:
        """The number of changes that replicas have made."""
        return int(self._numbers[0])

    def will_change(self) -> int:
        """Counts a change, before it is made. Returns its number."""
        self._numbers[0] += 1
        return self.changes

    @property
    def broadcast(self) -> int:
        """The number of the broadcast that a replica is putting into the block, while it holds the block alone; 0 if no
        replica does this."""
        return int(self._numbers[1])

    @broadcast.setter
    def broadcast(self, number: int) -> None:
        self._numbers[1] = number

    def lock(self, *, alone: bool) -> bool:
        """Holds the block alone, to change it, or together with other readers, to read it. Returns False if another
        holder prevents this; then this replica does not hold the block."""
        if alone:
            self.unlock()
        return try_lock(self._file.fd, alone=alone)

    def unlock(self) -> None:
        fcntl.flock(self._file.fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Frees the memory, unless other replicas use it. It may be called again."""
        if self._is_open:
            self._is_open = False
            self.unlock()  # the mapping has a descriptor of its own, which would keep the lock
            self.flat, self._numbers = NOTHING, np.zeros(2, dtype=np.uint64)
            self._file.close()


def shared_block(pointer: Path, nbytes: int, *, held: Block | None, timeout_s: float = POINTER_S) -> Block:
    """Returns the node's block for `nbytes` bytes of weights, to which the file `pointer` leads. It may be `held`, the
    block that this replica has. If the pointer leads to no such block, returns `held` or makes a new block. Writes the
    block's address into the pointer. Raises OSError if there is no memory for a new block, PermissionError if the
    pointer belongs to another user, and TimeoutError if another process has locked the pointer for `timeout_s`."""
    with pointer_held(pointer, timeout_s=timeout_s) as fd:
        block = _pointed(os.pread(fd, 4096, 0), nbytes, held=held) or held or Block(nbytes)
        os.ftruncate(fd, 0)
        os.pwrite(fd, " ".join(map(str, block.address)).encode(), 0)
        return block


def _pointed(text: bytes, nbytes: int, *, held: Block | None) -> Block | None:
    """Returns the block to which the text of a pointer leads. Returns None if it has another size or is gone."""
    with contextlib.suppress(OSError, ValueError):
        path, token, size = text.decode().split()
        if int(size) == nbytes:
            is_held = held is not None and held.address.token == token
            return held if is_held else Block(nbytes, at=Address(path, token, nbytes))
    return None


@contextlib.contextmanager
def pointer_held(pointer: Path, *, timeout_s: float = POINTER_S) -> Iterator[int]:
    """Opens the file `pointer`, and locks it for this process within the block. Raises TimeoutError after `timeout_s`.
    Raises PermissionError if the file belongs to another user, because all users may create files in /dev/shm."""
    fd = os.open(pointer, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        if os.fstat(fd).st_uid != os.getuid():
            raise PermissionError(
                errno.EACCES,
                "another user has made it, and could choose the weights from which this run samples",
                str(pointer),
            )
        deadline_s = time.monotonic() + timeout_s
        while not try_lock(fd, alone=True):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"another process has held {pointer} for {timeout_s:g} s")
            time.sleep(POLL_S)
        yield fd
    finally:
        os.close(fd)


class BroadcastRoom:
    """A replica's access to the node's block during a broadcast: all replicas of the node receive the bytes, and the
    first one that locks the block puts them into it."""

    def __init__(self, pointer: Path, *, room_s: float = ROOM_S) -> None:
        self._pointer = pointer
        self._room_s = room_s
        self._block: Block | None = None
        self.dropped = False
        """True if the last broadcast was not put into the block, because there was no memory, or because replicas used
        the block for other weights."""

    @contextlib.contextmanager
    def held(self, version: Version, nbytes: int) -> Iterator[Block | None]:
        """Yields the node's block, and holds it alone. Yields None if another replica puts this broadcast into it, if
        replicas use it for other weights for longer than `room_s`, or if there is no memory for it."""
        self.dropped = False
        try:
            block = shared_block(self._pointer, nbytes, held=self._held(nbytes))
        except OSError as error:
            logger.warning("the broadcast of weights %s is dropped, because there is no memory: %s", version, error)
            self.dropped = True
            yield None
            return
        if block is not self._block:
            self._close()
            self._block = block
        number = (version.incarnation << 32) + version.step + 1
        if not _held_alone(block, number, room_s=self._room_s):
            self.dropped = block.broadcast != number
            yield None
            return
        block.broadcast = number
        try:
            yield block
        finally:
            block.broadcast = 0
            block.unlock()

    def _held(self, nbytes: int) -> Block | None:
        if self._block is not None and self._block.address.nbytes != nbytes:
            self._close()
        return self._block

    def _close(self) -> None:
        if self._block is not None:
            self._block.close()
            self._block = None


def _held_alone(block: Block, number: int, *, room_s: float) -> bool:
    """Waits until this replica holds the block alone. Returns False if another replica puts broadcast `number` into
    it, or after `room_s`."""
    deadline_s = time.monotonic() + room_s
    while not block.lock(alone=True):
        if block.broadcast == number or time.monotonic() > deadline_s:
            return False
        time.sleep(POLL_S)
    return True
