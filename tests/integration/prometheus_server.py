"""A real Prometheus for a test: Debian's package, started as deploy/README.md does on a laptop.

The ports differ, and it scrapes and refreshes every second instead of every five."""

import contextlib
import json
import math
import os
import shlex
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import REPOSITORY

PROGRAM = "prometheus"
DEPLOY = REPOSITORY / "deploy"
INTERVAL_S = 1
READY_S = 120.0
ANSWER_S = 30.0
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
PORTS_OF_A_WORKER = 200
_given: set[int] = set()


class Line(NamedTuple):
    """A series of an answer: its labels, and its points (unix time in seconds, value)."""

    labels: dict[str, str]
    points: list[tuple[float, float]]


class PrometheusServer:
    """Runs from construction to `end`, in a folder with the layout of the repository.

    It finds the run `runs/quickstart` there, and over HTTP a learner at `learner_port`."""

    @staticmethod
    def installed() -> bool:
        return shutil.which(PROGRAM) is not None

    def __init__(self, folder: Path, *, learner_port: int) -> None:
        address = f"127.0.0.1:{free_port()}"
        self._url = f"http://{address}"
        self._log = (folder / "prometheus.log").open("wb")
        shipped = shutil.copytree(DEPLOY / "prometheus", folder / "deploy" / "prometheus")
        config = shipped / "prometheus.yml"
        changes = {
            "_interval: 5s": f"_interval: {INTERVAL_S}s",
            "//127.0.0.1:9400/": f"//127.0.0.1:{learner_port}/",
        }
        config.write_text(_changed(config.read_text(), changes))
        [line] = [line for line in (DEPLOY / "README.md").read_text().splitlines() if line.startswith(f"{PROGRAM} ")]
        self.process = subprocess.Popen(
            [*shlex.split(_changed(line, {"127.0.0.1:9099": address})), "--log.level=warn"],
            cwd=folder,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.end()
            raise

    def over(self, query: str, *, since_s: float, until_s: float) -> list[Line]:
        """Returns the query's values at every second. NaN is left out."""
        data = self._ask("query_range", query=query, start=f"{since_s}", end=f"{until_s}", step=f"{INTERVAL_S}")
        lines = [Line(found["metric"], _numbers(found["values"])) for found in data["result"]]
        return [line for line in lines if line.points]

    def scraped(self, selector: str, *, until_s: float) -> list[Line]:
        """Returns the raw samples of the last hour, with the times of their scrapes."""
        data = self._ask("query", query=f"{selector}[1h]", time=f"{until_s}")
        return [Line(found["metric"], _numbers(found["values"])) for found in data["result"]]

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(60)
        self._log.close()

    def _ask(self, what: str, **parameters: str) -> Any:
        body = urllib.parse.urlencode(parameters).encode()
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{what}", data=body, timeout=ANSWER_S) as response:
                return json.loads(response.read())["data"]
        except urllib.error.HTTPError as error:
            pytest.fail(f"{parameters['query']}: {error.read().decode()}")

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + READY_S
        while True:
            try:
                urllib.request.urlopen(f"{self._url}/-/ready", timeout=ANSWER_S).close()
            except OSError:
                assert self.process.poll() is None, Path(self._log.name).read_text()
                assert time.monotonic() < deadline_s, Path(self._log.name).read_text()
                time.sleep(0.1)  # polls another process
            else:
                return


def free_port() -> int:
    """Returns a free port that the caller can bind later. No other process takes it by chance in the meantime.

    The port is below the range from which the kernel chooses ports. It belongs to this pytest worker and is returned
    only once. The search starts at a place that depends on the process, because several pytest runs may run at the same
    time."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ephemeral_from = int(EPHEMERAL_PORTS.read_text().split()[0])
    lowest = ephemeral_from - (worker + 1) * PORTS_OF_A_WORKER
    for offset in range(PORTS_OF_A_WORKER):
        port = lowest + (os.getpid() + offset) % PORTS_OF_A_WORKER
        if port in _given:
            continue
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            _given.add(port)
            return port
    raise RuntimeError(f"none of the {PORTS_OF_A_WORKER} ports from {lowest} on is free")


def _changed(text: str, changes: dict[str, str]) -> str:
    for shipped, ours in changes.items():
        assert shipped in text, f"{shipped!r} is not in the shipped file, so the test would not test that file"
        text = text.replace(shipped, ours)
    return text


def _numbers(values: list[list[Any]]) -> list[tuple[float, float]]:
    points = [(float(moment), float(value)) for moment, value in values]
    return [point for point in points if not math.isnan(point[1])]
