"""Watches a run from outside its processes: from its records, and from its buffer's status while the buffer answers."""

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from asyncrl.common.roles import Role, RunState
from asyncrl.coordinator.status import RunStatus
from asyncrl.errors import RunEnded, RunError
from asyncrl.learner.costs import costs
from asyncrl.learner.records import (
    LOST_STEPS,
    EvalRecord,
    GrowingLines,
    RunInfo,
    StepRecord,
    known_info,
    read_config,
    read_info,
    read_lines,
)
from asyncrl.learner.training_time import training_time
from asyncrl.views.live import LiveView
from asyncrl.views.run_view import RunView, run_view
from asyncrl.views.setting import setting_at

NO_ANSWER = "the buffer does not answer"
ENDING = "the run is ending"


def watch(
    run_dir: Path, *, ask: Callable[[], RunStatus | None], absence: Callable[[], str] = lambda: NO_ANSWER
) -> Iterator[LiveView]:
    """Yields the present view of the run at each `next`.

    `ask` returns the buffer's status, or None if the buffer does not answer; the view then has the records only.
    `absence` then returns the phase that is shown, unless the run has trained its last step or has reported that it
    ends: the phase is then `ENDING`.

    Raises RunError if the directory cannot be read, or if the buffer is that of another run, and ConfigError if the
    run's configuration is not accepted. Raises RunEnded if another run has taken the directory.
    """
    info, config, setting = read_info(run_dir), read_config(run_dir), setting_at(run_dir)
    started_s = datetime.fromisoformat(info.started).timestamp()
    steps = GrowingLines(run_dir / "steps.jsonl", StepRecord)
    evals = GrowingLines(run_dir / "evals.jsonl", EvalRecord)
    lost = GrowingLines(run_dir / LOST_STEPS, StepRecord)
    last: RunStatus | None = None
    while True:
        if (present := read_info(run_dir)).nonce != info.nonce:
            raise RunEnded(f"run {info.name} has ended, and another run of this name has started")
        status = ask()
        if status is not None and not _is_of(status, info):
            raise RunError(
                f"the run {status.run} on this cluster is not the run of {run_dir}: give the directory of the run that "
                f"goes on, or the address of the cluster on which {run_dir} runs"
            )
        last, records = status or last, steps.read()
        trained = records[-1].version_after if records else 0
        ends = trained >= config.learner.total_steps or (
            last is not None and last.state not in (RunState.STARTING, RunState.RUNNING)
        )
        yield LiveView(
            config=config,
            phase=presence(status) if status is not None else ENDING if ends else absence(),
            elapsed_s=max(0.0, time.time() - started_s),
            run=run_view(
                records,
                recent=True,
                evals=evals.read(),
                setting=setting,
                status=status,
                training=training_time(records, lost=lost.read(), wall_s=present.wall_s(time.time())),
            ),
        )


def view_since_start(run_dir: Path, status: RunStatus) -> RunView:
    """Returns the view of the run with this status since its start. It has no records if the run's directory is not
    here, or is that of another run."""
    info = known_info(run_dir)
    if info is None or not _is_of(status, info):
        return run_view([], recent=False, setting=setting_at(run_dir), status=status)
    steps = read_lines(run_dir / "steps.jsonl", StepRecord)
    lost = read_lines(run_dir / LOST_STEPS, StepRecord)
    return run_view(
        steps,
        recent=False,
        evals=read_lines(run_dir / "evals.jsonl", EvalRecord),
        setting=setting_at(run_dir),
        status=status,
        training=training_time(steps, lost=lost, wall_s=info.wall_s(time.time())),
        costs=costs(steps, lost=lost),
    )


def presence(status: RunStatus) -> str:
    """Returns the state of the run and its processes as text."""
    count, troubled = len(status.replicas), [view for view in status.replicas if view.trouble]
    parts = [status.state.value]
    if not any(deployment.role is Role.LEARNER for deployment in status.deployments):
        parts.append("no learner")
    parts.append(f"{count} {'replica' if count == 1 else 'replicas'}")
    parts += [f"{view.replica}: {view.trouble}" for view in troubled]
    return ", ".join(parts)


def _is_of(status: RunStatus, info: RunInfo) -> bool:
    """Returns False if the status names a learner that is not the process of this run.json."""
    learners = [each for each in status.deployments if each.role is Role.LEARNER]
    return all((learner.host, learner.pid) == (info.host, info.pid) for learner in learners)
