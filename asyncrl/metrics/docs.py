"""`python -m asyncrl.metrics.docs [--check]` writes docs/metrics.md from the catalogue and the numbers of a step.

With `--check` it only checks that the page is up to date.
"""

import sys
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from asyncrl.metrics.catalogue import GROUPS, MAX_OPEN_VALUES
from asyncrl.metrics.numbers import GAUGES, NUMBERS, TRACKERS

PATH = Path(__file__).parents[2] / "docs" / "metrics.md"


def markdown() -> str:
    """Returns the text of the page. `metrics.md.j2` has its words."""
    templates = Environment(loader=PackageLoader("asyncrl.metrics", ""), undefined=StrictUndefined)
    return templates.get_template("metrics.md.j2").render(
        groups=GROUPS, max_open_values=MAX_OPEN_VALUES, numbers=NUMBERS, trackers=TRACKERS, gauges=GAUGES
    )


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, or 1 when `--check` finds the page out of date."""
    page = markdown()
    if arguments == ["--check"]:
        if PATH.exists() and PATH.read_text(encoding="utf-8") == page:
            return 0
        print(f"{PATH} is out of date: run `python -m asyncrl.metrics.docs`", file=sys.stderr)
        return 1
    PATH.parent.mkdir(parents=True, exist_ok=True)
    PATH.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
