"""Tells which children of its process belong to an engine, and notices the end of those only."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from asyncrl.generation.engine_start import first_end
from asyncrl.generation.vllm_engine import processes_of

pytestmark = pytest.mark.slow

WITH_CHILDREN = """
import subprocess, sys
children = [subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
print(*[child.pid for child in children], flush=True)
input()
for child in children:
    child.communicate(b"\\n")
"""


@contextmanager
def waiting(code: str = "input()") -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.communicate(b"\n", timeout=60)


class Engine:
    """The parts of vLLM's `AsyncLLM` that know its processes."""

    def __init__(self, core: int, *, workers: list[int]) -> None:
        manager = SimpleNamespace(processes=[SimpleNamespace(pid=core)])
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))
        self._workers = workers

    async def collective_rpc(self, method: str) -> list[Any]:
        assert method == "process_id"
        return self._workers


@pytest.mark.asyncio
async def test_an_engine_is_its_core_and_its_workers_without_other_children_of_both() -> None:
    with waiting(), waiting(WITH_CHILDREN) as core:
        assert core.stdout is not None
        first, second, tracker = map(int, core.stdout.readline().split())
        of_engine = await processes_of(Engine(core.pid, workers=[first, second]))
        assert [process.pid for process in of_engine] == [core.pid, first, second]
        assert tracker in {child.pid for child in psutil.Process(core.pid).children()}


@pytest.mark.asyncio
async def test_a_single_worker_in_the_process_of_the_core_and_workers_of_other_nodes_are_not_counted_twice() -> None:
    with waiting() as core:
        assert [each.pid for each in await processes_of(Engine(core.pid, workers=[core.pid, 1]))] == [core.pid]


@pytest.mark.asyncio
async def test_the_end_of_another_child_is_not_the_end_of_the_engine() -> None:
    with waiting() as of_engine, waiting() as another:
        ended = asyncio.create_task(first_end([psutil.Process(of_engine.pid)]))
        another.communicate(b"\n", timeout=60)
        await asyncio.sleep(0)
        assert not ended.done()
        of_engine.communicate(b"\n", timeout=60)
        assert (await asyncio.wait_for(ended, 60)).pid == of_engine.pid


@pytest.mark.asyncio
async def test_a_process_that_took_the_pid_of_an_ended_one_is_not_watched() -> None:
    with waiting() as later:
        process = psutil.Process(later.pid)
        process._ident = (later.pid, 0.0)  # as if a process with this pid had started before
        assert await asyncio.wait_for(first_end([process]), 60) is process
