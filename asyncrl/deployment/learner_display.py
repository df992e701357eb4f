"""Shows a learner on the screen: its present phase and its records."""

import asyncio
from collections.abc import Callable, Mapping

from asyncrl.config.schema import Config
from asyncrl.deployment.learner_log import LearnerLog
from asyncrl.deployment.screen import Screen
from asyncrl.views.live_from_records import live_view
from asyncrl.views.run_facts import setting_of

SHOW_EVERY_S = 0.5


class LearnerDisplay:
    """`run` shows the records every `SHOW_EVERY_S` until it is cancelled.

    `phase` returns the learner's current activity in a few words. `cores` returns the number of cores of the run's
    machines, `failures` the number of failed groups by reason.
    """

    def __init__(
        self,
        config: Config,
        *,
        screen: Screen,
        log: LearnerLog,
        cores: Callable[[], int],
        failures: Callable[[], Mapping[str, int]],
    ) -> None:
        self._config = config
        self._screen = screen
        self._log = log
        self._cores = cores
        self._failures = failures
        self.phase: Callable[[], str] = lambda: "starting the buffer"

    def enter(self, phase: str) -> None:
        """Sets the phase and shows it at once, because the next call may block the event loop for long."""
        self.phase = lambda: phase
        self.show()

    def show(self) -> None:
        self._screen.show(
            live_view(
                self._config,
                phase=self.phase(),
                elapsed_s=self._screen.elapsed_s,
                steps=self._log.steps,
                evals=self._log.evals,
                setting=setting_of(self._config, cores=self._cores()),
                failures=self._failures(),
            )
        )

    async def run(self) -> None:
        while True:
            self.show()
            await asyncio.sleep(SHOW_EVERY_S)
