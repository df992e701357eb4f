"""The program that plays the tasks of a taskset of the package verifiers.

It runs in an interpreter whose environment has verifiers, and uses nothing of asyncrl. Its first argument is the
configuration of verifiers' environment as JSON, and its second one the number of tasks. Each line that it reads is an
order as a JSON object, and each line that it writes answers the order with the same `id`. It ends when its input ends.
"""

import asyncio
import json
import os
import sys
from typing import Any, TextIO


class Program:
    """A taskset, and the episodes that are played. `replies` is the stream of the answers."""

    def __init__(self, env: Any, *, size: int, replies: TextIO) -> None:
        self._env = env
        self._tasks = list(env.taskset.take(size))
        self._replies = replies
        self._playing: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Follows orders until there are no more."""
        async with self._env.serving():
            while line := await asyncio.to_thread(sys.stdin.readline):
                order = json.loads(line)
                number = order["id"]
                if order["what"] == "tasks":
                    self._reply(number, tasks=[self._shown(task) for task in self._tasks])
                elif order["what"] == "stop":
                    if number in self._playing:
                        self._playing[number].cancel()
                else:
                    self._playing[number] = asyncio.create_task(self._play(order))
            for playing in list(self._playing.values()):
                playing.cancel()
            await asyncio.gather(*self._playing.values(), return_exceptions=True)

    async def _play(self, order: dict[str, Any]) -> None:
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        number = order["id"]
        # The subprocess runtime of verifiers withholds variables with this name from the programs that it runs.
        variable = f"ASYNCRL_API_KEY_{number}"
        os.environ[variable] = order["api_key"]
        try:
            client = EvalClientConfig(base_url=order["base_url"], api_key_var=variable)
            context = ModelContext(client=client, model=order["model"])
            episode = await self._env.run_episode(self._tasks[order["index"]], context)
            self._reply(number, **_result(episode))
        except Exception as error:
            self._reply(number, error=f"{type(error).__name__}: {error}")
        finally:
            del os.environ[variable], self._playing[number]

    def _shown(self, task: Any) -> str:
        return task.data.prompt_text or task.data.name or ""

    def _reply(self, number: int, **answer: Any) -> None:
        self._replies.write(json.dumps({"id": number, **answer}) + "\n")
        self._replies.flush()


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


def main() -> None:
    # A taskset may print. Its output must not be read as an answer.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    env = load_environment(resolve_env_config(json.loads(sys.argv[1])))
    asyncio.run(Program(env, size=int(sys.argv[2]), replies=replies).run())


if __name__ == "__main__":
    main()
