"""The ranks of one sharded model: a Ray actor each, calls that fan out to all of them, and one fate for all.

What must hold: every wait has a deadline; when one rank fails, none of the others outlives it, and what is raised is
the first cause, not a neighbour's broken connection (F34).
"""

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from asyncrl.config.schema import Config
from asyncrl.data_plane.calls import room
from asyncrl.errors import REFUSALS, AsyncRLError, PlacementError, RunError
from asyncrl.policy.rank_actor import BESIDE, LOOPBACK, POLICY_RANKS, RankActor, RankKind, Shared

FIRST_CAUSE_GRACE_S = 3.0
"""When only broken connections are known, how long to wait for the rank that broke them to be known too."""
CLOSE_TIMEOUT_S = 5.0
"""Seconds that a rank gets to leave its process group before its process is ended."""


class RankGroup:
    """`config.learner.ranks` ranks of the model at `model_path`, of one kind. Calls block, and may come from several
    threads."""

    def __init__(self, config: Config, *, model_path: str, kind: RankKind = POLICY_RANKS) -> None:
        self._config = config
        self._model_path = model_path
        self._kind = kind
        self._ranks: list[Any] = []
        self._placement: Any = None
        self.begun = False
        """Whether `start` or `shutdown` was called."""

    @property
    def size(self) -> int:
        """Ranks, whether they were started or not."""
        return self._config.learner.ranks

    def start(self) -> None:
        """Places the ranks and loads the model. PlacementError when Ray has no room within
        `ray.placement_timeout_s`, RunError when a rank fails or takes longer than `learner.startup_timeout_s`, and when
        they are there already. What fails leaves no rank, and no place taken."""
        if not ray.is_initialized():
            raise RunError("there is no Ray to place ranks on: ray.init() comes first (docs/own-loop.md)")
        self.begun = True
        if self._placement is not None:
            raise RunError(f"the {self._kind.section}'s ranks were started already: shutdown() comes first")
        try:
            self._start()
        except BaseException:
            self.shutdown()
            raise

    def _start(self) -> None:
        deadline_s, knob = self._config.learner.startup_timeout_s, "learner.startup_timeout_s"
        self._place()
        addresses = self._all("node_address", deadline_s=deadline_s, knob=knob)
        host = LOOPBACK if len(set(addresses)) == 1 else addresses[0]
        rendezvous = [self._ranks[0].open_rendezvous.remote(host)]
        [port] = self._wait(rendezvous, what="open_rendezvous", deadline_s=deadline_s, knob=knob)
        self._all("setup", deadline_s=deadline_s, knob=knob, model_path=self._model_path, host=host, port=port)

    def _place(self) -> None:
        learner, section, timeout_s = self._config.learner, self._kind.section, self._config.ray.placement_timeout_s
        bundle = {"CPU": learner.cpus} | ({"GPU": learner.gpus} if learner.gpus else {})
        self._placement = ray.util.placement_group(
            [bundle] * learner.ranks,
            strategy="PACK",
            bundle_label_selector=[learner.node_labels] * learner.ranks if learner.node_labels else None,
        )
        if not self._placement.wait(timeout_s):
            there = room(bundle, node_labels=learner.node_labels, section=section)
            raise PlacementError(
                f"Ray has no room for {learner.ranks} {section} ranks ({section}.ranks) of {bundle} each "
                f"({section}.cpus, {section}.gpus) within ray.placement_timeout_s={timeout_s}{there}"
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
            ).remote(rank=rank, world_size=learner.ranks, config=self._config, kind=self._kind)
            for rank in range(learner.ranks)
        ]

    # -- calls ---------------------------------------------------------------------------------------------------

    def call(self, method: str, *args: Any, **options: Any) -> list[Any]:
        """A worker's method on every rank with the same arguments; answers in rank order.

        The deadline is `run.stall_timeout_s`: such calls have no size that a collective's deadline could know of.
        """
        return self.call_each(method, [args] * self.size, **options)

    def call_each(
        self,
        method: str,
        args: Sequence[tuple[Any, ...]],
        *,
        shared: Sequence[Any] = (),
        with_meta: bool = False,
        **options: Any,
    ) -> list[Any]:
        """A worker's method, or its meta rank's, on every rank with positional arguments of its own, then the `shared`
        ones, objects of a caller that may be anything.

        What a rank refuses (`REFUSALS`) is raised here, and the ranks go on.
        """
        ranks, via = self._alive(), "call_with_meta" if with_meta else "call"
        common = [Shared(ref=ray.put(item)) for item in shared]
        calls = [
            getattr(rank, via).remote(method, *own, *common, **options) for rank, own in zip(ranks, args, strict=True)
        ]
        deadline_s, knob = self._config.run.stall_timeout_s, "run.stall_timeout_s"
        answers = self._wait(calls, what=method, deadline_s=deadline_s, knob=knob)
        for answer in answers:
            if isinstance(answer, REFUSALS):
                raise answer
        return answers

    def launch(self, method: str, *args: Any) -> list[Any]:
        """References to what a worker's method returns on every rank, in rank order, without waiting.

        The method has a deadline of its own. Its errors are raised where the references are resolved, and end no rank.
        """
        return [rank.attempt.remote(method, *args) for rank in self._alive()]

    def setup_data_plane(self) -> None:
        """Every rank opens its access to rows."""
        deadline_s, knob = self._config.learner.startup_timeout_s, "learner.startup_timeout_s"
        self._all("setup_data_plane", deadline_s=deadline_s, knob=knob)

    def on_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(worker, *args)` on every rank at once, `worker` being its worker; answers in rank order.

        `function` must be importable by the ranks. The deadline is `learner.collective_timeout_s`.
        """
        calls = [rank.on_rank.remote(function, *args) for rank in self._alive()]
        deadline_s, knob = self._config.learner.collective_timeout_s, "learner.collective_timeout_s"
        return self._wait(calls, what=function.__name__, deadline_s=deadline_s, knob=knob)

    def beside_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(worker, *args)` on every rank, in a thread beside the rank's steps: no collective, no weights."""
        calls = [rank.on_rank.options(concurrency_group=BESIDE).remote(function, *args) for rank in self._alive()]
        deadline_s = self._config.weights.load_timeout_s
        return self._wait(calls, what=function.__name__, deadline_s=deadline_s, knob="weights.load_timeout_s")

    def shutdown(self) -> bool:
        """Ends every rank; idempotent, and dead ranks do no harm. Whether all of them left in order."""
        self.begun = True
        ranks, self._ranks = self._ranks, []
        answers = [rank.close.remote().future() for rank in ranks]
        done, late = concurrent.futures.wait(answers, timeout=CLOSE_TIMEOUT_S)
        in_order = not late and all(answer.exception() is None for answer in done)
        for rank in ranks:
            ray.kill(rank, no_restart=True)
        if self._placement is not None:
            ray.util.remove_placement_group(self._placement)
            self._placement = None
        return in_order

    # -- one fate for all ranks ----------------------------------------------------------------------------------

    def _all(self, method: str, *, deadline_s: float, knob: str, **arguments: Any) -> list[Any]:
        calls = [getattr(rank, method).remote(**arguments) for rank in self._alive()]
        return self._wait(calls, what=method, deadline_s=deadline_s, knob=knob)

    def _wait(self, calls: Sequence[Any], *, what: str, deadline_s: float, knob: str) -> list[Any]:
        """The answers of one call to each rank, in rank order. On the first failure, or past the deadline, every rank
        is ended; then the first cause is raised."""
        answers: list[concurrent.futures.Future[Any]] = [call.future() for call in calls]
        first_failure = concurrent.futures.FIRST_EXCEPTION
        _, late = concurrent.futures.wait(answers, timeout=deadline_s, return_when=first_failure)
        failures = _failures(answers)
        if failures and all(_is_broken_connection(error) for error in failures.values()):
            concurrent.futures.wait(answers, timeout=FIRST_CAUSE_GRACE_S)
            failures = _failures(answers)
        if not failures and not late:
            return [answer.result() for answer in answers]
        self._end_all()
        if failures:
            raise _first_cause(failures, what=what, section=self._kind.section)
        unanswered = [rank for rank, answer in enumerate(answers) if answer in late]
        raise RunError(
            f"{self._kind.section} ranks {unanswered} did not finish {what} within {knob}={deadline_s} s; "
            "all were ended"
        )

    def _alive(self) -> list[Any]:
        if not self._ranks:
            raise RunError(f"the {self._kind.section} has no ranks: they have ended, or did not start")
        return self._ranks

    def _end_all(self) -> None:
        for rank in self._ranks:
            ray.kill(rank, no_restart=True)
        self._ranks = []


def _failures(answers: Sequence["concurrent.futures.Future[Any]"]) -> dict[int, BaseException]:
    """Errors by rank, of those that have failed by now."""
    errors = {rank: answer.exception() for rank, answer in enumerate(answers) if answer.done()}
    return {rank: error for rank, error in errors.items() if error is not None}


def _first_cause(failures: dict[int, BaseException], *, what: str, section: str) -> BaseException:
    """The failure that brought the others about: one that is no broken connection, before any that is."""
    rank, error = min(failures.items(), key=lambda item: (_is_broken_connection(item[1]), item[0]))
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, AsyncRLError):
        cause.add_note(f"on {section} rank {rank}, in {what}")
        return cause
    if isinstance(error, ray.exceptions.RayActorError):
        failure = RunError(f"{section} rank {rank} died in {what}: {error}")
    else:
        failure = RunError(f"{section} rank {rank} failed in {what}: {type(cause).__name__}: {cause}")
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
