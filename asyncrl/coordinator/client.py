"""The typed client of the coordinator. It takes the method that is called, and sends its name.

    lease = await client.call(Coordinator.lease, incarnation, wait_s=5.0)
    await client.call(Registry.keep, deployment_id)

`CoordinatorClient.over_ray` makes a client of a coordinator in another process. A client for a coordinator in this
process is `CoordinatorClient(partial(perform, coordinator))`.
"""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from asyncrl.config.schema import Config
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.registry import Registry
from asyncrl.data.prompts import Task
from asyncrl.data_plane.calls import finished, patiently
from asyncrl.data_plane.rows import PREFIX_PARTITION, Rows
from asyncrl.log_files import LogFile
from asyncrl.shown_text import describe_process, log_to_stderr

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Receiver = TypeVar("Receiver", Coordinator, Registry)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a method of a receiver (the coordinator or its registry), as it is sent."""

    receiver: str
    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]


async def perform(coordinator: Coordinator, call: Call) -> Any:
    """Performs a call in the process of the coordinator, and returns the answer."""
    receivers = {Coordinator.__name__: coordinator, Registry.__name__: coordinator.registry}
    answer = getattr(receivers[call.receiver], call.method)(*call.arguments, **call.options)
    return await answer if inspect.isawaitable(answer) else answer


class CoordinatorClient:
    """Calls the coordinator. `send` delivers a call and returns its answer."""

    def __init__(self, send: Callable[[Call], Awaitable[Any]]) -> None:
        self._send = send

    @classmethod
    def over_ray(cls, handle: Any, *, timeout_s: float, patience_s: float = 0.0) -> "CoordinatorClient":
        """Returns a client of a `CoordinatorActor`.

        A call is late after `timeout_s` seconds plus the `wait_s` that it passes to its method. A late call is repeated
        until `patience_s` seconds have passed, and then raises CallTimeout. The first call may have been performed, and
        only its answer was late. A repetition changes nothing, except that a repeated reserve gets other tickets;
        the tickets of the first reserve expire. `tests/coordinator/test_repeats.py` tests this for every method. A call
        raises ActorGone if the actor's process has ended.
        """

        def send(call: Call) -> Awaitable[Any]:
            limit_s, what = timeout_s + call.options.get("wait_s", 0.0), f"the buffer's {call.method}"
            return patiently(
                lambda: finished(handle.perform.remote(call), timeout_s=limit_s, what=what), patience_s=patience_s
            )

        return cls(send)

    @overload
    async def call(
        self,
        method: Callable[Concatenate[Receiver, Arguments], Awaitable[Answer]],
        /,
        *arguments: Arguments.args,
        **options: Arguments.kwargs,
    ) -> Answer: ...

    @overload
    async def call(
        self,
        method: Callable[Concatenate[Receiver, Arguments], Answer],
        /,
        *arguments: Arguments.args,
        **options: Arguments.kwargs,
    ) -> Answer: ...

    async def call(self, method: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        """Calls a method of `Coordinator` or `Registry` with these arguments. Returns its answer."""
        receiver, _, name = method.__qualname__.rpartition(".")
        return await self._send(Call(receiver, name, arguments, options))


# The Ray actor that runs the coordinator. `asyncrl.common.names.COORDINATOR` is its name.


class CoordinatorActor:
    """The Ray actor that runs the coordinator. Other processes call it through `CoordinatorClient`. `logs` is the
    folder for the log of this process, if there is one."""

    def __init__(self, config: Config, tasks: Sequence[Task], logs: Path | None = None) -> None:
        log_to_stderr(config.run.log_format)
        prefixes = Rows(config, partition=PREFIX_PARTITION) if config.generator.persist_every_tokens else None
        self._coordinator = Coordinator(config=config, tasks=tasks, rows=Rows(config), prefixes=prefixes)
        describe_process(
            run=config.run.name,
            role="coordinator",
            incarnation=lambda: self._coordinator.buffer.version.incarnation,
            step=lambda: self._coordinator.buffer.version.step,
        )
        if logs is not None:
            LogFile(logs / "coordinator.log", form=config.run.log_format)

    async def perform(self, call: Call) -> Any:
        """Performs a call that a `CoordinatorClient` has sent, and returns the answer."""
        return await perform(self._coordinator, call)
