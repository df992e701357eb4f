"""The learner deployment: enters the run, starts the ranks, trains, and writes the run's records and summary."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from asyncrl.config.load import flat_config
from asyncrl.config.schema import Config
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.registry import Registry
from asyncrl.data.prompts import Task
from asyncrl.data.tokenizer import encode_prompt, load_tokenizer, shown_prompt, tokenizer_fingerprint
from asyncrl.deployment.closing import Stopped, unless_stopped
from asyncrl.deployment.cluster import RunHandles, deployment_id, enter_run, keep_attached, leave_run, ray_nodes
from asyncrl.deployment.launch import Prompts, fitting_prompts
from asyncrl.deployment.run_dir import RunDir
from asyncrl.errors import CheckpointError, RunError
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.failure_watch import FailureWatch
from asyncrl.learner.failures import groups_by_reason, in_words
from asyncrl.learner.heldout import HeldoutEvaluation, ReplicaClient
from asyncrl.learner.loop import LearnerLoop
from asyncrl.learner.publication import Publisher
from asyncrl.learner.recording import described_metrics
from asyncrl.learner.records import EvalRecord, RunTotals, SampleRecord, StepRecord, Summary, build_summary
from asyncrl.learner.run_log import RunLog
from asyncrl.metrics.catalogue import LEARNER_STATES
from asyncrl.metrics.discovery import Target, ray_targets, target_groups, targets_of, write_targets
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.metrics.server import MetricsServer
from asyncrl.metrics.states import StateClock
from asyncrl.metrics.trackers import Trackers
from asyncrl.policy.tq_policy import TQPolicy
from asyncrl.run.roles import Role, RunState
from asyncrl.value.lm_value import critic_config
from asyncrl.value.tq_value import TQValue
from asyncrl.views.live import LiveView
from asyncrl.views.live_from_records import live_view
from asyncrl.views.run_facts import setting_of, usable_cores
from asyncrl.weights.manifest import Manifest, layout
from asyncrl.weights.transports.object_store import ObjectStoreTransport

logger = logging.getLogger(__name__)

PROBE_TASKS = 4
"""Number of tasks whose prompts and answers are the sequences of the parity probe."""
TARGETS_EVERY_S = 2.0
SHOW_EVERY_S = 0.5
SAMPLES_TRACKED_EVERY = 10
"""Steps between two tables of samples for trackers. Trackers keep every table, and samples/ has all samples anyway."""
TRACKED_COLUMNS = ("group", "prompt", "completion", "answer", "reward", "advantage", "staleness")
LEAVE_S = 3.0
"""Part of `run.shutdown_grace_s` that stays reserved for the last actions of a run, after its waits have ended."""


class LearnerDeployment:
    """`run` trains the run and returns its summary, or None if the run was stopped before its first step.

    `started_s` is the start of the process on the monotonic clock. `report` prints a permanent line, `show` updates the
    live view.
    """

    def __init__(
        self,
        config: Config,
        *,
        run_dir: RunDir,
        model_path: Awaitable[str],
        prompts: Awaitable[Prompts],
        started_s: float,
        show: Callable[[LiveView], None],
        report: Callable[[str], None],
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._model_path = model_path
        self._prompts = prompts
        self._started_s = started_s
        self._states = StateClock(states=LEARNER_STATES, initial="starting", started_s=started_s)
        self._show = show
        self._report = report
        self._steps: list[StepRecord] = []
        self._evals: list[EvalRecord] = []
        self._trackers = Trackers(
            config.metrics.trackers,
            project=config.metrics.project,
            run=config.run.name,
            folder=run_dir.path,
            settings=tracked_settings(config),
        )
        self._failures: FailureWatch | None = None
        self._cores = usable_cores()
        self._setting = setting_of(config, cores=self._cores)
        self._loop: LearnerLoop | None = None
        self._checkpoints: Checkpoints | None = None
        self._phase = "making prompts"
        self._targets: list[Target] = []
        self._targets_written: list[Target] | None = None

    @property
    def _trained_steps(self) -> int:
        return self._steps[-1].version_after if self._steps else 0

    @property
    def phase(self) -> str:
        """The learner's current activity, in a few words."""
        return self._loop.phase if self._loop is not None else self._phase

    async def run(self, stop: asyncio.Event) -> Summary | None:
        config = self._config
        self._enter("making prompts")
        prompts = await self._prompts
        self._enter("starting the buffer")
        handles = await enter_run(
            config, role=Role.LEARNER, deployment=deployment_id(Role.LEARNER), tasks=prompts.train
        )
        metrics = described_metrics(config)
        metrics.states_from(self._states.seconds)
        server = MetricsServer(
            metrics.registry,
            host=config.metrics.host,
            port=config.metrics.learner_port,
            discovery=lambda: target_groups(run=config.run.name, targets=self._targets),
        )
        self._failures = failures = FailureWatch(coordinator=handles.coordinator, keep=self._run_dir.write_failures)
        beside = [
            asyncio.create_task(failures.run()),
            asyncio.create_task(keep_attached(handles, every_s=config.buffer.heartbeat_timeout_s / 5)),
            asyncio.create_task(self._discover(handles)),
            asyncio.create_task(self._show_regularly()),
        ]
        grace = asyncio.create_task(self._grace(stop))
        policy: TQPolicy | None = None
        critic: TQValue | None = None
        failure = ""
        try:
            await handles.coordinator.call(Registry.add_target, "learner", server.address)
            self._enter("preparing the model")
            model_path = await unless_stopped(stop, self._model_path)
            policy = TQPolicy(config, model_path=model_path, dp_cfg=config.data_plane)
            if config.critic is not None:
                critic = TQValue(critic_config(config), model_path=model_path)
            totals = await self._train(handles, policy, critic, model_path, prompts, metrics, stop)
            if stop.is_set():
                if self._trained_steps < config.learner.total_steps:
                    after = f"after step {self._trained_steps} of {config.learner.total_steps}"
                    self._run_dir.stopped(f"asked to end by a signal, {after}")
            else:
                await self._check_trained(failures)
            summary = self._summary(totals)
            self._check_saved()
            return summary
        except Stopped:
            self._run_dir.stopped("asked to end by a signal, before the first step")
            return None
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            await self._rescue_weights()  # now, because the ranks that hold the weights are ended below
            raise
        finally:
            state = RunState.FAILED if failure else RunState.FINISHED
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            with contextlib.suppress(Exception):
                await failures.finish()
            self._show_now()
            if not failure:
                # A run that ended in order leaves Prometheus' target list, so that no alert fires. A failed run stays
                # in the list: its targets then look dead, and alerts fire.
                self._publish_targets([])
            ended_s = time.monotonic()
            # A run that Prometheus scrapes serves some seconds longer, so that Prometheus gets the last values. A
            # stopped run does not take this time, because it must end within its grace.
            if not failure and not stop.is_set():
                await asyncio.sleep(server.linger_s)
            await asyncio.to_thread(self._trackers.close)
            with contextlib.suppress(Exception):
                await handles.coordinator.call(Registry.set_state, state, failure)
            with contextlib.suppress(Exception):
                await leave_run(handles, namespace=config.run.name)
            for ranks in (critic, policy):
                if ranks is not None:
                    await asyncio.to_thread(ranks.shutdown)
            # Serve until the clients of the HTTP discovery have received the empty list, but not beyond the grace.
            if not failure:
                told = asyncio.create_task(server.told(since_s=ended_s))
                await asyncio.wait([told, grace], return_when=asyncio.FIRST_COMPLETED)
                told.cancel()
            grace.cancel()
            server.close()

    async def _train(
        self,
        handles: RunHandles,
        policy: TQPolicy,
        critic: TQValue | None,
        model_path: str,
        prompts: Prompts,
        metrics: LearnerMetrics,
        stop: asyncio.Event,
    ) -> RunTotals:
        config = self._config
        self._enter("checking the prompts")
        tokenizer = load_tokenizer(model_path, chat=config.data.chat)
        fingerprint = tokenizer_fingerprint(tokenizer)
        await handles.coordinator.call(Registry.handshake, who="the learner", fingerprint=fingerprint)
        # The buffer already has all prompts, also those that this call drops. If such a prompt is issued, it fails as
        # DATA.
        prompts = await fitting_prompts(config, prompts, tokenizer=tokenizer)
        for task in prompts.train[:1]:
            self._report(shown_prompt(tokenizer, task.prompt))
        self._enter("starting the learner's ranks")
        await unless_stopped(stop, asyncio.to_thread(policy.start))
        if critic is not None:
            self._enter("starting the critic's ranks")
            await unless_stopped(stop, asyncio.to_thread(critic.start))

        def delivered(manifest: Manifest, seconds: dict[str, float]) -> None:
            metrics.published(bytes=manifest.nbytes, phase_seconds=seconds)

        publisher = Publisher(
            policy=policy,
            entries=layout(policy.weights_metadata(), config.weights.bucket_bytes),
            probe_tokens=probe_sequences(tokenizer, prompts.train, max_length=config.model.max_length),
            transport=ObjectStoreTransport(),
            coordinator=handles.coordinator,
            weights=handles.weights,
            delivered=delivered,
        )
        log = RunLog(append_step=self.append_step, append_eval=self.append_eval, write_samples=self.write_samples)
        heldout = HeldoutEvaluation(
            config=config,
            tasks=prompts.heldout,
            coordinator=handles.coordinator,
            replicas=ReplicaClient(namespace=config.run.name, timeout_s=config.eval.timeout_s),
            log=log,
            metrics=metrics,
            started_s=self._started_s,
        )
        self._checkpoints = Checkpoints(
            config.checkpoint, folder=self._run_dir.path / "checkpoints", save_hf=policy.save_hf, metrics=metrics
        )
        self._loop = LearnerLoop(
            config=config,
            policy=policy,
            critic=critic,
            publisher=publisher,
            coordinator=handles.coordinator,
            heldout=heldout,
            checkpoints=self._checkpoints,
            log=log,
            metrics=metrics,
            states=self._states,
            decode=lambda ids, special: str(tokenizer.decode(list(ids), skip_special_tokens=not special)),
            started_s=self._started_s,
        )
        return await self._loop.run(stop)

    async def _check_trained(self, failures: FailureWatch) -> None:
        """Raises RunError if the prompts ran out before a step was trained."""
        if self._steps:
            return
        await failures.finish()
        if failures.counts:
            raise RunError(
                f"no step was trained: the prompts ran out, and rollouts failed ({in_words(failures.counts)}). "
                f"The first cause: {failures.counts[0].first.words}. Fix it and start the run again."
            )
        raise RunError(
            "no step was trained: the prompts ran out before there were learner.groups_per_step = "
            f"{self._config.learner.groups_per_step} groups; lower it, raise data.epochs, or add prompts"
        )

    def _check_saved(self) -> None:
        """Raises CheckpointError if the last weights of the run could not be saved."""
        if self._checkpoints is None or (error := self._checkpoints.unsaved) is None:
            return
        raise CheckpointError(
            f"the weights of step {self._trained_steps} are lost, because they could not be saved: {error}\n"
            f"free space on the disk of {self._run_dir.path}, or set run.dir to another disk, before the next run"
        ) from error

    async def _rescue_weights(self) -> None:
        """Saves the newest weights of a run that failed, if its ranks can still do it. Raises nothing."""
        if self._checkpoints is None or not self._steps or self._checkpoints.unsaved is not None:
            return
        try:
            await self._checkpoints.save(self._steps[-1].version_after)
        except Exception as error:
            logger.error("the trained weights could not be saved: %s", error)

    def _summary(self, totals: RunTotals) -> Summary | None:
        if not any(record.trained for record in self._steps):
            return None
        summary = build_summary(self._steps, self._evals, totals, staleness_limit=self._config.staleness.max_versions)
        try:
            self._run_dir.write_summary(summary)
        except OSError as error:
            logger.error("summary.json was not written: %s", error)
        return summary

    async def _discover(self, handles: RunHandles) -> None:
        """Updates Prometheus' targets every `TARGETS_EVERY_S`, because replicas and Ray's nodes come and go."""
        while True:
            try:
                status = await handles.coordinator.call(Coordinator.status)
                nodes = await ray_nodes(timeout_s=self._config.buffer.call_timeout_s)
            except (RunError, TimeoutError) as error:
                logger.warning("Prometheus' targets are not up to date: %s", error)
            else:
                self._publish_targets([*targets_of(status.targets), *ray_targets(nodes)])
                # Ray on one machine reports only the logical CPUs that the run asked for, so the machine's cores count.
                # A cluster reports the CPUs of all its machines.
                cores = sum(int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"])
                self._setting = setting_of(self._config, cores=max(self._cores, cores))
            await asyncio.sleep(TARGETS_EVERY_S)

    def _publish_targets(self, targets: list[Target]) -> None:
        """Publishes `targets` over HTTP and in the file metrics/targets.json.

        If the file cannot be written, the next call tries again, because the disk may have space then.
        """
        self._targets = targets
        if targets == self._targets_written:
            return
        try:
            write_targets(self._run_dir.targets_path, run=self._config.run.name, targets=targets)
            self._targets_written = targets
        except OSError as error:
            logger.warning("%s is not up to date: %s", self._run_dir.targets_path, error)

    async def _grace(self, stop: asyncio.Event) -> None:
        """Returns `LEAVE_S` before the end of the grace, once `stop` is set. After that the run waits for nothing."""
        await stop.wait()
        await asyncio.sleep(max(0.0, self._config.run.shutdown_grace_s - LEAVE_S))

    async def _show_regularly(self) -> None:
        while True:
            self._show_now()
            await asyncio.sleep(SHOW_EVERY_S)

    def _enter(self, phase: str) -> None:
        """Sets the phase and shows it at once, because the next call may block the event loop for long."""
        self._phase = phase
        self._show_now()

    def _show_now(self) -> None:
        elapsed_s = time.monotonic() - self._started_s
        self._show(
            live_view(
                self._config,
                phase=self.phase,
                elapsed_s=elapsed_s,
                steps=self._steps,
                evals=self._evals,
                setting=self._setting,
                failures=groups_by_reason(self._failures.counts) if self._failures is not None else {},
            )
        )

    # --- the methods of the learner loop's log -------------------------------------------------------------------

    def append_step(self, record: StepRecord) -> None:
        before = self._steps[-1] if self._steps else None
        self._steps.append(record)
        self._run_dir.append_step(record)
        self._trackers.log(record.version_after, record.numbers(before))

    def append_eval(self, record: EvalRecord) -> None:
        self._evals.append(record)
        self._run_dir.append_eval(record)
        self._trackers.log(record.version, {"reward/heldout_mean": record.reward_mean})

    def write_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        self._run_dir.write_samples(step, samples)
        if step % SAMPLES_TRACKED_EVERY == 0:
            cells = [
                [s.group, s.prompt, s.completion, s.answer, s.reward, s.advantage, s.staleness_versions]
                for s in samples
            ]
            self._trackers.log_samples(step, TRACKED_COLUMNS, cells)


def tracked_settings(config: Config) -> dict[str, str | int | float]:
    """Returns the configuration in the form that trackers accept: lists and unset values become text."""
    flat = flat_config(config)
    return {key: value if isinstance(value, str | int | float) else str(value) for key, value in flat.items()}


def probe_sequences(tokenizer: object, tasks: Sequence[Task], *, max_length: int) -> list[list[int]]:
    """Returns the token ids of the fixed sequences of the parity probe: the first prompts, each with its answer.

    A sequence has fewer than `max_length` tokens, because an engine that scores a sequence generates one more token,
    and refuses a sequence that leaves no room for it.
    """
    sequences = [encode_prompt(tokenizer, task.prompt + task.answer)[: max_length - 1] for task in tasks[:PROBE_TASKS]]
    return [sequence for sequence in sequences if len(sequence) > 1]
