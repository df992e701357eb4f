"""The staged weights of a replica: a version's flat buffer, complete and verified before the engine pauses.

The engine's workers map the buffer by its path, so all of them use the same bytes. So do all replicas of a node: the
first one that needs a version fetches it, and the others verify the bytes that they find, and fetch what is missing.
The memory is used again for the next version of the same size.

    await staged.stage(manifest, fetch)   # waits while another replica of the node changes the buffer, or loads from it
    ...                                   # no replica changes the buffer, so the engine can load it
    staged.release()
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from asyncrl.errors import FetchFailed, WeightsDamaged
from asyncrl.weights.delta import decode
from asyncrl.weights.manifest import Bytes, Link, Manifest, Piece, checksum, put_bucket
from asyncrl.weights.node_memory import POINTER_S, POLL_S, Block, pointer_held, shared_block

logger = logging.getLogger(__name__)

LOOP_BYTES = 2**20
"""To copy and verify this many bytes takes the event loop a millisecond. More bytes are handled in a thread."""
BLOCKED_S = 10.0
"""Seconds without a change after which a replica no longer waits for the node's memory, which other replicas use, and
stages in memory of its own: one of the others may be stuck."""

UNKNOWN = -1
"""A number of changes that no block has, so that the checksums of the bytes in a block are computed anew."""


class Part(NamedTuple):
    """Bytes that a replica lacks: a whole bucket, or one link of its chain (`asyncrl.weights.delta`). The fields are
    indices in the manifest."""

    bucket: int
    link: int | None


Fetch = Callable[[Part], Awaitable[Bytes]]


class StagedWeights:
    """Memory for the flat buffer of one version at a time. The file `pointer` leads to the memory that the replicas of
    the node share; without it this replica has memory of its own.

    If other replicas hold the node's memory and do not change it for `blocked_s` seconds, this replica takes memory of
    its own, provided that `available_bytes` says that the node has enough. It waits at most `pointer_s` seconds while
    another replica makes the node's memory.

    For a version, a replica calls only `stage` and then `release`. A process that shares the memory with no other one
    may instead call `begin`, and `put` for each `missing` part, in order.
    """

    def __init__(
        self,
        pointer: Path | None = None,
        *,
        blocked_s: float = BLOCKED_S,
        pointer_s: float = POINTER_S,
        available_bytes: Callable[[], int] = lambda: psutil.virtual_memory().available,
    ) -> None:
        self._pointer = pointer
        self._blocked_s, self._pointer_s = blocked_s, pointer_s
        self._available_bytes = available_bytes
        self._block: Block | None = None
        self._apart: Block | None = None
        """Memory of this replica's own for one version, because it could not use that of the node."""
        self._manifest: Manifest | None = None
        self._held: dict[tuple[Piece, ...], str] = {}
        """The checksums of the bytes in the buffer, by the pieces of each bucket."""
        self._seen = 0
        """The block's number of changes when `_held` was last right."""

    @property
    def path(self) -> str:
        """The path by which every process of this node maps the flat buffer."""
        return self._memory.address.path

    @property
    def flat(self) -> Bytes:
        """The flat buffer."""
        return self._memory.flat

    @property
    def _memory(self) -> Block:
        memory = self._apart or self._block
        assert memory is not None, "call begin() first"
        return memory

    @property
    def missing(self) -> list[Part]:
        """The parts that are not verified in the buffer yet."""
        assert self._manifest is not None, "call begin() first"
        parts = []
        for index, bucket in enumerate(self._manifest.buckets):
            held = self._held.get(bucket.pieces)
            if held == bucket.checksum:
                continue
            if not bucket.links:
                parts.append(Part(index, None))
                continue
            known = [number for number, link in enumerate(bucket.links) if link.checksum == held]
            first = known[-1] + 1 if known else 0
            parts += [Part(index, number) for number in range(first, len(bucket.links))]
        return parts

    async def stage(self, manifest: Manifest, fetch: Fetch) -> None:
        """Stages a version. No replica of the node changes it until `release`.

        Fetches one missing part at a time. While a part is put into the buffer and verified there, the next one is
        fetched.

        Raises FetchFailed if it gets no memory, also because another process is stuck, WeightsDamaged if fetched bytes
        are damaged, and the errors of `fetch`. Calls `release` before it raises. The verified parts stay in the node's
        memory for the next call, unless another replica changes them.
        """
        nbytes = manifest.flat_bytes
        if self._pointer is None:
            await beside_loop(lambda: self.begin(manifest), nbytes=nbytes)
        else:
            await _in_thread(lambda: self.begin(manifest))  # it may wait for another process
        changes, since_s = self._memory.changes, time.monotonic()
        try:
            while True:
                if self._memory.lock(alone=False):
                    await beside_loop(self._look, nbytes=nbytes)
                    if not self.missing:
                        return
                if self._memory.lock(alone=True):
                    await beside_loop(self._look, nbytes=nbytes)
                    await self._fill(manifest, fetch)
                    continue
                if changes != self._memory.changes:
                    changes, since_s = self._memory.changes, time.monotonic()
                elif time.monotonic() - since_s > self._blocked_s:
                    logger.warning(
                        "another replica of this node has held the memory for staged weights for %g s without "
                        "changing it, so weights %s are staged in memory of this replica's own",
                        self._blocked_s,
                        manifest.version,
                    )
                    await beside_loop(self._move_apart, nbytes=nbytes)
                await asyncio.sleep(POLL_S)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Lets other replicas of the node change the buffer, and frees memory of this replica's own. Call it when the
        engine has loaded the version."""
        if self._block is not None:
            self._block.unlock()
        if self._apart is not None:
            self._apart.close()
            self._apart = None
            self._seen = UNKNOWN

    async def _fill(self, manifest: Manifest, fetch: Fetch) -> None:
        missing = self.missing
        fetches = (asyncio.ensure_future(fetch(part)) for part in missing)  # a generator: a fetch begins at `next`
        following = next(fetches, None)
        try:
            for part in missing:
                assert following is not None
                data, following = await following, next(fetches, None)
                put = functools.partial(self.put, part, data)
                await beside_loop(put, nbytes=manifest.buckets[part.bucket].nbytes)
        finally:
            if following is not None:
                following.cancel()

    def begin(self, manifest: Manifest) -> None:
        """Provides memory for a version. Keeps the bytes that an earlier attempt has staged of the same version, and
        the bytes to which the version's deltas can be applied. Raises FetchFailed if it gets no memory, also because
        another process is stuck."""
        if manifest != self._manifest:
            linked = {bucket.pieces for bucket in manifest.buckets if bucket.links}
            self._held = {pieces: found for pieces, found in self._held.items() if pieces in linked}
        self._manifest = manifest
        nbytes = manifest.flat_bytes
        if self._block is not None and self._block.address.nbytes != nbytes:
            self.close()
        try:
            if self._pointer is not None:
                self._use(shared_block(self._pointer, nbytes, held=self._block, timeout_s=self._pointer_s))
            elif self._block is None:
                self._use(Block(nbytes))
        except TimeoutError as error:
            raise FetchFailed(
                f"{error}, so there is no memory for the weights; look for a process that is stuck"
            ) from error
        except OSError as error:
            raise FetchFailed(
                f"there is no memory for the {nbytes / 2**20:.0f} MiB of weights {manifest.version} ({error}); the "
                "replicas of a node need this much besides their engines"
            ) from error

    def _use(self, block: Block) -> None:
        if block is not self._block:
            self.close()
            # A block with 0 changes has no bytes of a version yet. With more, `_look` finds out which it has.
            self._block, self._seen = block, 0

    def _move_apart(self) -> None:
        """Takes memory of this replica's own, in place of the node's shared memory. Raises FetchFailed if the node has
        too little."""
        nbytes = self._memory.address.nbytes
        assert self._pointer is not None, "only shared memory can be in use by another replica"
        # The lock lets one replica at a time check and take memory. The next one then sees this memory as used.
        with pointer_held(self._pointer, timeout_s=self._pointer_s):
            free = self._available_bytes()
            try:
                own = Block(nbytes) if free >= 2 * nbytes else None
            except OSError:  # a container may have less than its machine
                own = None
        if own is None:
            raise FetchFailed(
                f"another replica of this node has held the memory for staged weights for {self._blocked_s:g} s "
                f"without changing it, and {free / 2**20:.0f} MiB of available memory are too few for another "
                f"{nbytes / 2**20:.0f} MiB and as much in reserve; the kernel frees the memory when that replica ends"
            )
        self._apart, self._seen = own, 0
        self._held.clear()

    def _look(self) -> None:
        """Computes the checksum of each bucket's bytes in the buffer anew, if another replica may have changed it."""
        assert self._manifest is not None, "call begin() first"
        changes = self._memory.changes
        if changes != self._seen:
            self._held = {
                bucket.pieces: checksum(
                    self.flat[piece.offset : piece.offset + piece.nbytes] for piece in bucket.pieces
                )
                for bucket in self._manifest.buckets
            }
            self._seen = changes

    def put(self, part: Part, data: Bytes) -> None:
        """Writes the bytes of a bucket into their places in the buffer, or applies a delta to the bytes there, and
        verifies the result. Raises WeightsDamaged if the result is wrong. The whole bucket then counts as missing."""
        assert self._manifest is not None, "call begin() first"
        bucket = self._manifest.buckets[part.bucket]
        link = None if part.link is None else bucket.links[part.link]
        self._held.pop(bucket.pieces, None)
        self._seen = self._memory.will_change()
        if link is not None and link.delta:
            data = self._changed(bucket.pieces, data, link)
        put_bucket(self._manifest, part.bucket, data, flat=self.flat, link=link)
        self._held[bucket.pieces] = bucket.checksum if link is None else link.checksum

    def _changed(self, pieces: tuple[Piece, ...], delta: Bytes, link: Link) -> Bytes:
        before = np.concatenate([self.flat[piece.offset : piece.offset + piece.nbytes] for piece in pieces])
        try:
            return decode(before, delta)
        except ValueError as error:
            raise WeightsDamaged(
                f"the delta to weights {link.version} is damaged: {error}; the replica fetches the whole bucket again"
            ) from error

    def close(self) -> None:
        """Frees this replica's memory, and its use of the node's memory. It may be called again."""
        self.release()
        if self._block is not None:
            self._block.close()
            self._block = None
            self._held.clear()


async def beside_loop(work: Callable[[], None], *, nbytes: int) -> None:
    """Runs `work`, which reads or writes `nbytes` bytes: in a thread if they are more than `LOOP_BYTES`."""
    if nbytes > LOOP_BYTES:
        await _in_thread(work)
    else:
        work()


async def _in_thread(work: Callable[[], None]) -> None:
    """Runs `work` in a thread. A cancelled call waits for the thread, which may write into the buffer until its end."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):  # a second cancellation must not end the wait either
                await asyncio.wait([running])
        raise
