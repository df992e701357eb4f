"""Held-out evaluation: the greedy reward of one version on questions that are never issued.

Any live replica that has loaded the version answers. The caller pauses admission first, so that the replica has
nothing newer to do; rewards count only when the replica still stands at that version afterwards.

A run whose first evaluation gets not one reward cannot learn: it ends there with the cause.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import ray

from asyncrl.buffer.records import Failure, Version
from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.data_plane.calls import finished
from asyncrl.errors import ActorGone, RunError, StallError
from asyncrl.learner.interfaces import Buffer, RunLog
from asyncrl.learner.progress import replicas_in_words
from asyncrl.learner.records import EvalRecord
from asyncrl.metrics.recorders import LearnerMetrics

logger = logging.getLogger(__name__)

REPLICA_POLL_S = 0.1


class Replicas(Protocol):
    """Generators, by the name of their actor."""

    async def evaluate(self, actor: str, tasks: Sequence[Task]) -> tuple[Version | None, list[float | Failure]]:
        """The version that the replica stands at afterwards, and for each task a greedy reward, or the failure of its
        rollout.

        ActorGone when the replica has ended.
        """
        ...


class ReplicaClient:
    """The generators of a run."""

    def __init__(self, *, namespace: str, timeout_s: float) -> None:
        self._namespace = namespace
        self._timeout_s = timeout_s

    async def evaluate(self, actor: str, tasks: Sequence[Task]) -> tuple[Version | None, list[float | Failure]]:
        try:
            handle = ray.get_actor(actor, namespace=self._namespace)
        except ValueError as error:
            raise ActorGone(f"replica {actor} has ended") from error
        answer: tuple[Version | None, list[float | Failure]] = await finished(
            handle.evaluate.remote(list(tasks)), timeout_s=self._timeout_s, what="held-out evaluation"
        )
        return answer


class HeldoutEvaluation:
    """Evaluates versions on the first `eval.prompts` of `tasks`. `started_s` is the run's start on `clock`."""

    def __init__(
        self,
        *,
        config: Config,
        tasks: Sequence[Task],
        buffer: Buffer,
        replicas: Replicas,
        log: RunLog,
        metrics: LearnerMetrics,
        started_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tasks = list(tasks[: config.eval.prompts])
        self._buffer = buffer
        self._replicas = replicas
        self._log = log
        self._metrics = metrics
        self._timeout_s = config.eval.timeout_s
        self._stall_timeout_s = config.run.stall_timeout_s
        self._started_s = started_s
        self._clock = clock
        self._gone: set[str] = set()
        self._evaluated = False

    @property
    def wanted(self) -> bool:
        """Whether there is anything to ask."""
        return bool(self._tasks)

    async def replica_at(self, version: Version) -> str:
        """Actor of a live replica that has loaded `version`. StallError when there is none in time."""
        deadline_s = self._clock() + self._stall_timeout_s
        while True:
            status = await self._buffer.status()
            for view in status.replicas:
                if view.live and view.version == version and view.replica in status.reports:
                    actor = status.reports[view.replica].actor
                    if actor not in self._gone:
                        return actor
            if self._clock() > deadline_s:
                raise StallError(
                    f"no replica has loaded the weights of {version.words} within run.stall_timeout_s = "
                    f"{self._stall_timeout_s:g}; {replicas_in_words(status)}"
                )
            await asyncio.sleep(REPLICA_POLL_S)

    async def evaluate(self, version: Version, *, actor: str) -> None:
        """Has `actor` answer the held-out questions, and records the mean reward as that of `version`.

        A rollout that fails is left out of the mean, as in training: one bad question must not end a run. RunError
        when all rollouts of the first evaluation fail, or when it takes longer than `eval.timeout_s`: nothing was
        trained yet, and training would fail alike. A later evaluation that takes longer is left out, with an error in
        the log.
        A replica that ends before it has answered is replaced by another one at that version (F2).
        """
        while True:
            try:
                at, answers = await self._replicas.evaluate(actor, self._tasks)
                break
            except ActorGone as error:
                logger.warning("held-out evaluation of %s: %s; another replica is asked", version.words, error)
                self._gone.add(actor)
                actor = await self.replica_at(version)
            except TimeoutError:
                self._late(version)
                return
        if at != version:
            evaluated = at.words if at is not None else "no weights"
            raise RunError(f"replica {actor} evaluated {evaluated} instead of {version.words}")
        rewards = [answer for answer in answers if not isinstance(answer, Failure)]
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        first_one, self._evaluated = not self._evaluated, True
        if failures:
            what = f"held-out evaluation of {version.words}: {len(failures)} of {len(answers)} prompts got no reward"
            if first_one and not rewards:
                raise RunError(f"{what}, so training did not start: {failures[0].words}. Fix it and start again.")
            logger.warning("%s. The first cause: %s", what, failures[0].words)
        mean = sum(rewards) / len(rewards) if rewards else None
        self._log.append_eval(
            EvalRecord(
                version=version.step,
                wall_s=self._clock() - self._started_s,
                prompts=len(rewards),
                failed=len(failures),
                reward_mean=mean,
            )
        )
        if mean is not None:
            self._metrics.heldout(mean)
            logger.info(
                "held-out reward of %s: %.3f (%d of %d prompts)", version.words, mean, len(rewards), len(answers)
            )

    def _late(self, version: Version) -> None:
        what = (
            f"held-out evaluation of {version.words}: {len(self._tasks)} prompts (eval.prompts) took longer than "
            f"eval.timeout_s = {self._timeout_s:g} s"
        )
        if not self._evaluated:
            raise RunError(
                f"{what}, so training did not start. If the reward is slow, make it async or raise "
                "environment.score_workers (docs/rewards.md); or lower eval.prompts, or raise eval.timeout_s"
            )
        logger.error("%s; it is left out", what)
