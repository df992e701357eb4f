"""Shows a run on its terminal: the live view, from its start to its end, and permanent lines above it."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from asyncrl.common.roles import TRAINING
from asyncrl.config.schema import Config
from asyncrl.deployment.learner_log import LearnerLog
from asyncrl.learner.records import RecordSink
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.views.live import LiveView
from asyncrl.views.run_view import RunView, run_view
from asyncrl.views.setting import setting_of

logger = logging.getLogger(__name__)

SHOW_EVERY_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Screen:
    """`show` updates the live view, and `report` prints a permanent line. The learner passes each record of the run to
    the sink `records`.

    `started_s` is the start of the command, or of the call of `asyncrl.run`, on the monotonic clock.
    """

    show: Callable[[LiveView], None]
    report: Callable[[str], None]
    started_s: float
    records: RecordSink = field(default_factory=RecordSink)

    @property
    def elapsed_s(self) -> float:
        """Time since `started_s`, seconds."""
        return time.monotonic() - self.started_s

    def starting(self, config: Config, phase: str) -> None:
        """Shows a phase of the start at once, because the next call may block the event loop for long."""
        self.show(LiveView(config=config, phase=phase, elapsed_s=self.elapsed_s))


class StartLog:
    """Passes views on to `show`. After the first step that this process trains, logs once how long each phase before it
    took.

    A phase lasts until the next phase is seen. The last phase is the wait for the first step.
    """

    def __init__(self, show: Callable[[LiveView], None]) -> None:
        self._show = show
        self._begins: list[tuple[str, float]] = [("importing the command", 0.0)]
        self._steps_before: int | None = None
        """Steps that the run had trained when this process began to train; None before that."""
        self._logged = False

    def update(self, view: LiveView) -> None:
        self._show(view)
        if self._logged:
            return
        if view.phase != self._begins[-1][0]:
            self._begins.append((view.phase, view.elapsed_s))
        if self._steps_before is None:
            self._steps_before = view.run.step if view.phase == TRAINING else None
        elif view.run.step > self._steps_before:
            self._logged = True
            ends = [*self._begins, ("", view.elapsed_s)]
            parts = [f"{phase} {end_s - begin_s:.1f} s" for (phase, begin_s), (_, end_s) in pairwise(ends)]
            logger.info("the first step was trained %.1f s after the start: %s", view.elapsed_s, ", ".join(parts))


@dataclass(kw_only=True)
class LearnerDisplay:
    """`run` shows the records every `SHOW_EVERY_S` until it is cancelled, on the screen and as health notes in the
    `metrics`.

    `cores` returns the number of cores of the run's machines. `phase` returns the learner's current activity in a few
    words, `failures` the number of failed groups by reason. `hidden_tags` are tags, such as `<think>`, that answers
    never have, although a reward may look for them.
    """

    config: Config
    screen: Screen
    log: LearnerLog
    cores: Callable[[], int]
    metrics: LearnerMetrics
    phase: Callable[[], str] = lambda: "starting the buffer"
    failures: Callable[[], Mapping[str, int]] = dict
    hidden_tags: tuple[str, ...] = ()
    _seen: tuple[object, ...] = field(default=(), init=False)
    """The numbers of records and the settings from which the last view was made."""
    _run: RunView = field(default_factory=RunView, init=False)

    def enter(self, phase: str) -> None:
        """Sets the phase and shows it at once, because the next call may block the event loop for long."""
        self.phase = lambda: phase
        self.show()

    def show(self) -> None:
        self._update()
        run = self._until_now()
        self.metrics.health(note.concern for note in run.notes)
        if run.training is not None:
            self.metrics.effective_training_time(run.training.ratio)
        self.screen.show(LiveView(config=self.config, phase=self.phase(), elapsed_s=self.screen.elapsed_s, run=run))

    def _until_now(self) -> RunView:
        """Returns the view with the wall time until now, so that the effective training time ratio falls while no step
        ends."""
        if (training := self._run.training) is None:
            return self._run
        return replace(self._run, training=replace(training, wall_s=self.log.wall_s()))

    def _update(self) -> None:
        """Makes the view again, but only if something is new: this reads all records, and blocks the event loop of the
        training meanwhile."""
        steps, evals, cores, failures = self.log.steps, self.log.evals, self.cores(), self.failures()
        seen = (len(steps), len(evals), cores, tuple(failures.items()), self.hidden_tags)
        if seen != self._seen:
            setting = setting_of(self.config, cores=cores, hidden_tags=self.hidden_tags)
            self._run = run_view(
                steps, recent=True, evals=evals, setting=setting, failures=failures, training=self.log.training()
            )
            self._seen = seen

    async def run(self) -> None:
        while True:
            self.show()
            await asyncio.sleep(SHOW_EVERY_S)
