"""Findings about a machine, and code that runs in a process of its own to make them."""

import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Severity of a finding. With FAIL a run cannot work."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the diagnosis. `fix` says how to fix the problem; it is empty if there is no problem."""

    level: Level
    what: str
    fix: str = ""


def ok(what: str) -> Finding:
    return Finding(level=Level.OK, what=what)


def warn(what: str, *, fix: str) -> Finding:
    return Finding(level=Level.WARN, what=what, fix=fix)


def fail(what: str, *, fix: str) -> Finding:
    return Finding(level=Level.FAIL, what=what, fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Result of Python code in a separate process: the last line of stdout if it succeeded, else that of stderr."""

    succeeded: bool
    last_line: str
    late: bool = False
    """Whether the process exceeded its time limit."""


def run_probe(code: str, *, timeout_s: float) -> Probe:
    """Runs Python code in a separate process and returns the result. The process is killed after `timeout_s`."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Probe(succeeded=False, last_line=f"took longer than {timeout_s:g} s (--timeout-s)", late=True)
    succeeded = done.returncode == 0
    lines = (done.stdout if succeeded else done.stderr).strip().splitlines()
    return Probe(succeeded=succeeded, last_line=lines[-1] if lines else f"exit status {done.returncode}")
