"""Breaks the generators of a real run at random moments, and checks that the run goes on.

    python benchmarks/pool_campaign.py --write

A run of 300 steps with three replicas is disturbed every few seconds, as a seed decides: a replica's process or its
engine is killed with `kill -9`, or frozen with SIGSTOP (and goes on later), and the pool is scaled in and out with
`asyncrl scale`. The last fault comes at step 220. Afterwards these statements are checked:

- While the coordinator knows a healthy replica, no two steps are further apart than `LONGEST_WAIT_S`.
- Within `HEALED_S` after the last fault, the run trains at least `HEALED` of the tokens per second before the first
  one.
- No prompt has failed, no trained token was older than the limit, the ledger closes, and `asyncrl audit` passes.
- No process and no file in /dev/shm is left.

`--write` puts the table into docs/guarantees.md, between its marks.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from crash_campaign import audited, shared_memory_of
from kills import PROCESSES, name_of, processes_of

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "guarantees.md"
MARKS = ("<!-- the pool's table: benchmarks/pool_campaign.py -->", "<!-- end of the pool's table -->")
STEPS, QUIET_STEPS, LAST_FAULT_STEP = 300, 25, 220
REPLICAS = 3
LONGEST_WAIT_S = 10.0
HEALED_S, HEALED = 60.0, 0.9
FAULTS = ["kill engine", "kill generator", "freeze engine", "freeze generator", "scale in", "scale out"]
FROZEN_S = (2.0, 20.0)
END_S = 900.0
OVERRIDES = [
    "model.max_length=64",
    "model.tiny.warmup_steps=40",
    f"learner.total_steps={STEPS}",
    "learner.groups_per_step=8",
    "learner.group_size=4",
    "learner.optimizer.warmup_steps=0",
    "learner.optimizer.learning_rate=1e-7",  # the policy stays as it is, so that speeds can be compared
    "learner.micro_batch_size=1",  # slow steps, so that the run lasts for many faults
    "learner.batching=padded",
    f"generator.replicas={REPLICAS}",
    "generator.max_concurrent_groups=6",
    "generator.max_completion_tokens=48",
    "generator.temperature=2",
    "generator.persist_every_tokens=8",
    "generator.stall_timeout_s=4",
    "generator.max_restarts=100000",
    "environment.reward=dense_reward:by_checksum",
    "eval.prompts=0",
    "staleness.max_versions=3",
    "checkpoint.every_steps=100",
    "buffer.heartbeat_timeout_s=4",
    "run.max_restarts=0",
]


def steps_of(run: Path) -> int:
    path = run / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def command(*words: str, log: Path, cwd: Path) -> psutil.Popen:
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests' / 'integration'}"}
    with log.open("ab") as file:
        return psutil.Popen(
            [sys.executable, "-m", "asyncrl", *words], stdout=file, stderr=subprocess.STDOUT, cwd=cwd, env=environment
        )


HEALTHY = re.compile(r'^asyncrl_replicas\{state="(?:generating|waiting)"\} (\S+)$', re.MULTILINE)
LOOK_EVERY_S = 0.25


class Onlooker(threading.Thread):
    """Measures the longest time in which the run trained no step although the coordinator knew a healthy replica. It
    reads the coordinator's metrics."""

    def __init__(self, run: Path) -> None:
        super().__init__(daemon=True)
        self._run = run
        self.ended = threading.Event()
        self.longest_wait_s = 0.0

    def run(self) -> None:
        steps, since_s = 0, time.monotonic()
        while not self.ended.wait(LOOK_EVERY_S):
            now_s, before, steps = time.monotonic(), steps, steps_of(self._run)
            if steps != before or not self._healthy():
                since_s = now_s
            self.longest_wait_s = max(self.longest_wait_s, now_s - since_s)

    def _healthy(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            targets = json.loads((self._run / "metrics" / "targets.json").read_text())
            [address] = [each["targets"][0] for each in targets if each["labels"]["role"] == "buffer"]
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=2.0) as answer:
                return int(sum(float(number) for number in HEALTHY.findall(answer.read().decode())))
        return 0


def break_something(
    run: Path, driver: psutil.Process, choose: random.Random, *, size: int, log: Path
) -> tuple[str, int]:
    """Does one fault. Returns its name and the wanted number of replicas afterwards."""
    fault = choose.choice(FAULTS)
    if fault == "scale in" and size > 2:
        size -= 1
    elif fault == "scale out" and size < REPLICAS + 1:
        size += 1
    elif fault.startswith("scale"):
        size = REPLICAS
    if fault.startswith("scale"):
        command("scale", str(run), f"generators={size}", "--no-wait", log=log, cwd=run.parent)
        return fault, size
    what = fault.split()[1]
    found = [each for each in processes_of(driver) if re.match(PROCESSES[what], name_of(each))]
    if not found:
        return f"{fault} (none there)", size
    victim = choose.choice(found)
    with contextlib.suppress(psutil.NoSuchProcess):
        if fault.startswith("kill"):
            victim.kill()
        else:
            victim.suspend()
            timer = threading.Timer(choose.uniform(*FROZEN_S), _resume, [victim])
            timer.daemon = True
            timer.start()
    return fault, size


def _resume(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()


def campaign(*, folder: Path, seed: int, every_s: float) -> dict[str, Any]:
    """Makes one run with its faults. Returns the record of the run. Raises RuntimeError if a statement is wrong."""
    choose = random.Random(seed)
    run, log = folder / f"pool-{seed}", folder / f"pool-{seed}.log"
    driver = command(
        "up", "-c", str(REPOSITORY / "configs" / "quickstart.yaml"), f"run.dir={folder}", f"run.name={run.name}",
        f"model.path={REPOSITORY / 'models' / 'pool-campaign'}", f"run.seed={seed}", *OVERRIDES, log=log, cwd=folder,
    )  # fmt: skip
    faults, size, family, files = Counter[str](), REPLICAS, set[psutil.Process](), set[str]()
    onlooker = Onlooker(run)
    try:
        _wait(lambda: steps_of(run) >= 1, driver, what="a first step")
        _wait(lambda: steps_of(run) >= QUIET_STEPS, driver, what=f"{QUIET_STEPS} steps")
        onlooker.start()
        while steps_of(run) < LAST_FAULT_STEP:
            fault, size = break_something(run, driver, choose, size=size, log=folder / "scale.log")
            faults[fault] += 1
            print(f"step {steps_of(run)}: {fault}", flush=True)
            family.update(processes_of(driver))
            for process in family:
                files |= shared_memory_of(process.pid)
            time.sleep(choose.uniform(0.5, 1.5) * every_s)
            _wait(lambda: True, driver, what="a living run")
        last = steps_of(run)
        command("scale", str(run), f"generators={REPLICAS}", "--no-wait", log=folder / "scale.log", cwd=folder)
        _wait(lambda: steps_of(run) >= STEPS - 1, driver, what="the last step")
        onlooker.ended.set()
        code = driver.wait(END_S)
        if code:
            raise RuntimeError(f"the run ended with exit code {code}: see {log}")
    finally:
        onlooker.ended.set()
        for process in [driver, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() == psutil.STATUS_STOPPED:
                    process.send_signal(signal.SIGCONT)
    record = _checked(run, faults=faults, last=last, family=family, files=files)
    return record | {"longest_wait_s": onlooker.longest_wait_s}


def _checked(
    run: Path, *, faults: Counter[str], last: int, family: set[psutil.Process], files: set[str]
) -> dict[str, Any]:
    """Returns the record of a run whose last fault came after `last` steps."""
    summary = json.loads((run / "summary.json").read_bytes())
    records = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    ends_s, tokens = ([record[name] for record in records] for name in ("wall_s", "trained_tokens"))
    before = sum(tokens[2:QUIET_STEPS]) / (ends_s[QUIET_STEPS - 1] - ends_s[1])
    left = [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    return {
        "faults": dict(faults),
        "steps": summary["steps"],
        "longest_gap_s": max(later - earlier for earlier, later in pairwise(ends_s[QUIET_STEPS:])),
        "healed_after_s": _healed_s(ends_s[last - 1 :], tokens[last - 1 :], rate=HEALED * before),
        "failed_groups": sum(summary["groups_failed"].values()),
        "max_token_staleness": summary["max_token_staleness"],
        "staleness_limit": summary["staleness_limit"],
        "ledger_closed": summary["ledger_closed"],
        "audit": audited(run),
        "left": [*map(str, left), *sorted(file for file in files if Path(file).exists())],
    }


def _healed_s(ends_s: list[float], tokens: list[int], *, rate: float) -> float | None:
    """Returns the time from which the run trained `rate` tokens a second until its end, after the first of the steps
    that ended at `ends_s`; None if there is no such time."""
    for step, at_s in enumerate(ends_s[: -QUIET_STEPS // 2]):
        if sum(tokens[step + 1 :]) / (ends_s[-1] - at_s) >= rate:
            return at_s - ends_s[0]
    return None


def _wait(holds: Any, driver: psutil.Popen, *, what: str, timeout_s: float = END_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        if driver.poll() is not None:
            raise RuntimeError(f"the run ended with exit code {driver.returncode} before there was {what}")
        if holds():
            return
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.1)


def table(record: dict[str, Any]) -> Iterator[str]:
    yield "| statement | limit | measured |"
    yield "|---|---|---|"
    faults = ", ".join(f"{count} × {fault}" for fault, count in sorted(record["faults"].items()))
    yield f"| faults until step {LAST_FAULT_STEP} | | {sum(record['faults'].values())}: {faults} |"
    yield f"| steps trained | {STEPS} | {record['steps']} |"
    yield (
        f"| longest time without a step while a healthy replica lived | {LONGEST_WAIT_S:g} s | "
        f"{record['longest_wait_s']:.1f} s |"
    )
    yield f"| longest time between two steps | | {record['longest_gap_s']:.1f} s |"
    healed_s = record["healed_after_s"]
    yield (
        f"| {HEALED:.0%} of the tokens a second before the first fault, after the last one | {HEALED_S:g} s | "
        f"{'not reached' if healed_s is None else f'{healed_s:.1f} s'} |"
    )
    yield f"| prompts that failed | 0 | {record['failed_groups']} |"
    yield f"| staleness of the oldest trained token | {record['staleness_limit']} | {record['max_token_staleness']} |"
    yield f"| ledger | closed | {'closed' if record['ledger_closed'] else 'open'} |"
    yield f"| processes and files that were left | 0 | {len(record['left'])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every-s", type=float, default=6.0, help="mean time between two faults, seconds")
    parser.add_argument("--folder", type=Path, default=Path("runs") / "pool-campaign")
    parser.add_argument("--write", action="store_true", help="write the table in docs/guarantees.md")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    record = campaign(folder=folder, seed=arguments.seed, every_s=arguments.every_s)
    lines = list(table(record))
    print("\n".join(lines), *record["audit"], *record["left"], sep="\n")
    if arguments.write:
        text = PAGE.read_text()
        before, _, rest = text.partition(MARKS[0])
        _, _, after = rest.partition(MARKS[1])
        PAGE.write_text(f"{before}{MARKS[0]}\n\n" + "\n".join(lines) + f"\n\n{MARKS[1]}{after}")


if __name__ == "__main__":
    main()
