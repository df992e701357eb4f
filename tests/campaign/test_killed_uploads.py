"""A real run is killed at random moments while it uploads to S3, each time with its machine: `asyncrl resume` goes on
from the mirror alone, in an empty folder, and the audit passes.

Each life trains some steps beyond the checkpoint with which it began, so it shows that the resume before it went on.
Then all of its processes get SIGKILL within one of its next uploads, before or after the server has stored it.
`KILLS=20` in the environment makes more kills.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from s3_server import BUCKET, Call, Refusal, S3Server
from small_run import SETTINGS, made_model, model_at
from two_machines import wait_for

from asyncrl.checkpoints.directory import CHECKPOINTS, complete_steps
from asyncrl.deployment.mirror import Store, complete_names, step_of_name

NAME = "killed"
URL = f"s3://{BUCKET}/{NAME}"
KILLS = int(os.environ.get("KILLS", "3"))
STEPS = 3
"""Steps of each life before its kill, beyond those of its first checkpoint."""
MOST_UPLOADS = 120
"""A kill comes within one of so many next uploads. With 30, six lives in a row were killed before a checkpoint was
complete in the mirror, which stayed at step 4."""
TRAINS_S, ENDS_S = 400.0, 200.0

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(7200)]


class Life:
    """A command of the run on a machine of its own: an empty folder, and the processes of the command."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder, self.run = folder, folder / NAME
        folder.mkdir()
        self.log = folder.with_suffix(".log")
        self.family: set[psutil.Process] = set()
        command = [sys.executable, "-m", "asyncrl", *words, f"run.dir={folder}"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with self.log.open("wb") as file:
            self.process = psutil.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, cwd=folder, env=environment, start_new_session=True
            )

    def __enter__(self) -> "Life":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def steps(self) -> int:
        path = self.run / "steps.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def resumed(self) -> list[int]:
        """Returns the step with which each life of the run after the first one has begun."""
        with contextlib.suppress(OSError, ValueError):  # not written yet
            return [each["step"] for each in json.loads((self.run / "run.json").read_bytes())["resumed"]]
        return []

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Polls until the condition holds. The command must live meanwhile."""

        def holds() -> bool:
            assert self.process.poll() is None, f"the command has ended:\n{self.log.read_text()[-4000:]}"
            return bool(condition())

        wait_for(holds, TRAINS_S, f"{what} ({self.log})")

    def train(self, *, lives: int) -> None:
        """Waits until this life, before which there were `lives`, has begun and has trained `STEPS` steps."""
        self.wait_for(lambda: self.run.exists() and len(self.resumed()) == lives, "the start")
        until = self.steps() + STEPS  # records after the checkpoint are set aside first, so the number may fall
        self.wait_for(lambda: self.steps() >= until, f"step {until}")

    def kill(self) -> None:
        """Kills all processes, beginning with the one that would start the others again."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.family |= {self.process, *self.process.children(recursive=True)}
        for process in sorted(self.family, key=lambda each: each != self.process):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _, left = psutil.wait_procs(self.family, timeout=60)
        assert not left


class Kill:
    """Kills a life within the upload of this number from now on: after the server has stored it, or before."""

    def __init__(self, s3: S3Server, life: Life, number: int, *, stored: bool) -> None:
        self.life, self.stored = life, stored
        self.call: Call | None = None
        self._left, self._lock, self._done = number, threading.Lock(), threading.Event()
        s3.before, s3.after = self._before, self._after

    def wait(self) -> str:
        """Waits for the kill. Returns the upload in words."""
        assert self._done.wait(TRAINS_S), self.life.log.read_text()[-4000:]
        assert self.call is not None
        return f"PUT {self.call.path}, {'after' if self.stored else 'before'} it was stored"

    def _now(self, call: Call) -> bool:
        with self._lock:
            self._left -= call.writes
            if self._left or self.call is not None or not call.writes:
                return False
            self.call = call
        self.life.kill()
        self._done.set()
        return True

    def _before(self, call: Call) -> Refusal | None:
        return Refusal(500, "InternalError") if not self.stored and self._now(call) else None

    def _after(self, call: Call) -> None:
        if self.stored:
            self._now(call)


def newest_in_mirror() -> int:
    return max(map(step_of_name, complete_names(Store(URL).sizes())), default=0)


def audit(run: Path | str, *, folder: Path) -> str:
    """Returns what the audit prints. It must pass."""
    words = [sys.executable, "-m", "asyncrl", "audit", str(run)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=ENDS_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_goes_on_from_s3_alone_after_each_kill(s3: S3Server, tmp_path: Path) -> None:
    of_run = [*SETTINGS, *model_at(made_model(tmp_path / "speller")), f"run.name={NAME}", f"run.mirror={URL}"]
    words, newest, chosen = ["up", "-c", "quickstart", *of_run, "checkpoint.every_steps=2"], 0, random.Random(7)
    for number in range(KILLS):
        began_s = time.monotonic()
        with Life(tmp_path / f"life-{number}", *words) as life:
            life.train(lives=number)
            assert life.resumed()[number - 1 :] == [newest][:number], "it began with the mirror's newest checkpoint"
            trained_s = time.monotonic() - began_s
            life.wait_for(newest_in_mirror, "a checkpoint in the mirror, without which a run cannot be resumed")
            kill = Kill(s3, life, chosen.randint(1, MOST_UPLOADS), stored=chosen.random() < 0.5)
            upload = kill.wait()
            s3.before, s3.after = lambda call: None, lambda call: None
        audit(life.run, folder=tmp_path)
        print(
            f"life {number + 1}: began with step {newest} and had trained {STEPS} more after {trained_s:.0f} s; killed "
            f"at step {life.steps()} within {upload}; newest checkpoint in its folder "
            f"{max(complete_steps(life.run / CHECKPOINTS))}, in the mirror {newest_in_mirror()}; its audit passed",
            flush=True,
        )
        newest = newest_in_mirror()
        shutil.rmtree(life.folder)
        words = ["resume", URL]
    with Life(tmp_path / f"life-{KILLS}", *words) as life:
        life.train(lives=KILLS)
        life.process.send_signal(signal.SIGINT)
        assert life.process.wait(ENDS_S) == 0, life.log.read_text()[-4000:]
    assert len(life.resumed()) == KILLS
    assert complete_steps(life.run / CHECKPOINTS)[-1] == life.steps() == newest_in_mirror()
    print(f"{KILLS} kills, {life.steps()} steps\n{audit(life.run, folder=tmp_path)}", flush=True)
    audit(URL, folder=tmp_path)
