"""A command goes on and ends normally after its terminal is closed or the reader of its output is gone."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.cli.terminal import lasting

pytestmark = pytest.mark.slow

TALKS = """
import signal, sys
from rich.console import Console
import typer
from asyncrl.cli.terminal import outlive_terminal
from asyncrl.config.schema import Config
from asyncrl.views.live import LiveDisplay, LiveView
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a disowned process gets no SIGHUP when its terminal is closed
outlive_terminal()
display = LiveDisplay(Console(), every_steps=1)
with display:
    print("ready", flush=True)
    sys.stdin.readline()
    for step in range(3):
        display.update(LiveView(config=Config(), phase=f"step {step}", elapsed_s=0))
        if display._live is not None:
            display._live.refresh()
        typer.echo("a line"); typer.echo("another", err=True)
open(sys.argv[1], "w").write("done")
"""


def test_a_terminal_that_was_closed_neither_raises_nor_hangs(tmp_path: Path) -> None:
    done = tmp_path / "done"
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", TALKS, str(done)],
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        said = b""
        while b"ready" not in said:
            said += os.read(ours, 1000)
        os.close(ours)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(60) == 0
    assert done.exists()


def test_a_pipe_that_nothing_reads_any_more_is_no_error(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with subprocess.Popen(
        [sys.executable, "-c", TALKS, str(done)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        while b"ready" not in process.stdout.readline():
            pass
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(60) == 0
    assert done.exists()


def test_a_full_disk_behind_the_output_does_not_end_the_command_and_later_lines_are_tried_again() -> None:
    with open("/dev/full", "w") as full:
        output = lasting(full)
        output.write("a line\n")
        output.flush()
        output.close()
        assert os.readlink(f"/proc/self/fd/{full.fileno()}") == "/dev/full"
