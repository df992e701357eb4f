"""`asyncrl up`: starts the whole system on this machine with one command."""

from asyncrl.cli.options import AllowPublic, ConfigFiles, Fresh, Overrides, again, choice
from asyncrl.cli.preflight import prepared
from asyncrl.cli.start import run_in_terminal


def up(files: ConfigFiles, overrides: Overrides, allow_public: AllowPublic = False, fresh: Fresh = False) -> None:
    """Start a local Ray, generators and a learner, show the run live, and end all of them when the run is done.

    Ctrl-C, or closing the terminal, ends the run cleanly. Its records and weights are in runs/NAME. The same command
    resumes a run that was ended or killed, from its newest checkpoint. If a process of the run dies, the command
    resumes the run by itself, at most run.max_restarts times within an hour. For several machines, see `asyncrl
    generator --help`.
    """
    config, prompts = prepared(files, overrides, allow_public=allow_public)
    run_in_terminal(
        config,
        prompts,
        command="up",
        address=config.ray.address,
        choose=choice(fresh=fresh),
        again=again("up", files, overrides, allow_public=allow_public),
    )
