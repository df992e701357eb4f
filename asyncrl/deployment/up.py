"""`asyncrl up`: a Ray of its own, both pools and a live view, in one process that supervises them."""

import asyncio
from collections.abc import Callable
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.deployment.cluster import join, start_local
from asyncrl.deployment.generators import GeneratorDeployment
from asyncrl.deployment.launch import load_prompts, ready_model
from asyncrl.deployment.learner import LearnerDeployment
from asyncrl.deployment.live import LiveView
from asyncrl.deployment.run_dir import RunDir
from asyncrl.learner.records import Summary


class Up:
    """Both deployments of one run."""

    def __init__(
        self,
        config: Config,
        *,
        run_dir: RunDir,
        started_s: float,
        show: Callable[[LiveView], None],
        report: Callable[[str], None],
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._started_s = started_s
        self._show = show
        self._report = report

    async def run(self, stop: asyncio.Event) -> Summary | None:
        """The run's summary. Whichever pool fails first ends the other; its error is raised."""
        config = self._config
        # Prompts, the model and Ray cost seconds each: they start at the same time.
        prompts = asyncio.create_task(load_prompts(config), name="prompts")
        model = asyncio.create_task(ready_model(config, prompts, report=self._report), name="model")
        await asyncio.sleep(0)
        if config.ray.address is None:
            self._run_dir.started_ray(start_local(config))
        else:
            join(config.ray.address, namespace=config.run.name)
            self._run_dir.started_ray(config.ray.address)
        generator_deployment = GeneratorDeployment(config, model_path=model, prompts=prompts)
        learner_deployment = LearnerDeployment(
            config,
            run_dir=self._run_dir,
            model_path=model,
            prompts=prompts,
            started_s=self._started_s,
            show=self._show,
        )
        end = asyncio.Event()
        learner = asyncio.create_task(learner_deployment.run(stop), name="learner")
        generators = asyncio.create_task(generator_deployment.run(end), name="generators")
        stopping = asyncio.create_task(stop.wait(), name="stopping")
        try:
            await asyncio.wait([learner, generators, stopping], return_when=asyncio.FIRST_COMPLETED)
            end.set()
            if generators.done() and generators.exception() is not None:
                learner.cancel()
                await asyncio.wait([learner])
                generators.result()
            await generators
            return await learner
        finally:
            beside: list[asyncio.Task[Any]] = [learner, generators, stopping, model, prompts]
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
