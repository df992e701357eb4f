"""Starts a run in another process, gives each pool a core of its own, and measures throughput and CPU time by process.

A core stands for a device: the processes of the generator (its engine and its scoring processes too) get one core, and
the learner's ranks another one. All other processes of the run may use both cores.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parents[1]
GENERATOR_CORE, LEARNER_CORE = 0, 1
ROLES = {
    "VLLM::EngineCore": "engine",
    "ray::GeneratorActor": "generator",
    "ray::RankActor": "rank",
    "ray::CoordinatorActor": "coordinator",
    "ray::WeightStore": "stores",
    "ray::RowStore": "stores",
    "ray::PartitionActor": "stores",
}
"""Role of a process by the beginning of its name. Other children of a generator score; the rest is Ray's."""
CORES = {"engine": GENERATOR_CORE, "generator": GENERATOR_CORE, "scoring": GENERATOR_CORE, "rank": LEARNER_CORE}
END_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The measurements between two steps. `records` are the steps after the first one, up to the second one."""

    records: list[dict[str, Any]]
    before: dict[str, Any]
    cpu_s: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return float(self.records[-1]["wall_s"] - self.before["wall_s"])

    @property
    def samples(self) -> int:
        return sum(record["trained_samples"] for record in self.records)

    @property
    def tokens(self) -> int:
        return sum(record["trained_tokens"] for record in self.records)

    def state_s(self, side: str) -> dict[str, float]:
        """Returns the seconds by state of one side, `learner` or `generator`, within the window."""
        now, then = (record[f"{side}_state_s"] for record in (self.records[-1], self.before))
        return {state: seconds - then.get(state, 0.0) for state, seconds in now.items()}


class MeasuredRun:
    """A run of `asyncrl up`, from construction to `end`. Its directory is `folder`/measured."""

    def __init__(self, config: str, overrides: Sequence[str], *, folder: Path, pinned: bool = True) -> None:
        self._log = folder / "log"
        self._steps = folder / "measured" / "steps.jsonl"
        self._pinned = pinned
        own = [f"run.dir={folder}", "run.name=measured", "learner.total_steps=100000"]
        command = [sys.executable, "-m", "asyncrl", "up", "-c", str(REPOSITORY / "configs" / config), *overrides, *own]
        paths = os.pathsep.join(map(str, [REPOSITORY, REPOSITORY / "benchmarks"]))
        with self._log.open("wb") as log:
            self._process = psutil.Popen(
                command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"PYTHONPATH": paths}
            )

    def records(self) -> list[dict[str, Any]]:
        """Returns the records of the trained steps. Raises RuntimeError with the log if the run has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(self._log.read_text()[-4000:])
        if not self._steps.exists():
            return []
        lines = self._steps.read_text().split("\n")[:-1]  # the last line may be incomplete
        return [record for record in map(json.loads, lines) if record["trained"]]

    def wait(self, steps: int, *, timeout_s: float) -> list[dict[str, Any]]:
        """Waits until `steps` steps are trained. Returns their records."""
        deadline_s = time.monotonic() + timeout_s
        while len(records := self.records()) < steps:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{len(records)} of {steps} steps within {timeout_s:g} s")
            time.sleep(0.05)
        return records

    def window(self, *, first: int, steps: int, timeout_s: float = 600.0) -> Window:
        """Measures `steps` steps after step number `first`."""
        begin = self.warm_up(first, timeout_s=timeout_s)
        cpu_before = self.cpu_s()
        records = self.wait(begin + steps, timeout_s=timeout_s)
        cpu = Counter(self.cpu_s())
        cpu.subtract(cpu_before)
        return Window(records=records[begin:], before=records[begin - 1], cpu_s=dict(cpu))

    def warm_up(self, steps: int, *, timeout_s: float = 600.0) -> int:
        """Pins the processes after the first step, and waits for `steps` steps. Returns the number of steps so far."""
        self.wait(1, timeout_s=timeout_s)
        if self._pinned:
            self._pin()
        return len(self.wait(steps, timeout_s=timeout_s))

    def cpu_s(self) -> dict[str, float]:
        """Returns the CPU seconds by role so far."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for process, role in self.processes():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            seconds[role] += times.user + times.system
        return dict(seconds)

    def _pin(self) -> None:
        for process, role in self.processes():
            if role in CORES:
                for thread in process.threads():  # an affinity is that of a thread, and later threads inherit it
                    with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
                        os.sched_setaffinity(thread.id, {CORES[role]})

    def processes(self) -> list[tuple[psutil.Process, str]]:
        found: list[tuple[psutil.Process, str]] = [(self._process, "command")]
        for process in self._process.children(recursive=True):
            try:
                found.append((process, _role(process)))
            except (psutil.NoSuchProcess, IndexError):
                continue
        return found

    def end(self) -> None:
        """Ends the run. Kills what is left of it after `END_S`."""
        if self._process.poll() is not None:
            return
        family = [self._process, *self._process.children(recursive=True)]
        self._process.terminate()
        _, alive = psutil.wait_procs(family, timeout=END_S)
        for process in alive:
            process.kill()


def _role(process: psutil.Process) -> str:
    name = process.cmdline()[0]
    for beginning, role in ROLES.items():
        if name.startswith(beginning):
            return role
    ancestors = [parent.cmdline()[:1] for parent in process.parents()]
    if any(words and words[0].startswith("ray::GeneratorActor") for words in ancestors):
        return "scoring"
    # Ray renames the process of its driver; the command's child has the same arguments as the command
    return "command" if process.cmdline()[1:4] == ["-m", "asyncrl", "up"] else "Ray"
