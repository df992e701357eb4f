"""Shows a run on its terminal: the live view, and permanent lines above it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.config.schema import Config
from asyncrl.views.live import LiveView, starting_view


@dataclass(frozen=True, kw_only=True)
class Screen:
    """`show` updates the live view, `report` prints a permanent line.

    `started_s` is the start of the process on the monotonic clock.
    """

    show: Callable[[LiveView], None]
    report: Callable[[str], None]
    started_s: float

    @property
    def elapsed_s(self) -> float:
        """Time since the start of the process, seconds."""
        return time.monotonic() - self.started_s

    def starting(self, config: Config, phase: str) -> None:
        """Shows a phase of the start at once, because the next call may block the event loop for long."""
        self.show(starting_view(config, phase=phase, elapsed_s=self.elapsed_s))
