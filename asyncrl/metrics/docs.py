"""`python -m asyncrl.metrics.docs [--check]` writes docs/metrics.md from the catalogue and the numbers of a step.

With `--check` it only checks that the page is up to date.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.docs import write_page
from asyncrl.config.text_templates import TEMPLATES
from asyncrl.metrics.catalogue import GROUPS, MAX_OPEN_VALUES
from asyncrl.metrics.numbers import GAUGES, NUMBERS, TRACKERS

PATH = Path(__file__).parents[2] / "docs" / "metrics.md"


def markdown() -> str:
    """Returns the text of the page, from the template `metrics.md.j2`."""
    return TEMPLATES.get_template("metrics/metrics.md.j2").render(
        groups=GROUPS, max_open_values=MAX_OPEN_VALUES, numbers=NUMBERS, trackers=TRACKERS, gauges=GAUGES
    )


def main(arguments: Sequence[str]) -> int:
    return write_page(PATH, markdown(), arguments, module="asyncrl.metrics.docs")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
