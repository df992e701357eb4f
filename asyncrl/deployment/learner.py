"""The learner deployment: enters the run, starts the ranks, trains, ends the ranks, and leaves the run."""

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

from asyncrl.checkpoints.run import read_snapshot
from asyncrl.common.roles import Role, RunState
from asyncrl.common.tasks import Stopped, running, unless_one_fails, unless_stopped
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.coordinator import Coordinator
from asyncrl.coordinator.registry import Attachment, Endpoint, Registry
from asyncrl.coordinator.status import Restored
from asyncrl.deployment.cluster import ray_nodes
from asyncrl.deployment.inputs import Prompts
from asyncrl.deployment.known_runs import has_checkpoint
from asyncrl.deployment.learner_log import LearnerLog, TrackedRecords
from asyncrl.deployment.run_dir import RunDir
from asyncrl.deployment.screen import LearnerDisplay, Screen
from asyncrl.deployment.shared_actors import (
    JOINED,
    JoinedCluster,
    RunHandles,
    keep_attached,
    leave_run,
    new_deployment,
)
from asyncrl.deployment.training import Training
from asyncrl.errors import AsyncRLError, CheckpointError, RunError
from asyncrl.learner.progress import nothing_trained
from asyncrl.learner.recording import FailureWatch, described_metrics
from asyncrl.learner.records import Summary, groups_by_reason
from asyncrl.metrics.catalogue import LEARNER_STATES
from asyncrl.metrics.discovery import Target, process_target, ray_targets, target_groups, write_targets
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.metrics.server import MetricsServer
from asyncrl.metrics.states import StateClock
from asyncrl.ranks.group import PlacedRanks
from asyncrl.shown_text import describe_process, redacted
from asyncrl.views.setting import usable_cores

logger = logging.getLogger(__name__)


class LearnerDeployment:
    """`run` trains the run and returns its summary, or None if the run was stopped before its first step.

    `supervised` returns whether the learner's process is started again after an error that a restart may fix. The
    generators then stay in the run. `new_training` makes the training of the run.

    `kept` has the ranks of an earlier run of this process, and gets those of this run when it has finished. If it is
    None, the ranks end with the run.

    If the run is asked to end, `engines_free` returns when the engines of the run may end. After a request to end, the
    run needs them only for the evaluation of its last weights.
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
        cluster: JoinedCluster = JOINED,
        kept: list[PlacedRanks] | None = None,
        new_training: Callable[..., Training] = Training,
    ) -> None:
        self._config = config
        self._supervised = supervised
        self._cluster = cluster
        self._run_dir = run_dir
        self._model_path = model_path
        self._prompts = prompts
        self._screen = screen
        self._states = StateClock(states=LEARNER_STATES, initial="starting", started_s=screen.started_s)
        self._metrics = self._described_metrics()
        self._log = LearnerLog(config, run_dir)
        describe_process(step=lambda: self._log.trained_steps)
        self._tracked = TrackedRecords(config, run_dir, before=self._log.before)
        self._targets = Targets(run=config.run.name, path=run_dir.targets_path, ray_nodes=cluster.nodes)
        self._display = LearnerDisplay(
            config=config, screen=screen, log=self._log, metrics=self._metrics, cores=lambda: self._targets.cores
        )
        self._training = new_training(
            config=config,
            run_dir=run_dir,
            display=self._display,
            log=self._log,
            # The files come before the caller, because a callback may read them.
            sinks=(self._log, run_dir, screen.records, self._tracked),
            metrics=self._metrics,
            states=self._states,
            grace_left_s=self._grace_left_s,
            kept=[] if kept is None else kept,
        )
        self._may_keep = kept is not None
        self._trained, self._engines_end = asyncio.Event(), False
        self._failure = ""
        """The error that ended the run; empty if it ended without one."""
        self._starts_again = False
        """Whether this deployment is started again after `_failure`, from a checkpoint."""
        self._ended_s = screen.started_s
        """Time at which the run emptied Prometheus' list of targets at its end, on the monotonic clock."""

    async def run(self, stop: asyncio.Event) -> Summary | None:
        # The stacks close from right to left: the learner leaves the run, the ranks end, and the metrics are served
        # last. Each step of closing takes place even if an earlier one fails.
        async with AsyncExitStack() as serving, AsyncExitStack() as ranks, AsyncExitStack() as entered:
            try:
                summary = await self._run(stop, serving=serving, ranks=ranks, entered=entered)
                finished = self._run_dir.end is RunState.FINISHED and not stop.is_set()
                self._training.keeps = self._may_keep and summary is not None and finished
                return summary
            except Stopped:
                self._run_dir.stopped()
                return None
            except BaseException as error:
                self._failure = redacted(f"{type(error).__name__}: {error}")
                mends = error.restart_mends if isinstance(error, AsyncRLError) else isinstance(error, Exception)
                self._starts_again = mends and self._supervised() and has_checkpoint(self._config)
                if self._training.checkpoints is not None and self._log.steps:
                    # Save the weights now: the ranks still have them, and end when the stack `ranks` closes.
                    await self._training.checkpoints.rescue(self._log.trained_steps)
                raise

    async def _run(
        self, stop: asyncio.Event, *, serving: AsyncExitStack, ranks: AsyncExitStack, entered: AsyncExitStack
    ) -> Summary | None:
        config = self._config
        prompts = await self._prompts
        self._display.enter("starting the buffer")
        restored = self._restored()
        deployment = new_deployment(Role.LEARNER, nonce=self._run_dir.nonce)
        client = await self._cluster.open_data_plane(config, deployment=deployment, restores=restored is not None)
        handles = await self._cluster.enter_run(config, deployment=deployment, tasks=prompts.train, restored=restored)
        entered.push_async_callback(self._leave, handles)
        entered.push_async_callback(asyncio.to_thread, self._tracked.close)
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
            "keep attached": keep_attached(
                handles,
                every_s=every_s,
                state_seconds=self._states.seconds,
                asked_to_end=partial(self._asked_to_end, stop),
            ),
            "targets": self._targets.follow(handles.coordinator, timeout_s=config.buffer.call_timeout_s),
            "display": self._display.run(),
            "admission": self._end_admission(handles, stop),
        }
        beside = [await entered.enter_async_context(running(work, name=name)) for name, work in works.items()]
        await handles.coordinator.call(Registry.set_endpoint, "learner", server.address, node=deployment.host)
        self._display.enter("preparing the model")
        model_path = await unless_one_fails(beside, unless_stopped(stop, self._model_path))
        training = self._training.run(
            handles, client=client, model_path=model_path, prompts=prompts, stop=stop, ranks=ranks
        )
        try:
            totals = await unless_one_fails(beside, training)
        finally:
            self._trained.set()
        if not stop.is_set():
            await self._check_trained(failures)
        elif self._log.trained_steps < config.learner.total_steps:
            self._run_dir.stopped(f"after step {self._log.trained_steps} of {config.learner.total_steps}")
        if totals.stop_reason is not None:
            self._run_dir.finished(totals.stop_reason)
        if (summary := self._log.summary(totals)) is not None:
            self._run_dir.write_summary(summary)
        self._check_saved()
        return summary

    def _asked_to_end(self, stop: asyncio.Event, request: Attachment) -> None:
        restarts = request is Attachment.ASKED_TO_RESTART
        if self._run_dir.asked and (restarts or not self._run_dir.starts_again):
            return
        by = "a pod of the learner that is about to end" if restarts else "`asyncrl down`"
        logger.warning("%s asked the run to %s", by, "save its weights and restart" if restarts else "end")
        self._run_dir.asked_to_end(by, restarts=restarts)
        stop.set()

    async def _end_admission(self, handles: RunHandles, stop: asyncio.Event) -> None:
        """Ends the admission of new groups when `stop` is set. The step that runs goes on, and so do groups in flight.
        An error is only logged, because the learner's loop ends admission again when its last step has ended."""
        await stop.wait()
        try:
            await handles.coordinator.call(Coordinator.pause, handles.lineage.incarnation)
        except (RunError, TimeoutError) as error:
            logger.warning("generators may begin groups until the last step has ended: %s", error)

    async def engines_free(self, stop: asyncio.Event) -> None:
        """Waits until `stop` is set, and then until the last weights are evaluated, but at most until only `LEAVE_S`
        seconds of `run.shutdown_grace_s` are left. If the weights cannot be evaluated, returns as soon as `stop` is
        set."""
        await stop.wait()
        if self._may_evaluate():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._grace_left_s()):
                    await self._trained.wait()
        self._engines_end = True

    def _may_evaluate(self) -> bool:
        """Returns whether the last weights may be evaluated after the request to end: the run has held-out prompts and
        no mirror, this process has trained a step, the run does not start again, and the step and the save that are
        left are expected to end before `run.shutdown_grace_s` is over."""
        heldout = self._training.heldout
        if heldout is None or not heldout.wanted or not self._run_dir.steps_written or self._run_dir.starts_again:
            return False
        return self._grace_left_s() > 0 and self._short_grace() is None

    def _short_grace(self) -> str | None:
        """Returns the warning of `short_grace` for the run as it is now; None before the first step."""
        if (checkpoints := self._training.checkpoints) is None or not self._log.steps:
            return None
        step_s, save_s = self._log.steps[-1].duration_s, checkpoints.expected_end_s()
        return short_grace(self._config.run.shutdown_grace_s, step_s=step_s, save_s=save_s)

    def _grace_left_s(self) -> float:
        """Returns how many seconds the evaluation of the last weights may take after a request to end; 0 if they must
        not be evaluated. With `run.mirror`, they are not evaluated: all of the time is for sending the last
        checkpoint."""
        if self._engines_end or self._config.run.mirror is not None:
            return 0.0
        return max(0.0, self._run_dir.left_s(self._config.run.shutdown_grace_s) - LEAVE_S)

    def _described_metrics(self) -> LearnerMetrics:
        metrics, restarts = described_metrics(self._config), self._run_dir.restarts
        metrics.incarnation(
            self._run_dir.lineage.incarnation,
            nonce=self._run_dir.nonce,
            restarts=len(restarts),
            resumed_unix_s=restarts[-1].unix_time_s if restarts else None,
        )
        metrics.states_from(self._states.seconds)
        if self._run_dir.mirror is not None:
            self._run_dir.mirror.report_to(metrics)
        return metrics

    def _restored(self) -> Restored | None:
        """Returns the buffer's snapshot in the checkpoint from which the run is resumed, with the run's lineage; None
        for a new run."""
        if (resumed := self._run_dir.resumed) is None:
            return None
        return Restored(
            snapshot=read_snapshot(resumed.path),
            lineage=self._run_dir.lineage,
            generators=self._log.generators,
        )

    async def _check_trained(self, failures: FailureWatch) -> None:
        """Raises RunError if the prompts ran out before a step was trained."""
        if self._log.steps:
            return
        await failures.finish()
        raise nothing_trained(failures.counts, config=self._config)

    def _check_saved(self) -> None:
        """Raises CheckpointError if the last weights of the run could not be saved."""
        if (checkpoints := self._training.checkpoints) is None or (error := checkpoints.unsaved) is None:
            return
        raise CheckpointError(
            f"the weights of step {self._log.trained_steps} are lost, because they could not be saved: {error}\n"
            f"free space on the disk of {self._run_dir.path}, or set run.dir to another disk, before the next run"
        ) from error

    # --- the end of the run, in this order -------------------------------------------------------------------------

    async def _show_end(self, server: MetricsServer, failures: FailureWatch, stop: asyncio.Event) -> None:
        """Shows the last state of the run, on the screen and to Prometheus."""
        with contextlib.suppress(Exception):
            await failures.finish()
        self._display.show()
        if self._failure:
            return
        # A run that ended without an error is removed from Prometheus' target list, so that no alert fires. A failed
        # run stays in the list: its targets then look dead, and alerts fire.
        self._targets.publish([])
        self._ended_s = time.monotonic()
        # A run that Prometheus scrapes serves some seconds longer, so that Prometheus gets the last values. A run that
        # was asked to end does not wait, because it must end within `run.shutdown_grace_s`.
        if not stop.is_set():
            await asyncio.sleep(server.linger_s)

    async def _leave(self, handles: RunHandles) -> None:
        with contextlib.suppress(Exception):
            state = RunState.FAILED if self._failure else self._run_dir.end
            if self._starts_again:
                state = RunState.STARTING
            await handles.coordinator.call(Coordinator.set_state, handles.lineage.incarnation, state, self._failure)
        await leave_run(handles.coordinator, handles.deployment, namespace=self._config.run.name)

    async def _serve_end(self, server: MetricsServer, grace: "asyncio.Future[None]") -> None:
        """After a run without an error, keeps the metrics server alive until the clients of the HTTP discovery have
        received the empty list of targets, or until `grace` is done."""
        if not self._failure:
            async with running(server.told(since_s=self._ended_s)) as told:
                await asyncio.wait([told, grace], return_when=asyncio.FIRST_COMPLETED)

    async def _grace(self, stop: asyncio.Event) -> None:
        """Waits until `stop` is set and only `LEAVE_S` seconds of `run.shutdown_grace_s` are left.

        Warns when `stop` is set if the grace is too short for the rest of the run.
        """
        await stop.wait()
        if warning := self._short_grace():
            logger.warning("%s", warning)
        await asyncio.sleep(max(0.0, self._config.run.shutdown_grace_s - LEAVE_S))


# The endpoints of a run for Prometheus: the list over HTTP (`groups`), and the file metrics/targets.json.

TARGETS_EVERY_S = 2.0


class Targets:
    """The endpoints from which Prometheus reads the metrics of the run's processes and of Ray's nodes, and the number
    of cores of the run's machines.

    `ray_nodes` lists Ray's nodes.
    """

    def __init__(
        self, *, run: str, path: Path, ray_nodes: Callable[..., Awaitable[list[dict[str, Any]]]] = ray_nodes
    ) -> None:
        self._run = run
        self._path = path
        self._ray_nodes = ray_nodes
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

    async def follow(
        self, coordinator: CoordinatorClient, *, timeout_s: float, every_s: float = TARGETS_EVERY_S
    ) -> None:
        """Updates the list every `every_s` seconds until it is cancelled, because replicas and Ray's nodes come and
        go."""
        own_cores = self.cores
        serial, endpoints = 0, dict[str, Endpoint]()
        while True:
            try:
                changes = await coordinator.call(Registry.endpoints_since, serial)
                serial, endpoints = changes.serial, changes.applied_to(endpoints)
                nodes = await self._ray_nodes(timeout_s=timeout_s)
            except (RunError, TimeoutError) as error:
                logger.warning("Prometheus' targets are not up to date: %s", error)
            else:
                processes = [process_target(name, each.address, node=each.node) for name, each in endpoints.items()]
                self.publish([*processes, *ray_targets(nodes)])
                # Ray on one machine reports only the logical CPUs that the run asked for, so the machine's cores count.
                # A cluster reports the CPUs of all its machines.
                cores = sum(int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"])
                self.cores = max(own_cores, cores)
            await asyncio.sleep(every_s)


# The time that a run needs to end when a signal asks it to.

LEAVE_S = 10.0
"""Part of `run.shutdown_grace_s` that stays reserved for the last actions of a run, after its waits have ended: the end
of engines, ranks and Ray. 10 s were measured for the quickstart on 2 cores."""


def short_grace(grace_s: float, *, step_s: float, save_s: float | None) -> str | None:
    """Returns a warning if a run that is asked to end needs longer than `run.shutdown_grace_s` (`grace_s`), else None.

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
