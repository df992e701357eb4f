"""Scoring in processes that can be killed: reward code may raise, hang, crash, fork or use too much memory.
docs/faults.md, F19, says what happens then.

Reward code runs in the processes of `scoring_worker.py`. `Scorer` gives a process the groups that wait, several in one
request if the reward is async or fast, and single completions if it is slow. A completion may take
`environment.score_timeout_s` of wall-clock time. `Scorer` kills and replaces a process that exceeds this limit or dies,
together with all processes that it has started, and the new process scores the completions that are left. A completion
that took too long may be scored once more (`Scorer.score`). Requests and replies are JSON. Lines that reward code
prints are passed on. `Scorer` cannot kill code that leaves its process tree and session on purpose, and it does not
limit access to the file system or the network.

Each process has a thread of its own, and not a task of the caller's event loop:

- The loop of a replica is blocked at times, e.g. while its engine starts. Meanwhile a task would neither kill a process
  that hangs nor read its output. Reward code waits in its own `print` until the output is read, and would exceed its
  limit.
- `output` writes to a disk, which may block.
- asyncio reaps its child processes at once. Another process may then get the id that `kill` is about to use.
"""

import asyncio
import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from asyncrl.config.schema import Config, EnvironmentSection
from asyncrl.data.prompts import Task
from asyncrl.environments.reward_function import Form
from asyncrl.environments.scores import Score
from asyncrl.environments.scoring_messages import Group, RewardFailure
from asyncrl.environments.scoring_process import ScoringProcess, closed
from asyncrl.environments.secrets import Secrets
from asyncrl.errors import DataError

SHARED_FROM_S = 0.005
"""Seconds. If a completion takes longer, a group is divided among several processes, one completion at a time.
Sending completions one by one costs less than a tenth of this."""

TOGETHER_S = 0.05
"""Seconds. A process takes waiting groups until their scoring is expected to take this time. On a busy machine, a
request and its reply take longer than this."""

AWAITED_AT_ONCE = 64
"""A process takes groups of an asynchronous reward until it has this number of completions, and scores all of them at
the same time. Groups are not divided, so it may have more. Clients of judges have similar limits: httpx opens 100
connections."""

_log = logging.getLogger(__name__)


class Scorer:
    """Scores groups in `environment.score_workers` processes.

    >>> scorer = Scorer(config.environment)
    >>> await scorer.start()                            # ConfigError for a reward that does not exist
    >>> scores = await scorer.score(task, completions)  # a reward for each, or the error of its reward
    >>> await scorer.close()

    Use it from any event loop. Cancelling `score` abandons the result but does not stop the process, which is busy for
    at most `score_timeout_s` for each completion. `output` is called with each line that reward code prints, in a
    thread of the scorer. Without it the lines are logged.
    """

    def __init__(
        self,
        section: EnvironmentSection,
        *,
        secrets: Secrets | None = None,
        output: Callable[[str], None] | None = None,
    ) -> None:
        self._closing = threading.Event()
        self._fails_groups = section.on_error == "fail"
        self._processes = [
            ScoringProcess(
                section,
                closing=self._closing,
                secrets=secrets or Secrets(),
                output=output or functools.partial(_log.info, "reward code: %s"),
            )
            for _ in range(section.score_workers)
        ]
        # Of the groups scored last. It is infinite at first, so that the first group is divided among the processes.
        self._seconds_per_completion = float("inf")
        self._line: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        # Each process has a thread that lives until `close`, because the kernel kills a scoring process when the thread
        # that started it ends.
        self._threads: list[threading.Thread] = []
        self._started: list[Future[None]] = []

    async def start(self) -> None:
        """Starts all processes. Call it before the first score. Raises ConfigError, or InfraError with the reason
        `scorer_unavailable`."""
        self._start_threads()
        await asyncio.gather(*map(asyncio.wrap_future, self._started))

    async def score(self, task: Task, completions: Sequence[str]) -> list[Score]:
        """Returns the score of each completion, in order: one finite reward, or a DataError if its reward failed. A
        completion is a text without special tokens and may be empty.

        A completion that exceeds its time limit is scored once more, because the machine may have been busy; an episode
        of an agent is not. A reward that takes one completion at a time is not called again if all completions of the
        group have failed, because it may always hang. With `environment.on_error: fail` nothing is scored again. With
        it, or when the reward has ended `GIVEN_UP_AFTER` processes in a row, completions whose scoring has not begun
        may get the error of another completion.

        Raises DataError when the group cannot be sent to a process. Raises InfraError with the reason
        `scorer_unavailable` when no process can be started, and `scorer_closed` after `close`.
        """
        if self._closing.is_set():
            raise closed()
        if not completions:
            return []
        scores = await self._scored_once(task, completions)
        late = [number for number, score in enumerate(scores) if _took_too_long(score)]
        some_end = self.form.batched or any(not isinstance(score, DataError) for score in scores)
        if late and some_end and not self._fails_groups and not self.form.agent:
            _log.warning(
                "%d of %d completions took too long to score; they are scored once more", len(late), len(scores)
            )
            for number, score in zip(late, await self._scored_once(task, [completions[n] for n in late]), strict=True):
                scores[number] = score
        return scores

    async def _scored_once(self, task: Task, completions: Sequence[str]) -> list[Score]:
        parts = [(each,) for each in completions] if self._shared() else [tuple(completions)]
        whole = _WholeGroup()
        calls = [self._in_line(Group(task=task, completions=part), whole) for part in parts]
        try:
            return [score for scores in await asyncio.gather(*calls) for score in scores]
        finally:
            for call in calls:
                call.cancel()  # after an error or a cancellation, drops the parts whose scoring has not begun

    def _in_line(self, group: Group, whole: "_WholeGroup") -> "asyncio.Future[list[Score]]":
        self._start_threads()
        waiting = _Waiting(group=group, whole=whole)
        self._line.put(waiting)
        return asyncio.wrap_future(waiting.scores)

    def _shared(self) -> bool:
        """Returns True if the completions of a group are divided among several processes."""
        form = self.form
        if len(self._processes) == 1 or form.batched or form.asynchronous:
            return False
        return self._seconds_per_completion >= SHARED_FROM_S

    @property
    def form(self) -> Form:
        """How the reward is called. Known after `start`."""
        return self._processes[0].form

    async def close(self) -> None:
        """Kills the processes. Running scores fail. It may be called twice."""
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
        """The thread of one process: starts the process, and scores the oldest waiting groups until `close`."""
        try:
            process.start()
            started.set_result(None)
        except Exception as error:
            started.set_exception(error)  # each later score tries to start the process again
        while (first := self._line.get()) is not None:
            taken = self._taken(first, process.form)
            try:
                results: Sequence[list[Score] | Exception] = self._scored(process, taken) if taken else []
            except Exception as error:
                results = [error] * len(taken)
            for waiting, result in zip(taken, results, strict=True):
                if isinstance(result, list) and (self._fails_groups or process.gives_up):
                    errors = (score for score in result if isinstance(score, DataError))
                    waiting.whole.error = waiting.whole.error or next(errors, None)
                waiting.deliver(result)

    def _taken(self, first: "_Waiting", form: Form) -> "list[_Waiting]":
        """Returns the groups to score together: `first`, and more from the queue while `_takes_more`. Leaves out
        cancelled ones and parts of groups that are given up."""
        taken = [first] if first.begin() else []
        completions = len(first.group.completions)
        with contextlib.suppress(queue.Empty):
            while self._takes_more(form, completions):
                waiting = self._line.get_nowait()
                if waiting is None:
                    self._line.put(None)  # an end mark: it ends a thread, so a thread's next `get` must find it
                    break
                if waiting.begin():
                    taken.append(waiting)
                    completions += len(waiting.group.completions)
        return taken

    def _takes_more(self, form: Form, completions: int) -> bool:
        """Returns whether a process that has taken `completions` completions takes one more group. Groups that are
        taken together end together, so each process takes one agent's group, or one group of a slow reward, at a
        time."""
        if form.asynchronous:
            return not form.agent and completions < AWAITED_AT_ONCE
        return self._seconds_per_completion < min(SHARED_FROM_S, TOGETHER_S / max(completions, 1))

    def _scored(self, process: ScoringProcess, taken: "list[_Waiting]") -> Sequence[list[Score] | Exception]:
        results = process.score([waiting.group for waiting in taken])
        completions = sum(len(waiting.group.completions) for waiting in taken)
        # Not the time until the reply: on a busy machine, it is long for any reward, and a divided group has more.
        self._seconds_per_completion = process.scored_s / completions
        return results

    def _close_in_thread(self) -> None:
        for process in self._processes:
            process.kill()
        for _ in self._threads:
            self._line.put(None)  # ends one thread; the groups before this mark fail, because the scorer is closed
        for thread in self._threads:
            thread.join()
        with contextlib.suppress(queue.Empty):
            while True:  # groups that were put into the queue after the end marks
                waiting = self._line.get_nowait()
                if waiting is not None and waiting.begin():
                    waiting.deliver(closed())
        for process in self._processes:
            process.discard()


def _took_too_long(score: Score) -> bool:
    return isinstance(score, DataError) and score.reason == RewardFailure.TIMEOUT


@dataclass(slots=True)
class _WholeGroup:
    """A group, of which several processes may score parts. If `error` is set, the other parts are given up: those that
    have not begun get this error."""

    error: DataError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waiting:
    """A group in the queue, or a part of the group `whole`, and the future of its scores. `scores` is cancelled if the
    caller has given up before the scoring begins."""

    group: Group
    whole: _WholeGroup
    scores: "Future[list[Score]]" = field(default_factory=Future)

    def begin(self) -> bool:
        """Returns whether the scoring is to begin. It is not if the caller has cancelled it, or if `whole` is given up:
        then each completion gets the error of `whole`."""
        if not self.scores.set_running_or_notify_cancel():
            return False
        if (error := self.whole.error) is None:
            return True
        self.deliver([DataError(str(error), reason=error.reason)] * len(self.group.completions))
        return False

    def deliver(self, result: list[Score] | Exception) -> None:
        if isinstance(result, Exception):
            self.scores.set_exception(result)
        else:
            self.scores.set_result(result)


# Scores the completions of all parts of a run, each with the rewards of its part.


class PartScorers:
    """The scorers of the parts of a run, which are the datasets that it trains or evaluates. `parts` has their
    configurations by name (`asyncrl.config.parts.all_configs`). Parts with equal environments share a scorer."""

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
        """Returns the scores of completions of a task, from the scorer of its part. Raises the errors of
        `Scorer.score`."""
        return await self._scorers[task.part].score(task, completions)

    async def close(self) -> None:
        """Kills the processes. It may be called twice."""
        await asyncio.gather(*(scorer.close() for scorer in self._all))
