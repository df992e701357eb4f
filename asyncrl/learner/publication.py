"""Publishes versions from the learner: takes snapshots of the weights, and delivers them to the weight store.

Training waits for a snapshot only. One delivery runs at a time, at the same time as the next steps, so that versions
reach the weight store in order. Each rank has memory for two snapshots: one is being delivered, and the other waits. A
newer snapshot replaces the one that waits. So if deliveries are slow, some versions are never delivered, but the steps
are not delayed and memory does not grow.

A delivery that fails is logged at once and repeated, unless a newer snapshot waits. It ends neither ranks nor training,
except with an error after which no delivery can succeed (`FINAL`). If a replica cannot get the bytes of a delivery that
has succeeded, because they are lost or damaged, the next delivery sends all weights in full, and no changes to earlier
versions (`weights.delta`). If no newer snapshot waits, the same version is delivered again.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from asyncrl.common.tasks import cancelled, running
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.data.prompts import Task
from asyncrl.data.tokenizer import encode_prompt
from asyncrl.data_plane.calls import patiently
from asyncrl.errors import ActorGone, Fenced, RunEnded, StallError, VersionConflict, VersionRegression
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.policy.tq_policy import TQPolicy
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.actor import SENDING
from asyncrl.weights.manifest import Manifest, Probe, TensorEntry
from asyncrl.weights.publisher import DeliveredBucket
from asyncrl.weights.store import WeightClient
from asyncrl.weights.transports.interfaces import Transport

logger = logging.getLogger(__name__)

PROBE_TASKS = 4
"""Number of tasks whose prompts and answers are the sequences of the parity probe."""

PAUSE_S = 0.5
"""Pause before the first repetition of a failed delivery, seconds. It doubles with each further repetition, up to
`LONGEST_PAUSE_S`."""
LONGEST_PAUSE_S = 10.0
REFUSED_WAIT_S = 20.0
"""Seconds of one wait for a replica that needs another delivery. The wait is repeated."""
FINAL = (ActorGone, Fenced, RunEnded, VersionConflict, VersionRegression)
"""Errors after which no delivery can succeed: a process that it needs has ended, or the run has another learner."""
MOST_REPEATS = 3
"""Number of times that the same weights are sent again for a replica that cannot get them. A replica that can never get
them must not keep the ranks busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    """A snapshot on the ranks: its version, the number of the memory slot that holds it (0 or 1), the parity probe with
    the learner's log-probs, and the seconds that the snapshot took."""

    version: Version
    slot: int
    probe: Probe
    snapshot_s: float


@dataclass(kw_only=True)
class Publisher:
    """Publishes the current weights of the policy's ranks.

    The coordinator gets the published version, and the weight store `weights` gets the manifest. `delivered` is called
    once for each version that the weight store has, with its manifest. `entries` describe the tensors, and
    `probe_tokens` has the sequences of the parity probe.
    """

    config: Config
    policy: TQPolicy
    entries: tuple[TensorEntry, ...]
    probe_tokens: Sequence[Sequence[int]]
    transport: Transport
    coordinator: CoordinatorClient
    weights: WeightClient
    metrics: LearnerMetrics
    delivered: Callable[[Manifest], None]
    published: Version | None = field(default=None, init=False)
    """The newest version whose snapshot was taken."""
    trouble: str = field(default="", init=False)
    """Why the delivery that is under way has not succeeded yet, for error messages; "" if it has no trouble."""

    def __post_init__(self) -> None:
        self._stored: tuple[_Taken, Manifest] | None = None  # the newest snapshot that the weight store has
        self._used: set[Version] = set()  # the versions whose bytes that snapshot needs
        self._used_before: set[Version] = set()  # the same for the snapshot before it
        self._repeated: Counter[Version] = Counter()  # how often the newest weights were sent again
        self._whole = False  # the next delivery must send all weights in full
        self._sending: _Taken | None = None
        self._waiting: _Taken | None = None
        self._slot = 1  # the memory slot of the last snapshot
        self._newer = asyncio.Event()
        self._deliveries: asyncio.Task[None] | None = None
        self._refusals: asyncio.Task[None] | None = None

    async def publish(self, version: Version) -> float | None:
        """Takes a snapshot of the weights. Its delivery begins when the delivery under way has ended.

        Returns as soon as the snapshot is taken. The result is the share of its elements whose bits are not those of
        the snapshot before; None for the first one. Raises the error after which no delivery can succeed, if there was
        one."""
        self.check()
        if self._waiting is not None:
            logger.info("weights %s are not delivered: newer ones follow", self._waiting.version)
            self.metrics.weight_delivery(outcome="replaced")
            self._waiting = None
        # Takes the slot that is not being sent, else the older one: with some transports, replicas still read the
        # memory of the snapshot before.
        slot = 1 - (self._slot if self._sending is None else self._sending.slot)
        self._slot = slot
        started_s = time.monotonic()
        probe_tokens = tuple(map(tuple, self.probe_tokens))
        taken = await asyncio.to_thread(
            self.policy.ranks.call, PolicyWorker.take_snapshot, self.entries, probe_tokens, slot
        )
        self._waiting = _Taken(
            version=version,
            slot=slot,
            probe=Probe(tokens=probe_tokens, logprobs=tuple(tuple(row) for row in taken[0][0])),
            snapshot_s=time.monotonic() - started_s,
        )
        self.published = version
        self._newer.set()
        self._begin_deliveries()
        if self._refusals is None:
            self._refusals = asyncio.create_task(self._answer_refusals(), name="refusals of weights")
        found = [changed for _, changed in taken if changed is not None]
        elements = sum(changed.elements for changed in found)
        return sum(changed.changed for changed in found) / elements if elements else None

    def _begin_deliveries(self) -> None:
        if self._deliveries is None or self._deliveries.done():
            self._deliveries = asyncio.create_task(self._deliver_all(), name="deliveries of weights")

    def check(self) -> None:
        """Raises the error after which no delivery can succeed, if there was one."""
        if self._deliveries is not None and self._deliveries.done():
            self._deliveries.result()

    async def settle(self) -> None:
        """Waits until the newest snapshot is delivered. Raises StallError after `run.stall_timeout_s`, and at once the
        error after which no delivery can succeed."""
        if self._deliveries is None:
            return
        limit_s = self.config.run.stall_timeout_s
        _, late = await asyncio.wait([self._deliveries], timeout=limit_s)
        if late:
            raise StallError(
                f"the weights of {self.published} were not delivered within run.stall_timeout_s = {limit_s:g} s: "
                f"{self.trouble or 'the delivery has not ended'}"
            )
        self._deliveries.result()

    async def stop(self) -> None:
        """Ends the deliveries, and the wait for replicas that need another one. A call that the ranks are running at
        the moment is not cancelled."""
        await cancelled(*[task for task in (self._deliveries, self._refusals) if task is not None])

    # -- deliveries --------------------------------------------------------------------------------------------------

    async def _deliver_all(self) -> None:
        """Delivers the newest snapshot until none waits. A delivery that fails is repeated, until it succeeds or a
        newer snapshot replaces it. Raises the errors in `FINAL` only."""
        failures = 0
        while self._sending is not None or self._waiting is not None:
            if self._waiting is not None:
                self._sending, self._waiting, failures = self._waiting, None, 0
            assert self._sending is not None
            self._newer.clear()
            try:
                await self._named_if_slow(self._sending)
            except FINAL:
                raise
            except Exception as error:
                failures += 1
                await self._failed(error, failures)
            else:
                self._sending, self.trouble = None, ""

    async def _failed(self, error: Exception, failures: int) -> None:
        """Logs the error of a delivery. Returns after the pause before the repetition, or as soon as a newer snapshot
        waits."""
        assert self._sending is not None
        pause_s = min(LONGEST_PAUSE_S, PAUSE_S * 2 ** min(failures - 1, 10))
        self.trouble = f"delivering weights {self._sending.version} failed ({type(error).__name__}: {error})"
        logger.error("%s; training goes on, and the delivery is repeated in %.1f s", self.trouble, pause_s)
        self.metrics.weight_delivery(outcome="failed")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._newer.wait()

    async def _named_if_slow(self, taken: _Taken) -> None:
        """Delivers a snapshot. Logs a warning each time that it has taken another `weights.load_timeout_s`."""
        limit_s = self.config.weights.load_timeout_s
        started_s = time.monotonic()
        async with running(self._deliver(taken), name=f"deliver {taken.version}") as delivery:
            while not (await asyncio.wait([delivery], timeout=limit_s))[0]:
                self.trouble = f"delivering weights {taken.version} has taken {time.monotonic() - started_s:.0f} s"
                logger.warning(
                    "%s, more than weights.load_timeout_s = %g s; training goes on, and generators keep their weights",
                    self.trouble,
                    limit_s,
                )
            delivery.result()

    async def _deliver(self, taken: _Taken) -> None:
        started_s, whole = time.monotonic(), self._whole
        stored = None if self._stored is None else self._stored[1]
        again = stored is not None and stored.version == taken.version
        by_rank: list[list[DeliveredBucket]] = await asyncio.to_thread(
            self.policy.ranks.beside,
            SENDING,
            PolicyWorker.deliver,
            self.transport,
            taken.slot,
            taken.version,
            None if stored is None else stored.version,
            whole,
        )
        buckets = [bucket for rank in by_rank for bucket in rank]
        manifest = Manifest(
            version=taken.version,
            tensors=self.entries,
            buckets=tuple(bucket.bucket for bucket in buckets),
            probe=taken.probe,
        )
        # The coordinator must get the version before any replica can load it: a replica may load it as soon as the
        # weight store has it, and the gate (asyncrl/weights/gate.py) compares the replicas' versions with the published
        # one.
        await self.coordinator.call(Coordinator.published, taken.version)
        await self.weights.publish(manifest, [bucket.handle for bucket in buckets], again=again)
        self._stored = taken, manifest
        self._whole = self._whole and not whole
        # The weight store offers the newest two versions. With `weights.delta`, a bucket may be a change to an earlier
        # version, which its links name, so the bytes of that version are needed too. All other bytes are deleted.
        links = {link.version for bucket in manifest.buckets for link in bucket.links}
        if not again:
            self._used_before = self._used
        self._used = {taken.version, *links}
        used, own = self._used_before | self._used, taken.version.incarnation
        await asyncio.to_thread(
            self.transport.delete, lambda version: version not in used and version.incarnation <= own
        )
        seconds = {"snapshot": taken.snapshot_s, "deliver": time.monotonic() - started_s}
        sent, nbytes = manifest.sent_bytes, sum(bucket.nbytes for bucket in manifest.buckets)
        logger.info("weights %s are delivered: %d of %d bytes were sent", taken.version, sent, nbytes)
        self.metrics.published(bytes=sent, whole_bytes=nbytes, phase_seconds=seconds)
        self.metrics.weight_delivery(outcome="again" if again else "delivered")
        if not again:
            self.delivered(manifest)

    async def _answer_refusals(self) -> None:
        """Delivers weights in full when a replica needs another delivery, until the weight store ends."""
        last = 0
        while True:
            wait = partial(self.weights.refused, last, wait_s=REFUSED_WAIT_S)
            try:
                refused = await patiently(wait, patience_s=math.inf)
            except ActorGone:
                return
            if refused is not None:
                last = refused
                self._deliver_whole()

    def _deliver_whole(self) -> None:
        """Makes the next delivery send all weights in full. If no snapshot waits or is being delivered, delivers the
        newest version again, at most `MOST_REPEATS` times."""
        self._whole = True
        if self._stored is None or self._sending is not None or self._waiting is not None:
            logger.warning("a replica cannot get the newest weights, so the next version is sent in full")
            return
        version = self._stored[0].version
        if self._repeated[version] >= MOST_REPEATS:
            logger.error(
                "a replica cannot get the weights %s, which were sent again %d times; look at the log of the replica, "
                "for example for a folder that its node cannot read",
                version,
                MOST_REPEATS,
            )
            return
        self._repeated = Counter({version: self._repeated[version] + 1})
        self._sending = self._stored[0]
        logger.warning("a replica cannot get the weights %s, so they are sent again in full", self._sending.version)
        self._begin_deliveries()


def probe_sequences(tokenizer: object, tasks: Sequence[Task], *, max_length: int) -> list[list[int]]:
    """Returns the token ids of the fixed sequences of the parity probe: the first prompts, each with its answer.

    A sequence has fewer than `max_length` tokens, because an engine that scores a sequence generates one more token,
    and refuses a sequence that leaves no room for it. Sequences with fewer than two tokens are left out.
    """
    sequences = [encode_prompt(tokenizer, task.prompt + task.answer)[: max_length - 1] for task in tasks[:PROBE_TASKS]]
    return [sequence for sequence in sequences if len(sequence) > 1]
