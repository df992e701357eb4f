"""What the learner's loop asks of everything around it: the policy, the publisher, the buffer, the rows, the run's log.

In a run these are `LMPolicy`, `Publisher`, `BufferClient`, `RowClient` and the deployment; every call that leaves the
process has a deadline of its own there.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from asyncrl.buffer.actor import RunStatus
from asyncrl.buffer.records import Lease, LeaseWait, Version
from asyncrl.learner.records import EvalRecord, SampleRecord, StepRecord
from asyncrl.policy.interfaces import StepReport, TrainGroup


class Trainer(Protocol):
    """The policy."""

    async def train_step(self, groups: Sequence[TrainGroup], *, step: int) -> StepReport: ...


class Publications(Protocol):
    """Publishing a version: `publish` returns when the weights are copied, `settle` when they are delivered."""

    @property
    def published(self) -> Version | None: ...
    async def publish(self, version: Version) -> None: ...
    async def settle(self) -> None: ...


class Buffer(Protocol):
    """The buffer's learner side."""

    async def lease(self, *, wait_s: float) -> Lease | LeaseWait: ...
    async def status(self) -> RunStatus: ...
    async def call(self, method: str, *arguments: Any, wait_s: float = 0.0) -> Any: ...


class RowSource(Protocol):
    """Where a group's rows are, and who drops them; a reference is awaitable."""

    async def refs(self, store: str, keys: list[str]) -> list[Any]: ...
    async def clear(self, store: str, keys: list[str]) -> None: ...


class RunLog(Protocol):
    """Where records go."""

    def append_step(self, record: StepRecord) -> None: ...
    def append_eval(self, record: EvalRecord) -> None: ...
    def write_samples(self, step: int, samples: Sequence[SampleRecord]) -> None: ...
