"""`asyncrl up`: starts the whole system on this machine with one command."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from asyncrl.cli.before_start import prepared
from asyncrl.cli.live_run import Runner, join_admitted, live_run
from asyncrl.cli.options import AllowPublic, ConfigFiles, Fresh, Overrides, again, choice
from asyncrl.config.schema import Config
from asyncrl.deployment.resuming import Choice

if TYPE_CHECKING:
    from asyncrl.deployment.inputs import Prompts


def up(files: ConfigFiles, overrides: Overrides, allow_public: AllowPublic = False, fresh: Fresh = False) -> None:
    """Start a local Ray, generators and a learner, show the run live, and end all of them when the run is done.

    Ctrl-C, or closing the terminal, ends the run cleanly. Its records and weights are in runs/NAME. The same command
    resumes a run that was ended or killed, from its newest checkpoint. If a process of the run dies, the command
    resumes the run by itself, at most run.max_restarts times within an hour. For several machines, see `asyncrl
    generator --help`.
    """
    config, prompts = prepared(files, overrides, allow_public=allow_public)
    command = again("up", files, overrides, allow_public=allow_public)
    run_here(config, prompts, again=command, choose=choice(fresh=fresh))


def run_here(config: Config, prompts: "Prompts | None", *, again: Sequence[str], choose: Choice) -> None:
    """Runs generators and learner on this machine. `again` is the command that starts the run again, without `asyncrl`.
    `choose` decides what becomes of an earlier run in the directory."""
    if config.ray.address is not None:
        choose = join_admitted(config.ray.address, config, choose=choose)

    def runner() -> Runner:
        from asyncrl.deployment.compose import run_both

        return partial(run_both, config, prompts=prompts)

    live_run(config, role="up", runner=runner, importing="importing Ray", again=again, choose=choose)
