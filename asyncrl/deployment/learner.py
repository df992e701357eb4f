"""The learner deployment: enters the run, starts the ranks, trains, and ends all of it in order."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.checkpoints.directory import HF, folder_of
from asyncrl.checkpoints.run import RunParts, read_snapshot
from asyncrl.common.roles import Role, RunState
from asyncrl.common.tasks import Stopped, running, unless_one_fails, unless_stopped
from asyncrl.config.load import shared_config
from asyncrl.config.schema import HELDOUT, Config
from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.coordinator import LearnerCalls
from asyncrl.coordinator.registry import Endpoints, Registry
from asyncrl.coordinator.status import Restored
from asyncrl.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from asyncrl.deployment.cluster import ray_nodes
from asyncrl.deployment.inputs import Prompts, data_record, lines_on_data, tags_of_rewards
from asyncrl.deployment.known_runs import has_checkpoint
from asyncrl.deployment.learner_log import LearnerLog
from asyncrl.deployment.run_dir import STOPPED_EARLY, RunDir, processor, provenance
from asyncrl.deployment.screen import LearnerDisplay, Screen
from asyncrl.deployment.shared_actors import (
    RunHandles,
    enter_run,
    keep_attached,
    leave_run,
    new_deployment,
    open_data_plane,
)
from asyncrl.errors import AsyncRLError, CheckpointError, RunError
from asyncrl.learner.audit_records import Began, Machine, PublishedVersion, manifest_digest
from asyncrl.learner.checkpoint import Checkpoints, KeptSteps
from asyncrl.learner.heldout import HeldoutEvaluation, ReplicaClient, nothing_trained
from asyncrl.learner.loop import LearnerLoop
from asyncrl.learner.publication import Publisher, probe_sequences
from asyncrl.learner.recording import FailureWatch, StepEnd, StepRecorder, described_metrics
from asyncrl.learner.records import RunLog, RunTotals, Summary, groups_by_reason
from asyncrl.learner.sample_records import Texts
from asyncrl.learner.step import Stages
from asyncrl.metrics.catalogue import LEARNER_STATES
from asyncrl.metrics.discovery import Target, ray_targets, target_groups, targets_of, write_targets
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.metrics.server import MetricsServer
from asyncrl.metrics.states import StateClock
from asyncrl.policy.tq_policy import TQPolicy
from asyncrl.shown_text import redacted
from asyncrl.value.lm_value import critic_config
from asyncrl.value.tq_value import TQValue
from asyncrl.views.run_facts import usable_cores
from asyncrl.weights.manifest import Manifest, layout
from asyncrl.weights.transports.of_config import transport_of

logger = logging.getLogger(__name__)


class LearnerDeployment:
    """`run` trains the run and returns its summary, or None if the run was stopped before its first step.

    `supervised` returns whether it is started again after an error that a restart may fix. The generators then stay.
    """

    def __init__(
        self,
        config: Config,
        *,
        run_dir: RunDir,
        model_path: Awaitable[str],
        prompts: Awaitable[Prompts],
        screen: Screen,
        supervised: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config = config
        self._supervised = supervised
        self._run_dir = run_dir
        self._model_path = model_path
        self._prompts = prompts
        self._screen = screen
        self._states = StateClock(states=LEARNER_STATES, initial="starting", started_s=screen.started_s)
        self._metrics = self._described_metrics()
        self._log = LearnerLog(config, run_dir)
        self._targets = Targets(run=config.run.name, path=run_dir.targets_path)
        self._display = LearnerDisplay(config=config, screen=screen, log=self._log, cores=lambda: self._targets.cores)
        self._transport = transport_of(config, nonce=run_dir.nonce)
        self._checkpoints: Checkpoints | None = None
        self._save_hf: Callable[[Path], None] = lambda path: None
        self._trained_step: Callable[[], int | None] = lambda: None
        self._failure = ""
        """The error that ended the run; empty if it ended in order."""
        self._starts_again = False
        """Whether this deployment is started again after `_failure`, from a checkpoint."""
        self._ended_s = screen.started_s
        """Time at which the list of targets became empty, on the monotonic clock."""

    async def run(self, stop: asyncio.Event) -> Summary | None:
        # The stacks close from right to left: the learner leaves the run, the ranks end, and the metrics are served
        # last. Each step of closing takes place even if an earlier one fails.
        async with AsyncExitStack() as serving, AsyncExitStack() as ranks, AsyncExitStack() as entered:
            try:
                return await self._run(stop, serving=serving, ranks=ranks, entered=entered)
            except Stopped:
                self._run_dir.stopped(STOPPED_EARLY)
                return None
            except BaseException as error:
                self._failure = redacted(f"{type(error).__name__}: {error}")
                mends = error.restart_mends if isinstance(error, AsyncRLError) else isinstance(error, Exception)
                self._starts_again = mends and self._supervised() and has_checkpoint(self._config)
                await self._rescue_weights()  # now, because the ranks that hold the weights end with their stack
                raise

    async def _run(
        self, stop: asyncio.Event, *, serving: AsyncExitStack, ranks: AsyncExitStack, entered: AsyncExitStack
    ) -> Summary | None:
        config = self._config
        prompts = await self._prompts
        self._display.enter("starting the buffer")
        restored = self._restored()
        deployment = new_deployment(Role.LEARNER, nonce=self._run_dir.nonce)
        rows = await open_data_plane(config, deployment=deployment, restores=restored is not None)
        handles = await enter_run(config, deployment=deployment, tasks=prompts.train, restored=restored)
        entered.push_async_callback(self._leave, handles)
        entered.push_async_callback(asyncio.to_thread, self._log.close)
        server = MetricsServer(
            self._metrics.registry,
            host=config.metrics.host,
            port=config.metrics.learner_port,
            discovery=self._targets.groups,
        )
        serving.callback(server.close)
        grace = await serving.enter_async_context(running(self._grace(stop)))
        serving.push_async_callback(self._serve_end, server, grace)
        failures = FailureWatch(coordinator=handles.coordinator, keep=self._run_dir.write_failures)
        self._display.failures = lambda: groups_by_reason(failures.counts)
        entered.push_async_callback(self._show_end, server, failures, stop)
        every_s = config.buffer.heartbeat_timeout_s / 5
        works = {
            "failures": failures.run(),
            "keep attached": keep_attached(handles, every_s=every_s, state_seconds=self._states.seconds),
            "targets": self._targets.follow(handles.coordinator, timeout_s=config.buffer.call_timeout_s),
            "display": self._display.run(),
        }
        beside = [await entered.enter_async_context(running(work, name=name)) for name, work in works.items()]
        await handles.coordinator.call(Endpoints.set, "learner", server.address)
        self._display.enter("preparing the model")
        model_path = await unless_one_fails(beside, unless_stopped(stop, self._model_path))
        ranks.push_async_callback(self._delete_weights, handles)
        policy = TQPolicy(config, model_path=model_path, dp_cfg=config.data_plane, dp_client=rows)
        ranks.push_async_callback(asyncio.to_thread, policy.shutdown)
        critic: TQValue | None = None
        if config.critic is not None:
            critic = TQValue(critic_config(config), model_path=model_path)
            ranks.push_async_callback(asyncio.to_thread, critic.shutdown)
        training = self._train(handles, policy, critic, model_path, prompts, stop)
        totals = await unless_one_fails(beside, training)
        if not stop.is_set():
            await self._check_trained(failures)
        elif self._log.trained_steps < config.learner.total_steps:
            after = f"after step {self._log.trained_steps} of {config.learner.total_steps}"
            self._run_dir.stopped(f"asked to end by a signal, {after}")
        if totals.stop_reason is not None:
            self._run_dir.finished(totals.stop_reason)
        summary = self._log.summary(totals)
        self._check_saved()
        return summary

    def _described_metrics(self) -> LearnerMetrics:
        metrics, restarts = described_metrics(self._config), self._run_dir.restarts
        metrics.incarnation(
            self._run_dir.lineage.incarnation,
            nonce=self._run_dir.nonce,
            restarts=len(restarts),
            resumed_unix_s=restarts[-1].unix_time_s if restarts else None,
        )
        metrics.states_from(self._states.seconds)
        return metrics

    def _restored(self) -> Restored | None:
        """Returns what the buffer continues from; None for a new run."""
        if (resumed := self._run_dir.resumed) is None:
            return None
        return Restored(snapshot=read_snapshot(resumed.path), lineage=self._run_dir.lineage)

    async def _train(
        self,
        handles: RunHandles,
        policy: TQPolicy,
        critic: TQValue | None,
        model_path: str,
        prompts: Prompts,
        stop: asyncio.Event,
    ) -> RunTotals:
        config = self._config
        self._display.enter("loading the tokenizer")
        tokenizer = load_tokenizer(model_path, chat=config.data.chat, chat_options=config.data.chat_options)
        fingerprint = tokenizer_fingerprint(tokenizer)
        await handles.coordinator.call(Registry.handshake, who="the learner", fingerprint=fingerprint)
        record = data_record(prompts, hidden_tags=tags_of_rewards(config, tokenizer))
        self._run_dir.write_data(record)
        self._display.hidden_tags = record.hidden_tags
        for line in lines_on_data(record, prompts, config=config, tokenizer=tokenizer):
            self._screen.report(line)
        self._display.enter("starting the learner's ranks")
        await unless_stopped(stop, asyncio.to_thread(policy.start))
        if critic is not None:
            self._display.enter("starting the critic's ranks")
            await unless_stopped(stop, asyncio.to_thread(critic.start))
        packages = provenance()
        parts = RunParts(
            config=config,
            policy=policy,
            critic=critic,
            lineage=handles.lineage,
            nonce=self._run_dir.nonce,
            packages=packages,
        )
        if (resumed := self._run_dir.resumed) is not None:
            self._display.enter(f"restoring step {resumed.step}")
            await asyncio.to_thread(parts.load, resumed.path)
        log = self._log.for_loop(
            Began(
                lineage=handles.lineage,
                settings=shared_config(config),
                machine=Machine(
                    processor=processor(), ranks=config.learner.ranks, threads=config.learner.threads, packages=packages
                ),
            )
        )
        loop = self._loop(handles, parts, prompts, tokenizer, log)
        self._display.phase = lambda: loop.phase
        return await loop.run(stop)

    def _loop(
        self,
        handles: RunHandles,
        parts: RunParts,
        prompts: Prompts,
        tokenizer: Any,
        log: RunLog,
    ) -> LearnerLoop:
        """Builds the learner's loop from its parts. The ranks have started."""
        config, policy = self._config, parts.policy
        resumed, before = self._run_dir.resumed, self._log.before
        # The time of a resumed run continues from its last record.
        started_s = self._screen.started_s - (before.wall_s if before else 0.0)
        heldout = HeldoutEvaluation(
            config=config,
            tasks={HELDOUT: prompts.heldout, **prompts.sets},
            coordinator=handles.coordinator,
            replicas=ReplicaClient(namespace=config.run.name, timeout_s=config.eval.timeout_s),
            log=log,
            metrics=self._metrics,
            started_s=started_s,
        )
        self._checkpoints = Checkpoints(
            config.checkpoint,
            folder=self._run_dir.checkpoints,
            run=parts,
            sync_records=self._run_dir.sync,
            metrics=self._metrics,
            restored_step=resumed.step if resumed else 0,
            best=partial(self._log.best_steps, running=lambda: heldout.running_step),
        )
        self._save_hf, self._trained_step = policy.save_hf, policy.trained_step
        incarnation = handles.lineage.incarnation
        stages = Stages(config=config, policy=policy, critic=parts.critic, states=self._states)
        step_end = StepEnd(
            stages=stages,
            incarnation=incarnation,
            coordinator=handles.coordinator,
            checkpoints=self._checkpoints,
            recorder=StepRecorder(
                log=log,
                metrics=self._metrics,
                elapsed_s=lambda: time.monotonic() - started_s,
                state_seconds=self._states.seconds,
                before=before,
            ),
            texts=Texts.of(tokenizer, config),
        )
        return LearnerLoop(
            config=config,
            incarnation=incarnation,
            coordinator=handles.coordinator,
            stages=stages,
            step_end=step_end,
            publisher=self._publisher(handles, policy, prompts, tokenizer, log),
            heldout=heldout,
            checkpoints=self._checkpoints,
            kept=KeptSteps(self._run_dir.path) if config.audit.keep_weights == "all" else None,
        )

    def _publisher(
        self,
        handles: RunHandles,
        policy: TQPolicy,
        prompts: Prompts,
        tokenizer: Any,
        log: RunLog,
    ) -> Publisher:
        config = self._config

        def delivered(manifest: Manifest) -> None:
            log.append_audit(PublishedVersion(manifest.version, manifest_digest(manifest)))

        return Publisher(
            config=config,
            policy=policy,
            entries=layout(policy.weights_metadata()),
            probe_tokens=probe_sequences(tokenizer, prompts.train, max_length=config.model.max_length),
            transport=self._transport,
            coordinator=handles.coordinator,
            weights=handles.weights,
            metrics=self._metrics,
            delivered=delivered,
        )

    async def _check_trained(self, failures: FailureWatch) -> None:
        """Raises RunError if the prompts ran out before a step was trained."""
        if self._log.steps:
            return
        await failures.finish()
        raise nothing_trained(failures.counts, config=self._config)

    def _check_saved(self) -> None:
        """Raises CheckpointError if the last weights of the run could not be saved."""
        if self._checkpoints is None or (error := self._checkpoints.unsaved) is None:
            return
        raise CheckpointError(
            f"the weights of step {self._log.trained_steps} are lost, because they could not be saved: {error}\n"
            f"free space on the disk of {self._run_dir.path}, or set run.dir to another disk, before the next run"
        ) from error

    async def _rescue_weights(self) -> None:
        """Saves the newest weights of a run that failed, if its ranks can still do it. Raises nothing."""
        if self._checkpoints is None or not self._log.steps or self._checkpoints.unsaved is not None:
            return
        await self._checkpoints.settle()  # the save that runs may be the last one of this run
        # The weights only, because the failure may have come in the middle of a step: then they belong to no state of
        # the buffer. The ranks may also hold the update of a step that failed before it was recorded.
        try:
            trained_step = await asyncio.to_thread(self._trained_step)
            step = max(self._log.steps[-1].version_after, trained_step or 0)
            folder = folder_of(self._run_dir.checkpoints, step)
            if step > 0 and not folder.exists():
                await asyncio.to_thread(self._save_hf, folder / HF)
        except Exception as error:
            logger.error("the trained weights could not be saved: %s", error)

    async def _delete_weights(self, handles: RunHandles) -> None:
        """Deletes what the transport keeps of this learner's versions outside of the ranks."""
        own = handles.lineage.incarnation
        await asyncio.to_thread(self._transport.delete, lambda version: version.incarnation == own)

    # --- the end of the run, in this order -------------------------------------------------------------------------

    async def _show_end(self, server: MetricsServer, failures: FailureWatch, stop: asyncio.Event) -> None:
        """Shows the last state of the run, on the screen and to Prometheus."""
        with contextlib.suppress(Exception):
            await failures.finish()
        self._display.show()
        if self._failure:
            return
        # A run that ended in order leaves Prometheus' target list, so that no alert fires. A failed run stays in the
        # list: its targets then look dead, and alerts fire.
        self._targets.publish([])
        self._ended_s = time.monotonic()
        # A run that Prometheus scrapes serves some seconds longer, so that Prometheus gets the last values. A stopped
        # run does not take this time, because it must end within its grace.
        if not stop.is_set():
            await asyncio.sleep(server.linger_s)

    async def _leave(self, handles: RunHandles) -> None:
        with contextlib.suppress(Exception):
            state = RunState.FAILED if self._failure else RunState.FINISHED
            if self._starts_again:
                state = RunState.STARTING
            await handles.coordinator.call(LearnerCalls.set_state, handles.lineage.incarnation, state, self._failure)
        await leave_run(handles.coordinator, handles.deployment, namespace=self._config.run.name)

    async def _serve_end(self, server: MetricsServer, grace: "asyncio.Future[None]") -> None:
        """Serves until the clients of the HTTP discovery have received the empty list, but not beyond the grace."""
        if not self._failure:
            async with running(server.told(since_s=self._ended_s)) as told:
                await asyncio.wait([told, grace], return_when=asyncio.FIRST_COMPLETED)

    async def _grace(self, stop: asyncio.Event) -> None:
        """Waits until `stop` is set and only `LEAVE_S` seconds of `run.shutdown_grace_s` are left.

        Warns when `stop` is set if the grace is too short for the rest of the run.
        """
        await stop.wait()
        if self._checkpoints is not None and self._log.steps:
            step_s, save_s = self._log.steps[-1].duration_s, self._checkpoints.expected_end_s()
            if warning := short_grace(self._config.run.shutdown_grace_s, step_s=step_s, save_s=save_s):
                logger.warning("%s", warning)
        await asyncio.sleep(max(0.0, self._config.run.shutdown_grace_s - LEAVE_S))


# The endpoints of a run for Prometheus: the list over HTTP (`groups`), and the file metrics/targets.json.

TARGETS_EVERY_S = 2.0


class Targets:
    """The endpoints of the run's processes and of Ray's nodes, and the number of cores of the run's machines."""

    def __init__(self, *, run: str, path: Path) -> None:
        self._run = run
        self._path = path
        self._written: list[Target] | None = None
        self.current: list[Target] = []
        self.cores = usable_cores()

    def groups(self) -> bytes:
        """Returns the list for Prometheus' HTTP discovery."""
        return target_groups(run=self._run, targets=self.current)

    def publish(self, targets: list[Target]) -> None:
        """Publishes `targets` over HTTP and in the file.

        If the file cannot be written, the next call tries again, because the disk may have space then.
        """
        self.current = targets
        if targets == self._written:
            return
        try:
            write_targets(self._path, run=self._run, targets=targets)
            self._written = targets
        except OSError as error:
            logger.warning("%s is not up to date: %s", self._path, error)

    async def follow(self, coordinator: CoordinatorClient, *, timeout_s: float) -> None:
        """Updates the list every `TARGETS_EVERY_S` until it is cancelled, because replicas and Ray's nodes come and
        go."""
        own_cores = self.cores
        serial, addresses = 0, dict[str, str]()
        while True:
            try:
                changes = await coordinator.call(Endpoints.since, serial)
                serial, addresses = changes.serial, changes.applied_to(addresses)
                nodes = await ray_nodes(timeout_s=timeout_s)
            except (RunError, TimeoutError) as error:
                logger.warning("Prometheus' targets are not up to date: %s", error)
            else:
                self.publish([*targets_of(addresses), *ray_targets(nodes)])
                # Ray on one machine reports only the logical CPUs that the run asked for, so the machine's cores count.
                # A cluster reports the CPUs of all its machines.
                cores = sum(int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"])
                self.cores = max(own_cores, cores)
            await asyncio.sleep(TARGETS_EVERY_S)


# The time that a run needs to end when a signal asks it to.

LEAVE_S = 10.0
"""Part of `run.shutdown_grace_s` that stays reserved for the last actions of a run, after its waits have ended: the end
of engines, ranks and Ray. 10 s were measured for the quickstart on 2 cores."""


def short_grace(grace_s: float, *, step_s: float, save_s: float | None) -> str | None:
    """Returns a warning if a run that is asked to end needs longer than its grace, else None.

    `step_s` is the duration of the last step, and `save_s` that of the saves to come; None if it is not known.

    >>> short_grace(20, step_s=6.0, save_s=3.0)
    >>> (short_grace(20, step_s=6.0, save_s=30.0) or "").partition(", but")[0]
    'the run needs about 46 s to end: 6 s for its step, 30 s for its checkpoint and 10 s to close'
    """
    needed_s = step_s + (save_s or 0.0) + LEAVE_S
    if needed_s <= grace_s:
        return None
    save = "an unknown time for its checkpoint" if save_s is None else f"{save_s:.0f} s for its checkpoint"
    return (
        f"the run needs about {needed_s:.0f} s to end: {step_s:.0f} s for its step, {save} and {LEAVE_S:.0f} s to "
        f"close, but run.shutdown_grace_s = {grace_s:g} s. If it is killed before, the steps since its newest "
        "checkpoint are lost, and a resumed run trains them again. Set run.shutdown_grace_s to "
        f"{math.ceil(needed_s)} or more, and "
        "give the process this time (Docker: stop_grace_period, Kubernetes: terminationGracePeriodSeconds, Slurm: "
        "KillWait)"
    )
