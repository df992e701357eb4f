"""Two of the sinks that get a learner's records: a log in memory, for the live view and the summary, and the experiment
trackers.

The other sinks are the run's directory (`RunDir`) and the callbacks of `asyncrl.run` (`Screen.records`).
"""

import time
from collections.abc import Callable, Sequence

from asyncrl.common.device_time import Pool
from asyncrl.config.load import flat_config
from asyncrl.config.schema import HELDOUT, Config
from asyncrl.coordinator.status import GeneratorTotals
from asyncrl.deployment.resuming import last_set_aside
from asyncrl.deployment.run_dir import RunDir
from asyncrl.learner.costs import costs, earlier_time
from asyncrl.learner.records import (
    LOST_STEPS,
    EvalRecord,
    RecordSink,
    RunTotals,
    SampleRecord,
    StepRecord,
    Summary,
    best_first,
    build_summary,
    read_lines,
)
from asyncrl.learner.training_time import TrainingTime, training_time
from asyncrl.metrics.trackers import Going, Trackers
from asyncrl.views.run_view import run_view
from asyncrl.views.setting import setting_at

SAMPLES_TRACKED_EVERY = 10
"""Steps between two tables of samples for trackers. Trackers keep every table, and samples/ has the samples of every
step anyway."""
TRACKED_COLUMNS = ("group", "prompt", "completion", "answer", "reward", "advantage", "staleness")


class LearnerLog(RecordSink):
    """Keeps the records of a run in memory. If the run was resumed, they begin with its earlier records."""

    def __init__(self, config: Config, run_dir: RunDir) -> None:
        self._path = run_dir.path
        self._staleness_limit = config.staleness.max_versions
        self._keep_best, self._best_eval = config.checkpoint.keep_best, config.checkpoint.best_eval
        self._restarts = len(run_dir.restarts)
        self._wall_s = run_dir.wall_s
        resumed = run_dir.resumed is not None
        self.steps = read_lines(run_dir.path / "steps.jsonl", StepRecord) if resumed else []
        self._lost = read_lines(run_dir.path / LOST_STEPS, StepRecord) if resumed else []
        self.evals = read_lines(run_dir.path / "evals.jsonl", EvalRecord) if resumed else []
        self.before = self.steps[-1] if self.steps else None
        """The last record before the run was resumed; None in a new run."""
        self.earlier_time = earlier_time(self.steps, self._lost)
        """The device-seconds before the run was resumed; None if they are not known."""

    @property
    def generators(self) -> GeneratorTotals:
        """The totals of the generators before the run was resumed, as far as its records have them."""
        device_time = tuple(time for time in self.earlier_time or () if time.pool is Pool.GENERATORS)
        if (before := self.before) is None:
            return GeneratorTotals(device_time=device_time)
        return GeneratorTotals(
            samples=before.generated_samples,
            weight_updates=before.weight_updates,
            state_seconds=before.generator_state_s,
            device_time=device_time,
        )

    def append_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def append_eval(self, record: EvalRecord) -> None:
        self.evals.append(record)

    @property
    def trained_steps(self) -> int:
        return self.steps[-1].version_after if self.steps else 0

    def wall_s(self) -> float:
        """Returns the time since the first start of the run, seconds."""
        return self._wall_s(time.time())

    def training(self) -> TrainingTime:
        """Returns the wall time of the run until now, and its parts."""
        return training_time(self.steps, lost=self._lost, wall_s=self.wall_s())

    def best_steps(self, steps: Sequence[int], *, running: Callable[[], int | None]) -> set[int]:
        """Returns the `checkpoint.keep_best` steps among `steps` with the best evaluations, and the step whose
        evaluation runs now, because it may be one of the best. `running` returns this step; None if no evaluation runs.
        Returns no step if `checkpoint.keep_best` is 0."""
        if not self._keep_best:
            return set()
        best = {record.step for record in best_first(self.evals, steps, name=self._best_eval)[: self._keep_best]}
        return best if (step := running()) is None else best | {step}

    def summary(self, totals: RunTotals) -> Summary | None:
        """Returns the summary of the run; None if no step was trained."""
        if not any(record.trained for record in self.steps):
            return None
        setting, failed = setting_at(self._path), totals.groups_failed
        view = run_view(self.steps, recent=False, evals=self.evals, setting=setting, failures=failed)
        return build_summary(
            self.steps,
            self.evals,
            totals,
            staleness_limit=self._staleness_limit,
            restarts=self._restarts,
            lost=self._lost,
            notes=view.notes,
            effective_training_time_ratio=self.training().ratio,
            costs=costs(self.steps, lost=self._lost),
        )


class TrackedRecords(RecordSink):
    """Sends the numbers of the records, and tables of samples (`SAMPLES_TRACKED_EVERY`), to the experiment trackers,
    which `new_trackers` makes. `before` is the last record
    before the run was resumed. `close` ends the trackers, which may take seconds."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        *,
        before: StepRecord | None,
        new_trackers: Callable[..., Trackers] = Trackers,
    ) -> None:
        self._last = before
        self._trackers = new_trackers(
            config.metrics.trackers,
            project=config.metrics.project,
            run=config.run.name,
            folder=run_dir.path,
            settings=tracked_settings(config),
            going=going_on(run_dir),
        )
        self.close = self._trackers.close

    def append_step(self, record: StepRecord) -> None:
        last, self._last = self._last, record
        self._trackers.log(record.version_after, record.numbers(last))

    def append_eval(self, record: EvalRecord) -> None:
        prefix = "reward/heldout" if record.name == HELDOUT else f"reward/heldout_{record.name}"
        numbers: dict[str, float] = {f"{prefix}_version": record.version}
        numbers |= {f"{prefix}_{name}": value for name, value in record.numbers().items()}
        # Trackers refuse a step lower than an earlier one, and the run may have trained more steps meanwhile.
        trained_steps = self._last.version_after if self._last else 0
        self._trackers.log(max(record.version, trained_steps), numbers)

    def write_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        if step % SAMPLES_TRACKED_EVERY == 0:
            cells = [
                [s.group, s.prompt, s.completion, s.answer, s.reward, s.advantage, s.staleness_versions]
                for s in samples
            ]
            self._trackers.log_samples(step, TRACKED_COLUMNS, cells)


def going_on(run_dir: RunDir) -> Going | None:
    """Returns at which step and incarnation a resumed run continues, for the trackers; None for a new run."""
    if run_dir.resumed is None:
        return None
    return Going(run_dir.resumed.step, run_dir.lineage.incarnation, went_back=last_set_aside(run_dir.checkpoints))


def tracked_settings(config: Config) -> dict[str, str | int | float]:
    """Returns the configuration in the form that trackers accept: lists and unset values become text."""
    flat = flat_config(config)
    return {key: value if isinstance(value, str | int | float) else str(value) for key, value in flat.items()}
