"""One replica of a generator deployment: its present actor, and what its deployment knows of it."""

import asyncio
from collections import deque
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from asyncrl.buffer.fleet import actor_of
from asyncrl.data_plane.calls import reason_of_death
from asyncrl.errors import ActorGone, AsyncRLError, RunError
from asyncrl.generation.shared_memory import EngineProcesses


class Replica:
    """A replica of the deployment. `name` stays, and each start has an actor of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.start = 0
        """Number of the present start, counted from 1."""
        self.handle: Any = None
        self.begun = False
        """Whether the call that starts the engine was sent. Before that call, the actor only imports vLLM."""
        self.processes: EngineProcesses | None = None
        self.running: asyncio.Task[None] | None = None
        """The call of the actor that generates. None while the replica starts."""
        self.work: asyncio.Task[None] | None = None
        """Starts the replica, or asks it whether it lives. None if neither is needed."""
        self.restarted_s: deque[float] = deque()
        self.samples = 0
        """Samples of all starts, by the last status."""
        self.samples_before = 0
        """Samples of the earlier starts."""
        self.error: BaseException | None = None
        """Why the replica was lost for the last time."""
        self.first_difference_nats: float | None = None
        """By how much the log-probs of the first weights differed in the last start in which they did."""
        self.fruitless = 0
        """Number of starts in a row that committed no group."""

    @property
    def actor(self) -> str:
        return actor_of(self.name, self.start)

    @property
    def generates(self) -> bool:
        return self.running is not None and not self.running.done()

    @property
    def ended_with(self) -> BaseException:
        """The error with which the call that generates has ended."""
        assert self.running is not None
        error = None if self.running.cancelled() else self.running.exception()
        if isinstance(error, RayTaskError) and isinstance(error.cause, AsyncRLError):
            return error.cause  # without the traceback of the actor, which Ray puts into the text of its own error
        if isinstance(error, RayActorError):
            return ActorGone(reason_of_death(error))
        return error or RunError("its rollout loop returned without an error")
