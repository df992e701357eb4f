"""Scores completions of several tasks, each with its own rewards."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.environments.scores import Score
from asyncrl.environments.scoring import Scorer
from asyncrl.environments.secrets import Secrets


class PartScorers:
    """The scorers of the parts of a run, by the names of the parts (`asyncrl.config.parts.all_configs`). Parts with
    equal environments share one."""

    def __init__(
        self,
        parts: Mapping[str, Config],
        *,
        secrets: Secrets | None = None,
        output: Callable[[str], None] | None = None,
    ) -> None:
        sections = {config.environment.model_dump_json(): config.environment for config in parts.values()}
        made = {key: Scorer(section, secrets=secrets, output=output) for key, section in sections.items()}
        self._all = list(made.values())
        self._scorers = {name: made[config.environment.model_dump_json()] for name, config in parts.items()}

    async def start(self) -> None:
        """Starts the processes of all parts. Raises the errors of `Scorer.start`."""
        await asyncio.gather(*(scorer.start() for scorer in self._all))

    def runs_agent(self, task: Task) -> bool:
        """Returns whether a task is for an agent, which makes its own calls to the model. Known after `start`."""
        return self._scorers[task.part].form.agent

    @property
    def any_agent(self) -> bool:
        """Whether any part has an agent. Known after `start`."""
        return any(scorer.form.agent for scorer in self._scorers.values())

    async def score(self, task: Task, completions: Sequence[str]) -> list[Score]:
        """Returns the scores of completions of a task, and raises errors, as `Scorer.score` does."""
        return await self._scorers[task.part].score(task, completions)

    async def close(self) -> None:
        """Kills the processes. It may be called twice."""
        await asyncio.gather(*(scorer.close() for scorer in self._all))
