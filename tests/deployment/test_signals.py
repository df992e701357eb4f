"""Signals to a separate process: SIGHUP asks for a clean end like SIGTERM, and a second SIGINT ends it at once."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from asyncrl.cli import down
from asyncrl.cli.main import app
from asyncrl.deployment import cluster
from asyncrl.deployment.known_runs import process_of
from asyncrl.errors import PREEMPTED, SAME_SIGNAL_S, RunError

pytestmark = pytest.mark.slow

RUN = """
import asyncio, signal, sys
from functools import partial
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from made_up_run import make_step
from rich.console import Console
from asyncrl.cli.terminal import outlive_terminal, show_cursor
from asyncrl.config.schema import Config
from asyncrl.cli.start import reported_run
from asyncrl.deployment.launch import asked_to_end, ended_at_once, run_until_done
from asyncrl.views.live import LiveDisplay, LiveView
outlive_terminal()
closes = sys.argv[2] == "closes"
config = Config.model_validate({"run": {"name": "quick", "dir": sys.argv[1]}})
with reported_run(config, role="up") as run, LiveDisplay(Console(), every_steps=1) as display:
    view = LiveView(config=config, phase="training", elapsed_s=0)
    display.update(view)

    async def main(stop):
        run.append_step(make_step(0))
        print("ready", flush=True)
        while not (stop.is_set() and closes):
            print("closing" if stop.is_set() else "training", flush=True)
            await asyncio.sleep(0.05)
        display.update(view)
        print("a line for the terminal", flush=True)
        run.stopped("after step 1 of 9")

    run_until_done(
        main, asked=partial(asked_to_end, run, 60.0), at_once=[show_cursor, partial(ended_at_once, run)]
    )
"""


class Started:
    """A process with its own terminal. The constructor returns when the process is ready."""

    def __init__(self, folder: Path, *, closes: bool, ignored: tuple[signal.Signals, ...] = ()) -> None:
        self.path = folder / "quick"
        views = str(Path(__file__).parents[1] / "views")
        self.terminal, theirs = pty.openpty()

        def set_signals() -> None:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)

        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(folder), "closes" if closes else "hangs", views],
            stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=set_signals,
        )  # fmt: skip
        os.close(theirs)
        self.said = b""
        self.read_until(b"ready")

    def read_until(self, text: bytes, *, times: int = 1) -> None:
        """Reads the output until `text` has appeared `times` times from now on."""
        said = b""
        while said.count(text) < times:
            said += os.read(self.terminal, 4096)
        self.said += said

    def read_on(self) -> None:
        """Reads the rest of the output."""
        try:
            while chunk := os.read(self.terminal, 4096):
                self.said += chunk
        except OSError:  # the process has closed its end of the terminal
            pass

    def written(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.path / "run.json").read_bytes())
        return loaded


ENDED = {"state": "stopped", "exit_reason": "asked to end by SIGHUP, after step 1 of 9"}


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.fault("F29")
def test_sighup_asks_for_a_clean_end_however_often_it_comes(tmp_path: Path, times: int) -> None:
    started = Started(tmp_path, closes=True)
    for _ in range(times):
        started.process.send_signal(signal.SIGHUP)
    started.read_on()
    assert started.process.wait(60) == 0
    assert started.written().items() >= ENDED.items()
    assert "badge stopped" in (started.path / "report.html").read_text()


@pytest.mark.fault("F29")
def test_a_closed_terminal_is_a_clean_end(tmp_path: Path) -> None:
    started = Started(tmp_path, closes=True)
    os.close(started.terminal)  # from now on, writing to the terminal fails
    # The kernel sends SIGHUP only to processes whose controlling terminal this is. Here there is none.
    started.process.send_signal(signal.SIGHUP)
    assert started.process.wait(60) == 0
    assert started.written().items() >= ENDED.items()
    assert "badge stopped" in (started.path / "report.html").read_text()


@pytest.mark.fault("F29")
def test_sighup_is_ignored_as_nohup_wants_it(tmp_path: Path) -> None:
    started = Started(tmp_path, closes=True, ignored=(signal.SIGHUP,))
    started.process.send_signal(signal.SIGHUP)
    started.read_until(b"training", times=5)
    assert started.written()["exit_reason"] is None
    started.process.send_signal(signal.SIGTERM)
    started.read_on()
    assert started.process.wait(60) == 0
    assert started.said.count(b"ending cleanly") == 1


@pytest.mark.fault("F29")
def test_a_second_ctrl_c_ends_at_once_shows_the_cursor_and_is_written_down(tmp_path: Path) -> None:
    started = Started(tmp_path, closes=False)
    assert b"\x1b[?25l" in started.said, "the live view hides the cursor"
    started.process.send_signal(signal.SIGINT)
    started.read_until(b"closing")
    started.process.send_signal(signal.SIGHUP)
    started.process.send_signal(signal.SIGTERM)  # within a second of the first
    started.read_until(b"closing", times=5)  # neither SIGHUP nor a signal within a second is the second one
    time.sleep(SAME_SIGNAL_S)
    started.process.send_signal(signal.SIGTERM)
    started.read_on()
    assert started.process.wait(60) == 130
    hidden, shown = started.said.rfind(b"\x1b[?25l"), started.said.rfind(b"\x1b[?25h")
    assert hidden < shown
    assert started.written()["state"] == "stopped"
    assert started.written()["exit_reason"] == "ended at once by a second signal, after 1 steps"


@pytest.mark.fault("F29")
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_two_kinds_of_signals_within_a_second_are_one_stop(tmp_path: Path, first: signal.Signals) -> None:
    """Seen once in a job that Slurm cancelled. Which process sent the second kind is not known."""
    started = Started(tmp_path, closes=True)
    started.process.send_signal(first)
    started.read_until(b"ending cleanly")
    started.process.send_signal(signal.SIGINT if first == signal.SIGTERM else signal.SIGTERM)
    started.read_on()
    assert started.process.wait(60) == 0
    assert started.written()["exit_reason"] == f"asked to end by {first.name}, after step 1 of 9"


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def join(*_: Any, **__: Any) -> None:
        raise RunError("no Ray cluster answers")

    monkeypatch.setattr(cluster, "join", join)


@pytest.mark.usefixtures("no_ray")
def test_down_ends_a_run_that_lives_here_as_ctrl_c_does_and_waits_for_its_end(tmp_path: Path) -> None:
    started = Started(tmp_path, closes=True)
    threading.Thread(target=started.read_on, daemon=True).start()
    assert process_of(started.path) == psutil.Process(started.process.pid)
    answer = CliRunner().invoke(app, ["down", str(started.path)])
    assert answer.exit_code == 0, answer.output
    assert not psutil.pid_exists(started.process.pid), "`down` returned before the run had ended"
    assert "it finishes its step and saves its weights" in answer.output
    assert "run quick stopped" in answer.output
    assert started.written().items() >= (ENDED | {"exit_reason": "asked to end by SIGINT, after step 1 of 9"}).items()
    assert process_of(started.path) is None


@pytest.mark.usefixtures("no_ray")
def test_a_second_down_is_no_second_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(tmp_path, closes=False)
    threading.Thread(target=started.read_on, daemon=True).start()
    monkeypatch.setattr(down, "CLOSE_S", -20.0)  # `run.shutdown_grace_s` is 20 s
    for _ in range(2):
        answer = CliRunner().invoke(app, ["down", str(started.path)])
        assert "has not ended after 0 s" in answer.output
    assert (started.process.poll(), started.written()["exit_reason"]) == (None, "asked to end by SIGINT")
    started.process.kill()
    started.process.wait(60)


@pytest.mark.usefixtures("no_ray")
def test_down_now_ends_a_run_that_does_not_close(tmp_path: Path) -> None:
    started = Started(tmp_path, closes=False)
    threading.Thread(target=started.read_on, daemon=True).start()
    assert CliRunner().invoke(app, ["down", str(started.path), "--now"]).exit_code == 0
    assert not psutil.pid_exists(started.process.pid)
    assert started.written()["exit_reason"] == "ended at once by a second signal, after 1 steps"


def test_down_signals_no_process_that_does_not_hold_the_directory(tmp_path: Path) -> None:
    started = Started(tmp_path, closes=True)
    threading.Thread(target=started.read_on, daemon=True).start()
    (started.path / "run.json").write_text(json.dumps(started.written() | {"pid": os.getpid()}))
    assert process_of(started.path) is None
    started.process.kill()
    started.process.wait(60)


BLOCKED = """
import sys
import typer
from asyncrl.cli.start import imported_parts, run_in_terminal
from asyncrl.config.schema import Config
config = Config.model_validate({"run": {"name": "quick", "dir": sys.argv[1]}})

def parts():
    print("importing", flush=True)
    sys.stdin.readline()  # blocks the event loop, as an import does
    return imported_parts()

try:
    run_in_terminal(config, None, command="up", address=None, again=["up"], new_parts=parts)
except typer.Exit as ended:
    sys.exit(ended.exit_code)
"""


class Blocked:
    """A process of `asyncrl up` whose event loop is blocked until `go_on` is called."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "quick"
        self.process = subprocess.Popen(
            [sys.executable, "-c", BLOCKED, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def read_until(self, text: bytes) -> None:
        assert self.process.stdout is not None
        said = b""
        while text not in (line := self.process.stdout.readline()):
            said += line
            assert line, f"the process has ended with {self.process.wait(60)}: {said.decode()}"

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def written(self) -> tuple[str, str | None]:
        info = json.loads((self.path / "run.json").read_bytes())
        return info["state"], info["exit_reason"]


@pytest.mark.fault("F29")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, PREEMPTED), (signal.SIGINT, 1)])
def test_a_signal_is_recorded_while_the_event_loop_is_blocked_and_the_start_then_ends(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    blocked = Blocked(tmp_path)
    blocked.read_until(b"importing\n")
    blocked.process.send_signal(number)
    blocked.read_until(b"ending cleanly")
    while blocked.written() != ("running", f"asked to end by {number.name}"):
        assert blocked.process.poll() is None
    blocked.go_on()
    blocked.read_until(b"the run ended before a step was trained")
    assert blocked.process.wait(60) == code
    assert blocked.written() == ("stopped", f"asked to end by {number.name}, before the first step")


@pytest.mark.fault("F29")
def test_a_second_signal_ends_the_process_while_the_event_loop_is_blocked(tmp_path: Path) -> None:
    blocked = Blocked(tmp_path)
    blocked.read_until(b"importing\n")
    blocked.process.send_signal(signal.SIGTERM)
    blocked.read_until(b"ending cleanly")
    time.sleep(SAME_SIGNAL_S)
    blocked.process.send_signal(signal.SIGINT)
    assert blocked.process.wait(60) == 130
    assert blocked.written() == ("stopped", "ended at once by a second signal, after 0 steps")
