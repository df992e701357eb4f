"""`asyncrl up`: one process that starts Ray (unless `ray.address` is set), supervises both pools, and shows them."""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncrl.config.schema import Config
from asyncrl.deployment.cluster import session_folder, start_local
from asyncrl.deployment.generators import GeneratorDeployment
from asyncrl.deployment.launch import Prompts, described_model, load_prompts, ready_model
from asyncrl.deployment.run_dir import RunDir
from asyncrl.learner.records import Summary
from asyncrl.views.live import LiveView, starting_view

if TYPE_CHECKING:
    from asyncrl.deployment.learner import LearnerDeployment


class Up:
    """Runs both deployments of a run, on a local Ray, or on the cluster at `ray.address`, which the process has joined.

    `prompts` are the prompts if they are loaded already. `report` prints a permanent line, `show` updates the live
    view.
    """

    def __init__(
        self,
        config: Config,
        *,
        run_dir: RunDir,
        started_s: float,
        show: Callable[[LiveView], None],
        report: Callable[[str], None],
        prompts: Prompts | None = None,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._started_s = started_s
        self._show = show
        self._report = report
        self._prompts = prompts

    async def run(self, stop: asyncio.Event) -> Summary | None:
        """Returns the run's summary. If one pool fails, the other is ended and the error is raised."""
        config = self._config
        # Ray starts first. Its start takes three times as long while the interpreter is busy. Replicas need Ray, and
        # their import of vLLM is the longest part of a start. Prompts, torch and the model are loaded meanwhile.
        if config.ray.address is None:
            self._say("starting Ray")
            address = start_local(config)
            self._run_dir.started_ray(address, session=session_folder())
        else:
            self._run_dir.started_ray(config.ray.address)
        prompts = asyncio.create_task(load_prompts(config, self._prompts), name="prompts")
        described = asyncio.create_task(described_model(config, prompts), name="described model")
        generator_deployment = GeneratorDeployment(
            config,
            model_path=described,
            prompts=prompts,
            started=lambda processes: self._run_dir.uses_shared_memory(processes.shared_memory),
        )
        end = asyncio.Event()
        generators = asyncio.create_task(generator_deployment.run(end), name="generators")
        beside: list[asyncio.Task[Any]] = [generators, described, prompts]
        try:
            # Meanwhile the task of the generators creates the replicas. The threads of these two tasks import libraries
            # that the learner imports too. Of two threads that import a library at the same time, one may see half of
            # it.
            self._say("making prompts")
            await asyncio.wait([prompts, described])
            self._say("importing the learner")
            model = asyncio.create_task(ready_model(config, prompts, described, report=self._report), name="model")
            beside.append(model)
            learner = asyncio.create_task(self._learner(model, prompts).run(stop), name="learner")
            stopping = asyncio.create_task(stop.wait(), name="stopping")
            beside += [learner, stopping]
            await asyncio.wait([learner, generators, stopping], return_when=asyncio.FIRST_COMPLETED)
            end.set()
            if generators.done() and generators.exception() is not None:
                learner.cancel()
                await asyncio.wait([learner])
                generators.result()
            await generators
            return await learner
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    def _say(self, phase: str) -> None:
        self._show(starting_view(self._config, phase=phase, elapsed_s=time.monotonic() - self._started_s))

    def _learner(self, model_path: "asyncio.Task[str]", prompts: "asyncio.Task[Prompts]") -> "LearnerDeployment":
        from asyncrl.deployment.learner import LearnerDeployment

        return LearnerDeployment(
            self._config,
            run_dir=self._run_dir,
            model_path=model_path,
            prompts=prompts,
            started_s=self._started_s,
            show=self._show,
            report=self._report,
        )
