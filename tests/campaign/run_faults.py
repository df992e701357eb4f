"""Plants faults in a copy of asyncrl, trains a few steps with each, and records which check has found it.

    python tests/campaign/run_faults.py [--only NAME ...] [--dtype float32 bfloat16] [--write]

A fault is a patch in `faults/`, whose first lines say what it does:

    # what: the loss is divided by a constant instead of the count of tokens
    # config: quickstart
    # settings: learner.micro_batch_tokens=256
    # dtypes: float32 bfloat16
    # found by: coefficients
    # found by in bfloat16: not found

`config` is a file of `configs/` (default: quickstart), `settings` are overrides of the run, `dtypes` are the precisions
in which it is a fault at all (default: both). `found by` has one or more of `FINDERS`, separated by |. The name
`healthy` stands for a run without a patch. Each run is one line of `faults.jsonl`, in place of the line of an earlier
run of this fault; `--write` also writes the table in docs/guarantees.md.

Exits with status 1 if a fault was not found by what its patch names, or if the healthy run ended with an error. A fault
that is expected to be `not found`, and is found, is no error: the patch should then be changed.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "benchmarks"))

from report_page import commit_of_tree  # noqa: E402

FAULTS = Path(__file__).parent / "faults"
RESULTS = Path(__file__).parent / "faults.jsonl"
PAGE = REPOSITORY / "docs" / "guarantees.md"
MARKS = ("<!-- the table of faults: tests/campaign/run_faults.py --write -->", "<!-- end of the table of faults -->")
MODEL = REPOSITORY / "models" / "fault-campaign"
HEALTHY, NOT_FOUND = "healthy", "not found"
CHECKS = ("counts", "prompts", "rows", "advantages", "bounds", "coefficients", "gradient", "optimizer", "frozen")
FINDERS = (*CHECKS, "greedy", "parity", "probe", "live parameters", "audit", "error", NOT_FOUND)
DTYPES = ("float32", "bfloat16")
SETTINGS = (
    "model.tiny.warmup_steps=300",
    "learner.total_steps=10",
    "learner.groups_per_step=8",
    "learner.optimizer.warmup_steps=0",
    "generator.max_concurrent_groups=16",
    "witness.every_steps=1",
    "eval.every_steps=0",
    "checkpoint.every_steps=0",
    "run.max_restarts=0",
    "run.shutdown_grace_s=5",
)
RUN_S, AUDIT_S, GRACE_S = 420.0, 240.0, 20.0
POLL_S = 1.0
ENDED = 124
"""The status of a command that was ended."""
SIGNS = (
    ("live parameters", re.compile(r"live parameters are not as published")),
    ("probe", re.compile(r"engine's log-probs of the probe are not the learner's")),
    ("parity", re.compile(r"learner's log-probs of on-policy tokens are not the engine's")),
)
"""What a log says if a check other than the witness has found a fault."""
WITNESSED = re.compile(r"The witness's check `(\w+)` found: ([^;]*)")
ERROR = re.compile(r"\b[A-Z]\w+(Error|Violation|Failed|Lost|Refused|Mismatch)\b|bug of asyncrl|^error: ")
STEP = re.compile(r"\bstep (\d+): ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A patch with its first lines. Without a `path` it is the healthy run."""

    name: str
    path: Path | None
    what: str
    config: str
    settings: tuple[str, ...]
    dtypes: tuple[str, ...]
    found_by: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A run. `step` is the one in which the fault was found, from 0; None after the end. `words` are those of the check
    or the error."""

    fault: str
    dtype: str
    found_by: str
    step: int | None
    words: str
    seconds: float
    version: str


def faults() -> dict[str, Fault]:
    """Returns the healthy run, and the faults by name. Raises ValueError for a wrong first line."""
    healthy = Fault(
        name=HEALTHY,
        path=None,
        what="no fault",
        config="quickstart",
        settings=(),
        dtypes=DTYPES,
        found_by=dict.fromkeys(DTYPES, (NOT_FOUND,)),
    )
    return {fault.name: fault for fault in (healthy, *map(fault_of, sorted(FAULTS.glob("*.patch"))))}


def fault_of(path: Path) -> Fault:
    """Reads the first lines of a patch. Raises ValueError if one is missing or has a wrong value."""
    lines = path.read_text().partition("\n--- ")[0].splitlines()
    keys = dict(line.removeprefix("# ").split(": ", 1) for line in lines if line.startswith("# "))
    finders = {"float32": keys["found by"], "bfloat16": keys.get("found by in bfloat16", keys["found by"])}
    found_by = {dtype: tuple(each.strip() for each in names.split("|")) for dtype, names in finders.items()}
    dtypes = tuple(keys.get("dtypes", " ".join(DTYPES)).split())
    if unknown := ({each for names in found_by.values() for each in names} - {*FINDERS}) | ({*dtypes} - {*DTYPES}):
        raise ValueError(f"{path} has unknown words: {', '.join(sorted(unknown))}")
    return Fault(
        name=path.stem,
        path=path,
        what=keys["what"],
        config=keys.get("config", "quickstart"),
        settings=tuple(keys.get("settings", "").split()),
        dtypes=dtypes,
        found_by=found_by,
    )


def copied(folder: Path) -> Path:
    """Copies the tracked files of asyncrl and of the configurations, as they are in the working tree."""
    tracked = subprocess.check_output(["git", "ls-files", "asyncrl", "configs"], cwd=REPOSITORY, text=True)
    for name in tracked.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPOSITORY / name, folder / name)
    return folder


def patched(copy: Path, fault: Fault, *, back: bool = False) -> None:
    """Applies the patch of a fault to a copy, or takes it back."""
    if fault.path is not None:
        command = ["git", "apply", *(["-R"] if back else []), str(fault.path)]
        subprocess.run(command, cwd=copy, check=True, env=os.environ | {"GIT_CEILING_DIRECTORIES": str(copy.parent)})


def called(
    command: Sequence[str], *, cwd: Path, limit_s: float, logs: Path | None = None, path: str | None = None
) -> tuple[int, str]:
    """Runs `asyncrl` with the code in `cwd`, or with `path` as PYTHONPATH. Returns its status and what it has written,
    also to the files in `logs`.

    A command that takes longer than `limit_s` is ended with Ctrl-C, and then all of its processes are killed. So is one
    whose logs have one of `SIGNS`: a run goes on with new replicas after a probe has failed, until they fail too.
    """
    words = [sys.executable, "-m", "asyncrl", *command]
    output, started_s = cwd / "output.log", time.monotonic()

    def written() -> str:
        files = [output, *(sorted(logs.glob("*.log")) if logs is not None else [])]
        return "\n".join(file.read_text(errors="replace") for file in files)

    with output.open("wb") as file:
        process = subprocess.Popen(
            words,
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": path or str(cwd)},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        seen = False
        while process.poll() is None and not seen and time.monotonic() < started_s + limit_s:
            time.sleep(POLL_S)
            seen = any(sign.search(written()) for _, sign in SIGNS)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
                process.wait()
            return ENDED, written()
    return process.returncode, written()


def ran(fault: Fault, dtype: str, *, copy: Path, version: str) -> Result:
    """Trains with a fault and audits the run."""
    folder, started_s = copy / "runs", time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    keeps = dtype == "float32" and fault.config == "quickstart"
    settings = [
        *SETTINGS,
        f"model.path={MODEL}",
        f"model.dtype={dtype}",
        f"audit.keep_weights={'all' if keeps else 'none'}",
        f"run.dir={folder}",
        f"run.name={fault.name}",
        *fault.settings,
    ]
    patched(copy, fault)
    try:
        command = ["up", "-c", str(copy / "configs" / f"{fault.config}.yaml"), *settings]
        status, log = called(command, cwd=copy, limit_s=RUN_S, logs=folder / fault.name / "logs")
        found_by, words = _found(status, log)
        steps = folder / fault.name / "steps.jsonl"
        at: int | None = len(steps.read_text().splitlines()) if steps.is_file() else 0
        if found_by == NOT_FOUND:
            asked = ["audit", str(folder / fault.name), *(["--witness-steps", "4"] if keeps else [])]
            at, (status, output) = None, called(asked, cwd=copy, limit_s=AUDIT_S)
            if status:
                found_by = "audit"
                words = next((line for line in output.splitlines() if line.startswith("FAILED")), output[-200:])
        elif (named := STEP.search(words)) is not None:
            at = int(named[1])
    finally:
        patched(copy, fault, back=True)
    seconds = round(time.monotonic() - started_s, 1)
    return Result(
        fault=fault.name,
        dtype=dtype,
        found_by=found_by,
        step=at,
        words=" ".join(words.split())[:300],
        seconds=seconds,
        version=version,
    )


def _found(status: int, log: str) -> tuple[str, str]:
    """Returns what has found a fault according to the status and the log of a run, and its words."""
    if (found := WITNESSED.search(log)) is not None:
        step = STEP.search(log[max(0, found.start() - 200) : found.start()])
        return found[1], f"{step[0] if step else ''}{found[2]}"
    for name, sign in SIGNS:
        if (seen := sign.search(log)) is not None:
            return name, log[log.rfind("\n", 0, seen.start()) + 1 : seen.end() + 200]
    if status:
        lines = log.splitlines()
        return "error", next((line for line in lines if ERROR.search(line)), lines[-1] if lines else "")
    return NOT_FOUND, ""


def recorded() -> dict[tuple[str, str], Result]:
    """Returns the results of earlier runs by fault and precision."""
    lines = RESULTS.read_text().splitlines() if RESULTS.is_file() else []
    results = [Result(**json.loads(line)) for line in lines]
    return {(result.fault, result.dtype): result for result in results}


def record(result: Result) -> None:
    """Writes a result in place of the earlier one."""
    results = recorded() | {(result.fault, result.dtype): result}
    RESULTS.write_text("".join(f"{json.dumps(asdict(results[key]))}\n" for key in sorted(results)))


def is_right(fault: Fault, result: Result) -> bool:
    """Returns whether a result is as expected. More than what is expected is right, but for the healthy run."""
    expected = fault.found_by[result.dtype]
    return result.found_by in expected or (NOT_FOUND in expected and fault.path is not None)


def table(known: Mapping[str, Fault], results: Mapping[tuple[str, str], Result]) -> list[str]:
    """Returns the lines of the table in docs/guarantees.md."""

    def cell(name: str, dtype: str) -> str:
        if dtype not in known[name].dtypes:
            return "no fault"
        if (result := results.get((name, dtype))) is None:
            return "not run yet"
        if result.found_by == NOT_FOUND:
            return "no alarm" if name == HEALTHY else NOT_FOUND
        return f"{result.found_by}, {'afterwards' if result.step is None else f'step {result.step}'}"

    lines = ["| fault | found in float32 by | in bfloat16 |", "|---|---|---|"]
    return lines + [
        f"| {fault.what} | {cell(name, 'float32')} | {cell(name, 'bfloat16')} |" for name, fault in known.items()
    ]


def write_table(lines: Sequence[str], *, marks: tuple[str, str] = MARKS) -> None:
    """Replaces the table between the marks in docs/guarantees.md."""
    begin, end = marks
    before, _, rest = PAGE.read_text().partition(begin)
    _, _, after = rest.partition(end)
    PAGE.write_text("\n".join([f"{before}{begin}\n", *lines, f"\n{end}{after}"]))


def main() -> int:
    known = faults()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*known], default=[*known], metavar="NAME")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=[*DTYPES])
    parser.add_argument("--write", action="store_true", help="write the table in docs/guarantees.md")
    parser.add_argument("--no-runs", action="store_true", help="only write the table of the recorded runs")
    options = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="asyncrl-faults-") as folder:
        copy, version = copied(Path(folder)), commit_of_tree(PAGE)
        for name, dtype in [] if options.no_runs else [(name, each) for each in options.dtype for name in options.only]:
            if dtype not in known[name].dtypes:
                continue
            result = ran(known[name], dtype, copy=copy, version=version)
            record(result)
            right = is_right(known[name], result)
            wrong += not right
            at = "" if result.step is None else f" at step {result.step}"
            expected = "" if right else f", expected: {' | '.join(known[name].found_by[dtype])}"
            print(f"{name} in {dtype}: {result.found_by}{at} ({result.seconds:.0f} s){expected}  {result.words}")
            sys.stdout.flush()
    if options.write:
        write_table(table(known, recorded()))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
