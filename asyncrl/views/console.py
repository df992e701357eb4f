"""The console on which views and tables are shown in a terminal."""

import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from asyncrl.shown_text import shown

UNLIMITED = 10_000
"""Number of characters on a line that no table needs."""


class ShownConsole(Console):
    """A console of rich without markup. All text of a view passes through `shown`, which hides the run's secrets and
    escapes control characters.

    The text may come from a model, a run directory or a configuration. The console's own control codes, such as those
    that move the cursor, stay.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields the segments of a renderable, with their text as `shown` returns it. Rich calls this method for each
        part of a view before it lays the part out."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=shown(segment.text))


def console_for_tables() -> ShownConsole:
    """Returns a console whose lines are as long as a table needs if the output is a file or a pipe, unless the
    environment sets COLUMNS."""
    console = ShownConsole()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = UNLIMITED
    return console
