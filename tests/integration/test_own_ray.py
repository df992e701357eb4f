"""The Ray of `asyncrl up`, of the README's two terminals, and of your own loop: all sockets listen at the loopback
address, and a connection without the token is refused."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import REPOSITORY
from listening_sockets import Listener, listeners

pytestmark = pytest.mark.integration

START = """
from asyncrl.deployment.local_clusters import use_ray_token
use_ray_token(own=True)
import contextlib, json, logging, os, sys, psutil, ray
from asyncrl.config.schema import Config
from asyncrl.deployment.cluster import start
address, session_folder, _ = start(Config.model_validate({"run": {"name": "own-ray"}}))
niceness = [os.nice(0), ray.get(ray.remote(num_cpus=0)(lambda: os.nice(0)).remote(), timeout=240)]
listening, commands = [], []
for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
    with contextlib.suppress(psutil.NoSuchProcess):
        commands.append(" ".join(process.cmdline()))
        listening += [
            [process.name(), connection.laddr.ip]
            for connection in process.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
print(json.dumps({"address": address, "listening": listening, "niceness": niceness, "commands": commands,
                  "mode": os.stat(os.path.join(session_folder, "..", "..")).st_mode & 0o777}), flush=True)
sys.stdin.read()
"""
README = REPOSITORY / "README.md"
OWN_LOOP = REPOSITORY / "docs" / "own-loop.md"
STDERR = "stderr of the one that started it"
JOIN = """
import sys
from asyncrl.deployment.local_clusters import use_ray_token
use_ray_token()
import ray
from asyncrl.deployment.cluster import join
join(sys.argv[1], namespace=sys.argv[2])
print("answer", ray.get(ray.remote(num_cpus=0)(lambda: 7).remote(), timeout=240))
"""


def environment(home: Path, **changed: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return kept | {"HOME": str(home)} | changed


@pytest.fixture(scope="module")
def own_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Path]]:
    """Starts a Ray. Returns the facts that the starting process prints about it, and the user's home directory, which
    was empty."""
    home = tmp_path_factory.mktemp("home")
    with (
        (home / STDERR).open("w") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", START],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment(home),
            start_new_session=True,
        ) as starter,
    ):  # fmt: skip
        assert starter.stdin is not None
        assert starter.stdout is not None
        line = next((line for line in starter.stdout if line.startswith("{")), "")
        assert line, (home / STDERR).read_text()
        yield json.loads(line), home
        starter.stdin.close()
        starter.wait(240)


def joined(address: str, home: Path, run: str = "other", **changed: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", JOIN, address, run],
        env=environment(home, **changed), capture_output=True, text=True, timeout=360, check=False,
    )  # fmt: skip


def test_nothing_of_it_listens_beyond_this_machine(own_ray: tuple[dict[str, Any], Path]) -> None:
    said, _ = own_ray
    assert len(said["listening"]) > 4, "the list must include Ray's daemons"
    beyond = [each for each in said["listening"] if each[1].removeprefix("::ffff:") != "127.0.0.1"]
    assert beyond == []


def test_other_users_cannot_enter_the_folder_above_its_own(own_ray: tuple[dict[str, Any], Path]) -> None:
    said, _ = own_ray
    assert said["mode"] == 0o700


def test_nobody_is_told_how_to_open_it(own_ray: tuple[dict[str, Any], Path]) -> None:
    _, home = own_ray
    assert "RAY_AUTH_MODE" not in (home / STDERR).read_text()


def test_its_workers_get_as_much_of_a_busy_machine_as_other_programs(own_ray: tuple[dict[str, Any], Path]) -> None:
    said, _ = own_ray
    driver, worker = said["niceness"]
    assert worker == driver


def test_it_has_no_daemons_that_a_run_does_not_use(own_ray: tuple[dict[str, Any], Path]) -> None:
    said, _ = own_ray
    unused = ("/dashboard.py", "/monitor.py", "/log_monitor.py")
    assert [command for command in said["commands"] if any(name in command for name in unused)] == []
    assert [command for command in said["commands"] if "/raylet" in command]


def test_its_user_joins_it(own_ray: tuple[dict[str, Any], Path]) -> None:
    said, home = own_ray
    done = joined(said["address"], home)
    assert "answer 7" in done.stdout, done.stderr


OTHER_TOKENS = {
    "no-token": {"RAY_AUTH_MODE": "disabled"},
    "another-token": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)},
}
"""The environment of processes that do not have the token."""


@pytest.mark.fault("F32")
def test_nobody_joins_it_without_its_token(own_ray: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    said, _ = own_ray
    few = {"RAY_NUM_REDIS_GET_RETRIES": "3"}  # attempts of Ray, one a second; by default 20
    with ThreadPoolExecutor() as threads:
        attempts = {
            name: threads.submit(joined, said["address"], tmp_path / name, **changed, **few)
            for name, changed in OTHER_TOKENS.items()
        }
    for name, attempt in attempts.items():
        done = attempt.result()
        assert done.returncode != 0, name
        assert "answer" not in done.stdout, name
        assert "refuses our token; set RAY_AUTH_TOKEN" in done.stderr.splitlines()[-1], name
        assert (tmp_path / name / ".ray" / "auth_token").exists() is False, name


def test_the_readmes_head_listens_on_this_machine_alone_is_joined_and_ends_when_it_is_stopped(tmp_path: Path) -> None:
    [line] = [line for line in README.read_text().splitlines() if line.startswith("asyncrl head")]
    command = [sys.executable, "-m", *line.partition("#")[0].split()]
    output = tmp_path / "output"
    with output.open("w") as file:
        head = psutil.Popen(
            command, cwd=REPOSITORY, env=environment(tmp_path), stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        deadline_s = time.monotonic() + 400
        while "Ray runs at 127.0.0.1:" not in output.read_text():
            assert head.poll() is None, output.read_text()
            assert time.monotonic() < deadline_s, output.read_text()
            time.sleep(0.2)  # polls another process
        done = joined("auto", tmp_path, "quickstart")
        assert "answer 7" in done.stdout, done.stderr
        assert {each.address for each in listeners([head], metrics=())} == {"127.0.0.1"}
        daemons = head.children(recursive=True)
        assert {"raylet", "gcs_server"} <= {process.name() for process in daemons}
        head.send_signal(signal.SIGINT)
        assert head.wait(120) == 0
        assert psutil.wait_procs(daemons, timeout=60)[1] == []
    finally:
        if head.poll() is None:
            head.kill()


RENAMED = "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"


def where_the_hosts_name_is_public(command: list[str]) -> list[str]:
    """Returns a command that runs `command` on a host whose name is an address that other machines can reach, as in
    many clouds. Libraries that listen at the address of the name are then found. Returns `command` if this process may
    not change the name, or has no such address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return command
        renamed = ["unshare", "--map-root-user", "--uts", sys.executable, "-c", RENAMED, probe.getsockname()[0]]
    try:
        subprocess.run([*renamed, sys.executable, "-c", ""], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return command
    return [*renamed, *command]


SAID = (
    r"^loss -?\d.*, effective sample size [01]\.\d+$",
    r"^step 2: reward [01]\.\d+, losses -?\d+\.\d+, -?\d+\.\d+$",
)
"""What the output of each example of the page must contain."""
IN_TURN = """
import runpy, sys
for number, example in enumerate(sys.argv[1:]):
    print("example", number, flush=True)
    runpy.run_path(example, run_name="__main__")
    import ray
    ray.shutdown()
"""
"""Runs all examples in one process, because each new one would import torch, transformers and Ray again."""


@pytest.mark.campaign
def test_the_examples_of_own_loops_run_as_they_are_and_on_this_machine_alone(model_path: str, tmp_path: Path) -> None:
    codes = re.findall(r"```python\n(.*?)```", OWN_LOOP.read_text(), re.DOTALL)
    assert len(codes) == len(SAID)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny-speller").symlink_to(model_path)
    examples, output = [tmp_path / f"example-{number}.py" for number in range(len(codes))], tmp_path / "output"
    for example, code in zip(examples, codes, strict=True):
        assert 'path = "models/tiny-speller"' in code
        example.write_text(code)
    with output.open("w") as file:
        loop = psutil.Popen(
            where_the_hosts_name_is_public([sys.executable, "-c", IN_TURN, *map(str, examples)]),
            cwd=tmp_path, env=environment(tmp_path), stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    deadline_s = time.monotonic() + 800
    seen: list[set[Listener]] = [set() for _ in SAID]
    try:
        while loop.poll() is None:
            assert time.monotonic() < deadline_s, output.read_text()[-4000:]
            running = listeners([loop], metrics=())
            number = len(re.findall(r"^example \d$", output.read_text(), re.MULTILINE)) - 1
            seen[max(0, number)] |= running
            time.sleep(1)  # polls another process
    finally:
        if loop.poll() is None:
            for left in [*loop.children(recursive=True), loop]:
                left.kill()
    assert loop.returncode == 0, output.read_text()[-4000:]
    assert "RAY_AUTH_MODE" not in output.read_text(), "the output must not tell the user how to turn tokens off"
    _, *outputs = re.split(r"^example \d$", output.read_text(), flags=re.MULTILINE)
    for said, printed, sockets in zip(SAID, outputs, seen, strict=True):
        assert re.search(said, printed, re.MULTILINE), printed[-4000:]
        assert {"Ray's GCS", "Ray's raylet"} <= {each.process for each in sockets}
        assert {each.address for each in sockets} == {"127.0.0.1"}
    [checkpoint] = (tmp_path / "checkpoints").iterdir()
    assert checkpoint.name == "step-3"
    assert {path.name for path in checkpoint.iterdir()} == {"weights", "optimizer", "tokenizer"}
