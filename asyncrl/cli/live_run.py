"""A run in the foreground, for `up`, `learner` and `asyncrl.run`: its directory, its live view, signals and its end."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from asyncrl.checkpoints.directory import CHECKPOINTS
from asyncrl.cli.options import (
    LINE_EVERY_STEPS,
    clear_previous,
    print_outcome,
    print_previous,
    print_warnings,
    weights_named,
)
from asyncrl.cli.restarts import mark_begun, restarts
from asyncrl.cli.terminal import show_cursor
from asyncrl.common.roles import Role
from asyncrl.config.schema import Config
from asyncrl.deployment.known_runs import has_checkpoint, may_have_died
from asyncrl.deployment.launch import asked_to_end, ended_at_once, log_to, run_until_done
from asyncrl.deployment.resuming import Choice, Resumed, no_checkpoint, rate_changes, unfinished_run
from asyncrl.deployment.run_dir import RunDir
from asyncrl.deployment.screen import Screen, StartLog
from asyncrl.errors import LearnerNotRestored
from asyncrl.learner.records import Summary, known_info
from asyncrl.metrics.states import monotonic_at_process_start
from asyncrl.shown_text import shown
from asyncrl.views.console import ShownConsole
from asyncrl.views.live import LiveDisplay
from asyncrl.views.report import write_report

logger = logging.getLogger(__name__)

Runner = Callable[..., Awaitable[Summary | None]]
"""A function of `deployment.compose` that runs the deployments until the run is done or its event is set."""


def join_admitted(address: str, config: Config, *, choose: Choice) -> Choice:
    """Joins the cluster at `address`. Raises the error with which the run there refuses this process as its learner.

    The commands call it before the directory of an earlier run is moved aside. `choose` decides what becomes of that
    directory. Returns the choice to use instead, which refuses to move the directory aside if the run there lives and
    would not admit a learner without a checkpoint. If the learner of this directory may have been killed, waits until
    the run counts it as gone.
    """
    from asyncrl.deployment.cluster import join
    from asyncrl.deployment.shared_actors import check_admission

    join(address, namespace=config.run.name, folder=config.run.dir)
    directory = config.run.dir / config.run.name
    limits, gone = config.buffer, restarts() > 0 or may_have_died(directory)
    patience_s = limits.heartbeat_timeout_s + limits.call_timeout_s if gone else 0.0
    info = known_info(directory) if choose is not no_checkpoint and has_checkpoint(config) else None
    restores = None if info is None else info.nonce
    asyncio.run(check_admission(config, role=Role.LEARNER, restores=restores, patience_s=patience_s))
    if restores is None:
        return choose
    try:
        asyncio.run(check_admission(config, role=Role.LEARNER))
    except LearnerNotRestored as error:
        # Only `choose` reads whether the run of the directory has finished.
        return partial(_chosen_or_refused, choose=choose, refusal=error)
    return choose


def _chosen_or_refused(directory: Path, config: Config, *, choose: Choice, refusal: LearnerNotRestored) -> Resumed:
    if (chosen := choose(directory, config)) is None:
        raise LearnerNotRestored(f"no checkpoint in {directory / CHECKPOINTS} can be used, and {refusal}") from refusal
    return chosen


def live_run(
    config: Config,
    *,
    role: str,
    runner: Callable[[], Runner],
    importing: str | None = None,
    again: Sequence[str],
    choose: Choice = unfinished_run,
) -> None:
    """Takes the run's directory, runs the result of `runner`, writes the report, and prints how the run ended.

    `runner` imports the function that runs the deployments. `importing` is the phase that is shown meanwhile. `again`
    is the command that starts the run again, without `asyncrl`. `choose` decides what becomes of an earlier run in the
    directory.
    """
    showing = shown_run(
        config, role=role, console=ShownConsole(), started_s=monotonic_at_process_start(), choose=choose
    )
    with showing as (run_dir, screen):

        async def main(stop: asyncio.Event) -> Summary | None:
            if importing is not None:
                screen.starting(config, importing)
            return await runner()(stop, run_dir=run_dir, screen=screen)

        summary = run_until_done(
            main,
            asked=lambda: asked_to_end(run_dir, config.run.shutdown_grace_s),
            at_once=[show_cursor, partial(ended_at_once, run_dir)],
        )
    print_outcome(summary, run_dir.path, config=config, again=again)


@contextlib.contextmanager
def shown_run(
    config: Config, *, role: str, console: Console, started_s: float, choose: Choice
) -> Iterator[tuple[RunDir, Screen]]:
    """Does what `reported_run` does, and shows the run on `console` within the block.

    Before that, removes what a killed run of this name left. If an error ends the block, prints where the run's newest
    weights are. `started_s` is the start of the run on the monotonic clock.
    """
    clear_previous(config)
    with reported_run(config, role=role, choose=choose) as run_dir, weights_named(run_dir.path):
        print_previous(run_dir)
        if run_dir.resumed is not None:
            print_warnings(rate_changes(run_dir.resumed, config))
        with LiveDisplay(console, every_steps=LINE_EVERY_STEPS) as display:

            def report(line: str) -> None:
                console.print(shown(line), markup=False, highlight=False)

            yield run_dir, Screen(show=StartLog(display.update).update, report=report, started_s=started_s)


@contextlib.contextmanager
def reported_run(config: Config, *, role: str, choose: Choice = unfinished_run) -> Iterator[RunDir]:
    """Takes the run's directory for this process and logs to it. `choose` decides what becomes of an earlier run in the
    directory.

    When the block ends in any way, run.json records how it ended, and the report is written. Raises RunLocked if
    another process holds the directory.
    """
    with (
        contextlib.ExitStack() as after,
        RunDir.create(config, choose=choose) as run_dir,
        log_to(run_dir.log_path(role, 0)),
    ):
        mark_begun()
        after.callback(_write_report, run_dir.path)  # after the block, so that run.json records how the run ended
        yield run_dir


def _write_report(path: Path) -> None:
    try:
        write_report(path)
    except Exception as error:  # an error in the report must not hide the outcome of the run
        logger.error("the report of %s was not written: %s: %s", path, type(error).__name__, error)
        logger.info("the report of %s was not written", path, exc_info=error)
