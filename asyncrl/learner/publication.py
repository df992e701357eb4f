"""Publishes a version from the learner: takes a snapshot of the weights, then delivers it to the weight store.

Training waits for the snapshot only. The delivery runs at the same time as the next step. At most one delivery runs at
a time, so versions reach the weight store in order.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from asyncrl.policy.worker import PolicyWorker
from asyncrl.run.version import Version
from asyncrl.weights.manifest import Manifest, Probe, TensorEntry
from asyncrl.weights.publisher import DeliveredBucket
from asyncrl.weights.transports.interfaces import Transport


class Ranks(Protocol):
    """Runs a function on each of the policy's ranks and returns the results by rank. Both calls block.

    `on_ranks` runs it between the steps of a rank, in the order of the calls. `beside_ranks` runs it at the same time
    as the steps.
    """

    def on_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]: ...
    def beside_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]: ...


class Publisher:
    """Publishes the current weights of the policy's ranks.

    `announce` sends the published version to the buffer. `offer` sends the manifest to the weight store. `delivered`
    records the size of the publication and the seconds of its phases.
    """

    def __init__(
        self,
        *,
        ranks: Ranks,
        entries: tuple[TensorEntry, ...],
        probe_tokens: Sequence[Sequence[int]],
        transport: Transport,
        announce: Callable[[Version], Awaitable[Any]],
        offer: Callable[[Manifest, list[Any]], Awaitable[Any]],
        delivered: Callable[[Manifest, dict[str, float]], None],
    ) -> None:
        self._ranks = ranks
        self._entries = entries
        self._probe_tokens = tuple(tuple(tokens) for tokens in probe_tokens)
        self._transport = transport
        self._announce = announce
        self._offer = offer
        self._delivered = delivered
        self._published: Version | None = None
        self._delivery: asyncio.Task[None] | None = None

    @property
    def published(self) -> Version | None:
        """The newest version whose snapshot was taken."""
        return self._published

    async def publish(self, version: Version) -> None:
        """Waits for the previous delivery, takes a snapshot of the weights and starts its delivery.

        Returns when the snapshot is taken. Raises the error of the previous delivery if it failed.
        """
        await self.settle()
        started_s = time.monotonic()
        logprobs, *_ = await asyncio.to_thread(
            self._ranks.on_ranks, PolicyWorker.take_snapshot, self._entries, self._probe_tokens
        )
        snapshot_s = time.monotonic() - started_s
        probe = Probe(tokens=self._probe_tokens, logprobs=tuple(tuple(row) for row in logprobs))
        previous, self._published = self._published, version
        self._delivery = asyncio.create_task(
            self._deliver(version, previous=previous, probe=probe, snapshot_s=snapshot_s), name=f"deliver {version}"
        )

    async def settle(self) -> None:
        """Waits for the running delivery, if there is one, and raises its error if it fails."""
        if self._delivery is not None:
            delivery, self._delivery = self._delivery, None
            await delivery

    async def _deliver(self, version: Version, *, previous: Version | None, probe: Probe, snapshot_s: float) -> None:
        started_s = time.monotonic()
        by_rank: list[list[DeliveredBucket]] = await asyncio.to_thread(
            self._ranks.beside_ranks, PolicyWorker.deliver, self._transport
        )
        buckets = sorted((bucket for rank in by_rank for bucket in rank), key=lambda bucket: bucket.index)
        manifest = Manifest(
            version=version,
            previous=previous,
            tensors=self._entries,
            buckets=tuple(bucket.bucket for bucket in buckets),
            probe=probe,
        )
        # The buffer must get the version before any replica can load it: a replica may load it right after the offer,
        # and the gate (asyncrl/weights/gate.py) compares the replicas' versions with the published one.
        await self._announce(version)
        await self._offer(manifest, [bucket.handle for bucket in buckets])
        self._delivered(manifest, {"snapshot": snapshot_s, "deliver": time.monotonic() - started_s})
