"""Kills the processes of a run, as a machine that fails or the kernel does."""

import contextlib
import random
import re
from collections.abc import Iterable
from pathlib import Path

import psutil

from asyncrl.deployment.known_runs import may_have_died
from asyncrl.learner.records import known_info

EVERYTHING = "everything"
PROCESSES = {
    "engine": r"VLLM::EngineCore",
    "Ray head": r"gcs_server",
    "rank": r"learner rank",
    "critic": r"critic rank",
    "buffer": r"ray::CoordinatorActor",
    "weight store": r"ray::WeightStore",
    "row store": r"ray::RowStore",
    "row index": r"ray::PartitionActor",
    "generator": r"ray::GeneratorActor",
}
"""Pattern of the names of a run's processes, by target."""
_SESSION = re.compile(r"/[\w./-]*/ray/session_[0-9][\w-]+")
_ACTOR_NAME = re.compile(r"^:actor_name:(.*)$", re.MULTILINE)
"""How Ray writes the name of an actor into the file of its standard output. The last one is that of its `__repr__`."""


def kill(run: Path, target: str, *, also: Iterable[psutil.Process] = (), choose: random.Random | None = None) -> int:
    """Sends SIGKILL to one process of the run in `run`, or to all of them. Returns the number of killed processes.

    `target` is a key of `PROCESSES`, `learner` for the run's command, or `EVERYTHING`. The processes are those that the
    command started, and those that the processes `also` started. `choose` takes one of several. The command must live.
    Raises RuntimeError if the run has no such process now.
    """
    info = known_info(run)
    if info is None or may_have_died(run):  # another process may have the pid of a run that has died
        raise RuntimeError(f"the command of the run in {run} does not live")
    driver = psutil.Process(info.pid)
    family = [child for root in (driver, *also) for child in processes_of(root)]
    if target == EVERYTHING:
        chosen = [driver, *family]
    elif target == "learner":
        chosen = [driver]
    else:
        found = [process for process in family if re.match(PROCESSES[target], name_of(process))]
        chosen = [(choose or random.Random(0)).choice(found)] if found else []
    if not chosen:
        raise RuntimeError(f"no process is a {target}: {sorted(map(name_of, family))}")
    for process in chosen:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    return len(chosen)


def ray_session(process: psutil.Process) -> str:
    """Returns the session folder of the Ray whose daemons this process started. Raises RuntimeError without one."""
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if found := _SESSION.search(" ".join(child.cmdline())):
                return found[0]
    raise RuntimeError(f"process {process.pid} has started no Ray")


def processes_of(root: psutil.Process) -> list[psutil.Process]:
    """Returns the processes that `root` has started, and theirs."""
    return root.children(recursive=True)


def name_of(process: psutil.Process) -> str:
    """Returns the name that the process has in Ray's log, or that Ray or vLLM gave it; else that of its program."""
    with contextlib.suppress(psutil.NoSuchProcess, IndexError, OSError):
        first = process.cmdline()[0]
        if first.startswith("ray::RankActor"):
            return _ACTOR_NAME.findall(Path(f"/proc/{process.pid}/fd/1").read_text(errors="replace"))[-1]
        return first if "::" in first else Path(first).name
    return ""
