"""The `asyncrl` command: a table of subcommands, each of which is imported only when it is used.

`asyncrl --help` and `asyncrl config check` answer within a second, because they import neither torch nor ray nor vllm.
Each command has its own module in this package, with a function of the same name. A module with several commands has a
Typer `app` instead.

Exit codes:

    0     success
    1     an error of the run
    2     an error in options or configuration
    75    a process or a connection of the run failed, so that a restart may succeed
    76    SIGTERM ended the run in order before its last step
    130   the process ended at once: by a second signal, or because it was asked to end before it had trained a step,
          and did not end within `run.shutdown_grace_s`
"""

import gc
import importlib
import logging
import os
import sys
import traceback
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from asyncrl import __version__
from asyncrl.cli.kept import KEPT
from asyncrl.cli.restarts import RESTART_MENDS, ends_on_purpose, report_death, sigterm_ends, supervise
from asyncrl.cli.terminal import command_app, say
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.run_files import OF_DAMAGED_FILES
from asyncrl.shown_text import LogFormatter, shown

SUPERVISED = ("up", "resume", "fork", "learner")
"""The commands that are started again after their process has died, or after an error that a restart may fix."""
REPORTED = ("generator",)
"""The commands that exit with the code of errors that a restart may fix if their process dies. Their user, and not
asyncrl, starts them again."""
READERS = ("status", "top", "stacks", "scale", "down", "audit", "samples", "export", "report", "compare", "mirror")
"""The commands that use the files of a run, which may be damaged or come from another person. An error that such files
can cause is shown in one sentence."""
LONGEST_PROBLEM = 300
"""Maximum number of characters of an error of a damaged file that are shown. The error may contain the content of the
file."""
COMMANDS: dict[str, str] = {
    "up": "Run everything on this machine: Ray, generators, learner, live view.",
    "sweep": "Train a run for each combination of settings and each seed, and compare them.",
    "resume": "Continue a run from its newest checkpoint, or from an earlier one.",
    "fork": "Begin a new run with the weights of a checkpoint of another run.",
    "head": "Start a Ray cluster on this machine, for a run in several terminals.",
    "generator": "Add generators to a run on a Ray cluster.",
    "learner": "Start the learner of a run on a Ray cluster.",
    "recipes": "List the recipes, which are complete configurations, or copy one.",
    "init": "Write a first configuration for your model and your data.",
    "status": "Show the state of a run.",
    "top": "Watch a run live.",
    "stacks": "Show what each process of a run does at this moment.",
    "scale": "Change the number of generators of a running run.",
    "down": "End a run, or clean up after a run that was killed.",
    "audit": "Check from a run's files that nothing was lost or repeated.",
    "samples": "Show samples of a run, token by token.",
    "eval": "Evaluate a model on held-out prompts, without training.",
    "export": "Write the trained weights of a run for other programs.",
    "report": "Write an HTML page with the curves and totals of a run.",
    "compare": "Compare runs, or groups of runs over seeds, on an HTML page.",
    "mirror": "Send what the mirror of an ended run lacks.",
    "data": "Show the prompts of a configuration, token by token.",
    "model": "Build the tiny model that a configuration describes.",
    "losses": "List the published objectives for algorithm.loss.",
    "config": "Show, check or describe a configuration, without starting a run.",
    "doctor": "Check this machine: packages, memory, processes of old runs.",
}
"""Maps each command to its line in the help."""

GARBAGE_AFTER = 10_000
"""Number of new objects after which Python's garbage collector searches them for garbage."""

_HELP = """\
Asynchronous reinforcement learning of language models. vLLM generators and an FSDP2 learner run at the same time, and
the age of the training data has a limit.

YAML files and overrides describe a run. -c names a file or a recipe; several are merged from left to right. An override
is section.key=value. Examples:

\b
  asyncrl doctor                                   check this machine
  asyncrl recipes                                  list the recipes that come with asyncrl
  asyncrl config check -c quickstart               check a configuration
  asyncrl up -c quickstart staleness.max_versions=4
                                                   run it on this machine
  asyncrl init models/my-llama questions.jsonl     write a configuration for your model and data
  asyncrl up -c run.yaml                           run this file
"""
_EPILOG = "For help on a command: asyncrl COMMAND --help. Set ASYNCRL_DEBUG=1 to see the traceback of an error."


_UsageError: Any = typer.BadParameter.__bases__[0]
"""The error about wrong arguments, which Typer does not export."""


class _LazyGroup(TyperGroup):
    """A group of commands that lists them from the table, and imports a command when it is invoked.

    The type of `ctx` is `Any`, because Typer does not export the type of its context.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, help_line in COMMANDS.items():
            self.add_command(TyperCommand(name, help=help_line, short_help=help_line, rich_markup_mode=None))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            command = typer.main.get_command(_app_of(name))
            command.name = name
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except AsyncRLError as error:
            if os.environ.get("ASYNCRL_DEBUG") == "1":
                raise
            for line in str(error).splitlines():
                say(line, label="error:", color="red", err=True)
            raise typer.Exit(
                2 if isinstance(error, ConfigError) else RESTART_MENDS if error.restart_mends else 1
            ) from None
        except OF_DAMAGED_FILES as error:
            command = ctx.invoked_subcommand
            known = command in READERS and not isinstance(error, BrokenPipeError)
            if not known or os.environ.get("ASYNCRL_DEBUG") == "1":
                raise
            problem = " ".join(f"{type(error).__name__}: {error}"[:LONGEST_PROBLEM].split())
            say(
                f"asyncrl {command} cannot use the files of the run ({problem}): they are damaged, or this version of "
                "asyncrl did not write them. ASYNCRL_DEBUG=1 shows the traceback",
                label="error:",
                color="red",
                err=True,
            )
            raise typer.Exit(1) from None
        except _UsageError as error:  # its text quotes arguments, which may have control characters
            error.message = shown(error.message)
            raise


def _app_of(command: str) -> typer.Typer:
    module = importlib.import_module(f"asyncrl.cli.{command}")
    app: typer.Typer = getattr(module, "app", None) or command_app()
    if not hasattr(module, "app"):
        app.command()(getattr(module, command))
    return app


app = command_app(help=_HELP, cls=_LazyGroup, epilog=_EPILOG)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"asyncrl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version of asyncrl.")
    ] = False,
) -> None:
    pass


def _show_traceback(*error: Any) -> None:
    say("".join(traceback.format_exception(*error)).rstrip(), err=True)


def main() -> None:
    """Runs the command in `sys.argv`. A command of `SUPERVISED` runs in a child process, and this process starts
    another child if that one dies, or ends with an error that a restart may fix. A command of `REPORTED` also runs in a
    child process, whose death this process only reports."""
    # By default the garbage collector searches new objects so often that this takes a seventh of the time of imports.
    gc.set_threshold(GARBAGE_AFTER)
    sys.excepthook = _show_traceback
    if logging.lastResort is not None:  # it prints the warnings of commands that have no log
        logging.lastResort.setFormatter(LogFormatter())
    if sys.argv[1:2] and sys.argv[1] in (*SUPERVISED, *REPORTED, "sweep"):
        sigterm_ends()  # before the fork, so that the child has this handler from its start
    if sys.argv[1:2] and sys.argv[1] in SUPERVISED:
        supervise()
    reported = sys.argv[1:2] and sys.argv[1] in REPORTED
    if reported:
        report_death()
    try:
        if KEPT is None:
            app()
        else:
            KEPT.train_each(app)
    except SystemExit:  # Typer ends every command with SystemExit, so other exceptions are bugs
        ends_on_purpose()
        raise
    except BaseException:  # a bug: the exit code must not be that of errors that a restart may fix
        if reported:
            ends_on_purpose()
        raise
