"""A run that is asked to end records the request at once, and ends within its grace even if its start hangs."""

import asyncio
import ctypes
import doctest
import os
import re
import signal
import threading
from pathlib import Path

import msgspec
import pytest
from made_up_run import make_step

from asyncrl.common.roles import RunState
from asyncrl.common.tasks import Stopped, unless_one_fails, unless_stopped
from asyncrl.config.schema import Config
from asyncrl.deployment import learner
from asyncrl.deployment.launch import asked_to_end, ended_at_once, give_up, run_until_done
from asyncrl.deployment.learner import short_grace
from asyncrl.deployment.run_dir import RunDir
from asyncrl.errors import INTERRUPTED, PREEMPTED, Terminated
from asyncrl.learner.records import RunInfo


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}}))


def written(run: RunDir) -> RunInfo:
    return msgspec.json.decode((run.path / "run.json").read_bytes(), type=RunInfo)


@pytest.mark.fault("F29")
def test_the_first_signal_is_in_run_json_before_anything_is_closed(run: RunDir) -> None:
    seen: list[RunInfo] = []

    async def main(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(60):
            await stop.wait()
        seen.append(written(run))

    run_until_done(main, asked=lambda number: run.asked_to_end(number.name))
    assert (seen[0].state, seen[0].exit_reason) == ("running", "asked to end by SIGTERM")
    run.close(state="stopped", reason="asked to end by SIGTERM, after step 3 of 9")
    assert written(run).exit_reason == "asked to end by SIGTERM, after step 3 of 9"
    run.asked_to_end("SIGINT")
    assert written(run).exit_reason == "asked to end by SIGTERM, after step 3 of 9", (
        "a request after the end must not change the recorded reason"
    )


def ignores_sigterm() -> bool:
    """Returns whether the kernel drops a SIGTERM to this process."""
    [mask] = re.findall(r"SigIgn:\s*(\w+)", Path("/proc/self/status").read_text())
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.fault("F29")
def test_sigterm_is_handled_again_after_a_library_has_replaced_the_handler_behind_pythons_back() -> None:
    async def main(stop: asyncio.Event) -> None:
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(int(signal.SIG_IGN)))
        assert ignores_sigterm()
        async with asyncio.timeout(60):
            while ignores_sigterm():
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.wait()

    run_until_done(main)


@pytest.mark.fault("F29")
def test_a_start_that_does_not_end_within_the_grace_is_ended_and_recorded(run: RunDir) -> None:
    left: list[int] = []
    give_up(run, 20.0, leave=left.append)
    assert left == [INTERRUPTED]
    assert written(run).state == "failed"
    assert written(run).exit_reason == (
        "asked to end before this process had trained a step, and not closed within run.shutdown_grace_s = 20 s"
    )


@pytest.mark.fault("F29")
def test_a_run_that_a_second_signal_ends_does_not_stay_running(run: RunDir) -> None:
    run.append_step(make_step(0))
    ended_at_once(run)
    assert written(run).state == "stopped"
    assert written(run).exit_reason == "ended at once by a second signal, after 1 steps"
    ended_at_once(run)


@pytest.mark.fault("F29")
def test_the_grace_is_counted_beside_an_event_loop_that_hangs(run: RunDir) -> None:
    before = set(threading.enumerate())
    asked_to_end(run, 3600.0, signal.SIGINT)
    [timer] = set(threading.enumerate()) - before
    assert isinstance(timer, threading.Timer)
    timer.cancel()
    assert (timer.interval, timer.function, timer.args) == (3600.0, give_up, [run, 3600.0])
    assert timer.daemon, "the timer must not keep the process alive"
    assert written(run).exit_reason == "asked to end by SIGINT"


def test_sigterm_before_the_run_handles_signals_is_its_end_in_run_json(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"name": "quick", "dir": str(tmp_path)}})
    with pytest.raises(Terminated) as ended, RunDir.create(config) as run:
        raise Terminated
    assert ended.value.code == PREEMPTED
    assert written(run).state == "stopped"
    assert written(run).exit_reason == "asked to end by SIGTERM, before the first step"


@pytest.mark.parametrize(("number", "end"), [(signal.SIGTERM, RunState.PREEMPTED), (signal.SIGINT, RunState.STOPPED)])
def test_only_sigterm_is_a_stop_from_outside(number: signal.Signals, end: RunState, run: RunDir) -> None:
    asked_to_end(run, 3600.0, number)
    assert run.end is RunState.FINISHED, "the run may still train its last step"
    run.stopped("after step 3 of 9")
    assert run.end is end


@pytest.mark.fault("F29")
def test_a_run_that_has_trained_or_closed_keeps_its_time(run: RunDir) -> None:
    left: list[int] = []
    run.append_step(make_step(0))
    give_up(run, 20.0, leave=left.append)
    assert not run.closed
    run.close(state="finished", reason="done")
    give_up(run, 20.0, leave=left.append)
    assert left == []


@pytest.mark.asyncio
async def test_work_ends_when_the_run_is_asked_to_end() -> None:
    stop, cancelled = asyncio.Event(), asyncio.Event()

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    waiting = asyncio.create_task(unless_stopped(stop, hangs()))
    await asyncio.sleep(0)
    stop.set()
    with pytest.raises(Stopped):
        await waiting
    assert cancelled.is_set()


@pytest.mark.asyncio
async def test_work_that_ends_by_itself_gives_its_result_or_its_error() -> None:
    assert await unless_stopped(asyncio.Event(), asyncio.sleep(0, "path")) == "path"

    async def fails() -> None:
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        await unless_stopped(asyncio.Event(), fails())


@pytest.mark.asyncio
async def test_work_is_cancelled_when_a_task_beside_it_fails_and_the_other_tasks_go_on() -> None:
    cancelled, failing = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def fails() -> None:
        await failing.wait()
        raise ValueError("the heartbeat broke")

    async def ends() -> None:
        pass

    beside = [asyncio.create_task(each) for each in (ends(), fails(), failing.wait())]
    goes_on = asyncio.create_task(asyncio.Event().wait())
    waiting = asyncio.create_task(unless_one_fails([*beside, goes_on], work()))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done(), "a task that ends without an error does not end the work"
    failing.set()
    with pytest.raises(ValueError, match="the heartbeat broke"):
        await waiting
    assert cancelled.is_set()
    assert not goes_on.done()
    goes_on.cancel()
    assert await unless_one_fails([], asyncio.sleep(0, "result")) == "result"


def test_doctest() -> None:
    assert doctest.testmod(learner).failed == 0


def test_a_run_that_has_saved_nothing_yet_says_that_the_time_is_not_known() -> None:
    assert "12 s for its step, an unknown time for its checkpoint" in (short_grace(20, step_s=12.0, save_s=None) or "")
