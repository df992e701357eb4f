"""`asyncrl stacks` with a program in place of py-spy. tests/integration/test_up.py has the real one."""

import os
import socket
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from asyncrl.cli import stacks
from asyncrl.cli.main import app
from asyncrl.learner.records import RunInfo


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Returns the directory of a run whose command is this process."""
    write(tmp_path, host=socket.gethostname())
    return tmp_path


def write(directory: Path, *, host: str) -> None:
    info = RunInfo(
        name="live", state="running", pid=os.getpid(), host=host, started="2026-11-20T16:38:09+00:00", nonce="n"
    )
    (directory / "run.json").write_bytes(msgspec.json.encode(info))


def answer_with(source: str, run: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Result:
    """Returns the answer of the command if py-spy is the Python program `source`."""
    program = run / "py-spy"
    program.write_text(f"#!{sys.executable}\nimport sys\n{source}\n")
    program.chmod(0o700)
    monkeypatch.setattr(stacks, "_py_spy", lambda: str(program))
    return CliRunner().invoke(app, ["stacks", str(run), *options])


DUMP = """
print("Process 1: python x\\nPython v3.11.7 (/usr/bin/python)\\n")
print("Thread 1 (idle): \\"MainThread\\"\\n    wait (threading.py:331) " + " ".join(sys.argv[1:]) + chr(27) + "[2J")
"""


def test_each_process_has_its_title_and_the_stacks_of_its_threads(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = answer_with(DUMP, run, monkeypatch, "--native")
    assert (answer.exit_code, answer.stderr) == (0, "")
    title, thread, frame, *_ = answer.stdout.splitlines()
    assert title.startswith("--- ")
    assert title.endswith(f"(pid {os.getpid()})")
    assert thread == 'Thread 1 (idle): "MainThread"'
    assert frame == f"    wait (threading.py:331) dump --pid {os.getpid()} --native\\u001b[2J"


def test_a_system_that_does_not_allow_it_is_an_error_with_advice(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = answer_with("sys.exit('Error: Permission denied (os error 13)\\nTry sudo')", run, monkeypatch)
    assert answer.exit_code == 1
    *_, note, error = answer.stderr.splitlines()
    assert "Permission denied (os error 13); run the command as root" in note
    assert "SYS_PTRACE" in note
    assert error == "error: the stacks of no process could be read"


def test_a_run_of_another_machine_names_it(tmp_path: Path) -> None:
    write(tmp_path, host="node-7")
    answer = CliRunner().invoke(app, ["stacks", str(tmp_path)])
    assert answer.exit_code == 1
    assert "has no process here; it is on node-7, so run this command there" in answer.stderr


def test_a_directory_without_a_run_says_so(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["stacks", str(tmp_path)])
    assert answer.exit_code == 1
    assert "has no process here; it has no run.json" in answer.stderr


def test_without_py_spy_the_error_says_what_to_install(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(run / "python"))
    monkeypatch.setenv("PATH", str(run))
    answer = CliRunner().invoke(app, ["stacks", str(run)])
    assert answer.exit_code == 1
    assert "pip install py-spy" in answer.stderr
