"""A learner is killed at random moments while it sends to its mirror, and each time its machine is lost: the run goes
on from the mirror alone, and no step before its checkpoint is lost or there twice.

The process trains nothing, so its kills are cheap: `test_killed_uploads.py` kills a real run. `KILLS=3` in the
environment makes fewer kills.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from s3_server import BUCKET

from asyncrl.checkpoints.directory import complete_steps, folder_of, verified
from asyncrl.deployment.fetching import fetched
from asyncrl.deployment.mirror import Store, complete_names, step_of_name
from asyncrl.learner.records import StepRecord, read_lines

PROCESS = Path(__file__).with_name("mirroring_run.py")
KILLS = int(os.environ.get("KILLS", "20"))
LONGEST_S = 3.0
"""Longest life of a process after its mirror has begun, seconds."""

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1800)]


def newest_in(url: str) -> int:
    """Returns the step of the newest complete checkpoint of the mirror; 0 without one."""
    return max(map(step_of_name, complete_names(Store(url).sizes())), default=0)


def kill_one(folder: Path, url: str, *, after_s: float = 0.0, beyond: int = -1) -> None:
    """Starts the process, and kills it `after_s` seconds after its mirror has begun and has a checkpoint beyond this
    step."""
    command = [sys.executable, str(PROCESS), str(folder), url]
    search = os.pathsep.join(sys.path)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": search}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        while beyond >= 0 and newest_in(url) <= beyond:
            assert process.poll() is None, "the process has died by itself"
            time.sleep(0.1)  # polls the storage
        threading.Timer(after_s, process.kill).start()
        assert process.wait(120) == -signal.SIGKILL


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/mirror"
    request.getfixturevalue("s3")
    return f"s3://{BUCKET}/kills"


def test_a_run_goes_on_from_its_mirror_alone_after_each_kill(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = random.Random(7)
    newest = 0
    (tmp_path / "machine-0").mkdir()
    monkeypatch.chdir(tmp_path / "machine-0")
    kill_one(Path("runs"), url, beyond=0)
    for number in range(1, KILLS + 1):
        machine = tmp_path / f"machine-{number}"
        machine.mkdir()
        monkeypatch.chdir(machine)
        shutil.rmtree(tmp_path / f"machine-{number - 1}")
        directory = fetched(url, [], step=None, report=print)
        [step] = complete_steps(directory / "checkpoints")
        assert step >= newest, "a kill loses no checkpoint that the mirror had"
        newest = step
        manifest = verified(folder_of(directory / "checkpoints", step))
        assert manifest.version.step == step
        steps = [record.step for record in read_lines(directory / "steps.jsonl", StepRecord)]
        assert steps[:step] == list(range(step))
        assert {path.name for path in (directory / "samples").iterdir()} >= {
            f"step-{each}.jsonl" for each in range(step)
        }
        kill_one(Path("runs"), url, after_s=chosen.uniform(0, LONGEST_S))
    kill_one(Path("runs"), url, beyond=newest)  # however slow the storage is, the run goes on
    left = complete_names(Store(url).sizes())
    assert 1 <= len(left) <= 6, left
