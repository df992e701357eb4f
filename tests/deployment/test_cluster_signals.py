"""The deployment keeps its SIGTERM handler when Ray starts, and Ray's daemons do not get the signal (F29)."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.deployment import cluster
from asyncrl.errors import RunError

pytestmark = pytest.mark.slow


class RayInit:
    """Stands for `ray.init`. `starts` is called in its place; `answer` is what Ray's function returns."""

    def __init__(self, session: Path) -> None:
        self.starts: Callable[[], object] = lambda: None
        self.answer = SimpleNamespace(address_info={"address": "127.0.0.1:1", "session_dir": session})

    def __call__(self, **_: Any) -> Any:
        self.starts()
        return self.answer


@pytest.fixture
def ray_init(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RayInit:
    fake = RayInit(tmp_path)
    monkeypatch.setattr(cluster.ray, "init", fake)
    return fake


@pytest.fixture
def ray_takes_sigterm(ray_init: RayInit, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets `ray.init` take the SIGTERM handler, as the real one does."""

    def ends_everything(number: int, frame: Any) -> None:
        raise AssertionError("Ray ended its processes and this one")

    before = signal.getsignal(signal.SIGTERM)
    ray_init.starts = lambda: signal.signal(signal.SIGTERM, ends_everything)
    monkeypatch.setattr(cluster, "_knock", lambda address: None)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.asyncio
@pytest.mark.usefixtures("ray_takes_sigterm")
@pytest.mark.parametrize(
    "start",
    [lambda: cluster.start_local(Config()), lambda: cluster.join("192.0.2.2:1", namespace="a")],
    ids=["up", "join"],
)
@pytest.mark.fault("F29")
async def test_sigterm_asks_for_a_clean_end_after_ray_was_started(start: Callable[[], object]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    try:
        start()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(60):
            await stop.wait()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


@pytest.mark.fault("F29")
def test_what_ray_starts_is_in_a_session_of_its_own_and_nothing_else_is(ray_init: RayInit) -> None:
    sessions: list[bool] = []

    def start() -> None:
        """Starts a child with a `preexec_fn`, as Ray starts its daemons."""
        code = "import os; print(os.getsid(0) == os.getpid())"
        child = subprocess.run([sys.executable, "-c", code], preexec_fn=lambda: None, capture_output=True, check=True)
        sessions.append(child.stdout.strip() == b"True")

    ray_init.starts = start
    cluster.start_local(Config())
    start()
    assert sessions == [True, False]


def test_a_ray_that_does_not_start_in_time_is_ended_and_started_again(ray_init: RayInit) -> None:
    daemons: list[subprocess.Popen[bytes]] = []
    others: list[subprocess.Popen[bytes]] = []
    program = os.path.join(os.path.dirname(cluster.ray.__file__), "core", "raylet")

    def late() -> None:
        waiting = [sys.executable, "-c", "input()"]
        daemons.append(subprocess.Popen([*waiting, program], stdin=subprocess.PIPE))
        others.append(subprocess.Popen(waiting, stdin=subprocess.PIPE))  # as another thread of a notebook may do
        if len(daemons) < late_starts + 1:
            raise Exception("The current node timed out during startup. This could happen because some of the raylet")

    ray_init.starts = late
    late_starts = 2
    assert cluster.start_local(Config()) == "127.0.0.1:1"
    *ended, last = daemons
    assert [process.wait(60) for process in ended] == [-signal.SIGKILL] * 2
    assert last.poll() is None
    daemons.clear()
    last.communicate(b"\n")
    late_starts = 3
    with pytest.raises(RunError, match="Ray did not start in 3 attempts of 30 s each"):
        cluster.start_local(Config())
    for other in others:
        other.communicate(b"\n", timeout=60)
    assert [other.returncode for other in others] == [0] * 6, "no other process was ended"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PermissionError(13, "Permission denied", "/tmp/ray/x"), "PermissionError: .*Permission denied: '/tmp/ray/x'"),
        (OSError(28, "No space left on device"), "OSError: .*No space left on device"),
        (RuntimeError("Maybe you called ray.init twice by accident?\nMore"), r"RuntimeError: .*accident\?\); the logs"),
        (Exception("The GCS server has died.\n\nits log"), r"Exception: The GCS server has died\.\)"),
    ],
    ids=["permission", "disk", "twice", "gcs"],
)
def test_another_error_of_rays_start_is_one_line_with_the_folder_of_the_logs(
    error: Exception, says: str, ray_init: RayInit
) -> None:
    def fail() -> None:
        raise error

    ray_init.starts = fail
    with pytest.raises(RunError, match=rf"^Ray did not start \({says}") as raised:
        cluster.start_local(Config())
    assert str(raised.value).endswith("/ray/session_latest/logs")
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is error


GROUP_SIGNAL = """
import os, signal, ray
from asyncrl.config.schema import Config
from asyncrl.deployment import cluster
signal.signal(signal.SIGTERM, lambda *_: None)
cluster.start_local(Config())
os.killpg(0, signal.SIGTERM)
print("answer", ray.get(ray.remote(num_cpus=0)(lambda: 7).remote(), timeout=240))
"""


@pytest.mark.integration
@pytest.mark.fault("F29")
def test_ray_answers_after_a_signal_to_our_whole_process_group() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROUP_SIGNAL],
        start_new_session=True, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert "answer 7" in done.stdout, done.stderr
