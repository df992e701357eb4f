"""The Ray actor that runs the coordinator. `asyncrl.common.names.COORDINATOR` is its name."""

from collections.abc import Sequence
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.coordinator.client import Call, perform
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.data.prompts import Task
from asyncrl.data_plane.clients import PREFIX_PARTITION, GroupRows
from asyncrl.shown_text import log_to_stderr


class CoordinatorActor:
    """The class of the actor. Callers use it through `CoordinatorClient`."""

    def __init__(self, config: Config, tasks: Sequence[Task]) -> None:
        log_to_stderr()
        prefixes = GroupRows(config, partition=PREFIX_PARTITION) if config.generator.persist_every_tokens else None
        self._coordinator = Coordinator(config=config, tasks=tasks, rows=GroupRows(config), prefixes=prefixes)

    async def perform(self, call: Call) -> Any:
        """Performs a call of the client."""
        return await perform(self._coordinator, call)
