"""Options that commands share, and the way from them to a configuration that is known to be runnable."""

import functools
import os
from collections.abc import Collection
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
from asyncrl.errors import ConfigError

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
"""For commands that know a run by its name alone."""


LINE_EVERY_STEPS = 10
"""Without a terminal, progress is a line every so many steps."""


def ray_address(config: Config, option: str | None) -> str:
    """The option, else the config, else whatever cluster runs here."""
    return option or config.ray.address or "auto"


def running_address(run: str, option: str | None) -> str:
    """The option, else what the environment says, else the cluster of the run that lives here, else whatever runs."""
    from asyncrl.deployment.known_runs import address_of

    return option or os.environ.get("RAY_ADDRESS") or address_of(run) or "auto"


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


def print_previous(run_dir: "RunDir") -> None:
    """Where the records of the last run of this name are now."""
    if run_dir.previous is not None:
        print_warnings([f"the previous run is now {run_dir.previous}"])


def print_outcome(summary: "Summary | None", run_dir: Path) -> None:
    """What a run came to; exits with 1 when it trained nothing."""
    if summary is None:
        typer.echo("stopped before the first step", err=True)
        raise typer.Exit(1)
    if summary.heldout_first is not None and summary.heldout_last is not None:
        typer.echo(f"held-out reward {summary.heldout_first:.3f} → {summary.heldout_last:.3f}")
    typer.echo(
        f"{summary.steps} steps in {summary.wall_s:.0f} s, staleness at most {summary.max_token_staleness} of "
        f"{summary.staleness_limit} versions, {summary.groups_discarded} groups discarded, "
        f"ledger {'closed' if summary.ledger_closed else 'NOT closed'}"
    )
    typer.echo(f"report: {run_dir / 'report.html'}")
