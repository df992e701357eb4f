"""`asyncrl generator`: starts a generator deployment of a run on a running Ray cluster.

All output goes to the log on stderr, so that progress and errors have one format.
"""

import asyncio
import contextlib
import logging

from asyncrl.cli.before_start import prepared
from asyncrl.cli.options import Address, AllowPublic, ConfigFiles, Overrides, ray_address
from asyncrl.common.roles import Role

logger = logging.getLogger(__name__)


def generator(
    files: ConfigFiles, overrides: Overrides, address: Address = None, allow_public: AllowPublic = False
) -> None:
    """Add generators to a run on a running Ray cluster, before or after the learner starts.

    A run may have several generator deployments, which can join and leave at any time. Each may have its own number of
    replicas, memory and GPUs (the keys with a star in docs/configuration.md). The command ends with the run. It ends
    cleanly on SIGTERM, on Ctrl-C, or when the terminal is closed. If a process that it needs has died, it ends with
    exit code 75: start it again.

    \b
      asyncrl head      -c quickstart          # one terminal
      asyncrl learner   -c quickstart          # another
      asyncrl generator -c quickstart          # another, or several
    """
    config, prompts = prepared(files, overrides, roles=[Role.GENERATOR], allow_public=allow_public)

    from asyncrl.deployment.launch import log_to, run_until_done

    async def main(stop: asyncio.Event) -> None:
        logger.info("importing Ray")
        import ray

        from asyncrl.common.tasks import Stopped, check_stop
        from asyncrl.deployment.cluster import join
        from asyncrl.deployment.compose import run_generators
        from asyncrl.deployment.shared_actors import check_admission

        name = config.run.name
        with contextlib.suppress(Stopped):
            await check_stop(stop)
            join(ray_address(config, address), namespace=name, folder=config.run.dir)
            where = ray.get_runtime_context().gcs_address  # the real address, also if the configured one is `auto`
            await check_stop(stop)
            await check_admission(config, role=Role.GENERATOR)
            logger.info("run %s on Ray at %s: starting %d replicas", name, where, config.generator.replicas)
            await run_generators(config, stop, prompts=prompts)

    with log_to(None):
        run_until_done(main)
        logger.info("generators ended")
