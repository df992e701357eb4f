"""Publishes a version from the learner: takes a snapshot of the weights, then delivers it to the weight store.

Training waits for the snapshot only. The delivery runs at the same time as the next step. At most one delivery runs at
a time, so versions reach the weight store in order.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from asyncrl.common.version import Version
from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.learner_calls import LearnerCalls
from asyncrl.data.prompts import Task
from asyncrl.data.tokenizer import encode_prompt
from asyncrl.policy.tq_policy import TQPolicy
from asyncrl.policy.worker import PolicyWorker
from asyncrl.weights.manifest import Manifest, Probe, TensorEntry
from asyncrl.weights.publisher import DeliveredBucket
from asyncrl.weights.store import WeightClient
from asyncrl.weights.transports.interfaces import Transport

PROBE_TASKS = 4
"""Number of tasks whose prompts and answers are the sequences of the parity probe."""


class Publisher:
    """Publishes the current weights of the policy's ranks.

    The coordinator gets the published version, and the weight store `weights` gets the manifest. `delivered` records
    the size of the publication and the seconds of its phases.
    """

    def __init__(
        self,
        *,
        policy: TQPolicy,
        entries: tuple[TensorEntry, ...],
        probe_tokens: Sequence[Sequence[int]],
        transport: Transport,
        coordinator: CoordinatorClient,
        weights: WeightClient,
        delivered: Callable[[Manifest, dict[str, float]], None],
    ) -> None:
        self._policy = policy
        self._entries = entries
        self._probe_tokens = tuple(tuple(tokens) for tokens in probe_tokens)
        self._transport = transport
        self._coordinator = coordinator
        self._weights = weights
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
            self._policy.on_ranks, PolicyWorker.take_snapshot, self._entries, self._probe_tokens
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
            self._policy.beside_ranks, PolicyWorker.deliver, self._transport
        )
        buckets = sorted((bucket for rank in by_rank for bucket in rank), key=lambda bucket: bucket.index)
        manifest = Manifest(
            version=version,
            previous=previous,
            tensors=self._entries,
            buckets=tuple(bucket.bucket for bucket in buckets),
            probe=probe,
        )
        # The coordinator must get the version before any replica can load it: a replica may load it as soon as the
        # weight store has it, and the gate (asyncrl/weights/gate.py) compares the replicas' versions with the published
        # one.
        await self._coordinator.call(LearnerCalls.published, version)
        await self._weights.publish(manifest, [bucket.handle for bucket in buckets])
        self._delivered(manifest, {"snapshot": snapshot_s, "deliver": time.monotonic() - started_s})


def probe_sequences(tokenizer: object, tasks: Sequence[Task], *, max_length: int) -> list[list[int]]:
    """Returns the token ids of the fixed sequences of the parity probe: the first prompts, each with its answer.

    A sequence has fewer than `max_length` tokens, because an engine that scores a sequence generates one more token,
    and refuses a sequence that leaves no room for it.
    """
    sequences = [encode_prompt(tokenizer, task.prompt + task.answer)[: max_length - 1] for task in tasks[:PROBE_TASKS]]
    return [sequence for sequence in sequences if len(sequence) > 1]
