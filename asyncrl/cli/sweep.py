"""`asyncrl sweep`: trains one run for each combination of settings and for each seed, one after the other.

A run of a sweep is a run like any other, in a folder of its own. A sweep has no files about its own progress: from the
directories of its runs, the same command finds and skips the runs that have finished, and resumes the others.
"""

import asyncio
import contextlib
import itertools
import json
import math
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from asyncrl.cli.compare import compare
from asyncrl.cli.options import ConfigFiles, Overrides
from asyncrl.cli.preflight import checked_config
from asyncrl.cli.sweep_processes import Ending, TrainingProcesses, ended_by_signals
from asyncrl.cli.terminal import print_warnings, say
from asyncrl.config.load import first_difference, flat_config, load_config, parse_yaml
from asyncrl.config.schema import HELDOUT, Config
from asyncrl.deployment.known_runs import as_it_is, process_of
from asyncrl.errors import INTERRUPTED, PREEMPTED, ConfigError
from asyncrl.learner.records import EvalRecord, StepRecord, read_lines
from asyncrl.views.quantities import duration
from asyncrl.views.short_values import run_name

LOOK_S = 1.0
"""Time between two checks whether a run that another process trains has ended, seconds."""
OWN_KEYS = ("run.name", "run.dir", "run.seed")
"""Settings that a sweep sets for each run. The user's `run.dir` gets the folder of the sweep, and the user's `run.seed`
is the first seed."""


class SweptRun(NamedTuple):
    """A run of a sweep: the overrides that make it differ from the others, and its configuration."""

    overrides: tuple[str, ...]
    config: Config

    @property
    def name(self) -> str:
        return self.config.run.name

    @property
    def directory(self) -> Path:
        return self.config.run.dir / self.name

    @property
    def log(self) -> Path:
        """The file with what the command of the run prints."""
        return self.config.run.dir / f"{self.name}.log"


def sweep(
    files: ConfigFiles,
    overrides: Overrides,
    name: Annotated[
        str, typer.Option(help="Name of the sweep: its runs are in a folder of this name in run.dir.")
    ] = "sweep",
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs of each combination, with the seeds run.seed, run.seed + 1 …")
    ] = 1,
    parallel: Annotated[int, typer.Option(min=1, help="Runs at the same time; the devices must suffice for them.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs, and start none.")] = False,
) -> None:
    """Train one run for each combination of the values that overrides list, and for each seed. Compare them at the end.

    An override with commas lists the values of a setting. A text with a comma needs quotes, and a list its brackets.
    The same command continues a sweep that was ended or killed: it skips the runs that have finished and resumes the
    others. Ctrl-C ends the runs that train at this moment cleanly, each with a checkpoint. The exit codes after Ctrl-C
    and SIGTERM are those of a run: 0 and 76.

    \b
      asyncrl sweep -c quickstart --seeds 3 staleness.max_versions=1,4
      asyncrl sweep -c run.yaml --name losses --seeds 3 algorithm.loss=grpo,dapo staleness.max_versions=1,4
    """
    runs = planned(files, overrides, name=name, seeds=seeds)
    waiting = [run for run in runs if not has_finished(run)]
    folder = runs[0].config.run.dir
    if dry_run:
        for run in runs:
            say(f"{run.name}  {'finished' if run not in waiting else shlex.join(run.overrides)}")
        return
    say(f"{len(runs)} runs in {folder}, {len(runs) - len(waiting)} of them finished before")
    commands = [command_of(run, files, overrides) for run in waiting]
    failed = asyncio.run(
        train_all(waiting, commands, parallel=parallel, first=len(runs) - len(waiting) + 1, of=len(runs))
    )
    write_comparison(runs, folder, seeds=seeds)
    if failed:
        raise typer.Exit(1)


# --- the runs of a sweep -------------------------------------------------------------------------------------------


def planned(files: Sequence[Path], overrides: Sequence[str], *, name: str, seeds: int) -> list[SweptRun]:
    """Returns the runs of the sweep, those of one combination after each other. Raises ConfigError if the configuration
    of any run is wrong, before the first one starts."""
    common, axes = divided(overrides)
    found = []
    warned: dict[str, list[str]] = {}
    for values in itertools.product(*axes.values()):
        combination = ", ".join(map(_shown, axes, values))
        chosen = [f"{key}={as_yaml(value)}" for key, value in zip(axes, values, strict=True)]
        given = load_config(files, [*common, *chosen]).run
        for seed in range(given.seed, given.seed + seeds):
            run = run_name(dict(zip(axes, values, strict=True)), seed=seed if seeds > 1 or not values else None)
            own = [*chosen, f"run.seed={seed}", f"run.dir={given.dir / name}", f"run.name={run}"]
            if given.mirror is not None:
                own.append(f"run.mirror={given.mirror.rstrip('/')}/{name}/{run}")
            config, warnings = _checked(files, [*common, *own], combination)
            found.append(SweptRun(tuple(own), config))
            for warning in warnings if seed == given.seed else []:
                warned.setdefault(warning, []).append(combination)
    of_all = math.prod(map(len, axes.values()))
    for warning, combinations in warned.items():  # a warning about all combinations names none
        of_each = [f"{combination}: {warning}" for combination in combinations]
        print_warnings([warning] if len(combinations) == of_all else of_each)
    names = [run.name for run in found]
    if twice := {each for each in names if names.count(each) > 1}:
        raise ConfigError(
            f"two runs of the sweep would have the name {min(twice)}; list each value once, with texts that differ"
        )
    return found


def _checked(files: Sequence[Path], overrides: list[str], combination: str) -> tuple[Config, list[str]]:
    """Returns the configuration of a run, and warnings about it. Errors name the `combination`."""
    try:
        return checked_config(files, overrides, starts=False)
    except ConfigError as error:
        raise ConfigError(f"{combination}: {error}" if combination else str(error)) from error


def divided(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[object]]]:
    """Returns the overrides that all runs share, and the values of each setting that is varied.

    >>> divided(["learner.total_steps=40", "algorithm.loss=grpo,dapo", "generator.stop=[a, b]"])
    (['learner.total_steps=40', 'generator.stop=[a, b]'], {'algorithm.loss': ['grpo', 'dapo']})
    """
    common, axes = [], dict[str, list[object]]()
    for override in overrides:
        key, _, text = override.partition("=")
        if key == "run.name" or (key in OWN_KEYS and "," in text):
            raise ConfigError(
                f"{override!r}: a sweep sets {key} for each run; give it a --name, one run.dir, and --seeds"
            )
        values = parse_yaml(f"[{text}]", source=f"override {override!r}") if "," in text else None
        if isinstance(values, list) and len(values) > 1:
            axes[key] = values
        else:
            common.append(override)
    return common, axes


def as_yaml(value: object) -> str:
    """Returns the value on one line of YAML."""
    text = json.dumps(value, ensure_ascii=False)
    return text if isinstance(value, str) else text.replace("Infinity", ".inf")


def _shown(key: str, value: object) -> str:
    return f"{key} = {value if isinstance(value, str) else as_yaml(value)}"


def has_finished(run: SweptRun) -> bool:
    """Returns whether the run has finished. Raises ConfigError if it finished with other settings."""
    info = as_it_is(run.directory)
    if info is None or info.state != "finished":
        return False
    ours, before = flat_config(run.config), flat_config(load_config([run.directory / "config.yaml"]))
    if key := first_difference(ours, before):
        raise ConfigError(
            f"{key} = {ours.get(key)!r}, but {run.directory} has finished with {before.get(key)!r}; give the sweep "
            "another --name, or remove this directory"
        )
    return True


def command_of(run: SweptRun, files: Sequence[Path], overrides: Sequence[str]) -> list[str]:
    common, _ = divided(overrides)
    words = [word for file in files for word in ("-c", str(file))]
    return [sys.executable, "-m", "asyncrl", "up", *words, *common, *run.overrides]


# --- training ------------------------------------------------------------------------------------------------------


async def train_all(
    runs: Sequence[SweptRun], commands: Sequence[Sequence[str]], *, parallel: int, first: int, of: int
) -> list[str]:
    """Trains the runs, `parallel` of them at a time. Returns the names of those that failed. When a signal asks the
    sweep to end, no further run is started, and typer.Exit is raised when the runs that train have ended. `first` is
    the number of the first run, and `of` the number of all runs of the sweep, for the printed lines."""
    room, ending = asyncio.Semaphore(parallel), Ending()
    processes = TrainingProcesses(ending)
    failed, waiting = list[str](), {first + number for number in range(len(runs))}

    async def train(number: int, run: SweptRun, command: Sequence[str]) -> None:
        async with room:
            if (left := process_of(run.directory)) is not None:
                say(f"{run.name}: waits for the end of process {left.pid}, which has this run")
                # Waits for the end of the run, not of the process, which may train other runs of its sweep.
                while process_of(run.directory) == left and not ending.asked.is_set():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_S):
                            await ending.asked.wait()
            waiting.discard(number)
            if ending.asked.is_set() or has_finished(run):
                return
            say(f"run {number} of {of}: {run.name} (watch it: asyncrl top {shlex.quote(str(run.directory))})")
            began_s = time.monotonic()
            code = await processes.train(command, run.config, log=run.log)
            if not waiting:  # no run needs idle processes any more, and other runs may go on for hours
                await processes.close()
            ending.at_once |= ending.asked.is_set() and code == INTERRUPTED
            took = duration(time.monotonic() - began_s)
            if code not in (0, PREEMPTED):
                failed.append(run.name)
                print_warnings(
                    [f"{run.name} failed after {took} with exit code {code}: {last_error(run.log)}; see {run.log}"]
                )
            else:
                say(f"  {run.name} ended after {took}{heldout(run)}")

    with ended_by_signals(ending):
        try:
            await asyncio.gather(*(map(train, itertools.count(first), runs, commands)))
        finally:
            await processes.close()
    if ending.asked.is_set():
        say("the sweep was asked to end; the same command continues it")
        in_order = PREEMPTED if ending.by is signal.SIGTERM else 1 if failed else 0
        raise typer.Exit(INTERRUPTED if ending.at_once else in_order)
    return failed


def last_error(log: Path) -> str:
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    return lines[-1].removeprefix("error: ") if lines else "no error was printed"


def heldout(run: SweptRun) -> str:
    """Returns the run's first and last held-out reward in words; "" without an evaluation."""
    evals = read_lines(run.directory / "evals.jsonl", EvalRecord)
    rewards = [f"{each.reward_mean:.3f}" for each in evals if each.name == HELDOUT and each.reward_mean is not None]
    return f", held-out reward {rewards[0]} → {rewards[-1]}" if rewards else ""


def write_comparison(runs: Sequence[SweptRun], folder: Path, *, seeds: int) -> None:
    """Prints the numbers of the runs that have trained a step, and writes them as a page and as CSV. Runs that differ
    only in their seed are one group. Does nothing if fewer than two runs have trained a step."""
    trained = [str(run.directory) for run in runs if read_lines(run.directory / "steps.jsonl", StepRecord)]
    if len(trained) < 2:
        return
    by = ["run.seed"] if seeds > 1 else None
    compare(trained, by=by, output=folder / "compare.html", csv=folder / "numbers.csv")
