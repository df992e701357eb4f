"""The driver's side of the policy: one Ray actor a rank, calls that fan out to all of them, and one fate for all.

What must hold: every wait has a deadline; when one rank fails, none of the others outlives it, and what is raised is
the first cause, not a neighbour's broken connection (F34); rows never pass through the driver.

    policy = LMPolicy(config, model_path=path)
    await policy.start()
    report = await policy.train_step(groups, step=0)
    await policy.shutdown()
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError, PlacementError, RunError
from asyncrl.policy.interfaces import ParameterSpec, StepReport, TrainGroup, deal_groups
from asyncrl.policy.rank_actor import BESIDE, LOOPBACK, RankActor

FIRST_CAUSE_GRACE_S = 3.0
"""When only broken connections are known, how long to wait for the rank that broke them to be known too."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds that a rank gets to leave its process group before its process is ended."""


class LMPolicy:
    """`config.learner.ranks` ranks of the model at `model_path`. Its methods belong to one event loop."""

    def __init__(self, config: Config, *, model_path: str) -> None:
        self._config = config
        self._model_path = model_path
        self._ranks: list[Any] = []
        self._placement: Any = None
        self._specs: tuple[ParameterSpec, ...] = ()

    async def start(self) -> None:
        """Places the ranks and loads the model. PlacementError when Ray has no room within
        `ray.placement_timeout_s`, RunError when a rank fails or takes longer than `learner.startup_timeout_s`."""
        learner = self._config.learner
        await self._place()
        deadline_s = learner.startup_timeout_s
        addresses = await self._all("node_address", deadline_s=deadline_s)
        host = LOOPBACK if len(set(addresses)) == 1 else addresses[0]
        knob = "learner.startup_timeout_s"
        rendezvous = [self._ranks[0].open_rendezvous.remote(host)]
        [port] = await self._wait(rendezvous, what="open_rendezvous", deadline_s=deadline_s, knob=knob)
        await self._all("setup", deadline_s=deadline_s, knob=knob, model_path=self._model_path, host=host, port=port)
        self._specs = (await self.on_ranks(_weights_metadata))[0]

    async def _place(self) -> None:
        learner, timeout_s = self._config.learner, self._config.ray.placement_timeout_s
        bundle = {"CPU": learner.cpus} | ({"GPU": learner.gpus} if learner.gpus else {})
        self._placement = ray.util.placement_group([bundle] * learner.ranks, strategy="PACK")
        if not await asyncio.to_thread(self._placement.wait, timeout_s):
            total, free = ray.cluster_resources(), ray.available_resources()  # type: ignore[no-untyped-call]
            await self.shutdown()
            raise PlacementError(
                f"Ray has no room for {learner.ranks} learner ranks (learner.ranks) of {bundle} each (learner.cpus, "
                f"learner.gpus) within ray.placement_timeout_s={timeout_s}: the cluster has "
                + ", ".join(f"{total.get(name, 0.0):g} {name}, {free.get(name, 0.0):g} free" for name in bundle)
            )
        threads = str(learner.threads)
        env = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        if not learner.gpus:
            # torch's CUDA build would otherwise make its default device mesh of GPUs that were not asked for
            env["CUDA_VISIBLE_DEVICES"] = ""
        actor = ray.remote(concurrency_groups={BESIDE: 1})(RankActor)  # type: ignore[call-overload]
        self._ranks = [
            actor.options(
                num_cpus=learner.cpus,
                num_gpus=learner.gpus,
                max_restarts=0,
                runtime_env={"env_vars": env},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._placement, placement_group_bundle_index=rank
                ),
            ).remote(rank=rank, world_size=learner.ranks, config=self._config)
            for rank in range(learner.ranks)
        ]

    # -- what the learner calls ----------------------------------------------------------------------------------

    async def train_step(self, groups: Sequence[TrainGroup], *, step: int) -> StepReport:
        """Trains step `step`. Each group's `rows` is the ObjectRef that only its rank fetches.

        The deadline is `run.stall_timeout_s`: a step has no size that a collective's deadline could know of.
        """
        learner = self._config.learner
        shares = deal_groups(groups, ranks=learner.ranks, updates=learner.updates_per_step)
        calls = [rank.train_on_refs.remote(share, step=step) for rank, share in zip(self._alive(), shares, strict=True)]
        reports: list[StepReport] = await self._wait(
            calls, what="train_step", deadline_s=self._config.run.stall_timeout_s, knob="run.stall_timeout_s"
        )
        if any(report.rows_lost for report in reports):
            return StepReport(rows_lost=True, lost_keys=tuple(key for report in reports for key in report.lost_keys))
        return reports[0]

    async def probe(self, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
        """Temperature-1 log-probs of tokens[1:] of each sequence, under the current weights."""
        answers: list[list[npt.NDArray[np.float32]]] = await self.on_ranks(_probe, sequences)
        return answers[0]

    def weights_metadata(self) -> tuple[ParameterSpec, ...]:
        """Names, shapes, dtypes and bytes of what `PolicyWorker.gather_weights` yields, in order; after `start`."""
        return self._specs

    async def save_hf(self, path: Path) -> None:
        """Writes a Hugging Face directory that vLLM serves, on rank 0's node."""
        await self.on_ranks(_save_hf, path, deadline_s=self._config.run.stall_timeout_s, knob="run.stall_timeout_s")

    async def on_ranks(
        self,
        function: Callable[..., Any],
        *args: Any,
        deadline_s: float | None = None,
        knob: str = "learner.collective_timeout_s",
    ) -> list[Any]:
        """`function(worker, *args)` on every rank at once, `worker` being its PolicyWorker; answers in rank order.

        `function` must be importable by the ranks. The deadline is `learner.collective_timeout_s` unless given.
        """
        deadline_s = self._config.learner.collective_timeout_s if deadline_s is None else deadline_s
        calls = [rank.on_rank.remote(function, *args) for rank in self._alive()]
        return await self._wait(calls, what=function.__name__.lstrip("_"), deadline_s=deadline_s, knob=knob)

    async def beside_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(worker, *args)` on every rank, in a thread beside the rank's steps: no collective, no weights."""
        calls = [rank.on_rank.options(concurrency_group=BESIDE).remote(function, *args) for rank in self._alive()]
        deadline_s = self._config.weights.load_timeout_s
        return await self._wait(calls, what=function.__name__, deadline_s=deadline_s, knob="weights.load_timeout_s")

    async def shutdown(self) -> bool:
        """Ends every rank; idempotent, and dead ranks do no harm. Whether all of them left in order."""
        ranks, self._ranks = self._ranks, []
        answers = [asyncio.wrap_future(rank.close.remote().future()) for rank in ranks]
        in_order = True
        if answers:
            done, late = await asyncio.wait(answers, timeout=CLOSE_TIMEOUT_S)
            in_order = not late and all(answer.exception() is None for answer in done)
            _forget(late)
        for rank in ranks:
            ray.kill(rank, no_restart=True)
        if self._placement is not None:
            ray.util.remove_placement_group(self._placement)
            self._placement = None
        return in_order

    # -- one fate for all ranks ----------------------------------------------------------------------------------

    async def _all(
        self, method: str, *, deadline_s: float, knob: str = "learner.startup_timeout_s", **arguments: Any
    ) -> list[Any]:
        calls = [getattr(rank, method).remote(**arguments) for rank in self._ranks]
        return await self._wait(calls, what=method, deadline_s=deadline_s, knob=knob)

    async def _wait(self, calls: Sequence[Any], *, what: str, deadline_s: float, knob: str) -> list[Any]:
        """The answers of one call to each rank, in rank order. On the first failure, or past the deadline, every rank
        is ended; then the first cause is raised."""
        answers = [asyncio.wrap_future(call.future()) for call in calls]
        _, late = await asyncio.wait(answers, timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
        failures = _failures(answers)
        if failures and all(_is_broken_connection(error) for error in failures.values()):
            await asyncio.wait(answers, timeout=FIRST_CAUSE_GRACE_S)
            failures = _failures(answers)
        if not failures and not late:
            return [answer.result() for answer in answers]
        self._end_all()
        _forget(answer for answer in answers if not answer.done())
        if failures:
            raise _first_cause(failures, what=what)
        unanswered = [rank for rank, answer in enumerate(answers) if answer in late]
        raise RunError(f"learner ranks {unanswered} did not finish {what} within {knob}={deadline_s} s; all were ended")

    def _alive(self) -> list[Any]:
        if not self._ranks:
            raise RunError("the policy has no ranks: it was not started, or it has ended")
        return self._ranks

    def _end_all(self) -> None:
        for rank in self._ranks:
            ray.kill(rank, no_restart=True)
        self._ranks = []


def _failures(answers: Sequence["asyncio.Future[Any]"]) -> dict[int, BaseException]:
    """Errors by rank, of those that have failed by now."""
    errors = {rank: answer.exception() for rank, answer in enumerate(answers) if answer.done()}
    return {rank: error for rank, error in errors.items() if error is not None}


def _first_cause(failures: dict[int, BaseException], *, what: str) -> BaseException:
    """The failure that brought the others about: one that is no broken connection, before any that is."""
    rank, error = min(failures.items(), key=lambda item: (_is_broken_connection(item[1]), item[0]))
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, AsyncRLError):
        cause.add_note(f"on learner rank {rank}, in {what}")
        return cause
    if isinstance(error, ray.exceptions.RayActorError):
        failure = RunError(f"learner rank {rank} died in {what}: {error}")
    else:
        failure = RunError(f"learner rank {rank} failed in {what}: {type(cause).__name__}: {cause}")
    failure.__cause__ = error
    return failure


def _is_broken_connection(error: BaseException) -> bool:
    """Whether a rank failed only because a collective with another rank did."""
    if isinstance(error, ray.exceptions.RayActorError):
        return False
    cause = getattr(error, "cause", None) or error
    text = f"{type(cause).__name__}: {cause}".lower()
    signs = ("distbackenderror", "distnetworkerror", "diststoreerror", "gloo", "nccl", "connection closed")
    return not isinstance(cause, AsyncRLError) and any(sign in text for sign in signs)


def _forget(futures: Any) -> None:
    """Reads the outcome of futures that nobody waits for any more, so that asyncio does not complain."""
    for future in futures:
        future.add_done_callback(lambda done: done.cancelled() or done.exception())


# importable by the ranks, unlike lambdas


def _weights_metadata(worker: Any) -> tuple[ParameterSpec, ...]:
    return worker.weights_metadata()  # type: ignore[no-any-return]


def _probe(worker: Any, sequences: Sequence[Sequence[int]]) -> list[npt.NDArray[np.float32]]:
    return worker.probe(sequences)  # type: ignore[no-any-return]


def _save_hf(worker: Any, path: Path) -> None:
    worker.save_hf(path)
