"""Shows tests the processes of a scorer."""

import pytest

from asyncrl.environments.scoring import Scorer


def pids(scorer: Scorer) -> list[int]:
    """Returns the ids of the scoring processes that are alive."""
    children = [process._child for process in scorer._processes]
    return [child.process.pid for child in children if child is not None and child.alive()]


def replaced(caplog: pytest.LogCaptureFixture) -> int:
    """Returns how many scoring processes were replaced, as the log says."""
    return sum("a scoring process is replaced, because" in record.getMessage() for record in caplog.records)
