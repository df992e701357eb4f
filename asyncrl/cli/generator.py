"""`asyncrl generator`: starts a generator deployment of a run on a running Ray cluster.

All output goes to the log on stderr, so that progress and errors have one format.
"""

import asyncio
import logging

from asyncrl.cli.before_start import prepare
from asyncrl.cli.options import (
    Address,
    AllowPublic,
    ConfigFiles,
    Overrides,
    checked_config,
    command_app,
    print_warnings,
    ray_address,
)
from asyncrl.cli.terminal import outlive_terminal
from asyncrl.run.roles import Role

logger = logging.getLogger(__name__)

app = command_app()


@app.command()
def generator(
    files: ConfigFiles, overrides: Overrides, address: Address = None, allow_public: AllowPublic = False
) -> None:
    """Add generators to a run on a running Ray cluster, before or after the learner starts.

    A run may have several generator deployments, which can join and leave at any time. Each may have its own number of
    replicas, memory and GPUs (the keys with a star in docs/configuration.md). The command ends with the run. It ends
    cleanly on SIGTERM, on Ctrl-C, or when the terminal is closed.

    \b
      asyncrl head      -c configs/quickstart.yaml          # one terminal
      asyncrl learner   -c configs/quickstart.yaml          # another
      asyncrl generator -c configs/quickstart.yaml          # another, or several
    """
    outlive_terminal()
    config, warnings = checked_config(files, overrides, roles=[Role.GENERATOR], allow_public=allow_public)
    print_warnings(warnings)

    from asyncrl.deployment.launch import described_model, load_prompts, log_to, run_until_done, use_ray_token

    use_ray_token()
    loaded = prepare(config, roles=[Role.GENERATOR])
    with log_to(None):
        logger.info("importing Ray")
        import ray

        from asyncrl.deployment.cluster import check_admission, join
        from asyncrl.deployment.generators import GeneratorDeployment

        async def main(stop: asyncio.Event) -> None:
            await check_admission(config, role=Role.GENERATOR)
            logger.info("run %s on Ray at %s: starting %d replicas", name, address, config.generator.replicas)
            prompts = asyncio.create_task(load_prompts(config, loaded))
            model = asyncio.create_task(described_model(config, prompts))
            await GeneratorDeployment(config, model_path=model, prompts=prompts).run(stop)

        name, where = config.run.name, ray_address(config, address)
        join(where, namespace=name)
        address = ray.get_runtime_context().gcs_address  # the real address, also if `where` is `auto`
        run_until_done(main)
        logger.info("generators ended")
