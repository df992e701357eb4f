"""`supervise` starts a process again that died or failed, and passes signals on. The processes and signals are real."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.cli.preflight import check_restart
from asyncrl.cli.restarts import EARLY_DEATHS, RESTART_MENDS
from asyncrl.complete_directory import COMPLETE
from asyncrl.config.schema import Config
from asyncrl.deployment.run_dir import RunDir
from asyncrl.errors import INTERRUPTED, PREEMPTED, RunError

pytestmark = pytest.mark.slow

COMMAND = """
import os, signal, sys, time
from asyncrl.cli.restarts import ends_on_purpose, restarts, supervise
supervise()
print("start", restarts(), flush=True)
"""


REPORTED = """
import os, signal, sys, time
from asyncrl.cli.restarts import ends_on_purpose, report_death
report_death()
print("start", flush=True)
"""


def started(body: str, *, command: str = COMMAND, word: str = "", **options: object) -> "subprocess.Popen[str]":
    """Starts a process that runs `body` in the child of `supervise`, or after another `command`."""
    return subprocess.Popen(
        [sys.executable, "-c", command + body, word],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )  # type: ignore[call-overload]


def ended(process: "subprocess.Popen[str]") -> tuple[list[str], int]:
    """Returns the lines of the output, and the exit code."""
    output, _ = process.communicate(timeout=60)
    return output.splitlines(), process.returncode


@pytest.mark.parametrize(
    "failure",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os._exit(1)",  # as Ray does without its head
        "raise RuntimeError",
        f"ends_on_purpose(); sys.exit({RESTART_MENDS})",
    ],
)
def test_a_process_that_died_or_may_be_mended_is_started_again_until_it_ends_on_purpose(failure: str) -> None:
    body = f"if restarts() < 2: {failure}\nends_on_purpose(); sys.exit(7)"
    assert ended(started(body, stderr=subprocess.DEVNULL)) == (["start 0", "start 1", "start 2"], 7)


def test_a_process_knows_whether_an_earlier_one_has_begun_the_run() -> None:
    body = """
from asyncrl.cli.restarts import begun_directory, mark_begun
print(begun_directory(), flush=True)
from pathlib import Path
if restarts() == 1: mark_begun(Path("runs/a long name")); mark_begun(Path("runs/quick"))
if restarts() < 2: os.kill(os.getpid(), signal.SIGKILL)
ends_on_purpose(); sys.exit(0)
"""
    lines, _ = ended(started(body, stderr=subprocess.DEVNULL))
    assert lines == ["start 0", "None", "start 1", "None", "start 2", "runs/quick"]


@pytest.mark.parametrize(
    "end", ["os.kill(os.getpid(), signal.SIGKILL)", f"ends_on_purpose(); sys.exit({RESTART_MENDS})"]
)
def test_a_process_that_was_asked_to_end_is_not_started_again_however_it_ends(end: str) -> None:
    body = f"from asyncrl.cli.restarts import starts_no_other\nstarts_no_other(); {end}"
    assert ended(started(body, stderr=subprocess.DEVNULL))[0] == ["start 0"]


def test_a_process_that_dies_at_its_start_again_and_again_is_not_started_for_ever() -> None:
    process = started("os.kill(os.getpid(), signal.SIGKILL)", stderr=subprocess.PIPE)
    output, errors = process.communicate(timeout=60)
    assert output.split("\n")[:-1] == [f"start {number}" for number in range(EARLY_DEATHS)]
    assert process.returncode == 128 + signal.SIGKILL
    assert "the last time by SIGKILL; it is not started again" in errors


def test_restarts_that_the_command_asks_for_are_no_early_deaths() -> None:
    body = f"ends_on_purpose(); sys.exit(7 if restarts() == {EARLY_DEATHS} else {RESTART_MENDS})"
    assert ended(started(body))[1] == 7


def test_a_process_knows_how_the_one_before_it_ended() -> None:
    body = f"""
from asyncrl.cli.restarts import earlier_end
print(earlier_end(), flush=True)
if restarts() == 0: os.kill(os.getpid(), signal.SIGKILL)
if restarts() == 1: os._exit(3)
if restarts() == 2: ends_on_purpose(); sys.exit({RESTART_MENDS})
ends_on_purpose(); sys.exit(0)
"""
    lines, _ = ended(started(body))
    assert lines[1::2] == ["", "by SIGKILL", "by exit code 3", "with an error"]


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_a_process_that_ends_on_purpose_is_not_started_again(code: int) -> None:
    assert ended(started(f"ends_on_purpose(); sys.exit({code})")) == (["start 0"], code)


MAIN = """
import os, signal, sys, time
from asyncrl.cli import main, restarts

def app():
    try:
        print("ready", flush=True)
        signal.pause()
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        print("cleaned", flush=True)

main.app = app
sys.argv = ["asyncrl", sys.argv[1]]
"""


@pytest.mark.parametrize("command", ["up", "learner", "generator", "sweep"])
def test_sigterm_before_the_run_begins_ends_in_order_and_its_repetition_counts_once(command: str) -> None:
    process = started("main.main()", command=MAIN, word=command)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert ended(process) == (["cleaned"], PREEMPTED)


def test_a_later_sigterm_ends_what_is_cleaned_before_the_run_begins() -> None:
    process = started("restarts.SAME_SIGNAL_S = 0.0\nmain.main()", command=MAIN, word="up")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert ended(process) == ([], INTERRUPTED)


@pytest.mark.fault("F29")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_the_child_once_and_then_nothing_is_started_again(number: signal.Signals) -> None:
    body = f"""
seen = []
signal.signal({int(number)}, lambda *_: seen.append(1))
print("ready", flush=True)
while not seen: time.sleep(0.01)
time.sleep(0.3)
print("seen", len(seen), flush=True)
os._exit(1)
"""
    process = started(body)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["start 0\n", "ready\n"]
    os.killpg(process.pid, number)  # as a terminal or `timeout` does
    assert ended(process) == (["seen 1"], 1)


def test_a_child_that_a_signal_ended_gives_the_exit_code_of_the_shell() -> None:
    process = started("print('ready', flush=True)\ntime.sleep(60)")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.readline()
    process.terminate()
    assert ended(process) == ([], 128 + signal.SIGTERM)


def test_the_child_dies_with_the_process_that_supervises_it() -> None:
    process = started("print(os.getpid(), flush=True)\ntime.sleep(600)")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.readline()
    process.kill()
    assert ended(process) == ([], -signal.SIGKILL)  # its output ends only when the child, which shares it, has ended


@pytest.mark.parametrize(
    ("death", "how"),
    [("os._exit(1)", "exit code 1"), ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL")],  # Ray without its head: 1
)
def test_the_death_of_a_command_that_its_user_starts_again_has_the_code_of_a_restart(death: str, how: str) -> None:
    process = started(death, command=REPORTED, stderr=subprocess.PIPE)
    output, errors = process.communicate(timeout=60)
    assert (output, process.returncode) == ("start\n", RESTART_MENDS)
    assert f"was ended by {how}, and has not ended itself" in errors
    assert "start the cluster again, and then this command (exit code 75)" in errors


@pytest.mark.parametrize("code", [0, 1, 2, RESTART_MENDS])
def test_an_end_on_purpose_keeps_its_code_and_is_not_reported(code: int) -> None:
    process = started(f"ends_on_purpose(); sys.exit({code})", command=REPORTED, stderr=subprocess.PIPE)
    assert (*process.communicate(timeout=60), process.returncode) == ("start\n", "", code)


def test_a_reported_child_that_a_signal_asked_to_end_is_not_mended() -> None:
    process = started("print('ready', flush=True)\ntime.sleep(60)", command=REPORTED)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["start\n", "ready\n"]
    os.killpg(process.pid, signal.SIGTERM)
    assert ended(process) == ([], 128 + signal.SIGTERM)


@pytest.mark.parametrize(
    ("number", "saved", "refusal"),
    [
        (0, False, None),
        (1, True, None),
        (3, True, None),
        (4, True, r"run\.max_restarts = 3 within an hour"),
        (1, False, "before its first checkpoint"),
        (1, None, None),
    ],
)
def test_a_restart_needs_a_checkpoint_and_has_a_limit(
    number: int, saved: bool | None, refusal: str | None, tmp_path: Path
) -> None:
    """`saved` is None if the process before this one has stopped in order, before its first step."""
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    if saved is None:
        with RunDir.create(config) as run_dir:
            run_dir.stopped()
    if saved:
        checkpoint = tmp_path / "quick" / "checkpoints" / "step-3"
        checkpoint.mkdir(parents=True)
        (checkpoint / COMPLETE).touch()
    if refusal is None:
        check_restart(config, number)
    else:
        with pytest.raises(RunError, match=refusal):
            check_restart(config, number)
