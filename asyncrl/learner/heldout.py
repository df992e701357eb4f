"""Held-out evaluation: the reward of one version on questions that are never used for training.

Any live replica that has loaded the version can run the evaluation, and keeps its weights meanwhile. For the first and
the last version of a run, the caller pauses admission: no replica begins a group. While the run trains, evaluations
run beside it: the replica generates groups too, and the learner goes on. Such an evaluation is of the version that the
replica has. A run that was asked to end evaluates its last version after its checkpoint, in the part of its grace
(`run.shutdown_grace_s`) that its end does not need.

If every rollout of the first evaluation of a new run fails, training would fail in the same way. The run then ends
with an error that names the cause. A later evaluation that fails does not end it: the run has trained weights by then.

With one completion of a prompt, the answers must be greedy: no token is less probable than another token at its
position. The generator counts the tokens that are less probable.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncrl.buffer.records import Failure
from asyncrl.common.names import REPLICAS
from asyncrl.common.tasks import cancelled
from asyncrl.common.version import Version
from asyncrl.config.schema import HELDOUT, Config
from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.data.prompts import Task
from asyncrl.data_plane.calls import finished, named_actor
from asyncrl.errors import ActorGone, ActorUnreachable, FailureClass, RunError, StallError, WitnessFailed
from asyncrl.generation.evaluation import Answer, mean_numbers
from asyncrl.learner.progress import replicas_in_words
from asyncrl.learner.records import EvalRecord, RecordSink, mean_and_error, pass_at
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.user_code import type_and_text

logger = logging.getLogger(__name__)

REPLICA_WAIT_S = 5.0
"""Longest wait of one call for a replica, seconds."""
REPLICA_WAIT_IN_GRACE_S = 0.5
"""Longest wait of one call for a replica in the grace of a run that was asked to end, seconds. It is short, because the
waiting must end as soon as no replica lives."""
EVALUATIONS = 5
"""Largest number of attempts at one evaluation that training waits for. It is repeated if its replica ends or if its
rollouts fail as INFRA. An evaluation beside training has one attempt."""
REPEAT_PAUSE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class ReplicaClient:
    """Calls the replicas of a run, which are Ray actors."""

    timeout_s: float

    async def evaluate(
        self, actor: str, tasks: Sequence[Task], *, name: str, share: float = 1.0
    ) -> tuple[Version | None, list[Answer]]:
        """Generates the completions of each task of the held-out set `name` on the replica `actor`, on a share of its
        slots, and scores them.

        Returns the version of the replica, and for each task the rewards or the failure of its rollout. Raises
        ActorGone when the replica's process has ended, and CallTimeout after `timeout_s`, or if it cannot be reached.
        """
        handle = named_actor(actor, namespace=REPLICAS)
        if handle is None:
            raise ActorGone(f"replica {actor} has ended")
        asked: Any = handle.evaluate.remote(list(tasks), name=name, share=share)
        answer: tuple[Version | None, list[Answer]]
        answer = await finished(asked, timeout_s=self.timeout_s, what="held-out evaluation")
        return answer


@dataclass(kw_only=True)
class HeldoutEvaluation:
    """Evaluates versions on the first prompts of each held-out set. `tasks` has the tasks of the sets by name. `sinks`
    get the records. `started_s` is the start of the run on `clock`. `grace_left_s` returns how many seconds an
    evaluation after a request to end may take; 0 if there must be none."""

    config: Config
    tasks: Mapping[str, Sequence[Task]]
    coordinator: CoordinatorClient
    replicas: ReplicaClient
    sinks: Sequence[RecordSink]
    metrics: LearnerMetrics
    started_s: float
    grace_left_s: Callable[[], float] = lambda: 0.0
    repeat_pause_s: float = REPEAT_PAUSE_S
    clock: Callable[[], float] = time.monotonic
    reached: EvalRecord | None = field(default=None, init=False)
    """The first evaluation of trained weights whose reward ends the run (`run.stop_when`)."""
    _beside: asyncio.Task[None] | None = field(default=None, init=False)
    _beside_step: int | None = field(default=None, init=False)
    _gone: set[str] = field(default_factory=set, init=False)
    _not_greedy: WitnessFailed | None = field(default=None, init=False)
    _newest: dict[str, Version] = field(default_factory=dict, init=False)
    """The version that was evaluated last on each set."""
    _evaluated: bool = field(default=False, init=False)
    _in_grace: bool = field(default=False, init=False)
    """Whether the run was asked to end and has saved its last version: no replica is started any more."""

    def __post_init__(self) -> None:
        self._how = self.config.eval.each_set()
        found = {name: list(self.tasks.get(name, ())[: how.prompts]) for name, how in self._how.items()}
        self._tasks = {name: of_set for name, of_set in found.items() if of_set}

    @property
    def wanted(self) -> bool:
        """Whether there are held-out tasks to evaluate on."""
        return bool(self._tasks)

    def stop_reason(self, version: Version) -> str | None:
        """Returns why the run ends after `version`; None if no evaluation ends it, or if `version` is the last one."""
        stop, total_steps = self.config.run.stop_when, self.config.learner.total_steps
        if self.reached is None or stop is None or version.step >= total_steps:
            return None
        return (
            f"ended after step {version.step} of {total_steps}, because the evaluation {self.reached.name} of "
            f"step {self.reached.version} has the reward {self.reached.reward_mean:.3f} (run.stop_when.reward = "
            f"{stop.reward:g})"
        )

    def check(self) -> None:
        """Raises WitnessFailed if an evaluation that had to be greedy was not, and `witness.on_failure` is `stop`."""
        if self._not_greedy is not None and self.config.witness.on_failure == "stop":
            raise self._not_greedy

    def has_evaluated(self, version: Version) -> bool:
        """Whether there is an evaluation of the weights of `version` on each set."""
        return all(self._newest.get(name) == version for name in self._tasks)

    async def replica_at(self, version: Version, *, avoid: str | None = None) -> str:
        """Returns the actor name of a live replica that has loaded `version`, and waits for one if necessary. Returns
        the actor `avoid` only if there is no other one now.

        Raises StallError when no live replica has loaded the version within `run.stall_timeout_s`. In the grace of a
        run that was asked to end, raises it as soon as no replica lives.
        """
        timeout_s = self.config.run.stall_timeout_s
        deadline_s = self.clock() + timeout_s
        wait_s = REPLICA_WAIT_IN_GRACE_S if self._in_grace else REPLICA_WAIT_S
        while True:
            actor = await self.coordinator.call(
                Coordinator.replica_at,
                version,
                other_than=(*self._gone, *filter(None, [avoid])),
                wait_s=0.0 if avoid else min(wait_s, timeout_s),
            )
            if actor is not None:
                return actor
            if self._in_grace:
                await self._check_any_lives()
            if avoid is None and self.clock() > deadline_s:
                status = await self.coordinator.call(Coordinator.status)
                raise StallError(
                    f"no live replica has loaded the weights of {version.words} within run.stall_timeout_s = "
                    f"{timeout_s:g} s; {replicas_in_words(status)}. Look at the generators' logs for a "
                    "failed weight update, or raise run.stall_timeout_s"
                )
            avoid = None

    async def _check_any_lives(self) -> None:
        """Raises StallError if no replica lives."""
        status = await self.coordinator.call(Coordinator.status)
        if not any(view.live and view.actor not in self._gone for view in status.replicas):
            raise StallError("no generator is left")

    async def evaluate(self, version: Version, *, actor: str) -> None:
        """Runs the tasks of each set on the replica `actor` and records their mean reward as the reward of `version`.
        In the grace of a run, leaves out the sets on which `version` was evaluated before.

        A failed rollout is left out of the mean, because one bad question must not end a run. Training treats it in the
        same way. Raises RunError when all rollouts of the first evaluation of step 0 fail, or when that evaluation
        takes longer than `eval.timeout_s`: training would fail in the same way, and no training is lost yet. Any other
        evaluation that takes longer is left out, and an error is logged. If the replica or its engine ends before it
        answers, another replica at that version runs the evaluation (F2 in docs/faults.md), or the same one after its
        restart. Raises StallError if the last of `EVALUATIONS` attempts ends in this way too, or if no replica is at
        that version (`replica_at`).
        """
        # only a new run evaluates step 0; a resumed run has trained weights, and goes on
        may_end_run, self._evaluated = version.step == 0 and not self._evaluated, True
        for name in self._tasks:
            if self._in_grace and self._newest.get(name) == version:
                continue
            try:
                actor, at, answers = await self._answers(name, version, actor=actor)
            except TimeoutError:
                self._late(name, version, may_end_run=may_end_run)
                continue
            if at != version:
                evaluated = at.words if at is not None else "no weights"
                raise RunError(
                    f"replica {actor} evaluated {evaluated} instead of {version.words}: it changed its weights "
                    "although admission was paused. This is a bug of asyncrl: report it with the run's directory"
                )
            self._record(name, version, answers, due=version.step, may_end_run=may_end_run)

    @property
    def running_step(self) -> int | None:
        """The step after which the present evaluation beside training was due; None if none runs now."""
        return self._beside_step if self._beside is not None and not self._beside.done() else None

    def begin(self, version: Version) -> None:
        """Begins an evaluation of `version` that runs beside training, if one is due (`eval.every_steps`) and none
        runs. The last version of the run is evaluated by `evaluate`."""
        every = self.config.eval.every_steps
        if not (every and self.wanted) or version.step % every or version.step >= self.config.learner.total_steps:
            return
        if self.running_step is not None:
            logger.warning("held-out evaluation of %s is left out, because the last one still runs", version.words)
            return
        self._beside_step = version.step
        self._beside = asyncio.create_task(self.evaluate_beside(version), name=f"evaluation of {version}")

    async def evaluate_in_grace(self, version: Version, evaluate: Callable[[], Awaitable[None]]) -> None:
        """Evaluates the last version of a run that was asked to end, by a call of `evaluate`, which it cancels after
        `grace_left_s` seconds.

        If the evaluation is left out, logs why. Raises nothing: the weights are saved, and the run must end in order.
        """
        if not self.wanted or self.has_evaluated(version):
            return
        self._in_grace, why = True, "the evaluation failed"
        if (left_s := self.grace_left_s()) <= 0:
            grace_s, mirror = self.config.run.shutdown_grace_s, self.config.run.mirror
            why = f"run.shutdown_grace_s = {grace_s:g} s leaves no time for it"
            why += "" if mirror is None else ", because run.mirror gets all of it"
        else:
            try:
                async with asyncio.timeout(left_s) as limit:
                    await self.cancel()  # a replica that still evaluates does not load the last version
                    await evaluate()
            except Exception as error:
                if limit.expired():  # a call that exceeds a limit of its own raises a TimeoutError too
                    why = f"it took longer than the {left_s:.1f} s that were left for it of run.shutdown_grace_s"
                else:
                    why = str(error) if isinstance(error, RunError) else type_and_text(error)
        if not self.has_evaluated(version):
            logger.warning("held-out evaluation of %s is left out: %s", version.words, why)

    async def settle(self) -> None:
        """Waits for the evaluation that runs beside training."""
        if self._beside is not None:
            await self._beside

    async def cancel(self) -> None:
        """Cancels the evaluation that runs beside training."""
        if self._beside is not None:
            await cancelled(self._beside)

    async def evaluate_beside(self, version: Version) -> None:
        """Evaluates `version`, or a newer version if the replica has loaded one by then, on each set while the run
        trains. An error is logged, and the evaluation of the set is left out: the run goes on."""
        for name in self._tasks:
            await self._evaluate_beside(name, version)

    async def _evaluate_beside(self, name: str, version: Version) -> None:
        what = f"{_on(name)} of {version.words} is left out"
        try:
            async with asyncio.timeout(self.config.eval.timeout_s):
                actor = None
                while actor is None:
                    actor = await self.coordinator.call(
                        Coordinator.replica_at,
                        version,
                        or_newer=True,
                        other_than=(*self._gone,),
                        wait_s=REPLICA_WAIT_S,
                    )
                tasks, share = self._tasks[name], self.config.eval.share
                at, answers = await self.replicas.evaluate(actor, tasks, name=name, share=share)
        except (RunError, TimeoutError) as error:
            logger.error("%s: %s", what, error or "it took too long")
            return
        infra = _infra(answers)
        if at is None:
            logger.error("%s: replica %s has no weights", what, actor)
        elif infra:  # the mean over the other prompts would be biased
            logger.error("%s: %d of %d rollouts failed: %s", what, len(infra), len(answers), infra[0].words)
        else:
            self._record(name, at, answers, due=version.step, may_end_run=False)

    def _record(self, name: str, version: Version, answers: Sequence[Answer], *, due: int, may_end_run: bool) -> None:
        """Records the rewards of `version` on the set `name`, for the evaluation that was due after step `due`. Raises
        RunError if there are none and `may_end_run` is set."""
        answered = [answer for answer in answers if not isinstance(answer, Failure)]
        rewards = [answer.of_samples for answer in answered]
        counts = [answer.non_greedy_tokens for answer in answered if answer.non_greedy_tokens is not None]
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        if failures:
            what = f"{_on(name)} of {version.words}: {len(failures)} of {len(answers)} prompts got no reward"
            if may_end_run and not rewards:
                raise RunError(
                    f"{what}, so training did not start. The first cause: {failures[0].words}. Fix the cause and start "
                    "again."
                )
            logger.warning("%s. The first cause: %s", what, failures[0].words)
        mean, error = mean_and_error(rewards)
        numbers = mean_numbers([answer.numbers for answer in answered if answer.numbers is not None])
        how = self._how[name]
        record = EvalRecord(
            name=name,
            version=version.step,
            due=None if due == version.step else due,
            wall_s=self.clock() - self.started_s,
            asked=len(self._tasks[name]),
            prompts=len(rewards),
            failed=len(failures),
            reward_mean=mean,
            reward_stderr=error,
            samples=how.samples,
            pass_at=pass_at(rewards, pass_reward=how.pass_reward) if how.samples > 1 else {},
            non_greedy_tokens=sum(counts) if counts else None,
            reward_components={} if numbers is None else dict(numbers.components),
            completion_tokens_mean=None if numbers is None else numbers.completion_tokens,
            truncated_ratio=None if numbers is None else numbers.truncated,
            turns_mean=None if numbers is None else numbers.turns,
        )
        for sink in self.sinks:
            sink.append_eval(record)
        self._newest[name] = version
        if record.non_greedy_tokens:
            self._not_greedy = WitnessFailed(
                f"{_on(name)} of {version.words}: it is not the one that the configuration describes. The witness's "
                f"check `greedy` found: {record.non_greedy_tokens} tokens are not the most probable ones, in "
                f"{sum(map(bool, counts))} of {len(counts)} answers; a single completion of a prompt must be greedy. "
                "It is a bug of asyncrl or of vLLM: report it with the run's directory. `witness.on_failure` says "
                "whether training goes on"
            )
            logger.error("%s", self._not_greedy)
        if mean is not None:
            self._may_stop(record, mean)
            self.metrics.heldout(name, mean)
            prompts = f"{len(rewards)} of {len(answers)} prompts"
            logger.info("%s of %s: reward %.3f (%s)", _on(name), version.words, mean, prompts)

    def _may_stop(self, record: EvalRecord, mean: float) -> None:
        """Sets `reached`, which ends the run, if the reward is as high as `run.stop_when` asks. The weights of step 0
        do not count, because they are not trained, and neither does a mean over too few of the prompts."""
        stop = self.config.run.stop_when
        if stop is None or self.reached is not None or not (record.version and record.covers):
            return
        if record.name == stop.eval and mean >= stop.reward:
            self.reached = record

    async def _answers(self, name: str, version: Version, *, actor: str) -> tuple[str, Version | None, list[Answer]]:
        """Returns the replica that has answered, the version that it has loaded, and its answers.

        Begins with the replica `actor`. If a replica ends or cannot be reached, or if rollouts fail as INFRA, the
        evaluation is repeated: there are at most `EVALUATIONS` attempts. Raises StallError if the replica of the last
        one ends too, and TimeoutError if an attempt takes longer than `eval.timeout_s`.
        """
        for left in reversed(range(EVALUATIONS)):
            try:
                at, answers = await self.replicas.evaluate(actor, self._tasks[name], name=name)
            except (ActorGone, ActorUnreachable) as error:
                why = str(error)
                if isinstance(error, ActorGone):
                    self._gone.add(actor)
                if not left:
                    break
            else:
                infra = _infra(answers)
                if not infra or not left:
                    return actor, at, answers
                why = f"{len(infra)} of {len(answers)} rollouts failed as INFRA, the first one: {infra[0].words}"
                await asyncio.sleep(self.repeat_pause_s)  # meanwhile, a replica whose engine died reports it
            logger.warning("%s of %s: %s; the evaluation is repeated", _on(name), version.words, why)
            actor = await self.replica_at(version, avoid=actor)
        raise StallError(f"{_on(name)} of {version.words}: {why}; {EVALUATIONS} attempts have failed")

    def _late(self, name: str, version: Version, *, may_end_run: bool) -> None:
        of_set = "eval" if name == HELDOUT else f"eval.sets.{name}"
        what = (
            f"{_on(name)} of {version.words}: {len(self._tasks[name])} prompts ({of_set}.prompts) × "
            f"{self._how[name].samples} completions ({of_set}.samples) took longer than eval.timeout_s = "
            f"{self.config.eval.timeout_s:g} s"
        )
        if may_end_run:
            raise RunError(
                f"{what}, so training did not start. If the reward is slow, make it async or raise "
                f"environment.score_workers (docs/rewards.md); or lower {of_set}.prompts or {of_set}.samples, or "
                "raise eval.timeout_s"
            )
        logger.error("%s; it is left out", what)


def _infra(answers: Sequence[Answer]) -> list[Failure]:
    """Returns the failures of machines and processes, which another attempt may not have."""
    return [each for each in answers if isinstance(each, Failure) and each.failure_class is FailureClass.INFRA]


def _on(name: str) -> str:
    return "held-out evaluation" if name == HELDOUT else f"evaluation on the set {name}"
