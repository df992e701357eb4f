"""Settings for quick unit tests: fewer hypothesis examples, and excluded files that are not even imported. Settings for
tests on a busy machine: Ray's workers get the same share of the CPU as all other processes. Settings for tests with
ranks that are processes: one process imports their libraries, and all ranks are forked from it. Rare garbage
collections, which by default take a quarter of the time of collecting the tests."""

import gc
import multiprocessing
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

gc.set_threshold(50_000)
# Ray's default is 15. Its workers would get less than a tenth of the CPU beside two busy programs on two cores.
os.environ.setdefault("RAY_worker_niceness", "0")

# A forkserver begins with the first test that needs it, and serves all later files of its pytest worker. So the list is
# the same for all files: a rank that is forked without these modules imports them itself, which takes eight seconds.
multiprocessing.set_forkserver_preload(["asyncrl.policy.worker", "asyncrl.value.worker"])

settings.register_profile("quick", settings.get_profile("ci"), max_examples=20)


SHARE_ENGINE = ("tests/integration/test_run_from_python.py", "tests/integration/test_vllm_engine.py")
"""Files that use the fixture `engine`. One pytest worker runs them, so that there is one engine and not two."""


FIRST = "tests/integration/test_mixture_run.py"
"""The whole run with the most processes. It begins with the suite, beside tests that start none. Beside the other whole
runs, which follow each other by name, Ray did not start within 90 s on two busy cores."""


class FileScheduling(LoadFileScheduling):
    """Gives each file to one pytest worker, and all files of `SHARE_ENGINE` to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return SHARE_ENGINE[0] if file in SHARE_ENGINE else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return FileScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.location[0] != FIRST)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Returns True for a file whose `pytestmark` has a mark that `-m "not …"` excludes.

    Such a file need not be collected, and the libraries that it imports take seconds.
    """
    left_out = re.findall(r"not (\w+)", config.option.markexpr)
    if not left_out or collection_path.suffix != ".py":
        return None
    marks = re.search(r"^pytestmark = (.*)$", collection_path.read_text(), re.MULTILINE)
    return True if marks and any(f"mark.{name}" in marks[1] for name in left_out) else None


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs in its own folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True, scope="module")
def ray_reads_its_mode_again() -> Iterator[None]:
    """Ray's C++ part keeps the mode that it has read first. `ray.init` makes it read the mode again only if the
    variable is unset. A file that sets it, and starts no Ray, would fail each later Ray of its pytest worker."""
    before = os.environ.get("RAY_AUTH_MODE")
    yield
    if before is None:
        os.environ.pop("RAY_AUTH_MODE", None)


@pytest.fixture(autouse=True, scope="module")
def no_process_group_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A process group of torch that a file leaves would fail each later file of its pytest worker that makes one."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
        warnings.warn(f"{request.node.name} has left a process group", stacklevel=1)
