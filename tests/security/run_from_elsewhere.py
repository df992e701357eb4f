"""A run directory whose run.json names what its sender wants, and processes that look like a run's."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from made_up_run import make_step
from written_runs import write_run

WAITS = "print(flush=True); import time; time.sleep(10_000)"
"""Code of a process that sleeps. It writes a line when it has started."""


def gone_pid() -> int:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(60)
    return gone.pid


def run_of(folder: Path, **changed: Any) -> Path:
    """Writes the directory of a run that was killed, with these fields of run.json."""
    path = write_run(folder / "runs", [make_step(0)], finish=False, end=None, name="sent")
    rewrite(path, **({"pid": gone_pid()} | changed))
    return path


def rewrite(path: Path, **changed: Any) -> None:
    """Changes fields of run.json, also to values that asyncrl does not write."""
    info = json.loads((path / "run.json").read_bytes())
    assert info["host"] == socket.gethostname()
    (path / "run.json").write_text(json.dumps(info | changed))


def waiting(command: Sequence[str], **streams: Any) -> Iterator[psutil.Popen]:
    """Starts a process that waits, and ends it and its child processes."""
    process = psutil.Popen(command, stdout=subprocess.PIPE, **streams)
    try:
        process.stdout.readline()
        yield process
    finally:
        for each in [*process.children(recursive=True), process] if process.is_running() else []:
            each.kill()
        process.wait(60)
        process.stdout.close()
