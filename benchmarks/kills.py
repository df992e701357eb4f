"""Kills the processes of a run, as a machine that fails or the kernel does."""

import contextlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

import psutil

EVERYTHING = "everything"
PROCESSES = {
    "engine": r"VLLM::EngineCore",
    "Ray head": r"gcs_server",
    "rank": r"ray::RankActor",
    "buffer": r"ray::CoordinatorActor",
    "weight store": r"ray::WeightStore",
    "row store": r"ray::RowStore",
    "generator": r"ray::GeneratorActor",
}
"""Pattern of the names of a run's processes, by target."""


def kill(run: Path, target: str, *, also: Iterable[psutil.Process] = ()) -> int:
    """Sends SIGKILL to one process of the run in `run`, or to all of them. Returns the number of killed processes.

    `target` is a key of `PROCESSES`, `learner` for the run's command, or `EVERYTHING`. The processes are those that the
    command started, and those that the processes `also` started. The command must live. Raises RuntimeError if the run
    has no such process now.
    """
    driver = psutil.Process(json.loads((run / "run.json").read_bytes())["pid"])
    family = [child for root in (driver, *also) for child in root.children(recursive=True)]
    if target == EVERYTHING:
        chosen = [driver, *family]
    elif target == "learner":
        chosen = [driver]
    else:
        chosen = [process for process in family if re.match(PROCESSES[target], _name(process))][:1]
    if not chosen:
        raise RuntimeError(f"no process is a {target}: {sorted(map(_name, family))}")
    for process in chosen:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(chosen)


def _name(process: psutil.Process) -> str:
    """Returns the name that Ray or vLLM gave the process; else the name of its program."""
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):
        first = process.cmdline()[0]
        return first if "::" in first else Path(first).name
    return ""
