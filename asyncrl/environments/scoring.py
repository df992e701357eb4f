"""Killable scoring: rewards from foreign code that may raise, hang, crash, fork or eat memory (F19).

Reward code runs in `scoring_worker.py`'s processes. `Scorer` gives one group at a time to each, or several at once if
the reward is async. It waits `environment.score_timeout_s` for a completion by the wall clock, and kills and replaces a
process that overruns or dies, with all that it has started. Requests and replies are JSON; what reward code prints is
passed on line by line. What this does not cover: code that leaves its process tree and session on purpose, the file
system, and the network.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from asyncrl.config.schema import EnvironmentSection
from asyncrl.data.prompts import Task
from asyncrl.environments.reward_function import Form
from asyncrl.environments.scoring_messages import Group
from asyncrl.environments.scoring_process import ScoringProcess, closed
from asyncrl.environments.secrets import Secrets

START_TIMEOUT_S = 120.0
"""Seconds until a scoring process must be ready; it imports the environment, seconds on a busy machine."""

SHARED_FROM_S = 0.005
"""Seconds for one completion from which a group is shared among several processes. Sending the completions one by one
costs less than a tenth of that."""

AWAITED_AT_ONCE = 64
"""Completions of an asynchronous reward that one process scores at the same time, of as many groups as there are; more
if a single group has more. Clients of judges have such limits too: httpx opens 100 connections."""

_log = logging.getLogger(__name__)


class Scorer:
    """Scores groups in `environment.score_workers` processes.

    >>> scorer = Scorer(config.environment)
    >>> await scorer.start()                            # ConfigError for a reward that does not exist
    >>> rewards = await scorer.score(task, completions)
    >>> await scorer.close()

    Use it from any event loop. A cancelled `score` gives up its result, not its process: that one is free again after
    `score_timeout_s` for each completion at the latest. `output` gets the lines that reward code prints, in threads of
    the scorer; without it they are logged.
    """

    def __init__(
        self,
        section: EnvironmentSection,
        *,
        secrets: Secrets | None = None,
        output: Callable[[str], None] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._closing = threading.Event()
        self._processes = [
            ScoringProcess(
                section,
                start_timeout_s=start_timeout_s,
                closing=self._closing,
                secrets=secrets or Secrets(),
                output=output or _log_line,
            )
            for _ in range(section.score_workers)
        ]
        self._seconds_per_completion = float("inf")  # of the last group: unknown before the first
        self._line: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        # A thread for each process, until `close`: the kernel kills a scoring process when the thread ends that started
        # it.
        self._threads: list[threading.Thread] = []
        self._started: list[Future[None]] = []

    @property
    def replacements(self) -> int:
        """Processes that were killed, or found dead, and replaced."""
        return sum(process.replacements for process in self._processes)

    @property
    def pids(self) -> list[int]:
        """Processes that are alive."""
        return [process.pid for process in self._processes if process.pid is not None]

    async def start(self) -> None:
        """Start all processes, before the first score. ConfigError, or InfraError `scorer_unavailable`."""
        self._start_threads()
        await asyncio.gather(*map(asyncio.wrap_future, self._started))

    async def score(self, task: Task, completions: Sequence[str]) -> list[float]:
        """One finite reward a completion (text without special tokens; may be empty), in order.

        DataError whose `reason` is a RewardFailure, whose message says what the reward did, and whose `completion` is
        the one that it failed for; InfraError `scorer_unavailable` when no process can be started, `scorer_closed`
        after `close`.
        """
        if self._closing.is_set():
            raise closed()
        if not completions:
            return []
        parts = [(each,) for each in completions] if self._shared() else [tuple(completions)]
        calls = [self._in_line(Group(task=task, completions=part)) for part in parts]
        if len(calls) == 1:
            return await calls[0]
        try:
            return [reward for rewards in await asyncio.gather(*calls) for reward in rewards]
        finally:
            for call in calls:
                call.cancel()  # what has not begun, if one failed or this call was cancelled

    def _in_line(self, group: Group) -> "asyncio.Future[list[float]]":
        self._start_threads()
        loop = asyncio.get_running_loop()
        rewards: asyncio.Future[list[float]] = loop.create_future()
        self._line.put(_Waiting(group=group, rewards=rewards, loop=loop))
        return rewards

    def _shared(self) -> bool:
        """Whether a group goes to several processes."""
        form = self._processes[0].form
        if len(self._processes) == 1 or form.batched or form.asynchronous:
            return False
        return self._seconds_per_completion >= SHARED_FROM_S

    async def close(self) -> None:
        """Kill the processes; scores under way fail. May be called twice."""
        self._closing.set()
        await asyncio.to_thread(self._close_in_thread)

    def _start_threads(self) -> None:
        if self._threads:
            return
        for process in self._processes:
            started: Future[None] = Future()
            self._started.append(started)
            thread = threading.Thread(target=self._serve, args=(process, started), name="scorer", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, process: ScoringProcess, started: "Future[None]") -> None:
        """The thread of one process: starts it, and scores what waits longest, until `close`."""
        try:
            process.start()
            started.set_result(None)
        except Exception as error:
            started.set_exception(error)  # each score tries again
        while (first := self._line.get()) is not None:
            taken = self._taken(first, process.form)
            try:
                results: Sequence[list[float] | Exception] = self._scored(process, taken) if taken else []
            except Exception as error:
                results = [error] * len(taken)
            for waiting, result in zip(taken, results, strict=True):
                waiting.deliver(result)

    def _taken(self, first: "_Waiting", form: Form) -> "list[_Waiting]":
        """What is scored together, without those that nothing waits for any more: several groups if the reward is
        async."""
        taken = [] if first.rewards.cancelled() else [first]
        completions = len(first.group.completions)
        with contextlib.suppress(queue.Empty):
            while form.asynchronous and completions < AWAITED_AT_ONCE:
                waiting = self._line.get_nowait()
                if waiting is None:
                    self._line.put(None)  # the end, which the next `get` finds
                    break
                if not waiting.rewards.cancelled():
                    taken.append(waiting)
                    completions += len(waiting.group.completions)
        return taken

    def _scored(self, process: ScoringProcess, taken: "list[_Waiting]") -> Sequence[list[float] | Exception]:
        begun_s = time.monotonic()
        results = process.score([waiting.group for waiting in taken])
        completions = sum(len(waiting.group.completions) for waiting in taken)
        self._seconds_per_completion = (time.monotonic() - begun_s) / completions
        return results

    def _close_in_thread(self) -> None:
        for process in self._processes:
            process.kill()
        for _ in self._threads:
            self._line.put(None)  # behind what waits in line, which fails as closed
        for thread in self._threads:
            thread.join()
        with contextlib.suppress(queue.Empty):
            while True:  # what got in line at the last moment
                if (waiting := self._line.get_nowait()) is not None:
                    waiting.deliver(closed())
        for process in self._processes:
            process.discard()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waiting:
    """A group in line, and what its caller waits for, in the caller's event loop."""

    group: Group
    rewards: "asyncio.Future[list[float]]"
    loop: asyncio.AbstractEventLoop

    def deliver(self, result: list[float] | Exception) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the caller
            self.loop.call_soon_threadsafe(self._set, result)

    def _set(self, result: list[float] | Exception) -> None:
        if self.rewards.done():
            return
        if isinstance(result, Exception):
            self.rewards.set_exception(result)
        else:
            self.rewards.set_result(result)


def _log_line(line: str) -> None:
    _log.info("reward code: %s", line)
