"""`python -m asyncrl.views.health_docs [--check]` writes docs/health.md from the rules of the health notes.

With `--check` it only checks that the page is up to date.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.docs import write_page
from asyncrl.config.text_templates import TEMPLATES
from asyncrl.views.evidence import BLOCK_STEPS, RECENT_STEPS, TREND_STEPS
from asyncrl.views.health import RULES

PATH = Path(__file__).parents[2] / "docs" / "health.md"


def markdown() -> str:
    """Returns the text of the page, from the template `health.md.j2`."""
    return TEMPLATES.get_template("views/health.md.j2").render(
        rules=RULES, recent=RECENT_STEPS, block=BLOCK_STEPS, trend=TREND_STEPS
    )


def main(arguments: Sequence[str]) -> int:
    return write_page(PATH, markdown(), arguments, module="asyncrl.views.health_docs")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
