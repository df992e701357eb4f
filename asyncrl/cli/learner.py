"""`asyncrl learner`: starts the learner deployment of a run on a running Ray cluster."""

from functools import partial

from asyncrl.cli.before_start import prepared
from asyncrl.cli.live_run import Runner, join_admitted, live_run
from asyncrl.cli.options import Address, AllowPublic, ConfigFiles, Fresh, Overrides, again, choice, ray_address
from asyncrl.cli.restarts import restarts
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
    when the terminal is closed. If it is killed, it starts again by itself and continues from its newest checkpoint.
    The generators stay, and what they have made with surviving weights is kept.
    """
    config, prompts = prepared(files, overrides, roles=[Role.LEARNER], allow_public=allow_public)
    choose = join_admitted(ray_address(config, address), config, choose=choice(fresh=fresh))

    def runner() -> Runner:
        from asyncrl.deployment.compose import run_learner

        def supervised() -> bool:
            # TransferQueue's index of the rows dies with the learner's process, so no generator can go on.
            stay = config.data_plane.backend != "transfer_queue"
            return stay and restarts() < config.run.max_restarts

        return partial(run_learner, config, prompts=prompts, supervised=supervised)

    command = again("learner", files, overrides, address=address, allow_public=allow_public)
    live_run(config, role="learner", runner=runner, again=command, choose=choose)
