"""`asyncrl learner`: starts the learner deployment of a run on a running Ray cluster."""

from asyncrl.cli.options import Address, AllowPublic, ConfigFiles, Fresh, Overrides, again, choice, ray_address
from asyncrl.cli.preflight import prepared
from asyncrl.cli.start import run_in_terminal
from asyncrl.common.roles import Role


def learner(
    files: ConfigFiles,
    overrides: Overrides,
    address: Address = None,
    allow_public: AllowPublic = False,
    fresh: Fresh = False,
) -> None:
    """Start the learner of a run on a running Ray cluster. Generators may have started already, or may join later.

    A run has one learner. Only the learner writes to the run's directory. It ends cleanly on SIGTERM, on Ctrl-C, or
    when the terminal is closed. If it is killed, it starts again by itself and continues from its newest checkpoint, at
    most run.max_restarts times within an hour. The generators stay meanwhile. Groups that they generated with weights
    up to that checkpoint are kept.
    """
    config, prompts = prepared(files, overrides, roles=[Role.LEARNER], allow_public=allow_public)
    run_in_terminal(
        config,
        prompts,
        command="learner",
        address=ray_address(config, address),
        choose=choice(fresh=fresh),
        again=again("learner", files, overrides, address=address, allow_public=allow_public),
    )
