"""Shows a learner on the screen: its present phase and its records."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from asyncrl.config.schema import Config
from asyncrl.deployment.learner_log import LearnerLog
from asyncrl.deployment.screen import Screen
from asyncrl.views.live_from_records import live_view
from asyncrl.views.run_facts import setting_of

SHOW_EVERY_S = 0.5


@dataclass(kw_only=True)
class LearnerDisplay:
    """`run` shows the records every `SHOW_EVERY_S` until it is cancelled.

    `cores` returns the number of cores of the run's machines. `phase` returns the learner's current activity in a few
    words, `failures` the number of failed groups by reason.
    """

    config: Config
    screen: Screen
    log: LearnerLog
    cores: Callable[[], int]
    phase: Callable[[], str] = lambda: "starting the buffer"
    failures: Callable[[], Mapping[str, int]] = dict

    def enter(self, phase: str) -> None:
        """Sets the phase and shows it at once, because the next call may block the event loop for long."""
        self.phase = lambda: phase
        self.show()

    def show(self) -> None:
        self.screen.show(
            live_view(
                self.config,
                phase=self.phase(),
                elapsed_s=self.screen.elapsed_s,
                steps=self.log.steps,
                evals=self.log.evals,
                setting=setting_of(self.config, cores=self.cores()),
                failures=self.failures(),
            )
        )

    async def run(self) -> None:
        while True:
            self.show()
            await asyncio.sleep(SHOW_EVERY_S)
