"""Starts the processes of vLLM's engine. Finds out why the engine did not start or has died, for the text of the error.

The engine runs in a process of its own, which writes the cause to its output only: to stderr while it starts, to stdout
later. This module reads the cause from there.
"""

import asyncio
import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

import psutil

from asyncrl.errors import AsyncRLError, RunError

STDERR = Path("/proc/self/fd/2")
"""The stderr of this process. In a Ray worker it is a file, which the engine's processes inherit."""

STDOUT = Path("/proc/self/fd/1")
"""The stdout of this process. In a Ray worker it is a file too."""

_ERROR = r"((?:\w+\.)*\w*(?:Error|Exception): .+)"
_LAST_LINE_OF_A_TRACEBACK = re.compile("^" + _ERROR, re.MULTILINE)
_LOGGED_BY_THE_ENGINE = re.compile(r"^\((?:EngineCore|Worker)[^)]*\) ERROR [^]]*\] " + _ERROR, re.MULTILINE)
_READ_BYTES = 2**20
"""Bytes at the end of the output in which the cause of a death is searched."""


@contextlib.contextmanager
def children_begin_with(module: str) -> Iterator[None]:
    """Processes that `multiprocessing` spawns in the block import `module` first, not this process's main module.

    `multiprocessing` finds the main module by its `__spec__`. A child needs the main module only for functions that are
    defined in it.
    """
    main = sys.modules["__main__"]
    before, main.__spec__ = main.__spec__, ModuleSpec(module, None)
    try:
        yield
    finally:
        main.__spec__ = before


@contextlib.contextmanager
def engine_starts(*, memory_knob: str, stderr: Path = STDERR) -> Iterator[None]:
    """Raises RunError for any error inside the block, except those of asyncrl.

    The message has the last error line that vLLM's processes wrote to `stderr`, or vLLM's error if there is none, and
    where the whole output is. If that line is about memory, the message also names `memory_knob`, the config key for
    it: vLLM's own message names vLLM's options.
    """
    before = stderr.stat().st_size if stderr.is_file() else None
    try:
        yield
    except AsyncRLError:
        raise
    except Exception as error:
        cause, rest = f"{type(error).__name__}: {error}", "above"
        if before is not None:
            with stderr.open(errors="replace") as file:
                file.seek(before)
                said = _LAST_LINE_OF_A_TRACEBACK.findall(file.read())
            cause, rest = said[-1] if said else cause, f"in {os.path.realpath(stderr)} on {socket.gethostname()}"
        if "memory" in cause.lower():
            cause += f"\nin the configuration of asyncrl this memory is set by {memory_knob}"
        raise RunError(f"vLLM did not start: {cause}\nthe whole output of its processes is {rest}") from error


async def first_end(processes: Sequence[psutil.Process]) -> psutil.Process:
    """Waits until one of these processes has ended. Returns it."""
    loop, ended = asyncio.get_running_loop(), asyncio.Future[psutil.Process]()

    def end(process: psutil.Process) -> None:
        if not ended.done():
            ended.set_result(process)

    with contextlib.ExitStack() as watched:
        for process in processes:
            try:
                descriptor = os.pidfd_open(process.pid)  # becomes readable when the process ends
            except ProcessLookupError:
                return process
            watched.callback(os.close, descriptor)
            if not process.is_running():  # its id belongs to another process now, as its start time shows
                return process
            loop.add_reader(descriptor, end, process)
            watched.callback(loop.remove_reader, descriptor)
        return await ended


def cause_of_death(known: str, *, stdout: Path = STDOUT) -> str:
    """Returns the last error that the engine's processes logged to `stdout`, and where the whole output is.

    vLLM raises only an EngineDeadError in the process that uses the engine. If the processes logged no error, returns
    what is `known` of the cause.
    """
    if stdout.is_file():
        with stdout.open("rb") as file:
            file.seek(max(0, stdout.stat().st_size - _READ_BYTES))
            logged = _LOGGED_BY_THE_ENGINE.findall(file.read().decode(errors="replace"))
        if logged:
            place = f"{os.path.realpath(stdout)} on {socket.gethostname()}"
            return f"{logged[-1]}\nthe whole output of its processes is in {place}"
    return known
