"""Tells which children of its process belong to an engine."""

import subprocess
import sys

import psutil
import pytest

from asyncrl.generation.vllm_engine import _runs_the_engine

pytestmark = pytest.mark.slow


def test_a_child_that_has_ended_and_was_not_waited_for_is_none_of_the_engines() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    child = psutil.Process(ended.pid)
    try:
        while child.status() != psutil.STATUS_ZOMBIE:
            pass  # waits some milliseconds for the interpreter's start and end
        assert not _runs_the_engine(child)
    finally:
        ended.wait(60)


def test_a_child_that_lives_is() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as lives:
        assert _runs_the_engine(psutil.Process(lives.pid))
        lives.communicate(b"\n", timeout=60)
