"""Settings for quick unit tests: fewer hypothesis examples, and excluded files that are not even imported."""

import re
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("quick", settings.get_profile("ci"), max_examples=20)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Returns True for a file whose `pytestmark` has a mark that `-m "not …"` excludes.

    Such a file need not be collected, and the libraries that it imports take seconds.
    """
    left_out = re.findall(r"not (\w+)", config.option.markexpr)
    if not left_out or collection_path.suffix != ".py":
        return None
    marks = re.search(r"^pytestmark = (.*)$", collection_path.read_text(), re.MULTILINE)
    return True if marks and any(f"mark.{name}" in marks[1] for name in left_out) else None
