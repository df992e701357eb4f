"""What makes the unit tests quick: fewer examples, and files that are left out without being imported. What makes the
tests with a Ray of their own end on a busy machine: workers with the niceness of all other processes."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import settings

# Ray adds 15: beside two busy programs on two cores its workers would get less than a tenth of the CPU.
os.environ.setdefault("RAY_worker_niceness", "0")

settings.register_profile("quick", settings.get_profile("ci"), max_examples=20)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that is marked as a whole with what `-m "not …"` leaves out: libraries that it imports cost seconds."""
    left_out = re.findall(r"not (\w+)", config.option.markexpr)
    if not left_out or collection_path.suffix != ".py":
        return None
    marks = re.search(r"^pytestmark = (.*)$", collection_path.read_text(), re.MULTILINE)
    return True if marks and any(f"mark.{name}" in marks[1] for name in left_out) else None
