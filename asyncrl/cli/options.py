"""Options that commands share, and the way from them to a configuration that is known to be runnable."""

import contextlib
import functools
import itertools
import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl.algorithms.checks import check_algorithm
from asyncrl.buffer.membership import Role
from asyncrl.cli.presence import check_presence
from asyncrl.config.checks import check_config
from asyncrl.config.exposure import check_exposure
from asyncrl.config.load import config_origins, load_config
from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError, ConfigError

if TYPE_CHECKING:
    from asyncrl.deployment.run_dir import RunDir
    from asyncrl.learner.records import Summary

ConfigFiles = Annotated[
    list[Path],
    typer.Option(
        "--config",
        "-c",
        metavar="FILE",
        default_factory=list,
        show_default=False,
        help="YAML file; several merge left to right.",
    ),
]
Overrides = Annotated[
    list[str],
    typer.Argument(
        metavar="[KEY=VALUE]...",
        default_factory=list,
        show_default=False,
        help="Overrides, e.g. staleness.max_versions=4; values are YAML.",
    ),
]


AllowPublic = Annotated[
    bool,
    typer.Option(
        "--allow-public",
        help="Metrics may be read from other machines: metrics.host may be an address that they reach.",
    ),
]

Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        show_default=False,
        help="Ray cluster; by default the config's ray.address, else the one that runs on this machine.",
    ),
]

RunningAddress = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        show_default=False,
        help="Ray cluster; by default that of RAY_ADDRESS, else the run's as its directory in runs/ has it, else the "
        "one that runs on this machine.",
    ),
]
"""For commands that read no config."""

RunningRun = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="A run's name, such as quickstart, or its directory."),
]

LINE_EVERY_STEPS = 10
"""Without a terminal, progress is a line every so many steps."""


def ray_address(config: Config, option: str | None) -> str:
    """The option, else the config, else whatever cluster runs here."""
    return option or config.ray.address or "auto"


def named_address(option: str | None) -> str | None:
    """The address of a Ray cluster that the user has named, by the option or in the environment."""
    return option or os.environ.get("RAY_ADDRESS")


def running_address(directory: Path, option: str | None) -> str:
    """The address that the user has named, else the cluster of the run that lives here, else whatever runs."""
    from asyncrl.deployment.known_runs import address_of

    return named_address(option) or address_of(directory) or "auto"


def command_app(*, help: str | None = None) -> typer.Typer:
    """A Typer app in the style of the others: plain help text, plain tracebacks for bugs."""
    return typer.Typer(
        help=help,
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=help is not None,
    )


def checked_config(
    files: list[Path], overrides: list[str], *, roles: Collection[Role] = tuple(Role), allow_public: bool = False
) -> tuple[Config, list[str]]:
    """The resolved configuration and what to warn about. ConfigError with all that is wrong: keys and values, else the
    rules over several of them and what deployments of these `roles` would not find on this machine."""
    config = load_config(files, overrides)
    problems: list[str] = []
    warnings: list[str] = []
    try:
        check_exposure(config, allow_public=allow_public)
    except ConfigError as error:
        problems.append(str(error))
    presence = functools.partial(check_presence, roles=roles, origins=config_origins(files, overrides))
    for check in (check_config, check_algorithm, presence):
        try:
            warnings += check(config)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return config, warnings


def print_warnings(warnings: list[str]) -> None:
    """Each on stderr, so that what a command prints can be piped."""
    for warning in warnings:
        typer.echo(f"{typer.style('note:', fg='yellow', bold=True)} {warning}", err=True)


def clear_previous(config: Config) -> None:
    """Ends what a killed run of this name left, and says so. Names what killed runs of other names left."""
    from asyncrl.deployment.known_runs import dead_runs
    from asyncrl.deployment.remains import clear, remains_of

    print_warnings(clear(config.run.dir / config.run.name))
    for other in dead_runs(config.run.dir):
        if remains := remains_of(other):
            print_warnings([f"run {other.name} was killed and left {remains}; `asyncrl down {other}` ends that"])


def print_previous(run_dir: "RunDir") -> None:
    """Where the records of the last run of this name are now."""
    if run_dir.previous is not None:
        print_warnings([f"the previous run is now {run_dir.previous}"])


def again(
    command: str, files: list[Path], overrides: list[str], *, address: str | None = None, allow_public: bool = False
) -> list[str]:
    """The words of a command line that starts such a run again."""
    words = [command, *(word for file in files for word in ("-c", str(file)))]
    words += ["--address", address] if address else []
    return words + (["--allow-public"] if allow_public else []) + overrides


@contextlib.contextmanager
def weights_named(directory: Path) -> Iterator[None]:
    """Within it an error that ends the run is preceded by where the run's weights are, if it saved any."""
    from asyncrl.deployment.known_runs import newest_weights

    try:
        yield
    except Exception:
        if (weights := newest_weights(directory)) is not None:
            typer.echo(f"weights: {weights}", err=True)
        raise


def print_outcome(summary: "Summary | None", run_dir: Path, *, config: Config, again: Sequence[str]) -> None:
    """What a run came to, and how to go on from it; exits with 1 when it trained nothing. `again` is the command that
    started it, without `asyncrl`."""
    if summary is None:
        typer.echo("stopped before the first step", err=True)
        raise typer.Exit(1)
    if summary.steps < config.learner.total_steps:
        typer.echo(f"Stopped at step {summary.steps} of {config.learner.total_steps}.")
    if summary.heldout_first is not None and summary.heldout_last is not None:
        asked = summary.heldout_prompts + summary.heldout_failed
        got = f" ({summary.heldout_prompts} of {asked} prompts)" if summary.heldout_failed else ""
        typer.echo(f"held-out reward {summary.heldout_first:.3f} → {summary.heldout_last:.3f}{got}")
    typer.echo(
        f"{summary.steps} steps in {summary.wall_s:.0f} s, staleness at most {summary.max_token_staleness} of "
        f"{summary.staleness_limit} versions, {dropped_in_words(summary)}"
    )
    print_headline(run_dir)
    typer.echo(f"report: {run_dir / 'report.html'}")
    _print_weights(run_dir, config=config, again=again)


def dropped_in_words(summary: "Summary") -> str:
    """How many groups were dropped, why, and whether all are accounted for."""
    failed = sum(summary.groups_failed.values())
    others = summary.groups_discarded - failed
    parts = []
    if failed:
        of_reward = all(reason.startswith("reward_") for reason in summary.groups_failed)
        reasons = ", ".join(f"{reason} {groups}" for reason, groups in summary.groups_failed.items())
        what = "the reward" if of_reward else "their rollouts"
        parts.append(f"{failed} groups were dropped because {what} failed ({reasons})")
    if others:
        parts.append(f"{others} {'other ' if failed else ''}groups were dropped")
    words = " and ".join(parts) or "no group was dropped"
    closed = "all groups are accounted for" if summary.ledger_closed else "NOT all groups are accounted for: a bug"
    return f"{words}; {closed}"


def print_headline(run_dir: Path) -> None:
    """The report's headline, when it is a warning."""
    from asyncrl.views.report import read_run

    try:
        found = read_run(run_dir).headline
    except (AsyncRLError, OSError):  # records that cannot be read must not turn a finished run into a failed one
        return
    if found is not None and found.warns:
        typer.echo(f"{typer.style('warning:', fg='yellow', bold=True)} {found.sentence}")


def _print_weights(run_dir: Path, *, config: Config, again: Sequence[str]) -> None:
    from asyncrl.deployment.known_runs import newest_weights

    weights = newest_weights(run_dir)
    if weights is None:
        return
    typer.echo(f"weights: {weights}")
    typer.echo(f"  use them: vllm serve {weights}")
    typer.echo(f'       or   transformers.AutoModelForCausalLM.from_pretrained("{weights}")')
    typer.echo("  train on from them, as a new run whose optimizer and step count start anew:")
    typer.echo(f"    {command_to_go_on(again, config=config, weights=weights)}")


def command_to_go_on(again: Sequence[str], *, config: Config, weights: Path) -> str:
    """The command that trains on from `weights` under a new name, made from the one that started the run.

    >>> config = Config.model_validate({"run": {"name": "live"}, "model": {"tiny": {}}})
    >>> again = ["up", "-c", "my tasks.yaml", "run.name=live", "model.tiny.warmup_steps=3", "run.seed=7"]
    >>> command_to_go_on(again, config=config, weights=Path("runs/live/step-9/hf"))
    "asyncrl up -c 'my tasks.yaml' run.seed=7 run.name=live-2 model.path=runs/live/step-9/hf model.tiny=null"
    """
    kept = [word for word in again if not word.startswith(("run.name=", "model.path=", "model.tiny=", "model.tiny."))]
    changed = [f"run.name={_next_name(config)}", f"model.path={weights}"]
    if config.model.tiny is not None:
        changed.append("model.tiny=null")
    return shlex.join(["asyncrl", *kept, *changed])


def _next_name(config: Config) -> str:
    """The run's name with the next number that is free."""
    stem, number = re.fullmatch(r"(.*?)(?:-(\d+))?", config.run.name).groups()  # type: ignore[union-attr]
    following = itertools.count(int(number or 1) + 1)
    return next(name for each in following if not (config.run.dir / (name := f"{stem}-{each}")).exists())
