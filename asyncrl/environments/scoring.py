"""Killable scoring: rewards from foreign code that may raise, hang, crash, fork or eat memory (F19).

Reward code runs in `scoring_worker.py`'s processes. `Scorer` gives one group at a time to each, waits
`environment.score_timeout_s` for a completion by the wall clock, and kills and replaces a process that overruns or
dies, with all that it has started. Requests and replies are JSON; what reward code prints is passed on line by line.
What this does not cover: code that leaves its process tree and session on purpose, the file system, and the network.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from asyncrl.config.schema import EnvironmentSection
from asyncrl.data.prompts import Task
from asyncrl.environments.scoring_process import ScoringProcess, closed
from asyncrl.environments.secrets import Secrets

START_TIMEOUT_S = 120.0
"""Seconds until a scoring process must be ready; it imports the environment, seconds on a busy machine."""

SHARED_FROM_S = 0.005
"""Seconds for one completion from which a group is shared among several processes. Sending the completions one by one
costs less than a tenth of that."""

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
        self._free: queue.SimpleQueue[ScoringProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._free.put(process)
        # As many threads as processes: the executor's queue is the waiting line. A scoring process is killed by the
        # kernel when the thread that started it ends, and these end in `close`.
        self._executor = ThreadPoolExecutor(section.score_workers, thread_name_prefix="scorer")

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
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(self._executor, process.start) for process in self._processes))

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
        loop = asyncio.get_running_loop()
        if not self._shared():
            return await loop.run_in_executor(self._executor, self._score_in_thread, task, tuple(completions))
        calls = [
            loop.run_in_executor(self._executor, self._score_in_thread, task, (completion,))
            for completion in completions
        ]
        try:
            return [reward for [reward] in await asyncio.gather(*calls)]
        finally:
            for call in calls:
                call.cancel()  # what has not begun, if one failed or this call was cancelled

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

    def _score_in_thread(self, task: Task, completions: tuple[str, ...]) -> list[float]:
        process = self._free.get_nowait()  # never empty: there are as many threads as processes
        begun_s = time.monotonic()
        try:
            rewards = process.score(task, completions)
            self._seconds_per_completion = (time.monotonic() - begun_s) / len(completions)
            return rewards
        finally:
            self._free.put(process)

    def _close_in_thread(self) -> None:
        for process in self._processes:
            process.kill()
        self._executor.shutdown(wait=True)  # what waits in line fails as closed
        for process in self._processes:
            process.discard()


def _log_line(line: str) -> None:
    _log.info("reward code: %s", line)
