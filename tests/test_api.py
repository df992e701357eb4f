"""`asyncrl.run` with made-up trainings: threads, callbacks, interrupts and errors. tests/integration has a real one."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import asyncrl
from asyncrl import api
from asyncrl.config.schema import Config
from asyncrl.deployment.launch import attended_run, sigterm_interrupts
from asyncrl.deployment.run_dir import RunDir
from asyncrl.errors import ConfigError, RunError, StallError

pytestmark = pytest.mark.slow


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    with RunDir.create(Config.model_validate({"run": {"dir": tmp_path, "name": "test"}})) as made:
        yield made


def attended(run_dir: RunDir, training: Any, calls: "SimpleQueue[Any] | None" = None) -> Any:
    with sigterm_interrupts():
        return attended_run(training, calls=SimpleQueue() if calls is None else calls, run_dir=run_dir)


def test_calls_are_made_in_order_in_the_callers_thread_while_the_training_has_its_own(run_dir: RunDir) -> None:
    calls: SimpleQueue[Any] = SimpleQueue()
    made: list[tuple[int, int]] = []
    threads: list[int] = []

    async def training(stop: asyncio.Event) -> None:
        threads.append(threading.get_ident())
        for number in range(3):
            calls.put(lambda number=number: made.append((number, threading.get_ident())))

    assert attended(run_dir, training, calls) == (None, None)
    assert made == [(number, threading.get_ident()) for number in range(3)]
    assert threads[0] != threading.get_ident()


def test_it_runs_beside_an_event_loop_of_the_caller_as_in_a_notebook(run_dir: RunDir) -> None:
    async def training(stop: asyncio.Event) -> str:
        await asyncio.sleep(0)
        return "trained"

    async def cell() -> Any:
        return attended(run_dir, training)

    assert asyncio.run(cell()) == ("trained", None)


def test_an_error_of_a_callback_ends_the_training_in_order_first(run_dir: RunDir) -> None:
    calls: SimpleQueue[Any] = SimpleQueue()
    mistake = ZeroDivisionError("mine")

    def fail() -> None:
        raise mistake

    async def training(stop: asyncio.Event) -> str:
        calls.put(fail)
        await asyncio.wait_for(stop.wait(), 60)
        return "ended in order"

    assert attended(run_dir, training, calls) == ("ended in order", mistake)
    assert recorded(run_dir)["exit_reason"] is not None, "run.json must have the request to end"


def recorded(run_dir: RunDir) -> dict[str, Any]:
    """Returns the content of run.json."""
    content: dict[str, Any] = json.loads((run_dir.path / "run.json").read_bytes())
    return content


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_training_in_order_first(run_dir: RunDir, number: signal.Signals) -> None:
    async def training(stop: asyncio.Event) -> str:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 60)
        return "ended in order"

    # An earlier test may have started Ray in this process. Ray's handler of SIGTERM, which ends the process, stays.
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        summary, interruption = attended(run_dir, training)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert summary == "ended in order"
    assert isinstance(interruption, KeyboardInterrupt)


def test_an_alarm_that_ray_sets_at_sigterm_does_not_abort_the_process(run_dir: RunDir) -> None:
    left: list[int] = []

    async def training(stop: asyncio.Event) -> None:
        signal.alarm(600)  # Ray's handler sets one of 3 s before Python's handler is called
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.wait(), 60)
        left.append(signal.alarm(0))

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        attended(run_dir, training)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert left == [0]


def test_sigterm_keeps_the_callers_handler(run_dir: RunDir) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))

    async def training(stop: asyncio.Event) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return "trained"

    try:
        assert attended(run_dir, training) == ("trained", None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


def test_a_second_keyboard_interrupt_does_not_wait(run_dir: RunDir) -> None:
    ended = threading.Event()

    async def training(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(stop.wait(), 60)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.to_thread(ended.wait, 60)

    with pytest.raises(KeyboardInterrupt):
        attended(run_dir, training)
    ended.set()
    assert recorded(run_dir)["state"] == "stopped"


def test_the_error_of_the_training_is_raised(run_dir: RunDir) -> None:
    async def training(stop: asyncio.Event) -> None:
        raise StallError("no progress")

    with pytest.raises(StallError, match="no progress"):
        attended(run_dir, training)


@pytest.mark.parametrize(
    "config",
    [
        {"run": {"name": "test"}, "learner.total_stps": 4},
        {"run": {"name": "test"}, "model.path": "/no/such/model"},
    ],
    ids=["unknown key", "no model"],
)
def test_a_configuration_that_cannot_run_is_refused_before_anything_is_made(
    config: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError):
        asyncrl.run(config, {"run.dir": tmp_path})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.parametrize("host", ["10.0.0.7", "node", "gpu-3.example"])
def test_metrics_that_other_machines_can_reach_are_refused(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.host = .*other machines can reach it.*use `asyncrl up` instead"):
        asyncrl.run("quickstart", {"metrics.host": host})
    assert not list(tmp_path.iterdir())


def test_a_run_that_was_asked_to_start_again_ends_with_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(training: Any, *, calls: Any, run_dir: RunDir) -> tuple[object, None]:
        run_dir.asked_to_end("a pod of the learner that is about to end", restarts=True)
        run_dir.stopped("after step 1 of 2")
        return object(), None

    config = Config.model_validate({"run": {"dir": tmp_path, "name": "test"}})
    monkeypatch.setattr(api, "checked_config", lambda *_: (config, []))
    monkeypatch.setattr(api, "prepare", lambda _: None)
    monkeypatch.setattr(api, "use_ray_token", lambda **_: None)
    monkeypatch.setattr(api, "_enter_ray", lambda _, choose: choose)
    monkeypatch.setattr(api, "attended_run", attend)
    with pytest.raises(RunError, match=r"call asyncrl\.run again") as ended:
        asyncrl.run(config, progress=False)
    assert ended.value.restart_mends


@pytest.mark.parametrize("name", ["api_key", "password", "access_token"])
def test_a_config_with_a_secret_is_refused_and_the_error_does_not_show_it(name: str) -> None:
    config = asyncrl.Config.model_validate({"environment": {"options": {name: "hunter2"}}})
    with pytest.raises(ConfigError, match=rf"environment\.options\.{name} .*looks like a secret") as caught:
        asyncrl.run(config)
    assert "hunter2" not in str(caught.value)
