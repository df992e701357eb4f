"""Measures the cost of scraping a run every second: its throughput with scrapes, divided by its throughput without.

    python benchmarks/scrape_cost.py [--windows 16] [--steps 40] [--rate 10]

The script starts a quickstart and divides it into windows of `--steps` steps. In half of the windows, it fetches the
endpoint of every process, except Ray's, `--rate` times per second. The order of windows is with, without, without,
with, so that a slow drift of the throughput affects both in the same way.

The cost of one scrape per second is the measured loss of tokens per second divided by the rate. Ten scrapes per second
have an effect that is larger than the noise; one scrape per second has not. The claim is a cost of less than 1 %. The
script also prints the CPU time per token. Run it on a machine without other work. A Prometheus on the same machine
costs more, because it also stores the data.
"""

import argparse
import gzip
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

import psutil

REPOSITORY = Path(__file__).parents[1]
ORDER = (True, False, False, True)
STEPS_BEFORE = 20
START_S = 300.0


class Window(NamedTuple):
    """The measurements of one window. `cpu_s` are CPU seconds of all processes of the run."""

    scraped: bool
    tokens: int
    seconds: float
    cpu_s: float


class Scraper:
    """Fetches all endpoints except Ray's `rate` times per second, from `start` to `stop`, in one thread per
    endpoint."""

    def __init__(self, learner: str, *, rate: float) -> None:
        self._learner = learner
        self.rate = rate
        self._stopping = Event()
        self._threads: list[Thread] = []
        self.fetched = 0
        self.bytes = 0

    def start(self) -> None:
        targets = json.loads(_fetch(f"http://{self._learner}/sd"))
        self._stopping = Event()
        self._threads = [
            Thread(target=self._scrape, args=(f"http://{address}/metrics", self._stopping), daemon=True)
            for group in targets
            if group["labels"]["role"] != "ray"
            for address in group["targets"]
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _scrape(self, url: str, stopping: Event) -> None:
        while True:
            due_s = time.monotonic() + 1 / self.rate
            self.bytes += len(_fetch(url))
            self.fetched += 1
            if stopping.wait(max(0.0, due_s - time.monotonic())):
                return


def _fetch(url: str) -> bytes:
    request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request, timeout=10) as response:
        body: bytes = response.read()
    return gzip.decompress(body) if response.headers.get("Content-Encoding") == "gzip" else body


class Run:
    """A quickstart in another process, from construction to `end`."""

    def __init__(self, folder: Path, *, port: int) -> None:
        overrides = [
            f"run.dir={folder}",
            "learner.total_steps=100000",
            "eval.prompts=0",
            f"metrics.learner_port={port}",
        ]
        self._log = folder / "log"
        self._steps = folder / "quickstart" / "steps.jsonl"
        self._read = 0
        self.records: list[dict[str, Any]] = []
        with self._log.open("wb") as log:
            self._process = psutil.Popen(
                [sys.executable, "-m", "asyncrl", "up", "-c", "configs/quickstart.yaml", *overrides],
                cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def wait_for_steps(self, count: int, *, timeout_s: float) -> None:
        """Waits until `count` steps have ended."""
        deadline_s = time.monotonic() + timeout_s
        while self._look() < count:
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline_s, f"no {count} steps within {timeout_s:g} s"
            time.sleep(0.02)

    def cpu_s(self) -> float:
        """Returns the CPU seconds of all processes of the run so far."""
        times = [process.cpu_times() for process in [self._process, *self._process.children(recursive=True)]]
        return sum(each.user + each.system for each in times)

    def end(self) -> None:
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGTERM)
            self._process.wait(60)

    def _look(self) -> int:
        if self._steps.exists():
            with self._steps.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if line.endswith(b"\n"):
                        self._read += len(line)
                        self.records.append(json.loads(line))
        return len(self.records)


def windows(run: Run, scraper: Scraper, *, count: int, steps: int) -> Iterator[Window]:
    """Yields `count` windows of `steps` steps each."""
    for i in range(count):
        scraped = ORDER[i % len(ORDER)]
        if scraped:
            scraper.start()
        run.wait_for_steps(len(run.records) + 1, timeout_s=START_S)  # starts at the end of a step
        first, before_s = len(run.records), run.cpu_s()
        run.wait_for_steps(first + steps, timeout_s=START_S)
        last, after_s = len(run.records), run.cpu_s()
        if scraped:
            scraper.stop()
        tokens = sum(record["trained_tokens"] for record in run.records[first:last])
        yield Window(
            scraped, tokens, run.records[last - 1]["wall_s"] - run.records[first - 1]["wall_s"], after_s - before_s
        )


def report(measured: list[Window], scraper: Scraper) -> None:
    """Prints the ratios of tokens per second and of CPU time per token, with their standard errors."""
    print(f"{scraper.fetched} scrapes of {scraper.bytes / max(scraper.fetched, 1) / 1024:.0f} KiB on average")
    ratio, error = _compare("tokens per second", measured, lambda window: window.tokens / window.seconds)
    _compare("CPU µs per token", measured, lambda window: window.cpu_s / window.tokens * 1e6)
    share = 1 / scraper.rate
    print(f"one scrape per second costs {(1 - ratio) * share:.2%} ± {error * share:.2%} of the tokens per second")


def _compare(what: str, measured: list[Window], value: Callable[[Window], float]) -> tuple[float, float]:
    """Returns the mean ratio of windows with scrapes to windows without, over pairs of neighbours, and its error."""
    pairs = [{window.scraped: value(window) for window in measured[i : i + 2]} for i in range(0, len(measured), 2)]
    ratios = [pair[True] / pair[False] for pair in pairs]
    with_it, without = (statistics.mean(pair[kind] for pair in pairs) for kind in (True, False))
    ratio, error = statistics.mean(ratios), statistics.stdev(ratios) / math.sqrt(len(ratios))
    print(
        f"{what}: {with_it:.0f} scraped, {without:.0f} not scraped; ratio {ratio:.3f} ± {error:.3f}, {len(pairs)} pairs"
    )
    return ratio, error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=16, help="number of windows, a multiple of 4")
    parser.add_argument("--steps", type=int, default=40, help="steps in a window")
    parser.add_argument("--rate", type=float, default=10.0, help="scrapes per second of each endpoint")
    arguments = parser.parse_args()
    if arguments.windows < len(ORDER) or arguments.windows % len(ORDER):
        parser.error(f"--windows {arguments.windows} is not a positive multiple of {len(ORDER)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # exits through `finally` below, which ends the run
    with tempfile.TemporaryDirectory() as folder:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        run, scraper = Run(Path(folder), port=port), Scraper(f"127.0.0.1:{port}", rate=arguments.rate)
        try:
            run.wait_for_steps(STEPS_BEFORE, timeout_s=START_S)
            report(list(windows(run, scraper, count=arguments.windows, steps=arguments.steps)), scraper)
        finally:
            run.end()


if __name__ == "__main__":
    main()
