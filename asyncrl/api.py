"""`asyncrl.run`: trains from Python, in a script or in a notebook, as `asyncrl up` does from a terminal.

The run gets a thread and an event loop of its own, because the thread of a notebook already runs an event loop. The
caller's thread waits for the run's records and makes the callbacks. So a slow callback does not delay the training, and
a callback can draw where a notebook expects it.
"""

import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from asyncrl.cli.preflight import checked_config, prepare
from asyncrl.cli.start import join_admitted, run_both, shown_run
from asyncrl.cli.terminal import print_warnings
from asyncrl.common.roles import RunState
from asyncrl.config.load import Layer
from asyncrl.config.schema import Config
from asyncrl.deployment.known_runs import newest_weights
from asyncrl.deployment.launch import attended_run, sigterm_interrupts
from asyncrl.deployment.local_clusters import use_ray_token
from asyncrl.deployment.resuming import Choice, no_checkpoint, unfinished_run
from asyncrl.errors import RunError
from asyncrl.learner.records import EvalRecord, RecordSink, StepRecord, Summary
from asyncrl.views.console import ShownConsole


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run: its directory, with `report.html`, and its numbers.

    `steps` has one record for each step that this call of `run` has trained or skipped, and `evals` one for each of its
    held-out evaluations: those before a resumed step are in the directory. `weights` is the folder of the newest saved
    weights, which vLLM and transformers load; None if the run saved none.
    """

    directory: Path
    summary: Summary
    steps: list[StepRecord]
    evals: list[EvalRecord]
    weights: Path | None


def run(
    config: Config | Layer,
    overrides: Mapping[str, object] | None = None,
    *,
    on_step: Callable[[StepRecord], object] | None = None,
    on_eval: Callable[[EvalRecord], object] | None = None,
    progress: bool = True,
    fresh: bool = False,
) -> RunResult:
    """Trains a run on this machine, or on the Ray cluster at `ray.address`, and returns its result.

    `config` is a `Config`, the path of a YAML file, the name of a recipe, or a mapping of sections. `overrides` are
    merged over it; their keys may be dotted: `{"learner.total_steps": 20}`. `on_step` is called with the record of each
    step and `on_eval` with the record of each held-out evaluation, in the caller's thread. `progress` prints the run's
    progress. A run of this name that did not finish is resumed from its newest checkpoint, unless `fresh` is True.

    Raises the error that ends the run: ConfigError and DatasetError before anything has started, RunError if this
    process already uses Ray, and others of `asyncrl.errors` later. Also raises RunError if another process ended the
    run before its first step, and, with `restart_mends`, if the run has ended in order to start again, because a
    Kubernetes pod of the learner was about to end (`asyncrl.deployment.pod_end`). If a callback raises, or on Ctrl-C
    (in a notebook: "interrupt"), the run first ends cleanly and saves its weights; then the error is raised. A second
    Ctrl-C is raised at once, while the run ends in the background. In the main thread, SIGTERM without a handler counts
    as Ctrl-C.

    >>> import asyncrl
    >>> result = asyncrl.run("quickstart", {"learner.total_steps": 20})
    >>> [step.reward_mean for step in result.steps]
    """
    layer = config.model_dump(mode="json") if isinstance(config, Config) else config
    checked, warnings = checked_config([layer, overrides or {}], [])
    print_warnings(warnings)
    if "ray" not in sys.modules:  # else Ray has read the environment already, and turns tokens on by itself
        use_ray_token(own=checked.ray.address is None)
    prompts = prepare(checked)
    choose = _enter_ray(checked, no_checkpoint if fresh else unfinished_run)
    calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
    records = _CallbackRecords(calls, on_step=on_step, on_eval=on_eval)
    console = ShownConsole(quiet=not progress)
    showing = shown_run(checked, role="up", console=console, started_s=time.monotonic(), choose=choose)
    with sigterm_interrupts(), showing as (run_dir, screen):
        training = partial(run_both, checked, run_dir=run_dir, screen=replace(screen, records=records), prompts=prompts)
        summary, interruption = attended_run(training, calls=calls, run_dir=run_dir)
    if interruption is not None:
        raise interruption
    if run_dir.end is RunState.STARTING:
        error = RunError(
            "a pod of the learner is about to end, and asked the run to save its weights and to start again: call "
            "asyncrl.run again, which resumes the run from its newest checkpoint"
        )
        error.restart_mends = True
        raise error
    if summary is None:
        raise RunError(f"the run trained no step: see the logs in {run_dir.path / 'logs'} for the cause")
    weights = newest_weights(run_dir.path)
    return RunResult(directory=run_dir.path, summary=summary, steps=records.steps, evals=records.evals, weights=weights)


class _CallbackRecords(RecordSink):
    """Keeps the records for the result of `run`, and puts a call of the user's callback for each record into the queue
    `calls`. The caller's thread takes these calls out and makes them."""

    def __init__(
        self,
        calls: "SimpleQueue[Callable[[], object] | None]",
        *,
        on_step: Callable[[StepRecord], object] | None,
        on_eval: Callable[[EvalRecord], object] | None,
    ) -> None:
        self.steps: list[StepRecord] = []
        self.evals: list[EvalRecord] = []
        self._calls, self._on_step, self._on_eval = calls, on_step, on_eval

    def append_step(self, record: StepRecord) -> None:
        self.steps.append(record)
        if self._on_step is not None:
            self._calls.put(partial(self._on_step, record))

    def append_eval(self, record: EvalRecord) -> None:
        self.evals.append(record)
        if self._on_eval is not None:
            self._calls.put(partial(self._on_eval, record))


def _enter_ray(config: Config, choose: Choice) -> Choice:
    """Joins the cluster at `ray.address`, if it is set. Returns the function that chooses the checkpoint from which the
    run is resumed: `choose`, or the function that `join_admitted` returns in its place.

    Raises RunError if this process already uses Ray, and the errors of `join_admitted`: no cluster answers, or a run of
    this name on the cluster refuses this process as its learner.
    """
    import ray

    if ray.is_initialized():
        raise RunError(
            "cannot start a run, because this process already uses Ray: an earlier run is still ending, or your own "
            "code has started Ray; call ray.shutdown() first"
        )
    if config.ray.address is None:
        return choose
    with ThreadPoolExecutor(1) as pool:  # `join_admitted` needs an event loop, and the caller's thread may run one
        return pool.submit(join_admitted, config.ray.address, config, choose=choose).result()
