"""The `asyncrl` command: a table of subcommands, each imported when it is used and never before.

`asyncrl --help` and `asyncrl config check` answer within a second because neither torch nor ray nor vllm is imported
on their way. A command lives in its own module here, which exposes a Typer `app`; its help line stands in the table.

Exit codes: 0, 1 for an error of the run, 2 for what the user wrote (options and configuration).
"""

import importlib
import os
from typing import Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from asyncrl.errors import AsyncRLError, ConfigError

COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("asyncrl.cli.up", "Run everything on this machine: Ray, generators, learner, a live view."),
    "generator": ("asyncrl.cli.generator", "Add generators to a run on a Ray cluster."),
    "learner": ("asyncrl.cli.learner", "Train a run on a Ray cluster."),
    "init": ("asyncrl.cli.init", "Write a first configuration for your model and your data."),
    "status": ("asyncrl.cli.status", "Show where a run stands."),
    "top": ("asyncrl.cli.top", "Watch a run live, from its metrics endpoints alone."),
    "down": ("asyncrl.cli.down", "End what is left of a run."),
    "report": ("asyncrl.cli.report", "Write one HTML page with a run's curves and totals."),
    "model": ("asyncrl.cli.model", "Build the tiny model that a config describes."),
    "losses": ("asyncrl.cli.losses", "List the published objectives that algorithm.loss takes."),
    "config": ("asyncrl.cli.config", "Show, check or describe a configuration, without starting anything."),
    "doctor": ("asyncrl.cli.doctor", "Check this machine: packages, memory, leftovers of old runs."),
}
"""Command to the module that exposes its `app`, and its line in the help."""

_HELP = """\
Reinforcement learning of language models on two pools that never wait for each other's clock: vLLM generators and an
FSDP2 learner, with a bound on how old training data may be.

A run is described by YAML files (-c, several merge left to right) and overrides (section.key=value):

\b
  asyncrl doctor                                    is this machine ready?
  asyncrl config check -c configs/quickstart.yaml   can this run, and what should I know?
  asyncrl up -c configs/quickstart.yaml staleness.max_versions=4
                                                    run it here
  asyncrl init models/my-llama questions.jsonl      a configuration for your model and data
"""
_EPILOG = "Every command explains itself: asyncrl COMMAND --help. ASYNCRL_DEBUG=1 shows the traceback of an error."


class _LazyGroup(TyperGroup):
    """Lists commands from the table and imports one when it is invoked. Typer keeps its context type to itself,
    hence `Any`."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, help_line) in COMMANDS.items():
            self.add_command(TyperCommand(name, help=help_line, short_help=help_line, rich_markup_mode=None))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            module = importlib.import_module(COMMANDS[name][0])
            command = typer.main.get_command(module.app)
            command.name = name
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AsyncRLError as error:
            if os.environ.get("ASYNCRL_DEBUG") == "1":
                raise
            for line in str(error).splitlines():
                typer.echo(f"{typer.style('error:', fg='red', bold=True)} {line}", err=True)
            raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None


app = typer.Typer(
    cls=_LazyGroup,
    help=_HELP,
    epilog=_EPILOG,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
)


@app.callback()
def _root() -> None:
    pass
