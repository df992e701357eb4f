"""Scores completions of several tasks, each with its own rewards."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.environments.scores import Score
from asyncrl.environments.scoring import Scorer
from asyncrl.environments.secrets import Secrets


class PartScorers:
    """The scorers of the parts of a run, by the names of the parts (`asyncrl.config.parts.part_configs`)."""

    def __init__(
        self,
        parts: Mapping[str, Config],
        *,
        secrets: Secrets | None = None,
        output: Callable[[str], None] | None = None,
    ) -> None:
        self._scorers = {
            name: Scorer(config.environment, secrets=secrets, output=output) for name, config in parts.items()
        }

    async def start(self) -> None:
        """Starts the processes of all parts. Raises the errors of `Scorer.start`."""
        await asyncio.gather(*(scorer.start() for scorer in self._scorers.values()))

    async def score(self, task: Task, completions: Sequence[str]) -> list[Score]:
        """Returns the scores of completions of a task, and raises errors, as `Scorer.score` does."""
        return await self._scorers[task.part].score(task, completions)

    async def close(self) -> None:
        """Kills the processes. It may be called twice."""
        await asyncio.gather(*(scorer.close() for scorer in self._scorers.values()))
