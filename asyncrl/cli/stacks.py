"""`asyncrl stacks RUN`: prints the stacks of the processes of a run on this machine, except for Ray's daemons."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import psutil
import typer

from asyncrl.cli.options import RunningRun
from asyncrl.cli.terminal import print_warnings, say
from asyncrl.deployment.known_runs import RAY_DAEMONS, as_it_is, ended_run, existing_run, living_processes
from asyncrl.errors import RunError

READ_S = 60.0
"""Longest time in which py-spy reads the stacks of a process."""
TITLE = 120
"""Characters of a process's title or command that are shown."""
NOT_ALLOWED = ("permission", "not permitted")
"""Words of py-spy's message if the system does not let it read another process."""


def stacks(
    run: RunningRun,
    native: Annotated[
        bool, typer.Option("--native", help="Also show the frames of compiled code, such as torch and NCCL.")
    ] = False,
) -> None:
    """Show what each process of a run does at this moment: the Python stack of each of its threads.

    Use it for a run that hangs or is slow. py-spy reads the stacks of the run's command, of the ranks, the generators,
    the engines, the coordinator and the scoring processes on this machine, and stops each process for some
    milliseconds. A coroutine that waits has no stack, so an event loop shows only that it waits. If the run uses a Ray
    cluster that it has not started, only the run's command is shown: `ray stack` on each node shows the others.
    """
    directory = existing_run(run)
    processes = [process for process in living_processes(directory) if _title(process) not in ("", *RAY_DAEMONS)]
    if not processes:
        if ended := ended_run(directory):
            say(ended)
            return
        info = as_it_is(directory)
        where = f"it is on {info.host}, so run this command there" if info is not None else "it has no run.json"
        raise RunError(f"run {directory.name} has no process here; {where}")
    program = _py_spy()
    failed = [problem for process in processes if (problem := _print_stacks(process, program, native=native))]
    print_warnings(failed)
    if len(failed) == len(processes):
        raise RunError("the stacks of no process could be read")


def _py_spy() -> str:
    """Returns the path of py-spy, which comes with Ray and is installed beside Python."""
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if program is None:
        raise RunError("py-spy, which reads the stacks, is not installed; run `pip install py-spy`")
    return program


def _title(process: psutil.Process) -> str:
    """Returns the name of a Ray daemon, or the command line of another process; "" if it has ended or cannot be
    read."""
    try:
        words, name = process.cmdline(), str(process.name())
    except psutil.Error:
        return ""
    return name if name in RAY_DAEMONS else " ".join(words).strip()


def _print_stacks(process: psutil.Process, program: str, *, native: bool) -> str:
    """Prints the stacks of a process. Returns why they could not be read; "" if they were, or if the process has ended
    meanwhile."""
    title = f"{_title(process)[:TITLE]} (pid {process.pid})"
    options = ["--native"] if native else []
    try:
        done = subprocess.run(
            [program, "dump", "--pid", str(process.pid), *options],
            capture_output=True, text=True, errors="replace", timeout=READ_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{title}: py-spy took longer than {READ_S:g} s"
    if done.returncode:
        if not process.is_running():
            return ""
        reason, *_ = (done.stderr.strip() or f"py-spy ended with status {done.returncode}").splitlines()
        advice = ""
        if any(word in done.stderr.lower() for word in NOT_ALLOWED):
            advice = "; run the command as root, or in a container with the capability SYS_PTRACE"
        return f"{title}: {reason}{advice}"
    _, _, threads = done.stdout.partition("\n\n")  # py-spy first prints the command and the version of Python
    say(title, label="---", color="cyan")
    say(f"{threads.rstrip()}\n")
    return ""
