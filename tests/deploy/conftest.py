"""Fixtures with the paths of the repository and of the deployment files."""

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy"


@pytest.fixture
def deploy() -> Path:
    return DEPLOY


@pytest.fixture
def repository() -> Path:
    return REPOSITORY


@pytest.fixture
def importable_configs(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a test import the modules of configs/, as /tasks in the image."""
    monkeypatch.syspath_prepend(repository / "configs")
