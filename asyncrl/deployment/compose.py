"""Builds the deployments of a process and runs them, for the commands `up`, `learner` and `generator`.

A deployment gets its inputs as tasks of `Inputs`, so that it can start the parts that do not need them. Everything that
a function starts here ends before the function returns, in the opposite order.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncrl.common.tasks import Stopped, check_stop, running
from asyncrl.config.schema import Config
from asyncrl.deployment import cluster
from asyncrl.deployment.inputs import Inputs, Prompts
from asyncrl.deployment.pool import GeneratorDeployment
from asyncrl.deployment.run_dir import STOPPED_EARLY, RunDir
from asyncrl.deployment.screen import Screen
from asyncrl.deployment.shared_actors import JOINED, JoinedCluster
from asyncrl.learner.records import Summary

if TYPE_CHECKING:
    from asyncrl.deployment.learner import LearnerDeployment


def new_learner(
    config: Config,
    inputs: Inputs,
    *,
    run_dir: RunDir,
    screen: Screen,
    supervised: Callable[[], bool] = lambda: False,
    cluster: JoinedCluster = JOINED,
) -> "LearnerDeployment":
    """Returns the learner deployment of the run. Imports torch, which takes seconds."""
    from asyncrl.deployment.learner import LearnerDeployment

    return LearnerDeployment(
        config,
        run_dir=run_dir,
        model_path=inputs.learner_model,
        prompts=inputs.prompts,
        screen=screen,
        supervised=supervised,
        cluster=cluster,
    )


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The functions that make the parts of a run's process. `joined_address` returns the address of the joined
    cluster."""

    start_ray: Callable[[Config], cluster.LocalRay] = cluster.start
    joined_address: Callable[[], str] = cluster.joined_address
    new_inputs: Callable[..., Inputs] = Inputs
    new_generators: Callable[..., GeneratorDeployment] = GeneratorDeployment
    new_learner: Callable[..., "LearnerDeployment"] = new_learner


PARTS = Parts()


async def run_generators(config: Config, stop: asyncio.Event, *, prompts: Prompts | None) -> None:
    """Runs a generator deployment on the cluster that this process has joined. `prompts` are the prompts if they are
    loaded already."""
    async with Inputs(config, loaded=prompts) as inputs:
        await GeneratorDeployment(config, model_path=inputs.generator_model, prompts=inputs.prompts).run(stop)


async def run_learner(
    config: Config,
    stop: asyncio.Event,
    *,
    run_dir: RunDir,
    screen: Screen,
    prompts: Prompts | None,
    supervised: Callable[[], bool] = lambda: False,
    parts: Parts = PARTS,
) -> Summary | None:
    """Runs the learner deployment on the cluster that this process has joined. Returns the run's summary.

    `supervised` returns whether the learner is started again after an error that a restart may fix.
    """
    run_dir.started_ray(parts.joined_address())
    async with parts.new_inputs(config, loaded=prompts, report=screen.report) as inputs:
        screen.starting(config, "making prompts")
        await _loaded(inputs)
        learner = parts.new_learner(config, inputs, run_dir=run_dir, screen=screen, supervised=supervised)
        return await learner.run(stop)


async def run_both(
    config: Config,
    stop: asyncio.Event,
    *,
    run_dir: RunDir,
    screen: Screen,
    prompts: Prompts | None,
    parts: Parts = PARTS,
) -> Summary | None:
    """Runs both deployments, on a local Ray or on the cluster at `ray.address`, which this process has joined.

    Returns the run's summary, or None if `stop` was set before the first step. If one deployment fails, the other is
    ended and the error is raised.
    """
    try:
        return await _run_both(config, stop, run_dir=run_dir, screen=screen, prompts=prompts, parts=parts)
    except Stopped:
        run_dir.stopped(STOPPED_EARLY)
        return None


async def _run_both(
    config: Config,
    stop: asyncio.Event,
    *,
    run_dir: RunDir,
    screen: Screen,
    prompts: Prompts | None,
    parts: Parts,
) -> Summary | None:
    await check_stop(stop)  # importing Ray, starting Ray and importing torch block the event loop for seconds
    # Ray starts first. Its start takes three times as long while the interpreter is busy. Replicas need Ray, and their
    # import of vLLM is the longest part of a start. Prompts, torch and the model are loaded meanwhile.
    if config.ray.address is None:
        screen.starting(config, "starting Ray")
        address, session = parts.start_ray(config)
        run_dir.started_ray(address, session=session)
    else:
        run_dir.started_ray(parts.joined_address() if config.ray.address == "auto" else config.ray.address)
    await check_stop(stop)
    end = asyncio.Event()
    async with AsyncExitStack() as closing:
        inputs = await closing.enter_async_context(parts.new_inputs(config, loaded=prompts, report=screen.report))
        # The local Ray was made for this run. Its replicas ask for no CPUs, so that `asyncrl scale` can add some.
        pool = config.generator.model_copy(update={"cpus": 0.0} if config.ray.address is None else {})
        generator_deployment = parts.new_generators(
            config.model_copy(update={"generator": pool}),
            model_path=inputs.generator_model,
            prompts=inputs.prompts,
            started=lambda engine: run_dir.uses_shared_memory(engine.shared_memory if engine.here else []),
        )
        generators = await closing.enter_async_context(running(generator_deployment.run(end), name="generators"))
        screen.starting(config, "making prompts")
        await _loaded(inputs)  # meanwhile the task of the generators creates the replicas
        await check_stop(stop)
        screen.starting(config, "importing the learner")
        learner_deployment = parts.new_learner(config, inputs, run_dir=run_dir, screen=screen)
        learner = await closing.enter_async_context(running(learner_deployment.run(stop), name="learner"))
        stopping = await closing.enter_async_context(running(stop.wait(), name="stopping"))
        first: tuple[asyncio.Future[Any], ...] = (learner, generators, stopping)
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        end.set()
        await generators  # if it raises, the learner is cancelled
        return await learner


async def _loaded(inputs: Inputs) -> None:
    """Waits for the prompts and the description of the model, before the learner is imported.

    The threads of these tasks import libraries that the learner imports too. Of two threads that import a library at
    the same time, one may see half of it.
    """
    await asyncio.wait([inputs.prompts, inputs.generator_model])
