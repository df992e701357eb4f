"""The ranks of one sharded model: one Ray actor for each rank, and calls that go to all of them.

Invariants: every wait has a deadline, except the wait for a delivery of weights. If a rank fails in a call, all ranks
are ended, and the error that is raised is the likely root cause, not the broken connection of another rank (F34). Calls
by `beside` and `launch`, which run at the same time as others, end no rank.
"""

import concurrent.futures
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.common.kept_memory import KEPT_MEMORY
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data_plane.calls import reason_of_death, require_ray, room
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.errors import (
    REFUSALS,
    ActorGone,
    AsyncRLError,
    CallTimeout,
    CheckpointError,
    PlacementError,
    RunError,
)
from asyncrl.log_files import logs_folder
from asyncrl.ranks.actor import LOOPBACK, SAVING, SENDING, RankActor, rank_order, spanning_warning
from asyncrl.ranks.out_of_memory import LESS_MEMORY, is_out_of_memory
from asyncrl.ranks.worker import RankWorker
from asyncrl.shown_text import fact

logger = logging.getLogger(__name__)

WorkerT = TypeVar("WorkerT", bound=RankWorker[Any])
P = ParamSpec("P")
R = TypeVar("R")

STARTUP = "learner.startup_timeout_s"
"""The setting that limits each call by which the ranks start."""
FIRST_CAUSE_GRACE_S = 3.0
"""Seconds that a failed call waits for further errors if all errors so far are broken connections: the rank that caused
them may report its own error later. A call by `beside` waits so long after any error if it has a deadline, and after
the death of a rank."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds for a rank to answer whether it lives, to leave its process group, or to rest. Then its process is killed."""


@dataclass(frozen=True, slots=True)
class PlacedRanks:
    """The actors of a model's ranks, in rank order, and the placement group with their resources. `fixed` is what a run
    cannot change in their processes (`fixed_at_start`)."""

    actors: Sequence[Any]
    placement: Any
    fixed: tuple[Any, ...] = ()

    def kill(self) -> None:
        """Ends the processes of the ranks."""
        for rank in self.actors:
            ray.kill(rank, no_restart=True)

    def release(self) -> None:
        """Removes the placement group, so that Ray can use its resources again."""
        ray.util.remove_placement_group(self.placement)


def fixed_at_start(worker: type[RankWorker[Any]], config: Config) -> tuple[Any, ...]:
    """Returns the class and the settings that are fixed when the processes of these ranks start. A run may take over
    ranks of an earlier run only if theirs are equal."""
    learner = config.learner
    return (worker, learner.ranks, learner.shards, learner.cpus, learner.gpus, learner.node_labels, _variables(config))


def place_ranks(worker: type[RankWorker[Any]], config: Config) -> PlacedRanks:
    """Starts the actors of `config.learner.ranks` ranks. Raises PlacementError, and reserves nothing, if Ray has no
    resources within `ray.placement_timeout_s`."""
    require_ray("place ranks")
    learner, timeout_s = config.learner, config.ray.placement_timeout_s
    bundle = {"CPU": learner.cpus} | ({"GPU": learner.gpus} if learner.gpus else {})
    placement = ray.util.placement_group(
        [bundle] * learner.ranks,
        strategy="PACK",
        bundle_label_selector=[learner.node_labels] * learner.ranks if learner.node_labels else None,
    )
    try:
        if not placement.wait(timeout_s):
            there = room(bundle, node_labels=learner.node_labels, section=worker.section)
            raise PlacementError(
                f"Ray has no room for {learner.ranks} {worker.section} ranks ({worker.section}.ranks) of {bundle} each "
                f"({worker.section}.cpus, {worker.section}.gpus) within ray.placement_timeout_s={timeout_s}{there}"
            )
        return PlacedRanks(_actors(worker, config, placement), placement, fixed_at_start(worker, config))
    except BaseException:
        ray.util.remove_placement_group(placement)
        raise


def _actors(worker: type[RankWorker[Any]], config: Config, placement: Any) -> list[Any]:
    """Starts an actor in each bundle of the placement group. Returns the actors in rank order."""
    learner = config.learner
    nodes = ray.util.placement_group_table(placement)["bundles_to_node_id"]
    order = rank_order([nodes[bundle] for bundle in range(learner.ranks)], shards=learner.shards or learner.ranks)
    if worker.section == "learner":  # the warning names learner.shards, and the section critic has no such key
        _warn_of_spanning([nodes[bundle] for bundle in order], shards=learner.shards)
    actor = ray.remote(concurrency_groups={SENDING: 1, SAVING: 1})(RankActor)  # type: ignore[call-overload]
    return [
        actor.options(
            num_cpus=learner.cpus,
            num_gpus=learner.gpus,
            max_restarts=0,
            runtime_env={"env_vars": _variables(config)},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=placement, placement_group_bundle_index=bundle
            ),
        ).remote(worker=worker, rank=rank, world_size=learner.ranks)
        for rank, bundle in enumerate(order)
    ]


def _variables(config: Config) -> dict[str, str]:
    """Returns the environment variables of a rank's process."""
    learner = config.learner
    env = {"OMP_NUM_THREADS": str(learner.threads), "TOKENIZERS_PARALLELISM": "false"}
    if not learner.gpus:
        env |= KEPT_MEMORY
        # otherwise torch's CUDA build would make its default device mesh of GPUs that the ranks did not request
        env["CUDA_VISIBLE_DEVICES"] = ""
    return env


def _warn_of_spanning(nodes: Sequence[str], *, shards: int | None) -> None:
    """Logs a warning if a copy of the model is on several nodes. `nodes` are the ids of the ranks' nodes."""
    if len(set(nodes)) == 1:
        return
    known = ray.nodes()  # type: ignore[no-untyped-call]
    names = {node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in known}
    if warning := spanning_warning([names[node] for node in nodes], shards=shards):
        logger.warning("%s", warning)


class RankGroup(Generic[WorkerT]):
    """The model at `model_path` on `config.learner.ranks` ranks, each with a `worker`.

    Calls block, except `launch`. Several threads may call. A call takes a function whose first argument is the rank's
    worker, and its further arguments: `ranks.call(PolicyWorker.load_checkpoint, path)`. The ranks must be able to
    import the function. With `named_rows`, each rank also has a data-plane client, and a call may pass the names
    of its rows.

    `kept` is a list of ranks of earlier runs of this process: `start` takes over ranks from it if they fit, and
    `shutdown` with `keep` puts ranks into it. `place` makes new actors. If all errors of a call are broken connections,
    the call waits `grace_s` seconds for the error of the rank that caused them.
    """

    def __init__(
        self,
        worker: type[WorkerT],
        config: Config,
        *,
        model_path: str,
        named_rows: bool = False,
        kept: list[PlacedRanks] | None = None,
        place: Callable[[type[RankWorker[Any]], Config], PlacedRanks] = place_ranks,
        grace_s: float = FIRST_CAUSE_GRACE_S,
    ) -> None:
        self._worker = worker
        self._config = config
        self._model_path = model_path
        self._named_rows = named_rows
        self._kept = [] if kept is None else kept
        self._place = place
        self._grace_s = grace_s
        self._placed: PlacedRanks | None = None
        self._ranks: list[Any] = []
        self._ended_by: BaseException | None = None  # the failure after which all ranks were ended
        self.begun = False
        """True after the ranks were placed, Ray had no resources for them, or `shutdown` was called."""

    @property
    def size(self) -> int:
        """Number of ranks. They may not be started yet."""
        return self._config.learner.ranks

    def start(self) -> None:
        """Places the ranks, or takes over those that an earlier run has kept, and loads the model.

        Raises PlacementError if Ray has no resources within `ray.placement_timeout_s`. Raises RunError if a rank fails
        or takes longer than `learner.startup_timeout_s` in one of the calls that start it. In both cases no rank and no
        placement group is left. Also raises RunError if the ranks are already started; these ranks go on.
        """
        if self._placed is not None:
            raise RunError(f"the {self._worker.section}'s ranks are already started: call shutdown() first")
        try:
            placed = self._taken_over() or self._place(self._worker, self._config)
        except PlacementError:
            self.begun = True  # the next call does not wait for resources again
            raise
        self.begun, self._placed, self._ranks = True, placed, list(placed.actors)
        run = self._config.run
        incarnation = fact("incarnation")  # of the learner's process, which starts the ranks
        # An audit, or a loop of the user's own, does not have the run directory of the config. So its ranks write no
        # logs there.
        logs = None if incarnation is None else logs_folder(run.dir / run.name)
        try:
            addresses = self._all("begin", config=self._config, incarnation=incarnation, logs=logs)
            host = LOOPBACK if len(set(addresses)) == 1 else addresses[0]
            rendezvous = [self._ranks[0].open_rendezvous.remote(host)]
            [port] = self._wait(rendezvous, what="open_rendezvous", knob=STARTUP)
            self._all("setup", model_path=self._model_path, host=host, port=port, named_rows=self._named_rows)
        except BaseException:
            self.shutdown()
            raise

    def _taken_over(self) -> PlacedRanks | None:
        """Returns the ranks that an earlier run of this process has kept for this worker, if they are alive and were
        started with the same settings; otherwise None. Ends kept ranks of this worker that do not fit, so that their
        resources are free."""
        section, fixed = self._worker.section, fixed_at_start(self._worker, self._config)
        for placed in [each for each in self._kept if each.fixed[0] is self._worker]:
            self._kept.remove(placed)
            problem = "they were started for other settings"
            if placed.fixed == fixed:
                problem = _problem([rank.node_address.remote().future() for rank in placed.actors])
            if not problem:
                logger.info("the %s takes over the ranks of the run before this one", section)
                return placed
            logger.warning("the %s gets new ranks, and those of the run before this one end: %s", section, problem)
            placed.kill()
            placed.release()
        return None

    # -- calls ---------------------------------------------------------------------------------------------------

    def call(self, function: Callable[Concatenate[WorkerT, P], R], *args: P.args, **options: P.kwargs) -> list[R]:
        """Calls `function(worker, *args)` on every rank at the same time. Returns the results in rank order.

        If a rank refuses the call (`REFUSALS`), the refusal is raised in this process, and the ranks stay usable. Any
        other error ends all ranks. The deadline is `run.stall_timeout_s` and not `learner.collective_timeout_s`,
        because the time of such a call depends on its number of rows.
        """
        return self._answers(function, [rank.call.remote(function, *args, **options) for rank in self._alive()])

    def call_with_rows(
        self,
        function: Callable[Concatenate[WorkerT, BatchedDataDict, P], R],
        shards: Sequence[BatchedDataDict] | Sequence[KVBatchMeta],
        writes: Mapping[str, str],
        *shared: P.args,
        **options: P.kwargs,
    ) -> list[R]:
        """Calls `function(worker, rows, *shared)` on every rank with the rank's shard. Returns the results like `call`.

        A shard has the rows, or it is a meta that names them; `RankActor.call_with_rows` explains `writes`. The
        positional arguments `shared` may be any object of the caller, such as a loss.
        """
        ranks = self._alive()
        common = [ray.put(item) for item in shared]
        calls = [
            rank.call_with_rows.remote(function, shard, writes, common, **options)
            for rank, shard in zip(ranks, shards, strict=True)
        ]
        return self._answers(function, calls)

    def launch(
        self, function: Callable[Concatenate[WorkerT, P], R], *args: P.args, **options: P.kwargs
    ) -> list["ray.ObjectRef[R]"]:
        """Calls `function(worker, *args)` on every rank without waiting. Returns references to the results, in rank
        order.

        There is no deadline: the function must have its own. Its errors are raised where the references are resolved,
        and end no rank.
        """
        return [rank.attempt.remote(function, *args, **options) for rank in self._alive()]

    def beside(
        self, lane: str, function: Callable[Concatenate[WorkerT, P], R], *args: P.args, **options: P.kwargs
    ) -> list[R]:
        """Calls `function(worker, *args)` on every rank in the thread `lane` beside the rank's steps. Returns the
        results in rank order. A failure ends no rank, because training needs neither the delivery of weights nor
        the files.

        - `SENDING`: sends weights. There is no deadline. Raises ActorGone when a rank has died. Raises any other error
          only when all ranks have ended the call: otherwise a repetition would have to wait for a rank that still
          sends.
        - `SAVING`: writes files. Raises CheckpointError if a rank fails or dies, or if a rank takes longer than
          `checkpoint.timeout_s`.
        """
        calls = [
            rank.attempt.options(concurrency_group=lane).remote(function, *args, **options) for rank in self._alive()
        ]
        name = function.__name__
        if lane == SENDING:
            return self._ended_beside(name, calls, timeout_s=None)
        timeout_s = self._config.checkpoint.timeout_s
        try:
            return self._ended_beside(name, calls, timeout_s=timeout_s)
        except CheckpointError:
            raise
        except _Unfinished as late:
            raise CheckpointError(
                f"{late} within checkpoint.timeout_s={timeout_s} s; look at the disk of the run's directory, or raise "
                "the limit"
            ) from None
        except AsyncRLError as error:
            raise CheckpointError(str(error)) from error

    def _ended_beside(self, name: str, calls: Sequence[Any], *, timeout_s: float | None) -> list[Any]:
        """Waits for the `calls` of `beside`, one to each rank. Returns their results in rank order. Ends no rank.

        After a failure it waits for the other ranks before it raises: at most `_grace_s`, or until all have ended if
        `timeout_s` is None and no rank has died. Raises `_Unfinished` if no rank failed, but some are late.
        """
        answers: list[concurrent.futures.Future[Any]] = [call.future() for call in calls]
        first_failure = concurrent.futures.FIRST_EXCEPTION
        _, late = concurrent.futures.wait(answers, timeout=timeout_s, return_when=first_failure)
        if failures := _failures(answers):
            # The ranks fail together, but a rank whose peer has died may wait for the peer until its collective ends.
            alive = not any(isinstance(error, ray.exceptions.RayActorError) for error in failures.values())
            concurrent.futures.wait(answers, timeout=None if timeout_s is None and alive else self._grace_s)
        if failures := _failures(answers):
            raise _root_cause(failures, what=name, section=self._worker.section)
        if late:
            unfinished = [rank for rank, answer in enumerate(answers) if answer in late]
            raise _Unfinished(f"{self._worker.section} ranks {unfinished} did not finish {name}")
        return [answer.result() for answer in answers]

    def shutdown(self, *, keep: bool = False) -> bool:
        """Ends every rank. Idempotent. A rank that is already dead does not cause an error. Returns True if all ranks
        left their process group within `CLOSE_TIMEOUT_S` and without an error.

        With `keep`, ranks that are in order go into `kept` instead: their processes stay, without anything of this run.
        """
        self.begun = True
        ranks, self._ranks, self._ended_by = self._ranks, [], None
        in_order = not _problem([rank.close.remote().future() for rank in ranks])
        if self._placed is not None:
            if not (keep and ranks and in_order and self._rests(self._placed)):
                self._placed.kill()
                self._placed.release()
            self._placed = None
        return in_order

    def _rests(self, placed: PlacedRanks) -> bool:
        """Lets ranks that have closed drop everything of this run, and puts them into `kept`. Returns False if a rank
        cannot."""
        if problem := _problem([rank.rest.remote().future() for rank in placed.actors]):
            logger.warning("the ranks of the %s are not kept for the next run: %s", self._worker.section, problem)
            return False
        logger.info("the ranks of the %s are kept for the next run", self._worker.section)
        self._kept.append(placed)
        return True

    # -- all ranks fail together ---------------------------------------------------------------------------------

    def _answers(self, function: Callable[..., Any], calls: Sequence[Any]) -> list[Any]:
        answers = self._wait(calls, what=function.__name__, knob="run.stall_timeout_s")
        for answer in answers:
            if isinstance(answer, REFUSALS):
                raise answer
        return answers

    def _all(self, method: str, **arguments: Any) -> list[Any]:
        """Calls a method of every rank's actor while the ranks start."""
        calls = [getattr(rank, method).remote(**arguments) for rank in self._alive()]
        return self._wait(calls, what=method, knob=STARTUP)

    def _wait(self, calls: Sequence[Any], *, what: str, knob: str) -> list[Any]:
        """Returns the results of one call to each rank, in rank order. At the first failure, ends every rank and raises
        the likely root cause. After the seconds of the setting `knob`, ends every rank and raises CallTimeout."""
        deadline_s: float = attrgetter(knob)(self._config)
        answers: list[concurrent.futures.Future[Any]] = [call.future() for call in calls]
        first_failure = concurrent.futures.FIRST_EXCEPTION
        _, late = concurrent.futures.wait(answers, timeout=deadline_s, return_when=first_failure)
        failures = _failures(answers)
        if failures and all(_is_broken_connection(error) for error in failures.values()):
            concurrent.futures.wait(answers, timeout=self._grace_s)
            failures = _failures(answers)
        if not failures and not late:
            return [answer.result() for answer in answers]
        if failures:
            cause = _root_cause(failures, what=what, section=self._worker.section)
        else:
            unanswered = [rank for rank, answer in enumerate(answers) if answer in late]
            cause = CallTimeout(
                f"{self._worker.section} ranks {unanswered} did not finish {what} within {knob}={deadline_s} s, so all "
                f"ranks were ended; look at the ranks' logs, or raise the limit"
            )
        self._ended_by = cause
        if self._placed is not None:
            self._placed.kill()
        self._ranks = []
        raise cause

    def _alive(self) -> list[Any]:
        if self._ranks:
            return self._ranks
        section, again = self._worker.section, "call shutdown() and start()"
        if self._ended_by is None:
            raise RunError(f"the {section} has no ranks: they have ended, or were not started; {again}")
        # A call in another thread has failed and ended the ranks, and the learner may see this error before that one.
        # So both errors must agree on whether a restart of the run may help.
        kind = ActorGone if getattr(self._ended_by, "restart_mends", False) else RunError
        raise kind(
            f"the {section} has no ranks: they were ended after a call had failed ({self._ended_by}); {again}"
        ) from self._ended_by


def _problem(answers: Sequence["concurrent.futures.Future[Any]"]) -> str:
    """Waits at most `CLOSE_TIMEOUT_S` for these calls of any kind, one to each rank. Returns the error of the first
    rank that has one, or that a rank was late; "" if all calls have ended without an error."""
    _, late = concurrent.futures.wait(answers, timeout=CLOSE_TIMEOUT_S)
    errors = [str(error) for error in _failures(answers).values()]
    return errors[0] if errors else f"a rank did not answer within {CLOSE_TIMEOUT_S:g} s" if late else ""


class _Unfinished(Exception):
    """A rank did not answer within the deadline of a call by `beside`."""


def _failures(answers: Sequence["concurrent.futures.Future[Any]"]) -> dict[int, BaseException]:
    """Returns the errors of the calls that have failed by now, by rank."""
    errors = {rank: answer.exception() for rank, answer in enumerate(answers) if answer.done()}
    return {rank: error for rank, error in errors.items() if error is not None}


def _root_cause(failures: dict[int, BaseException], *, what: str, section: str) -> BaseException:
    """Returns the likely root cause of a failed call: the error of the lowest rank that has more than a broken
    connection, or else that of the lowest rank. Errors that are not asyncrl's own become a RunError or ActorGone."""
    rank, error = min(failures.items(), key=lambda item: (_is_broken_connection(item[1]), item[0]))
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, AsyncRLError):
        cause.add_note(f"on {section} rank {rank}, in {what}")
        return cause
    if isinstance(error, ray.exceptions.RayActorError):
        failure: RunError = ActorGone(
            f"{section} rank {rank} died in {what}: {reason_of_death(error)}. If the memory of its machine was full: "
            f"{LESS_MEMORY}"
        )
    elif is_out_of_memory(cause):
        failure = RunError(
            f"{section} rank {rank} ran out of memory in {what}: {LESS_MEMORY} ({type(cause).__name__}: {cause})"
        )
    else:
        # A connection breaks when the rank at its other end has died.
        kind = ActorGone if _is_broken_connection(error) else RunError
        failure = kind(f"{section} rank {rank} failed in {what}: {type(cause).__name__}: {cause}")
    failure.__cause__ = error
    return failure


def _is_broken_connection(error: BaseException) -> bool:
    """Returns True if the class and the text of an error say that a rank failed only because a collective with another
    rank failed."""
    if isinstance(error, ray.exceptions.RayActorError):
        return False
    cause = getattr(error, "cause", None) or error
    text = f"{type(cause).__name__}: {cause}".lower()
    signs = ("distbackenderror", "distnetworkerror", "diststoreerror", "gloo", "nccl", "connection closed")
    return not isinstance(cause, AsyncRLError) and any(sign in text for sign in signs)
