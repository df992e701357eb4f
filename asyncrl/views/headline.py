"""Chooses the headline of a run: one sentence with its most urgent problem and what to do about it.

All views choose the headline in the same way. It is the first health note (`asyncrl.views.health`). Without a note, the
headline says which side waits for the other (`bottleneck`) in the steps that the view covers.

When one side waits, the other side limits the run. When both sides wait, the limit is between them: the staleness
limit, the buffer's capacity, or the publication of weights. To change a setting of these is therefore recommended only
when the learner waits and generators are blocked by it. A learner that never waits would gain nothing. The time that
processes take to start does not count.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from asyncrl.common.concern import Concern
from asyncrl.views.health_finds import percent
from asyncrl.views.run_view import RunView

NOTABLE_SHARE = 0.2
"""A side that waits, is blocked or is idle for less than this share of its time does not count as such."""
NEGLIGIBLE_SHARE = 0.05
"""A smaller share of a side's time is not worth a change of settings."""


class Bound(StrEnum):
    """The cause that limits the speed of a run."""

    GENERATORS = "generators"
    LEARNER = "learner"
    STALENESS = "staleness"
    CAPACITY = "capacity"
    WEIGHTS = "weights"
    PROMPTS = "prompts"
    ENVIRONMENT = "environment"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One sentence for the user, and its subject."""

    concern: Concern
    sentence: str

    @property
    def warns(self) -> bool:
        """Whether the sentence is a warning. A bottleneck is not a fault, so its sentence is not a warning."""
        return self.concern is not Concern.BOTTLENECK


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The cause that limits a run, with a sentence that names the settings to change."""

    bound: Bound
    sentence: str


OTHER_WAITS = {
    "blocked_on_capacity": (
        Bound.CAPACITY,
        "Generators wait for free slots in the buffer",
        "raise buffer.capacity_groups or buffer.capacity_bytes",
    ),
    "paused_for_weights": (
        Bound.WEIGHTS,
        "Generators are paused to load weights",
        "raise weights.publish_every_steps",
    ),
    "starved_of_prompts": (Bound.PROMPTS, "Generators have no prompts", "add prompts, or raise data.epochs"),
    "waiting_for_environment": (
        Bound.ENVIRONMENT,
        "Generators wait for rewards, or for agents' own code",
        "make rewards, tools and environments faster, or raise environment.score_workers (a judge: its most_per_s) and "
        "generator.max_concurrent_groups",
    ),
}

HELD_BACK = ("blocked_on_staleness", "blocked_on_capacity", "starved_of_prompts")
"""States in which a generator has a free slot but gets no permission (ticket) to start a group."""


def headline(run: RunView) -> Headline | None:
    """Returns the most urgent sentence; None while too few facts are known.

    >>> shares = {"optimizer": 1.0}, {"generating": 1.0}
    >>> headline(RunView(learner_shares=shares[0], generator_shares=shares[1])).concern
    <Concern.BOTTLENECK: 'bottleneck'>
    """
    if run.notes:
        return Headline(concern=run.notes[0].concern, sentence=run.notes[0].sentence)
    limits = bottleneck_of(run)
    return None if limits is None else Headline(concern=Concern.BOTTLENECK, sentence=limits.sentence)


def bottleneck_of(run: RunView) -> Bottleneck | None:
    """Returns what limits a run; None while the shares of time of a side are not known."""
    if not (run.learner_shares and run.generator_shares):
        return None
    return bottleneck(run.learner_shares, run.generator_shares, room=run.room)


def bottleneck(
    learner_shares: Mapping[str, float], generator_shares: Mapping[str, float], *, room: bool | None = None
) -> Bottleneck:
    """Returns what limits a run, from both sides' shares of time by state. The shares of a side add up to 1, without
    the state `starting`.

    `room` is whether cores or GPUs are free for another process; None when it is not known.

    >>> bottleneck({"waiting_for_groups": 0.5}, {"generating": 0.6, "blocked_on_staleness": 0.4}).bound
    <Bound.STALENESS: 'staleness'>
    >>> bottleneck({"optimizer": 1.0}, {"generating": 0.6, "blocked_on_staleness": 0.4}).bound
    <Bound.LEARNER: 'learner'>
    """
    waiting = learner_shares.get("waiting_for_groups", 0.0)
    if waiting < NOTABLE_SHARE:
        return _of_the_learner(generator_shares, waiting, room)
    blocked = generator_shares.get("blocked_on_staleness", 0.0)
    other = max(OTHER_WAITS, key=lambda state: generator_shares.get(state, 0.0))
    # if slots wait for agents' code more than for the engine, more generators would only wait for the same code
    slow_agents = other == "waiting_for_environment" and generator_shares[other] >= max(
        NOTABLE_SHARE, blocked, generator_shares.get("generating", 0.0)
    )
    if slow_agents or generator_shares.get(other, 0.0) >= max(waiting, blocked):
        bound, what, advice = OTHER_WAITS[other]
        return _found(bound, what, generator_shares[other], f": {advice}.")
    if blocked >= NOTABLE_SHARE:
        return _found(
            Bound.STALENESS,
            "The learner waits for groups",
            waiting,
            f", and generators wait {percent(blocked)} for the learner's next version: raise staleness.max_versions "
            "while the effective sample size is high.",
        )
    idle = generator_shares.get("idle", 0.0)
    if idle >= NOTABLE_SHARE:
        advice = (
            f"generator slots are idle {percent(idle)} of the time. That is normal before the first weights, in "
            "evaluations and at the end of the run; otherwise raise generator.max_starts_per_s"
            f"{'' if room is False else ', or add generators'}"
        )
    elif room is False:
        advice = "raise generator.max_concurrent_groups (all cores of this machine are in use)"
    else:
        advice = "add generators, or slots (generator.max_concurrent_groups) where cores or GPUs are free"
    if blocked >= NEGLIGIBLE_SHARE:
        advice += f"; the staleness limit blocks generators {percent(blocked)} of the time"
    return _found(Bound.GENERATORS, "The learner waits for groups", waiting, f": {advice}.")


def _of_the_learner(generator_shares: Mapping[str, float], waiting: float, room: bool | None) -> Bottleneck:
    """Returns the bottleneck of a run whose learner does not wait. More generated groups would only wait for the
    learner."""
    blocked = sum(generator_shares.get(state, 0.0) for state in HELD_BACK)
    if blocked < NOTABLE_SHARE:
        return Bottleneck(
            bound=Bound.NOTHING, sentence=f"Neither side waits for more than {percent(NOTABLE_SHARE)} of the time."
        )
    ranks = {True: ": add learner ranks.", None: ": add learner ranks where cores or GPUs are free.", False: "."}
    advice = ranks[room]
    if waiting < NEGLIGIBLE_SHARE:
        advice += " You can lower staleness.max_versions (but not to 0) to train on fresher samples at the same speed."
    return _found(Bound.LEARNER, "Generators wait for the learner", blocked, advice)


def _found(bound: Bound, what: str, share: float, rest: str) -> Bottleneck:
    return Bottleneck(bound=bound, sentence=f"{what} {percent(share)} of the time{rest}")
