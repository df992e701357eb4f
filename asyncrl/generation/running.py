"""The rollouts that run on a replica, and the waits for their ends."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator

from asyncrl.common.tasks import cancelled


class RunningRollouts:
    """The tasks of rollouts by the key of their ticket. A rollout calls `generated` when its group is only scored from
    now on, and `ended` at its end."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._scored: set[str] = set()
        self._in_environment: set[str] = set()
        self._one_ended = asyncio.Event()
        self._none_left = asyncio.Event()

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    @property
    def generating(self) -> int:
        """The number of rollouts whose groups are not generated yet."""
        return len(self._tasks) - len(self._scored)

    @property
    def in_environment(self) -> int:
        """The number of rollouts that wait for code of their agents: the engine has no call of their group."""
        return len(self._in_environment)

    def waits_for_environment(self, key: str, waits: bool) -> None:
        (self._in_environment.add if waits and key in self._tasks else self._in_environment.discard)(key)

    def start(self, key: str, rollout: Coroutine[None, None, None]) -> None:
        self._tasks[key] = asyncio.create_task(rollout, name=f"rollout {key}")
        self._none_left.clear()

    def generated(self, key: str) -> None:
        self._scored.add(key)
        self._in_environment.discard(key)
        self._one_ended.set()

    def ended(self, key: str) -> None:
        self._tasks.pop(key, None)
        self._scored.discard(key)
        self._in_environment.discard(key)
        self._one_ended.set()
        if not self._tasks:
            self._none_left.set()

    def cancel(self, key: str) -> bool:
        """Cancels a rollout. Returns False if it does not run."""
        task = self._tasks.get(key)
        return task is not None and task.cancel()

    async def cancel_all(self) -> None:
        """Cancels all rollouts, and waits for their ends."""
        await cancelled(*self._tasks.values())

    async def next_end(self) -> None:
        """Waits until a group is generated, a rollout ends, or `wake` is called."""
        self._one_ended.clear()
        await self._one_ended.wait()

    def wake(self) -> None:
        self._one_ended.set()

    async def more_ends(self, *, wait_s: float) -> None:
        """Waits `wait_s` seconds, so that the next call serves the rollouts that end meanwhile. Returns when none is
        left."""
        if self._tasks and wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._none_left.wait()
