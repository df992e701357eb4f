"""The tasks of a taskset of the package verifiers, played in an interpreter that has it (`own_interpreter_main.py`)."""

import os
from typing import Any


class Part:
    """A taskset and its harness. `env` is the configuration of verifiers' environment. `size` is the largest number of
    tasks."""

    def __init__(self, *, env: dict[str, Any], size: int) -> None:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        self._env = load_environment(resolve_env_config(env))
        self._tasks = list(self._env.taskset.take(size))

    def serving(self) -> Any:
        """Returns the async context manager in which verifiers can play episodes."""
        return self._env.serving()

    async def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Returns the texts of all tasks for the order `tasks`. For the order `play`, plays one task and returns its
        rewards, or its error."""
        if order["what"] == "tasks":
            return {"tasks": [task.data.prompt_text or task.data.name or "" for task in self._tasks]}
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        # The subprocess runtime of verifiers withholds variables with this name from the programs that it runs.
        variable = f"ASYNCRL_API_KEY_{order['id']}"
        os.environ[variable] = order["api_key"]
        try:
            client = EvalClientConfig(base_url=order["base_url"], api_key_var=variable)
            context = ModelContext(client=client, model=order["model"])
            return _result(await self._env.run_episode(self._tasks[order["index"]], context))
        finally:
            del os.environ[variable]


def _result(episode: Any) -> dict[str, Any]:
    """Returns the weighted rewards of an episode by name, or its error."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        return {"error": "; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode is not ok"}
    if len(episode.traces) != 1:
        return {"error": f"the episode has {len(episode.traces)} traces, but only one agent can be trained"}
    rewards = episode.traces[0].rewards
    if missing := [name for name, reward in rewards.items() if reward is None]:
        return {"error": f"no reward {', '.join(missing)}"}
    return {"rewards": {name: reward.value for name, reward in rewards.items()}}
