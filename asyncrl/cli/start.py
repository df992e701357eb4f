"""How a run starts and ends, from top to bottom: for `asyncrl up`, `resume`, `fork`, `learner`, `generator` and
`asyncrl.run`.

    preflight    the configuration is checked, and the user's code is tried (`preflight.prepared`)
        │
    admission    a cluster that runs already is joined, and its run must admit this process (`join_admitted`)
        │
    directory    runs/NAME is locked, a checkpoint is chosen; log and live view begin (`shown_run`)
        │
    signals      the run gets a thread with an event loop; signals stay with the main thread (`run_until_done`)
        │
    Ray          is imported, and started here if it does not run already (`run_both`)
        ├─ inputs        threads load the prompts and the model (`Inputs`)
        ├─ generators    enter the run, and start replicas with their engines (`GeneratorDeployment.run`)
        └─ learner       is imported; enters the run, starts the ranks and trains (`LearnerDeployment.run`)
        │
    end          learner and generators leave the run; then run.json, the report, and the last lines of the command

A deployment that enters the run finds or creates the run's shared actors, coordinator and weight store
(`shared_actors.enter_run`). Everything that a function of this module starts ends before the function returns, in the
opposite order. Only Ray stays until the process ends, or until `asyncrl.run` returns.

`asyncrl generator` takes no directory: it is admitted, and runs its part (`run_generators`). The imports of Ray and
torch take seconds. So they are inside functions, and are phases of the start that the live view shows.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.console import Console

from asyncrl.checkpoints.directory import CHECKPOINTS
from asyncrl.cli import restarts
from asyncrl.cli.kept import KEPT, command_began_s
from asyncrl.cli.options import (
    LINE_EVERY_STEPS,
    clear_previous,
    print_outcome,
    print_previous,
    weights_named,
)
from asyncrl.cli.sweep_processes import kept_for
from asyncrl.cli.terminal import print_warnings, show_cursor
from asyncrl.common.roles import Role, RunState
from asyncrl.common.tasks import Stopped, check_stop, running
from asyncrl.config.schema import Config
from asyncrl.deployment.inputs import Inputs, Prompts
from asyncrl.deployment.known_runs import has_checkpoint, may_have_died
from asyncrl.deployment.launch import asked_to_end, ended_at_once, log_to, run_until_done
from asyncrl.deployment.mirror import Mirror, Store
from asyncrl.deployment.resuming import Choice, Resumed, no_checkpoint, rate_changes, unfinished_run
from asyncrl.deployment.run_dir import RunDir
from asyncrl.deployment.screen import Screen, StartLog
from asyncrl.errors import PREEMPTED, ClusterUnreachable, LearnerNotRestored, RunError
from asyncrl.learner.records import ForkPoint, Summary, known_info
from asyncrl.shown_text import describe_process, shown
from asyncrl.views.console import ShownConsole
from asyncrl.views.live import LiveDisplay
from asyncrl.views.report import write_report

if TYPE_CHECKING:
    from asyncrl.deployment.cluster import LocalRay
    from asyncrl.deployment.learner import LearnerDeployment
    from asyncrl.deployment.pool import GeneratorDeployment

logger = logging.getLogger(__name__)

LEAST_AT_END_S = 2.0
"""Least time for the last pass of the mirror, seconds, if SIGTERM ended the run and less is left of the grace."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The functions with which `run_both` and `run_learner` make the parts of a run's process. Tests give stand-ins for
    them. `start_ray` starts a local Ray; `joined_address` returns the address of the joined cluster."""

    start_ray: "Callable[[Config], LocalRay]"
    joined_address: Callable[[], str]
    new_inputs: Callable[..., Inputs] = Inputs
    new_generators: "Callable[..., GeneratorDeployment]"
    new_learner: "Callable[..., LearnerDeployment]"


def imported_parts() -> Parts:
    """Imports Ray, and returns the parts that use it."""
    from asyncrl.deployment import cluster
    from asyncrl.deployment.pool import GeneratorDeployment

    return Parts(
        start_ray=cluster.start,
        joined_address=cluster.joined_address,
        new_generators=GeneratorDeployment,
        new_learner=new_learner,
    )


def new_learner(config: Config, **arguments: Any) -> "LearnerDeployment":
    """Imports torch, and returns the learner's deployment."""
    from asyncrl.deployment.learner import LearnerDeployment

    return LearnerDeployment(config, **arguments)


def run_in_terminal(
    config: Config,
    prompts: Prompts | None,
    *,
    command: Literal["up", "learner"],
    address: str | None,
    choose: Choice = unfinished_run,
    again: Sequence[str],
    forked_from: ForkPoint | None = None,
    new_parts: Callable[[], Parts] = imported_parts,
) -> None:
    """Runs the learner and the generators of a run (`command` "up", also of `resume` and `fork`), or only its learner
    (`command` "learner"). Then prints how the run ended. Raises typer.Exit if the run trained no step, was ended by
    SIGTERM before its last step, or is to start again.

    `prompts` are the prompts if they are loaded already. `address` is the cluster to join; None to start one. `choose`
    decides whether an earlier run in the directory is resumed, or the directory moved aside. `again` is the command
    that starts the run again, without `asyncrl`. A new run begins with the weights of `forked_from`, if there is one.
    """
    if address is not None:
        choose = join_admitted(address, config, choose=choose)
    run = run_both if command == "up" else run_learner
    showing = shown_run(
        config,
        role=command,
        console=ShownConsole(),
        started_s=command_began_s(),
        choose=choose,
        forked_from=forked_from,
    )
    with showing as (run_dir, screen):

        def asked(number: signal.Signals) -> None:
            restarts.starts_no_other()
            asked_to_end(run_dir, config.run.shutdown_grace_s, number)

        try:
            summary = run_until_done(
                partial(run, config, run_dir=run_dir, screen=screen, prompts=prompts, new_parts=new_parts),
                asked=asked,
                at_once=[show_cursor, partial(ended_at_once, run_dir)],
            )
        finally:
            if KEPT is None:  # the run has ended, so the exit code of `sigterm_ends` would be wrong from now on
                restarts.sigterm_kills()
            # `asyncrl down` on another machine asks the run to end without a signal, so `asked` was not called.
            if run_dir.asked and not run_dir.starts_again:
                restarts.starts_no_other()
    if KEPT is not None:
        KEPT.in_order = summary is not None and run_dir.end is RunState.FINISHED
    preempted = run_dir.end is RunState.PREEMPTED
    print_outcome(summary, run_dir.path, config=config, again=again)
    if run_dir.end is RunState.STARTING:
        raise typer.Exit(restarts.RESTART_MENDS)
    if summary is None or preempted:
        raise typer.Exit(PREEMPTED if preempted else 1)


# --- admission -----------------------------------------------------------------------------------------------------


def join_admitted(address: str, config: Config, *, choose: Choice) -> Choice:
    """Joins the cluster at `address`. Raises the error with which a run of this name on the cluster refuses this
    process as its learner.

    Call it before the directory of an earlier run is moved aside. `choose` decides whether that run is resumed, or its
    directory moved aside. Returns the function to use in place of `choose`. It raises LearnerNotRestored, and moves
    nothing, if `choose` finds no checkpoint and the run on the cluster admits no learner without one. If the learner of
    this directory may have been killed, waits until the run on the cluster counts it as gone, at most
    `buffer.heartbeat_timeout_s` + `buffer.call_timeout_s`. With `run.lost_weights = new_run`, ends the run of this
    directory on the cluster if no learner can continue it.

    If this command has begun the run and was started again, waits for the cluster for up to `run.stall_timeout_s`,
    because its head may be starting again too. Otherwise the address may be wrong. Then a RunError is raised in place
    of ClusterUnreachable, after which the command would start again by itself.
    """
    from asyncrl.data_plane.calls import patiently_in_thread
    from asyncrl.deployment.cluster import join
    from asyncrl.deployment.shared_actors import check_admission, end_lost_run

    try:
        patiently_in_thread(
            partial(join, address, namespace=config.run.name, folder=config.run.dir),
            patience_s=config.run.stall_timeout_s if restarts.begun_before() else 0.0,
        )
    except ClusterUnreachable as error:
        if not restarts.begun_before():
            raise RunError(str(error)) from error
        raise
    directory = config.run.dir / config.run.name
    limits, gone = config.buffer, restarts.restarts() > 0 or may_have_died(directory)
    patience_s = limits.heartbeat_timeout_s + limits.call_timeout_s if gone else 0.0
    info = known_info(directory)
    restores = info.nonce if info is not None and choose is not no_checkpoint and has_checkpoint(config) else None
    try:
        asyncio.run(check_admission(config, role=Role.LEARNER, restores=restores, patience_s=patience_s))
    except LearnerNotRestored:
        # Without a run.json in this directory, the run on the cluster belongs to another directory.
        if info is None or config.run.lost_weights == "refuse":
            raise
        end_lost_run(directory, info.nonce)
        print_warnings(
            [f"the rest of run {config.run.name} on this cluster was ended, because no learner can continue it"]
        )
    if restores is None:
        return choose
    try:
        asyncio.run(check_admission(config, role=Role.LEARNER))
    except LearnerNotRestored as error:
        # `choose` is called later, and only it finds out whether the directory has a checkpoint to resume from.
        return partial(_chosen_or_refused, choose=choose, refusal=error)
    return choose


def _chosen_or_refused(directory: Path, config: Config, *, choose: Choice, refusal: LearnerNotRestored) -> Resumed:
    if (chosen := choose(directory, config)) is None:
        raise LearnerNotRestored(f"no checkpoint in {directory / CHECKPOINTS} can be used, and {refusal}") from refusal
    return chosen


# --- the run's directory -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def shown_run(
    config: Config,
    *,
    role: str,
    console: Console,
    started_s: float,
    choose: Choice,
    forked_from: ForkPoint | None = None,
) -> Iterator[tuple[RunDir, Screen]]:
    """Takes the run's directory for this process (`reported_run`), and shows the run on `console` within the block.

    First removes the processes and files that a killed run of this name left. If an error ends the block, prints where
    the run's newest weights are. `started_s` is the time on the monotonic clock at which the run's command, or
    `asyncrl.run`, began.
    """
    clear_previous(config)
    taken = reported_run(config, role=role, choose=choose, forked_from=forked_from)
    with taken as run_dir, weights_named(run_dir.path):
        print_previous(run_dir)
        if run_dir.resumed is not None:
            print_warnings(rate_changes(run_dir.resumed, config))
        with LiveDisplay(console, every_steps=LINE_EVERY_STEPS) as display:

            def report(line: str) -> None:
                console.print(shown(line), markup=False, highlight=False)

            yield run_dir, Screen(show=StartLog(display.update).update, report=report, started_s=started_s)


@contextlib.contextmanager
def reported_run(
    config: Config, *, role: str, choose: Choice = unfinished_run, forked_from: ForkPoint | None = None
) -> Iterator[RunDir]:
    """Takes the run's directory for this process and logs to it. `choose` decides whether an earlier run in the
    directory is resumed, or the directory moved aside. A new run begins with the weights of `forked_from`.

    When the block ends in any way, run.json records how it ended, and the report is written. Raises RunLocked if
    another process holds the directory.
    """
    creating = RunDir.create(config, choose=choose, forked_from=forked_from)
    with contextlib.ExitStack() as after, creating as run_dir:
        # `creating` closes the directory first, and then `after` closes its parts in reverse order. The report comes
        # first, because it needs the end in run.json. Then the mirror gets the report. The log is closed last, because
        # it gets the errors of the report and of the mirror.
        describe_process(run=config.run.name, role=role, incarnation=run_dir.lineage.incarnation, step=None)
        # Later, this process may run a loop of the user's own, whose ranks must not log to this run.
        after.callback(describe_process, incarnation=None)
        after.enter_context(log_to(run_dir.log_path(role, 0), form=config.run.log_format))
        after.enter_context(mirrored(config, run_dir))
        after.callback(_write_report, run_dir.path)
        restarts.mark_begun(run_dir.path)
        yield run_dir


@contextlib.contextmanager
def mirrored(config: Config, run_dir: RunDir) -> Iterator[None]:
    """Copies the directory to `run.mirror` within the block, and then waits until everything is sent.

    Waits at most `run.shutdown_grace_s`. After SIGTERM, this time counts from the signal, but is at least
    `LEAST_AT_END_S`. The directory stays locked meanwhile. Raises ConfigError if another run is mirrored there. Without
    `run.mirror`, nothing is copied.
    """
    if config.run.mirror is None:
        yield
        return
    with run_dir.lock_longer():
        run_dir.mirror = mirror = Mirror(
            Store(config.run.mirror),
            run_dir.path,
            nonce=run_dir.nonce,
            lineage=run_dir.lineage,
            keep=config.checkpoint,
        )
        mirror.start()
        try:
            yield
        finally:
            within_s = config.run.shutdown_grace_s
            # The sender of SIGTERM may kill the process when the grace is over. This also holds if `run.stop_when` has
            # finished the run since then.
            if run_dir.asked_from_outside:
                within_s = max(LEAST_AT_END_S, run_dir.left_s(within_s))
            mirror.finish(within_s=within_s)


def _write_report(path: Path) -> None:
    try:
        write_report(path)
    except Exception as error:  # an error in the report must not hide the outcome of the run
        logger.error("the report of %s was not written: %s: %s", path, type(error).__name__, error)
        logger.info("the report of %s was not written", path, exc_info=error)


# --- Ray, generators and learner -----------------------------------------------------------------------------------


async def run_both(
    config: Config,
    stop: asyncio.Event,
    *,
    run_dir: RunDir,
    screen: Screen,
    prompts: Prompts | None,
    new_parts: Callable[[], Parts] = imported_parts,
) -> Summary | None:
    """Runs both deployments, on a local Ray or on the cluster at `ray.address`, which this process has joined.

    Returns the run's summary, or None if `stop` was set before the first step. If one deployment fails, the other is
    ended and the error is raised.
    """
    try:
        return await _run_both(config, stop, run_dir=run_dir, screen=screen, prompts=prompts, new_parts=new_parts)
    except Stopped:
        run_dir.stopped()
        return None


async def _run_both(
    config: Config,
    stop: asyncio.Event,
    *,
    run_dir: RunDir,
    screen: Screen,
    prompts: Prompts | None,
    new_parts: Callable[[], Parts],
) -> Summary | None:
    # Ray starts first. Its start takes three times as long while the interpreter is busy. Replicas need Ray, and their
    # import of vLLM is the longest part of a start. Prompts, torch and the model are loaded meanwhile.
    screen.starting(config, "importing Ray")
    parts = new_parts()
    # Importing Ray, starting Ray and importing torch block the event loop for seconds. A request to end is answered
    # between them.
    await check_stop(stop)
    if config.ray.address is None:
        screen.starting(config, "starting Ray")
        start_ray = partial(parts.start_ray, config)
        local = start_ray() if KEPT is None else KEPT.ray_of(kept_for(config), start_ray)
        run_dir.started_ray(local.address, session=local.session_folder, since=local.since)
    else:
        run_dir.started_ray(parts.joined_address() if config.ray.address == "auto" else config.ray.address)
    await check_stop(stop)
    end = asyncio.Event()
    async with AsyncExitStack() as closing:
        inputs = await closing.enter_async_context(parts.new_inputs(config, loaded=prompts, report=screen.report))
        # A next learner would be in another process, which starts its own replicas, so these do not wait for it. On a
        # local Ray, which was started for this run, replicas ask for no CPUs, so that `asyncrl scale` can add replicas.
        own = {"wait_for_learner_s": 0.0} | ({"cpus": 0.0} if config.ray.address is None else {})
        pool = config.generator.model_copy(update=own)
        generator_deployment = parts.new_generators(
            config.model_copy(update={"generator": pool}),
            model_path=inputs.generator_model,
            prompts=inputs.prompts,
            started=lambda engine: run_dir.uses_shared_memory(engine.shared_memory if engine.here else []),
            asked=stop.is_set,
            grace_left_s=partial(run_dir.left_s, config.run.shutdown_grace_s),
            kept=None if KEPT is None else KEPT.replicas,
        )
        generators = await closing.enter_async_context(running(generator_deployment.run(end), name="generators"))
        screen.starting(config, "making prompts")
        await _loaded(inputs)  # meanwhile the task of the generators creates the replicas
        await check_stop(stop)
        screen.starting(config, "importing the learner")
        learner_deployment = parts.new_learner(
            config,
            run_dir=run_dir,
            model_path=inputs.learner_model,
            prompts=inputs.prompts,
            screen=screen,
            kept=None if KEPT is None else KEPT.ranks,
        )
        learner = await closing.enter_async_context(running(learner_deployment.run(stop), name="learner"))
        # After a request to end, the engines stay until the learner has evaluated its last weights.
        free = await closing.enter_async_context(running(learner_deployment.engines_free(stop), name="engines"))
        both: tuple[asyncio.Future[Any], ...] = (learner, generators)
        done, _ = await asyncio.wait((*both, free), return_when=asyncio.FIRST_COMPLETED)
        trained = learner in done and not learner.cancelled() and learner.exception() is None
        if KEPT is not None and trained and run_dir.end is RunState.FINISHED and not stop.is_set():
            generator_deployment.keep_replicas()
        end.set()
        if stop.is_set():  # the learner saves its weights, also if generators fail
            await asyncio.wait(both)
            if not generators.cancelled() and (error := generators.exception()) is not None:
                logger.warning("the generators did not end in order: %s", error)
            return await learner
        if learner in done:  # if the learner has failed, generators may fail too: raise the learner's error
            await asyncio.wait([generators])
            await learner
        await generators  # if it raises, the learner is cancelled
        return await learner


async def run_learner(
    config: Config,
    stop: asyncio.Event,
    *,
    run_dir: RunDir,
    screen: Screen,
    prompts: Prompts | None,
    new_parts: Callable[[], Parts] = imported_parts,
) -> Summary | None:
    """Runs the learner deployment on the cluster that this process has joined. Returns the run's summary, or None if
    `stop` was set before the first step."""

    def starts_again() -> bool:
        # TransferQueue's index of the rows dies with the learner's process, so no generator can go on.
        may_start = config.data_plane.backend != "transfer_queue" and restarts.restarts() < config.run.max_restarts
        return may_start and (run_dir.starts_again or not run_dir.asked)

    parts = new_parts()
    run_dir.started_ray(parts.joined_address())
    async with parts.new_inputs(config, loaded=prompts, report=screen.report) as inputs:
        screen.starting(config, "making prompts")
        await _loaded(inputs)
        learner = parts.new_learner(
            config,
            run_dir=run_dir,
            model_path=inputs.learner_model,
            prompts=inputs.prompts,
            screen=screen,
            supervised=starts_again,
        )
        return await learner.run(stop)


async def run_generators(
    config: Config,
    stop: asyncio.Event,
    *,
    address: str,
    prompts: Prompts | None,
    admitted: Callable[[], object],
) -> RunState | None:
    """Joins the cluster at `address`, and runs a generator deployment there until `stop` is set or the run has ended.
    Calls `admitted` when the run has not refused the deployment. Returns the run's last state; None if `stop` ended the
    deployment. Raises the error with which the run refuses the deployment."""
    logger.info("importing Ray")
    from asyncrl.deployment.cluster import join, joined_address
    from asyncrl.deployment.pool import GeneratorDeployment
    from asyncrl.deployment.shared_actors import check_admission

    with contextlib.suppress(Stopped):
        await check_stop(stop)
        join(address, namespace=config.run.name, folder=config.run.dir)
        await check_stop(stop)
        await check_admission(config, role=Role.GENERATOR)
        admitted()
        replicas = config.generator.replicas
        logger.info("run %s on Ray at %s: starting %d replicas", config.run.name, joined_address(), replicas)
        async with Inputs(config, loaded=prompts) as inputs:
            deployment = GeneratorDeployment(config, model_path=inputs.generator_model, prompts=inputs.prompts)
            return await deployment.run(stop)
    return None


async def _loaded(inputs: Inputs) -> None:
    """Waits for the prompts and the description of the model, before the learner is imported.

    The threads of these tasks import libraries that the learner imports too. Of two threads that import a library at
    the same time, one may see half of it.
    """
    await asyncio.wait([inputs.prompts, inputs.generator_model])
