"""Saves what a reorganization of the code must not change, and compares it later on the same machine.

    python tests/run_unchanged.py save /tmp/before.json
    python tests/run_unchanged.py compare /tmp/before.json

It saves the losses, gradient norms, rewards and weights of four runs at η = 0 (one rank, two ranks, an adapter,
agents), the public names, the help of every command, and the text of every error that the tests of the configuration
and of the commands raise. `compare` prints what differs, and exits with status 1 if something does. Two of the
runs took six minutes on a busy machine.
"""

import argparse
import contextlib
import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent
ERRORS_FILE = "ERRORS_FILE"
"""Environment variable with the file to which this module, as a plugin of pytest, adds the texts of errors."""
STEPS = 4
SHORT = [
    "staleness.max_versions=0",
    f"learner.total_steps={STEPS}",
    "learner.groups_per_step=4",
    "learner.group_size=4",
    "learner.optimizer.warmup_steps=0",
    "generator.max_concurrent_groups=4",
    "environment.options.size=2000",
    "model.tiny.warmup_steps=40",
    "algorithm.zero_variance=keep",
    "eval.prompts=0",
    "environment.reward=dense_reward:by_checksum",  # otherwise all rewards are 0, and so are the losses
]
OF_AGENTS = [setting for setting in SHORT if not setting.startswith(("environment.", "model.tiny"))]
RUNS = {
    "one rank": ("configs/quickstart.yaml", SHORT),
    "two ranks": ("configs/quickstart.yaml", [*SHORT, "learner.ranks=2", "learner.batching=packed"]),
    "adapter": ("configs/lora.yaml", SHORT),
    "agents": ("configs/agents/calculator.yaml", [*OF_AGENTS, "model.tiny.warmup_steps=100"]),
}


def pytest_configure() -> None:
    """Adds the text of each error of asyncrl to the file, a JSON text a line."""
    from asyncrl.errors import AsyncRLError

    path = Path(os.environ[ERRORS_FILE])

    def noted(error: AsyncRLError, *arguments: object) -> None:
        Exception.__init__(error, *arguments)
        with path.open("a") as file:
            file.write(f"{json.dumps(f'{type(error).__name__}: {error}')}\n")

    AsyncRLError.__init__ = noted  # type: ignore[method-assign, assignment]


def digest_of_run(recipe: str, overrides: list[str]) -> list[list[str]]:
    """Makes a run. Returns loss, gradient norm and mean reward of each step, and the digest of the exported weights."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "runs" / "unchanged"
        places = [f"run.dir={run.parent}", f"run.name={run.name}", f"model.path={folder}/model"]
        asyncrl("up", "-c", recipe, *places, *overrides)
        asyncrl("export", str(run), f"{folder}/weights")
        weights = [*Path(folder, "weights").glob("*.safetensors")]
        lines = (run / "steps.jsonl").read_text().splitlines()
        if not any(step["loss"] for step in map(json.loads, lines)):
            sys.exit(f"all losses of {recipe} are 0, so that the run shows nothing")
        numbers = [[step[key].hex() for key in ("loss", "grad_norm", "reward_mean")] for step in map(json.loads, lines)]
        return [*numbers, [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(weights)]]


def asyncrl(*arguments: str) -> None:
    command = [sys.executable, "-m", "asyncrl", *arguments]
    search_path = os.pathsep.join([str(REPOSITORY / "tests" / "integration"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": search_path}, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def public_names() -> dict[str, list[str]]:
    import asyncrl

    return {name: sorted(vars(value)) if isinstance(value := getattr(asyncrl, name), type) else [] for name in sorted(
        asyncrl.__all__
    )}  # fmt: skip


def helps() -> dict[str, str]:
    import click
    from typer.main import get_command
    from typer.testing import CliRunner

    from asyncrl.cli.main import app

    main: Any = get_command(app)
    asked = [[], *([name] for name in main.commands)]
    for name in main.commands:
        _, command, _ = main.resolve_command(click.Context(main), [name])  # loads it
        asked += [[name, part] for part in getattr(command, "commands", [])]
    runner = CliRunner(env={"COLUMNS": "120", "TERM": "dumb"})
    return {" ".join(words): runner.invoke(app, [*words, "--help"]).output for words in asked}


def refusals() -> list[str]:
    """Returns the texts of the errors that the tests raise, each once, without paths and numbers of this call."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "errors"
        search_path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "run_unchanged", "--numprocesses=2",
             "--basetemp", f"{folder}/base", "-m", "not integration", "tests/config", "tests/cli"],
            cwd=REPOSITORY, timeout=1200, check=True, stdout=sys.stderr,
            env=os.environ | {ERRORS_FILE: str(path), "PYTHONPATH": search_path},
        )  # fmt: skip
        found = map(json.loads, path.read_text().splitlines())
        base = re.compile(rf"(/private)?{re.escape(folder)}/base/(popen-gw\d/)?[^/\s'\"]*")
        return sorted({re.sub(r"\d{4,}|0x[0-9a-f]+", "N", base.sub("TMP", text)) for text in found})


PARTS: dict[str, Callable[[], Any]] = {
    "names": public_names,
    "helps": helps,
    "refusals": refusals,
    **{f"run: {name}": lambda made=made: digest_of_run(*made) for name, made in RUNS.items()},
}


def differences(before: Any, after: Any) -> Iterator[str]:
    texts = [
        json.dumps(value, indent=1, ensure_ascii=False).replace("\\n", "\n").splitlines() for value in (before, after)
    ]
    yield from difflib.unified_diff(*texts, "before", "after", lineterm="", n=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["save", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", default=[*PARTS], choices=PARTS, metavar="PART", help=", ".join(PARTS))
    arguments = parser.parse_args()
    saved = {}
    with contextlib.suppress(FileNotFoundError):
        saved = json.loads(arguments.file.read_text())
    found = {name: PARTS[name]() for name in arguments.only}
    if arguments.what == "save":
        arguments.file.write_text(json.dumps(saved | found, indent=1))
        return 0
    changed = {name: lines for name in found if (lines := [*differences(saved[name], found[name])])}
    for name, lines in changed.items():
        print(f"{name}:", *lines, sep="\n")
    print(f"{len(changed)} of {len(found)} parts differ: {', '.join(changed) or 'none'}")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
