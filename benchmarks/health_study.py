"""Trains runs that are broken on purpose, and recipes without a fault. There is a run for each kind of health note,
except for those that need an error in the code: `nothing_trained`, `not_verified` and `parity`.

    python benchmarks/health_study.py --write

The table in docs/benchmarks.md says which note each run had first, and at which step. A note of a broken run is right
if it is the first one, and appears within `WITHIN_STEPS` steps. A note about held-out rewards has `WITHIN_EVALUATIONS`
evaluations. A recipe without a fault may have no note, and must train all of its steps. A run that fails is wrong. The
two runs of SmolLM2 need its folder, which
`benchmarks/make_smollm2.py models/SmolLM2-135M-Instruct` makes.

The command may be ended and given again: a run whose result is in its folder is not trained again. `--only` trains some
of the runs, and `--again` some of them a second time. The notes are found in the records of the runs with the rules of
this commit, so `--only` without a name makes the table from what is there.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from report_page import REPOSITORY, busy_percent, provenance, write_section

from asyncrl.common.concern import Concern
from asyncrl.learner.records import EvalRecord, Note, StepRecord, read_lines
from asyncrl.views.run_view import run_view
from asyncrl.views.setting import setting_at

Line = TypeVar("Line", StepRecord, EvalRecord)

BENCHMARK = "health_study.py"
WITHIN_STEPS, WITHIN_EVALUATIONS = 10, 3
RUN_S, END_S = 900.0, 90.0
"""Longest time of a run, and of its end after a signal, seconds."""
SHORT = ("checkpoint.every_steps=0", "eval.prompts=64", "run.max_restarts=0")
FAST = (
    "learner.total_steps=16",
    "learner.optimizer.warmup_steps=0",
    "learner.optimizer.schedule=constant",
)
FEW = ("learner.total_steps=6", "learner.groups_per_step=16", "eval.prompts=0", "eval.every_steps=0")
"""Enough for a note about a level, which looks at three steps."""
SMOLLM = "model.path=models/SmolLM2-135M-Instruct"
NO_MORE_STALE = "staleness.max_versions=0"
SPELLING = (
    "environment.name=math",
    'data.prompt_template="{question}>"',
    "model.path=models/health-speller",
    "model.tiny={warmup_wrong_fraction: 0.6, warmup_accuracy: 0.35, warmup_steps: 300}",
)
"""Settings of the quickstart with questions of broken_tasks.py, and a model that is warmed up on them."""
MISLABELLED = (
    *SPELLING,
    "model.path=models/health-mislabelled",
    "data.dataset=broken_tasks:wrongly_labelled",
    "environment.reward=exact_match",
    "eval.sets={checked: {data: {dataset: broken_tasks:rightly_labelled}}}",
)
TABLE = ("run", "expected note", "first note", "in step", "notes at the end", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run: what is broken in it, a recipe of `configs/`, its overrides, and the note that it must have first; None
    for a run without a fault, which has to train `steps` steps."""

    what: str
    config: str = "quickstart"
    settings: tuple[str, ...] = ()
    expected: Concern | None = None
    steps: int = 0


BROKEN: Mapping[str, Run] = {
    "cut": Run(
        what="`generator.max_completion_tokens=2`, for answers of 4 or 5 tokens",
        settings=("generator.max_completion_tokens=2",),
        expected=Concern.CUT,
    ),
    "no_template": Run(
        what="`data.chat=off` for SmolLM2, which was trained with a chat template",
        config="smollm",
        settings=(*FEW, SMOLLM, "data.chat=off", "data.few_shot=[]"),
        expected=Concern.CUT,
    ),
    "equal_groups": Run(
        what="a reward that depends on the question only",
        settings=(*FEW, "environment.reward=broken_tasks:of_question"),
        expected=Concern.NO_GRADIENT,
    ),
    "zero_rewards": Run(
        what="a reward that looks for `boxed`, which the model never writes",
        settings=(*FEW, 'environment.rewards=[{name: boxed, fn: regex, options: {pattern: "boxed"}}]'),
        expected=Concern.ZERO_REWARDS,
    ),
    "entropy": Run(
        what="a reward for answers on which the group agrees, right or not, less the group's mean",
        settings=(
            "environment.reward=broken_tasks:agreement",
            "learner.optimizer.learning_rate=4e-3",
            NO_MORE_STALE,
        ),
        expected=Concern.ENTROPY,
    ),
    "length": Run(
        what="`algorithm.overlong=penalise` over the whole length, beside a reward with the weight 0.2",
        settings=(
            "environment.rewards=[{name: right, fn: exact_match, weight: 0.2}]",
            "algorithm.overlong=penalise",
            "algorithm.overlong_buffer_tokens=6",
            "learner.optimizer.learning_rate=2e-3",
            NO_MORE_STALE,
        ),
        expected=Concern.LENGTH,
    ),
    "components": Run(
        what="`tiny_chat` with a reward for short answers of twice the weight",
        config="tiny_chat",
        settings=(
            "environment.rewards=[{name: right, fn: exact_match}, "
            "{name: short, fn: length, weight: 2.0, options: {free_chars: 0, buffer_chars: 2}}]",
            NO_MORE_STALE,
        ),
        expected=Concern.COMPONENTS,
    ),
    "empty": Run(
        what="the quickstart with a reward for short answers of twice the weight, and a rate of 2e-3",
        settings=(
            "learner.total_steps=12",
            "learner.groups_per_step=24",
            "environment.rewards=[{name: right, fn: exact_match}, "
            "{name: short, fn: length, weight: 2.0, options: {free_chars: 0, buffer_chars: 4}}]",
            "learner.optimizer.learning_rate=2e-3",
            NO_MORE_STALE,
        ),
        expected=Concern.LENGTH,
    ),
    "stale": Run(
        what="`staleness.max_versions=16`, new weights for the engines every 16 steps, a rate of 3e-3",
        settings=(
            "staleness.max_versions=16",
            "weights.publish_every_steps=16",
            "learner.optimizer.learning_rate=3e-3",
        ),
        expected=Concern.STALE_DATA,
    ),
    "high_kl": Run(
        what="the uncorrected baseline (`grpo`) with `staleness.max_versions=16` and a rate of 2e-3",
        settings=(
            "algorithm.loss=grpo",
            "algorithm.uncorrected=true",
            "staleness.max_versions=16",
            "weights.publish_every_steps=16",
            "learner.optimizer.learning_rate=2e-3",
        ),
        expected=Concern.HIGH_KL,
    ),
    "unchanged": Run(
        what="`learner.optimizer.learning_rate=1e-20`",
        settings=(*FEW, "learner.optimizer.learning_rate=1e-20"),
        expected=Concern.UNCHANGED,
    ),
    "no_tool_calls": Run(
        what="an agent with a calculator, without `generator.tool_parser`",
        config="agents/calculator",
        settings=(*FEW, "generator.tool_parser=null"),
        expected=Concern.NO_TOOL_CALLS,
    ),
    "one_turn": Run(
        what="an agent that ends after the model's first answer, also if this is a call",
        config="agents/calculator",
        settings=(*FEW, "environment.options={highest: 9, calls: 0}"),
        expected=Concern.ONE_TURN,
    ),
    "failures": Run(
        what="a reward that raises an error for a fifth of the questions",
        settings=(
            *FEW,
            *SPELLING,
            "data.dataset=broken_tasks:rightly_labelled",
            "environment.reward=broken_tasks:raising",
        ),
        expected=Concern.FAILURES,
    ),
    "heldout": Run(
        what="questions with wrong answers, and a held-out set with right ones",
        settings=(
            *MISLABELLED,
            "eval.every_steps=5",
            "learner.total_steps=20",
            "learner.optimizer.learning_rate=5e-4",
            NO_MORE_STALE,
        ),
        expected=Concern.HELDOUT,
    ),
}
HEALTHY: Mapping[str, Run] = {
    name: Run(what=f"`{name}`, {steps} steps", config=config, settings=tuple(more), steps=steps)
    for name, config, steps, *more in (
        ("quickstart", "quickstart", 20),
        ("lora", "lora", 20),
        ("ppo", "ppo", 20),
        ("mixture", "mixture", 20),
        ("own_task", "own_task", 16),
        ("tiny_chat", "tiny_chat", 16),
        ("calculator", "agents/calculator", 12),
        ("guess_the_number", "agents/guess_the_number", 12),
        ("key_value_store", "agents/key_value_store", 12),
        ("smollm", "smollm", 12, SMOLLM),
    )
}
RUNS: Mapping[str, Run] = {**BROKEN, **HEALTHY}


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a run ended: its exit code, or None if it took longer than `RUN_S`, and the last line that it wrote."""

    code: int | None
    seconds: float
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The notes of a run. `first` is its first note, after `steps` steps and `evaluations` evaluations of the set with
    most of them. `last` are its notes at the end. `recorded` is the number of its steps."""

    first: Note | None
    steps: int
    evaluations: int
    last: Sequence[Note]
    recorded: int


def command(name: str, run: Run, *, folder: Path) -> list[str]:
    own = FAST if run.expected is not None else (f"learner.total_steps={run.steps}",)
    words = ["up", "-c", str(REPOSITORY / "configs" / f"{run.config}.yaml"), *SHORT, *own, *run.settings]
    return [sys.executable, "-m", "asyncrl", *words, f"run.dir={folder}", f"run.name={name}"]


def train(name: str, run: Run, *, folder: Path) -> End:
    """Trains a run, and ends it after `RUN_S` seconds."""
    log, started_s = folder / f"{name}.log", time.monotonic()
    paths = os.pathsep.join(map(str, [REPOSITORY, Path(__file__).parent]))
    code: int | None
    with (
        log.open("wb") as file,
        subprocess.Popen(
            command(name, run, folder=folder),
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": paths},
            stdout=file,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        try:
            code = process.wait(RUN_S)
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
    lines = log.read_text(errors="replace").split("\n")
    words = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return End(code=code, seconds=round(time.monotonic() - started_s), words=words[:200])


def seen_in(directory: Path) -> Seen:
    """Finds the notes that a reader of the directory had after each step."""
    steps = _lines(directory / "steps.jsonl", StepRecord)
    evals = _lines(directory / "evals.jsonl", EvalRecord)
    setting = setting_at(directory)

    def notes(known: Sequence[StepRecord], evaluated: Sequence[EvalRecord]) -> Sequence[Note]:
        return run_view(known, recent=False, evals=evaluated, setting=setting).notes

    moments = [
        (steps[: n + 1], [record for record in evals if record.wall_s <= steps[n].wall_s]) for n in range(len(steps))
    ]
    moments.append((steps, evals))
    for known, evaluated in moments:
        if found := notes(known, evaluated):
            sets = [record.name for record in evaluated]
            most = max(map(sets.count, sets), default=0)
            return Seen(
                first=found[0], steps=len(known), evaluations=most, last=notes(steps, evals), recorded=len(steps)
            )
    return Seen(first=None, steps=len(steps), evaluations=0, last=(), recorded=len(steps))


def _lines(path: Path, kind: type[Line]) -> list[Line]:
    return read_lines(path, kind) if path.is_file() else []


def is_right(run: Run, seen: Seen, end: End) -> bool:
    """Whether the run ended in order, and its first note is the expected one and came in time. A recipe without a fault
    must have trained all of its steps without a note."""
    if end.code != 0:
        return False
    if run.expected is None or seen.first is None:
        return run.expected is None and seen.first is None and seen.recorded >= run.steps
    in_time = seen.steps <= WITHIN_STEPS
    if run.expected is Concern.HELDOUT:
        in_time = seen.evaluations <= WITHIN_EVALUATIONS
    return seen.first.concern is run.expected and in_time


def row(run: Run, seen: Seen, end: End) -> list[str]:
    first = "none" if seen.first is None else f"`{seen.first.concern}`: {seen.first.fact}"
    at = "" if seen.first is None else str(seen.steps)
    if run.expected is Concern.HELDOUT and seen.first is not None:
        at += f", evaluation {seen.evaluations}"
    last = ", ".join(f"`{note.concern}`" for note in seen.last) or "none"
    said = "right" if is_right(run, seen, end) else "**wrong**"
    if end.code != 0:
        said += f"; ended after {seen.recorded} steps: {end.words}"
    expected = "none" if run.expected is None else f"`{run.expected}`"
    return [run.what, expected, first, at, last, said]


def page(folder: Path, *, busy: float) -> list[str]:
    """Returns the lines of the table, with the runs that have ended, and the names of the others."""
    lines, missing, verdicts = [], list[str](), {True: [0, 0], False: [0, 0]}
    for name, run in RUNS.items():
        if (end := result(folder, name)) is None:
            missing.append(f"`{name}`")
            continue
        seen = seen_in(folder / name)
        lines.append(row(run, seen, end))
        count = verdicts[run.expected is not None]
        count[0] += is_right(run, seen, end)
        count[1] += 1
    text = [[*TABLE], ["---"] * len(TABLE), *lines]
    (broken, all_broken), (healthy, all_healthy) = verdicts[True], verdicts[False]
    return [
        provenance(BENCHMARK, busy_percent=busy),
        "",
        *[f"| {' | '.join(cells)} |" for cells in text],
        "",
        f"{broken} of {all_broken} broken runs had the right note first and in time, and {healthy} of {all_healthy} "
        f"recipes without a fault had all of their steps and no note. Runs without a result: "
        f"{', '.join(missing) or 'none'}.",
    ]


def result(folder: Path, name: str) -> End | None:
    """Returns how a run has ended; None if it has no result yet."""
    path = folder / f"{name}.json"
    return End(**json.loads(path.read_text())) if path.is_file() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "health-study", help="folder of the runs")
    parser.add_argument("--only", nargs="*", choices=[*RUNS], default=[*RUNS], metavar="NAME")
    parser.add_argument("--again", nargs="*", choices=[*RUNS], default=[], metavar="NAME")
    parser.add_argument("--write", action="store_true", help="write the table to docs/benchmarks.md")
    arguments = parser.parse_args()
    busy, folder = busy_percent(), arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.again:
        (folder / f"{name}.json").unlink(missing_ok=True)
    for name in [each for each in RUNS if each in {*arguments.only, *arguments.again}]:
        if result(folder, name) is not None:
            continue
        shutil.rmtree(folder / name, ignore_errors=True)  # what is left of a run that was ended in its middle
        end = train(name, RUNS[name], folder=folder)
        (folder / f"{name}.json").write_text(json.dumps(asdict(end)))
        cells = row(RUNS[name], seen_in(folder / name), end)
        print(f"{name}: {end.seconds:.0f} s, exit code {end.code}: {' | '.join(cells)}")
        sys.stdout.flush()
    lines = page(folder, busy=busy)
    print("\n".join(lines))
    if arguments.write:
        write_section(BENCHMARK, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
