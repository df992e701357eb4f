"""The workers of Ray do not depend on how the process that starts or joins the cluster was started."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray._private import ray_constants, worker

from asyncrl.config.schema import Config
from asyncrl.deployment import cluster

pytestmark = pytest.mark.slow

STARTS: dict[str, Callable[[], object]] = {
    "up": lambda: cluster.start_local(Config()),
    "join": lambda: cluster.join("192.0.2.2:6379", namespace="run"),
}
UV_RUN = {
    "asyncrl": ["uv", "run", "asyncrl", "up", "-c", "quickstart"],
    "python": ["/root/.local/bin/uv", "run", "--extra", "cpu", "python", "train.py"],
    "module": ["uv", "run", "--frozen", "-m", "asyncrl", "head"],
    "with": ["uv", "run", "--with", "extra-package", "--python", "3.12", "asyncrl", "learner"],
}


@pytest.fixture
def runtime_envs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Returns the list of the runtime environments that Ray would give its workers, one for each `ray.init`."""
    found: list[Any] = []

    def init(**options: Any) -> Any:
        inherited = os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR")
        found.append(json.loads(inherited) if inherited else worker._maybe_modify_runtime_env(None, False))
        return SimpleNamespace(address_info={"address": "127.0.0.1:1", "session_dir": tmp_path})

    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster, "_knock", lambda address: None)
    return found


@pytest.mark.parametrize("command", UV_RUN)
@pytest.mark.parametrize("start", STARTS)
def test_workers_are_not_started_with_uv_if_the_driver_was(
    start: str, command: str, runtime_envs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = [SimpleNamespace(cmdline=lambda: ["bash"]), SimpleNamespace(cmdline=lambda: UV_RUN[command])]
    monkeypatch.setattr(psutil.Process, "parents", lambda self: parents)
    assert "py_executable" in worker._maybe_modify_runtime_env({"working_dir": "s3://a/b.zip"}, False), "Ray's own rule"
    STARTS[start]()
    assert runtime_envs == [None]
    assert ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV is True, "a loop of one's own may rely on it"


@pytest.mark.parametrize("start", STARTS)
def test_only_a_joined_cluster_gets_the_environment_of_the_job_that_this_process_belongs_to(
    start: str, runtime_envs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {"runtime_env": {"working_dir": "gcs://_ray_pkg_0123456789abcdef.zip"}, "metadata": {}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    monkeypatch.setenv("RAY_REDIS_ADDRESS", "192.0.2.3:6379")
    STARTS[start]()
    assert runtime_envs == [None if start == "up" else job]
    assert json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"]) == job
    assert os.environ["RAY_REDIS_ADDRESS"] == "192.0.2.3:6379"


@pytest.mark.parametrize("start", STARTS)
def test_a_hook_of_the_environment_is_for_joined_clusters(
    start: str, runtime_envs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_RUNTIME_ENV_HOOK", "test_ray_driver.hook")
    monkeypatch.setattr(worker, "load_class", lambda path: lambda runtime_env: {"from": path})
    STARTS[start]()
    assert runtime_envs == [None if start == "up" else {"from": "test_ray_driver.hook"}]


# A parent process whose command line is `uv run FILE`. Its program is Python, named uv.
AS_UV = """
import subprocess, sys
sys.exit(subprocess.run([sys.executable_of_driver, "-c", open("driver.py").read()], timeout=500).returncode)
"""
DRIVER = """
from asyncrl.deployment.local_clusters import use_ray_token
use_ray_token(own=True)
import ray, sys
from asyncrl.config.schema import Config
from asyncrl.deployment.cluster import start_local
from ray._private.runtime_env.uv_runtime_env_hook import _get_uv_run_cmdline
print("uv", _get_uv_run_cmdline() is not None)
start_local(Config())
print("same", ray.get(ray.remote(num_cpus=0)(lambda: sys.executable).remote(), timeout=240) == sys.executable)
print("env", ray.get_runtime_context().runtime_env == {})
"""


@pytest.mark.integration
def test_a_worker_of_a_driver_below_uv_run_answers(tmp_path: Path) -> None:
    (tmp_path / "run").write_text(AS_UV.replace("sys.executable_of_driver", repr(sys.executable)))
    (tmp_path / "driver.py").write_text(DRIVER)
    done = subprocess.run(
        ["uv", "run"], executable=sys.executable, cwd=tmp_path,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["uv", "True", "same", "True", "env", "True"], done.stderr
