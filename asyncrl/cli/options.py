"""Options that several commands share, and what they print about a run."""

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic_core import PydanticCustomError

from asyncrl.cli.preflight import user_modules
from asyncrl.cli.restarts import begun_before, earlier_end
from asyncrl.cli.terminal import print_warnings, say, sigterm_exits
from asyncrl.common.roles import Role
from asyncrl.config.load import secret_values
from asyncrl.config.schema import Config, storage_url
from asyncrl.deployment.fetching import MirroredRun, is_url, visited
from asyncrl.deployment.known_runs import address_of, best_checkpoint, dead_runs, existing_run, newest_weights
from asyncrl.deployment.resuming import Choice, no_checkpoint, unfinished_run
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.learner.records import known_info
from asyncrl.run_files import OF_DAMAGED_FILES

if TYPE_CHECKING:
    from asyncrl.deployment.run_dir import RunDir
    from asyncrl.learner.records import Summary

logger = logging.getLogger(__name__)

ConfigFiles = Annotated[
    list[Path],
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        default_factory=list,
        show_default=False,  # Typer would show the class `list`
        help="YAML file, or a recipe of `asyncrl recipes`; several are merged from left to right.",
    ),
]
Overrides = Annotated[
    list[str],
    typer.Argument(
        metavar="[KEY=VALUE]...",
        default_factory=list,
        show_default=False,  # Typer would show the class `list`
        help="Overrides, e.g. staleness.max_versions=4. Values are YAML.",
    ),
]


AllowPublic = Annotated[
    bool,
    typer.Option(
        "--allow-public",
        help="Allow other machines to read metrics: metrics.host may be an address that they can reach.",
    ),
]

Fresh = Annotated[
    bool,
    typer.Option(
        "--fresh", help="Begin a new run, and move the directory of an unfinished one aside. Default: resume it."
    ),
]

_address = functools.partial(typer.Option, "--address", metavar="HOST:PORT")

Address = Annotated[
    str | None,
    _address(help="Ray cluster. Default: the config's ray.address, else the cluster that runs on this machine."),
]

RunningAddress = Annotated[
    str | None,
    _address(
        help="Ray cluster. Default: RAY_ADDRESS, else the address in the run's directory, if this machine is a node "
        "of that cluster, else the cluster that runs on this machine."
    ),
]
"""The option --address of commands that do not read a config."""

RunningRun = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Name of a run, such as quickstart, or its directory."),
]
"""A run whose processes a command calls."""

RecordedRun = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Directory of a run, or the name of a run in runs/, such as quickstart."),
]
"""A run whose files a command reads."""

RunOrMirror = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Name of a run, such as quickstart, its directory, or the URL of its mirror."),
]
"""A run whose files a command reads, from its directory or from its mirror (`recorded_run`)."""

Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Use the code, programs, servers, secrets and cluster that the configuration of the run names.",
    ),
]

at_option = functools.partial(typer.Option, "--at", metavar="CHECKPOINT")
"""The option --at of commands that use a checkpoint of a run. Its `help` says for what."""

LINE_EVERY_STEPS = 10
"""Steps between two lines of progress, if the output is not a terminal."""


@contextlib.contextmanager
def recorded_run(run: str, fetch: Callable[[MirroredRun], object]) -> Iterator[Path]:
    """Yields the directory of a run (`RunOrMirror`). For the URL of a mirror, `fetch` fetches what the command needs
    into a temporary directory, which is removed when the block ends, also after SIGTERM."""
    if not is_url(run):
        yield existing_run(Path(run))
        return
    check_url(run)
    with sigterm_exits(), visited(run, fetch, report=functools.partial(say, err=True)) as directory:
        yield directory


def check_url(url: str) -> None:
    """Raises ConfigError if the URL of a mirror on the command line has a secret, because commands print URLs, or if it
    is not the URL of one storage. The configuration refuses the same URLs in `run.mirror`."""
    if any(True for _ in secret_values(url)):
        raise ConfigError(
            "the URL of the mirror has a password or a key, and commands show URLs; write it without, and give the "
            "password to the package of the storage, e.g. in AWS_SECRET_ACCESS_KEY or in its configuration file "
            "(fsspec: ~/.config/fsspec/conf.json)"
        )
    try:
        storage_url(url)
    except PydanticCustomError as error:
        raise ConfigError(f"{url} {error.message()}") from None


def check_writable(option: str, path: Path) -> None:
    """Raises ConfigError if the folder of a file that a command will write cannot be written."""
    if not os.access(path.absolute().parent, os.W_OK):
        raise ConfigError(f"{option} {path}: its folder is missing or cannot be written; name another file")


def choice(*, fresh: bool) -> Choice:
    """Returns the function that chooses the checkpoint from which an earlier run of this name is resumed. With --fresh
    it chooses none, and a new run begins.

    If a process of this command has begun the new run and has died, the restarted process ignores --fresh.
    """
    return no_checkpoint if fresh and not begun_before() else unfinished_run


def ray_address(config: Config, option: str | None) -> str:
    """Returns the address of the option, else of the config, else `auto`: the cluster that runs on this machine."""
    return option or config.ray.address or "auto"


def named_address(option: str | None) -> str | None:
    """Returns the address of the Ray cluster that the user gave by the option or by RAY_ADDRESS; else None."""
    return option or os.environ.get("RAY_ADDRESS")


def running_address(directory: Path, option: str | None) -> str:
    """Returns the address of the cluster of a running run.

    It is the address that the user gave, else the address in the run's directory, else `auto`. Raises RunError for an
    address in the run's directory to which the user's Ray token may not be sent (`own_address`).
    """
    return named_address(option) or address_of(directory) or "auto"


def clear_previous(config: Config) -> None:
    """Ends and removes the processes and files that a killed run of this name left, and prints what was removed. Prints
    also what killed runs of other names left."""
    from asyncrl.deployment.known_runs import clear, remains_of

    print_warnings(clear(config.run.dir / config.run.name))
    for other in dead_runs(config.run.dir):
        if remains := remains_of(other):
            print_warnings([f"run {other.name} was killed and left {remains}; `asyncrl down {other}` ends that"])


def print_previous(run_dir: "RunDir") -> None:
    """Prints and logs from which checkpoint the run continues or was forked. Prints to which directories the previous
    run of this name and later checkpoints were moved."""
    from asyncrl.views.quantities import duration

    fork = run_dir.forked_from
    if run_dir.previous is not None:
        before = known_info(run_dir.previous)
        of_fork = "" if before is None or before.forked_from is None else f", which began with {before.forked_from}"
        begins = "; this run begins with the model at model.path" if of_fork and fork is None else ""
        print_warnings([f"the previous run is now {run_dir.previous}{of_fork}{begins}"])
    if fork is not None and run_dir.resumed is None:
        line = f"run {run_dir.path.name} begins with the weights of {fork}"
        logger.info("%s", line)
        say(line)
    if (resumed := run_dir.resumed) is not None:
        ended = f"ended {earlier_end()}" if resumed.info.state != "stopped" else f"was {resumed.info.exit_reason}"
        why = f"the process before this one {ended}; " if earlier_end() else ""
        line = (
            f"{why}resuming run {run_dir.path.name} from step {resumed.step}: the checkpoint {resumed.path} is "
            f"{duration(max(0.0, time.time() - resumed.saved_at))} old"
        )
        logger.info("%s", line)
        say(f"{line} (asyncrl up --fresh begins a new run)")
        if run_dir.set_aside.is_dir():
            names = ", ".join(sorted(path.name for path in run_dir.set_aside.iterdir()))
            say(
                f"the later checkpoints {names} are now in {run_dir.set_aside}; delete the folder if you do not need "
                "them"
            )


def again(
    command: str, files: list[Path], overrides: list[str], *, address: str | None = None, allow_public: bool = False
) -> list[str]:
    """Returns the words of a command line that starts or resumes a run, without `asyncrl`. Messages show them as the
    command that resumes the run."""
    words = [command, *(word for file in files for word in ("-c", str(file)))]
    words += ["--address", address] if address else []
    return words + (["--allow-public"] if allow_public else []) + overrides


@contextlib.contextmanager
def weights_named(directory: Path) -> Iterator[None]:
    """Prints where the run's newest weights are, if it saved any, before an error in the block ends the command."""
    try:
        yield
    except Exception:
        with contextlib.suppress(OSError):  # the error of the block is more important
            if (weights := newest_weights(directory)) is not None:
                say(f"weights: {weights}", err=True)
        raise


def print_outcome(summary: "Summary | None", run_dir: Path, *, config: Config, again: Sequence[str]) -> None:
    """Prints the last lines of a run: totals, report, weights, and the command that resumes it or continues the
    training.

    `again` is the command that resumes the run, without `asyncrl`. `summary` is None if the run trained no step.
    """
    if summary is None:
        say("the run ended before a step was trained", err=True)
        return
    from asyncrl.views.outcome import best_line, lines_to_go_on, totals_lines, weights_lines
    from asyncrl.views.setting import setting_at

    say("\n".join(totals_lines(summary, total_steps=config.learner.total_steps)))
    if (uncorrected := setting_at(run_dir).uncorrected) is not None:
        say(f"{uncorrected}.", label="note:", color="yellow")
    print_notes(run_dir)
    say(f"report: {run_dir / 'report.html'}")
    if (weights := newest_weights(run_dir)) is not None:
        finished = summary.steps >= config.learner.total_steps or summary.stop_reason is not None
        searched = os.environ.get("PYTHONPATH") if user_modules(config, tuple(Role)) else None
        going_on = lines_to_go_on(weights, finished=finished, config=config, again=again, pythonpath=searched)
        keeps = config.checkpoint
        best = best_checkpoint(run_dir, name=keeps.best_eval) if keeps.keep_best else None
        say("\n".join([*weights_lines(weights, config=config), *([best_line(*best)] if best else []), *going_on]))


def print_notes(run_dir: Path) -> None:
    """Prints the health notes of the report. The first one is its headline."""
    from asyncrl.views.report import read_run

    try:
        notes = read_run(run_dir).view.notes
    except (AsyncRLError, *OF_DAMAGED_FILES):  # unreadable records must not turn a finished run into a failed one
        return
    for note in notes:
        say(note.sentence, label="warning:", color="yellow")
