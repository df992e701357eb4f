"""Kills the processes of real runs at random moments and checks that nothing is lost.

    python benchmarks/crash_campaign.py run --kills 40 --minutes 60
    python benchmarks/crash_campaign.py report

`run` makes runs of a tiny model, each with `KILLS_A_RUN` kills with `kill -9`. Each run ends with Ctrl-C, and then
`asyncrl audit` must pass, and no process and no file in /dev/shm may be left. It can be ended after each run and
started again later: the results of complete runs are appended to benchmarks/crash_campaign.jsonl, and the seeds go on.

There are three kinds of runs. In `up`, one command has all processes, and starts again after a process has died.
`critic` is the same with PPO. In `deployments`, the learner and the generators are separate commands on a Ray of their
own, and only the learner's processes are killed: the generators must stay. A kill `while saving` comes while a
checkpoint is being written.

`report` writes the table in docs/guarantees.md, between its two marks.
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
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from kills import EVERYTHING, kill, ray_session

REPOSITORY = Path(__file__).parents[1]
REWARDS = REPOSITORY / "tests" / "integration"
"""Folder with the reward. It gives each completion another one, so that every step changes the weights."""
RESULTS = Path(__file__).with_suffix(".jsonl")
PAGE = REPOSITORY / "docs" / "guarantees.md"
MARKS = ("<!-- the campaign's table: benchmarks/crash_campaign.py report -->", "<!-- end of the table -->")
KILLS_A_RUN = 11
RECOVERY_S = 400.0
"""Longest time until the run trains again. It is longer than every deadline of the run."""
END_S = 300.0
SAVING = "learner, while saving"
TARGETS = {
    "up": [
        "learner", SAVING, "rank", "generator", "engine", "buffer", "row store", "row index", "weight store",
        "Ray head", EVERYTHING,
    ],
    "critic": ["critic", SAVING],
    "deployments": ["learner", SAVING, "rank"],
}  # fmt: skip
GOES_ON = ("row store", "generator", "engine")
"""Targets without which a run may go on. After the end of any other one it starts again, at once or after a timeout."""
CONFIGS = {
    "up": ["quickstart.yaml", "learner.ranks=2"],
    "critic": ["ppo.yaml", "learner.ranks=1", "critic.warmup_steps=0"],
    "deployments": ["quickstart.yaml", "learner.ranks=2"],
}
"""Configuration of each kind of run, and its own overrides."""
OVERRIDES = [
    "model.max_length=64",
    "model.tiny.warmup_steps=40",
    "learner.total_steps=1000000",
    "learner.groups_per_step=4",
    "learner.group_size=4",
    "generator.max_concurrent_groups=8",
    "generator.max_completion_tokens=40",
    "generator.temperature=2",
    "generator.persist_every_tokens=1",
    "environment.reward=dense_reward:by_checksum",
    "eval.prompts=0",
    "learner.optimizer.warmup_steps=0",
    "staleness.max_versions=2",
    "checkpoint.every_steps=4",
    "weights.load_timeout_s=30",
    "buffer.heartbeat_timeout_s=10",
    "run.max_restarts=1000",
    "run.shutdown_grace_s=60",
]
_WENT_BACK = re.compile(r"goes back from \S+ to \S+: (\d+) tokens of finished groups stay, and (\d+) tokens of groups")


class Run:
    """A run with its commands, which write their output into its directory's parent."""

    def __init__(self, kind: str, directory: Path, *, seed: int) -> None:
        self.directory = directory
        self._logs = directory.parent
        config, *own = CONFIGS[kind]
        self._config = REPOSITORY / "configs" / config
        self._overrides = [f"run.dir={directory.parent}", f"run.name={directory.name}", f"run.seed={seed}"]
        self._overrides += [f"model.path={REPOSITORY / 'models' / 'crash-campaign'}", *OVERRIDES, *own]
        self._commands: list[psutil.Popen] = []
        self._session = ""
        self.family: set[psutil.Process] = set()
        """All processes that the commands had started at the kills and at the end."""
        self.shared_memory: set[str] = set()
        """The files in /dev/shm that these processes had open or mapped. Other work on this machine may leave its own
        files there."""
        self.others: list[psutil.Popen] = []
        """Commands that start processes for the learner."""
        if kind != "deployments":
            self._start("up")
        else:
            self.others = [self._start("head", says="Ray runs at")]
            address = re.search(r"Ray runs at (\S+);", self._log("head").read_text())
            assert address is not None, "asyncrl head names its address"
            self._overrides.append(f"ray.address={address[1]}")  # there may be another Ray on this machine
            self._start("generator")
            self._start("learner")
            self._session = ray_session(self.others[0])

    def _start(self, command: str, *, says: str = "") -> psutil.Popen:
        log = self._log(command)
        with log.open("wb") as file:
            words = [sys.executable, "-m", "asyncrl", command, "-c", str(self._config), *self._overrides]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [REPOSITORY, REWARDS]))}
            process = psutil.Popen(words, stdout=file, stderr=subprocess.STDOUT, cwd=self._logs, env=environment)
        self._commands.append(process)
        wait_until(lambda: says in log.read_text(), what=f"{says!r} in {log}")
        return process

    def _log(self, command: str) -> Path:
        return self._logs / f"{self.directory.name}-{command}.log"

    def steps(self) -> int:
        """Returns the number of the run's recorded steps. Raises RuntimeError if a command has ended."""
        for process in self._commands:
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(process.args[2:5])} ended with exit code {process.returncode}")
        path = self.directory / "steps.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def note_family(self) -> None:
        for process in self._commands:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.family.update(process.children(recursive=True))
        self.shared_memory.update(*map(shared_memory_of, (process.pid for process in self.family)))

    def resumed(self) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.directory / "run.json").read_bytes())["resumed"]  # type: ignore[no-any-return]
        return []

    def saving(self) -> bool:
        return any((self.directory / "checkpoints").glob("step-*.tmp"))

    def kept_tokens(self) -> tuple[int, int]:
        """Returns two sums over all times that a learner went back: the tokens of groups that stayed whole, and the
        tokens of surviving weights in groups that lost weights had finished."""
        files = Path(self._session).glob("logs/worker-*.err") if self._session else ()
        found = [match for file in files for match in _WENT_BACK.findall(file.read_text(errors="replace"))]
        return sum(int(whole) for whole, _ in found), sum(int(split) for _, split in found)

    def end(self) -> None:
        """Ends the learner with Ctrl-C, waits for the generators, and ends Ray. Raises RuntimeError if one fails."""
        self.note_family()
        for process in reversed(self._commands):
            if "generator" not in process.args:  # generators end with their run
                process.send_signal(signal.SIGINT)
            code = process.wait(END_S)
            if code != 0:
                raise RuntimeError(f"{' '.join(process.args[2:5])} ended with exit code {code}")

    def kill(self) -> None:
        """Kills what is left of the run after an error."""
        family = [child for process in self._commands if process.is_running() for child in process.children(True)]
        for process in [*self._commands, *family]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def wait_until(holds: Callable[[], bool], *, what: str, timeout_s: float = RECOVERY_S) -> float:
    """Waits until `holds` returns True. Returns the seconds. Raises RuntimeError after `timeout_s`."""
    started_s = time.monotonic()
    while not holds():
        if time.monotonic() - started_s > timeout_s:
            raise RuntimeError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.01 if timeout_s < RECOVERY_S else 0.1)
    return time.monotonic() - started_s


def one_kill(run: Run, target: str, *, moment: random.Random) -> dict[str, Any]:
    """Kills a process after a random time, and waits until the run trains again. Returns the record of the kill."""
    trained, restarts = run.steps(), len(run.resumed())
    wait_until(lambda: run.steps() > trained + 6, what="steps before the next kill")
    time.sleep(moment.uniform(0.0, 3.0))
    if target == SAVING:
        wait_until(run.saving, what="a save", timeout_s=60.0)
    trained = run.steps()
    killed_at = trained
    run.note_family()
    kill(run.directory, "learner" if target == SAVING else target, also=run.others, choose=moment)
    while_saving = target == SAVING and run.saving()

    def trains_again() -> bool:
        nonlocal trained
        since = run.resumed()[restarts:]
        if not since:
            trained = max(trained, run.steps())
        return run.steps() > since[-1]["step"] if since else target in GOES_ON and run.steps() > killed_at + 3

    seconds = wait_until(trains_again, what=f"a step after the {target} was killed at step {killed_at}")
    since = run.resumed()[restarts:]
    lost = trained - since[-1]["step"] if since else 0
    return {"target": target, "saving": while_saving, "step": killed_at, "restart": bool(since), "lost_steps": lost,
            "seconds": round(seconds, 1)}  # fmt: skip


def audited(directory: Path) -> list[str]:
    """Returns the lines of the audit. Raises RuntimeError if it does not pass."""
    audit = subprocess.run(
        [sys.executable, "-m", "asyncrl", "audit", str(directory)], capture_output=True, text=True, timeout=END_S
    )
    if audit.returncode != 0:
        raise RuntimeError(f"the audit of {directory} failed:\n{audit.stdout}{audit.stderr}")
    return [line for line in audit.stdout.splitlines() if "passed" in line]


def shared_memory_of(pid: int) -> set[str]:
    """Returns the files in /dev/shm that a process has open or mapped; none if it has ended."""
    files, process = set[str](), Path("/proc") / str(pid)
    with contextlib.suppress(OSError):
        files.update(line.split(maxsplit=5)[-1].strip() for line in (process / "maps").read_text().splitlines())
        files.update(os.readlink(each) for each in (process / "fd").iterdir())
    return {file for file in files if file.startswith("/dev/shm/")}


def one_run(kind: str, number: int, *, folder: Path, seed: int) -> dict[str, Any]:
    """Makes one run with its kills. Returns its record."""
    choose = random.Random(f"{seed}/{number}")
    targets = (TARGETS[kind] * KILLS_A_RUN)[:KILLS_A_RUN]
    choose.shuffle(targets)
    run = Run(kind, folder / f"{kind}-{number}", seed=number)
    kills = []
    try:
        for target in targets:
            kills.append(one_kill(run, target, moment=choose))
            print(f"{kind}-{number}: {kills[-1]}", flush=True)
        steps, (whole, split) = run.steps(), run.kept_tokens()
        run.end()
    finally:
        run.kill()
    checks = audited(run.directory)
    prompts = re.search(r"of (\d+) prompts", " ".join(checks))
    summary = json.loads((run.directory / "summary.json").read_bytes())
    living = [process for process in run.family if process.is_running()]
    if left := [*living, *sorted(file for file in run.shared_memory if Path(file).exists())]:
        raise RuntimeError(f"the run left {left}")
    return {"kind": kind, "run": number, "kills": kills, "steps": steps, "checks": len(checks),
            "prompts": int(prompts[1]) if prompts else 0, "whole_tokens": whole, "split_tokens": split,
            "continued_tokens": summary["tokens_continued"] if split else 0}  # fmt: skip


def results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def campaign(*, kinds: Sequence[str], kills: int, minutes: float, folder: Path, seed: int) -> None:
    """Makes runs in turn, until there are `kills` more kills or the time is over."""
    deadline_s, made = time.monotonic() + 60 * minutes, 0
    while made < kills and time.monotonic() < deadline_s:
        done = results()
        kind = min(kinds, key=lambda each: sum(record["kind"] == each for record in done))
        record = one_run(kind, sum(each["kind"] == kind for each in done), folder=folder, seed=seed)
        with RESULTS.open("a") as file:
            file.write(json.dumps(record) + "\n")
        made += len(record["kills"])


def table() -> Iterator[str]:
    """Yields the lines of the table of all results."""
    runs = results()
    yield "| killed | kills | restarts | seconds until the next step: median (longest) | steps trained again: median |"
    yield "|---|---|---|---|---|"
    for kind, targets in TARGETS.items():
        for target in targets:
            found = [each for run in runs if run["kind"] == kind for each in run["kills"] if each["target"] == target]
            if not found:
                continue
            seconds = [each["seconds"] for each in found]
            where = {"up": "", "critic": " (PPO)", "deployments": " (separate deployments)"}[kind]
            name = "learner, when a save had begun" if target == SAVING else target
            yield (
                f"| {name}{where} | {len(found)} | {sum(each['restart'] for each in found)} | {median(seconds):.0f} "
                f"({max(seconds):.0f}) | {median(each['lost_steps'] for each in found):.0f} |"
            )
    kills = [each for run in runs for each in run["kills"]]
    names = ("whole_tokens", "split_tokens", "continued_tokens")
    whole, split, continued = (sum(run[name] for run in runs) for name in names)
    yield ""
    while_saving, prompts = sum(each["saving"] for each in kills), sum(run["prompts"] for run in runs)
    yield (
        f"{len(kills)} kills in {len(runs)} runs. {while_saving} of them left an unfinished checkpoint. The "
        f"audit of every run passed: of {prompts} prompts, 0 were lost and 0 were trained twice. No process and no "
        "file in /dev/shm was left."
    )
    if whole + split:
        kept = (whole + min(continued, split)) / (whole + split)
        yield (
            f"When the learner went back while the generators stayed, the finished groups that its checkpoint had not "
            f"trained had {whole + split} tokens of surviving weights. {whole} of them were in groups without a token "
            f"of lost weights, and stayed. Of the other {split}, {continued} had been stored and were continued. So "
            f"{kept:.2%} were not generated again."
        )


def report() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    PAGE.write_text(f"{before}{MARKS[0]}\n\n" + "\n".join(table()) + f"\n\n{MARKS[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="make more runs")
    run.add_argument("--kills", type=int, default=40)
    run.add_argument("--minutes", type=float, default=60.0, help="begin no other run after this time")
    run.add_argument("--kind", choices=list(TARGETS), action="append", help="only runs of this kind")
    run.add_argument("--folder", type=Path, default=Path("runs") / "crash-campaign")
    run.add_argument("--seed", type=int, default=0)
    commands.add_parser("report", help="write the table in docs/guarantees.md")
    arguments = parser.parse_args()
    if arguments.command == "report":
        report()
        return
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    kinds = arguments.kind or list(TARGETS)
    campaign(kinds=kinds, kills=arguments.kills, minutes=arguments.minutes, folder=folder, seed=arguments.seed)


if __name__ == "__main__":
    main()
