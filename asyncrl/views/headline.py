"""Chooses the headline of a run: one sentence with its most urgent problem and what to do about it.

All views show the same headline. It is the first of these that applies: no step was trained, the witness has found
another update than it should be, answers are cut, the rewards give no gradient, rollouts fail, log-probs disagree, the
data is too far from the policy. If none applies, the headline says which side waits for the other (`bottleneck`).

When one side waits, the other side limits the run. When both sides wait, the limit is between them: the staleness
limit, the buffer's capacity, or the publication of weights. A setting of these is therefore recommended only when the
learner waits and generators are blocked by it. A learner that never waits would gain nothing. The time that processes
take to start does not count.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from asyncrl.buffer.ledger import OPEN_FATES, Fate
from asyncrl.views.run_view import RunView

NOTABLE_SHARE = 0.2
"""A side that waits for less than this share of its time does not count as waiting."""
NEGLIGIBLE_SHARE = 0.05
"""A smaller share of a side's time is not worth a change of settings."""
MOSTLY_EQUAL = 0.9
"""When a larger share of the groups has equal rewards, there is almost no gradient."""
MOSTLY_CUT = 0.9
"""When a larger share of the answers is cut at its length limit, the model probably does not end its answers."""
MANY_FAILURES = 0.05
"""A larger share of failed groups causes a warning."""
LOW_ESS = 0.3
"""Below this effective sample size, few tokens dominate a step. The alert AsyncrlESSCollapse has the same limit."""


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


class Concern(StrEnum):
    """The subject of a headline, the most urgent first."""

    NOTHING_TRAINED = "nothing_trained"
    NOT_VERIFIED = "not_verified"
    CUT = "cut"
    NO_GRADIENT = "no_gradient"
    FAILURES = "failures"
    PARITY = "parity"
    STALE_DATA = "stale_data"
    BOTTLENECK = "bottleneck"


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
"""States in which a generator has a free slot but gets no ticket."""


def headline(run: RunView) -> Headline | None:
    """Returns the most urgent sentence; None while too few facts are known.

    >>> headline(RunView(equal_rewards_ratio=1.0, recent_trained_steps=20)).concern
    <Concern.NO_GRADIENT: 'no_gradient'>
    """
    for concern, sentence in _warnings(run):
        return Headline(concern=concern, sentence=sentence)
    limits = bottleneck_of(run)
    return None if limits is None else Headline(concern=Concern.BOTTLENECK, sentence=limits.sentence)


def failed_share(groups: Mapping[str, float]) -> float:
    """Returns the share of failed groups among all groups with a final fate; 0 when no group has one.

    >>> failed_share({"trained": 24, "failed": 8, "reserved": 100})
    0.25
    """
    ended = sum(number for fate, number in groups.items() if fate not in OPEN_FATES)
    return groups.get(Fate.FAILED, 0) / ended if ended else 0.0


def by_reason(failures: Mapping[str, int]) -> str:
    """Returns the numbers of `groups_by_reason` as text, such as `reward_raised 20, reward_timeout 3`."""
    return ", ".join(f"{reason} {number}" for reason, number in failures.items())


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
    # if slots wait for agents more than for the engine, more generators would only wait for the same code
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
            f", and generators wait {_percent(blocked)} for the learner's next version: raise staleness.max_versions "
            "while the effective sample size is high.",
        )
    idle = generator_shares.get("idle", 0.0)
    if idle >= NOTABLE_SHARE:
        advice = (
            f"generator slots are idle {_percent(idle)} of the time. That is normal before the first weights, in "
            "evaluations and at the end of the run; otherwise raise generator.max_starts_per_s"
            f"{'' if room is False else ', or add generators'}"
        )
    elif room is False:
        advice = "raise generator.max_concurrent_groups (all cores of this machine are in use)"
    else:
        advice = "add generators, or slots (generator.max_concurrent_groups) where cores or GPUs are free"
    if blocked >= NEGLIGIBLE_SHARE:
        advice += f"; the staleness limit blocks generators {_percent(blocked)} of the time"
    return _found(Bound.GENERATORS, "The learner waits for groups", waiting, f": {advice}.")


def _of_the_learner(generator_shares: Mapping[str, float], waiting: float, room: bool | None) -> Bottleneck:
    """Returns the bottleneck of a run whose learner does not wait: more generated groups would only wait for it."""
    blocked = sum(generator_shares.get(state, 0.0) for state in HELD_BACK)
    if blocked < NOTABLE_SHARE:
        return Bottleneck(
            bound=Bound.NOTHING, sentence=f"Neither side waits for more than {_percent(NOTABLE_SHARE)} of the time."
        )
    ranks = {True: ": add learner ranks.", None: ": add learner ranks where cores or GPUs are free.", False: "."}
    advice = ranks[room]
    if waiting < NEGLIGIBLE_SHARE:
        advice += " You can lower staleness.max_versions (but not to 0) to train on fresher samples at the same speed."
    return _found(Bound.LEARNER, "Generators wait for the learner", blocked, advice)


def _found(bound: Bound, what: str, share: float, rest: str) -> Bottleneck:
    return Bottleneck(bound=bound, sentence=f"{what} {_percent(share)} of the time{rest}")


def _warnings(run: RunView) -> Iterator[tuple[Concern, str]]:
    """Yields the warnings about a run, the most urgent first."""
    if run.steps_trained == 0 and run.steps_skipped:
        yield (
            Concern.NOTHING_TRAINED,
            "No step was trained: every step was skipped, because a loss or a gradient was not finite. Lower "
            "learner.optimizer.learning_rate, and look at the learner's log for the first skipped step.",
        )
    if run.witness_ratio is not None and run.witness_ratio > 1:
        yield (
            Concern.NOT_VERIFIED,
            "The witness has found that an update is not the one that the configuration describes: an error in the "
            "learner's log says what differs. witness.on_failure says whether training goes on.",
        )
    if (ratio := run.recent_truncated_ratio) is not None and ratio > MOSTLY_CUT:
        yield Concern.CUT, _cut(run, ratio)
    if (ratio := run.equal_rewards_ratio) is not None and ratio > MOSTLY_EQUAL:
        yield Concern.NO_GRADIENT, _no_gradient(run, ratio)
    if (share := failed_share(run.groups)) > MANY_FAILURES:
        reasons = f" ({by_reason(run.failures)})" if run.failures else ""
        of_reward = run.failures and all(reason.startswith("reward_") for reason in run.failures)
        yield (
            Concern.FAILURES,
            f"{_percent(share)} of the groups failed and were not trained{reasons}: "
            f"{'fix the reward' if of_reward else 'fix the cause'}. The learner's log and report.html have the first "
            "failure of each kind.",
        )
    elif (ratio := run.failed_samples_ratio) is not None and ratio > MANY_FAILURES:
        yield (
            Concern.FAILURES,
            f"The reward failed for {_percent(ratio)} of the trained groups' samples, which are left out of the loss: "
            "fix the reward. The learner's log and report.html have the first failure of each kind.",
        )
    if run.parity_ratio is not None and run.parity_ratio > 1 and run.parity_nats is not None:
        yield (
            Concern.PARITY,
            f"The log-probs of generators and learner differ by {run.parity_ratio:.3g} times the accepted "
            f"difference (weights.parity_tolerance_nats, in bfloat16 weights.parity_factor), and by up to "
            f"{run.parity_nats:.3g} nats, so importance weights are wrong: check model.dtype and weights.kv_cache.",
        )
    if (ratio := run.recent_ess_ratio) is not None and ratio < LOW_ESS:
        yield (
            Concern.STALE_DATA,
            f"The effective sample size is {_percent(ratio)}: the policy is far from the policy that sampled the data. "
            "Lower staleness.max_versions or learner.optimizer.learning_rate.",
        )


def _no_gradient(run: RunView, ratio: float) -> str:
    steps = "the last step" if run.recent_trained_steps == 1 else f"the last {run.recent_trained_steps} steps"
    fact = f"In {_percent(ratio)} of the groups of {steps} all rewards are equal"
    if run.at_highest_reward is not None:
        return (
            f"{fact}, and most are {run.at_highest_reward:.3g}, the highest reward that the run has seen. If a "
            "reward cannot be higher, there is little left to learn: use harder questions. Otherwise use easier ones."
        )
    gradient = "no gradient" if ratio > 0.995 else "hardly any gradient"  # from 0.995 on, the sentence says 100 %
    advice = (
        "use easier questions (harder ones if the answers are right), a denser reward, or a larger learner.group_size."
    )
    if run.hidden_tags:
        advice += (
            f" If the reward looks for {' or '.join(run.hidden_tags)}: the text that it gets never has them; see "
            "environment.special_tokens and task.generation_prompt."
        )
    return f"{fact}, so there is {gradient}: {advice}"


def _cut(run: RunView, ratio: float) -> str:
    fact = f"{_percent(ratio)} of the answers are cut at their length limit"
    longer = "raise generator.max_completion_tokens and model.max_length"
    if (run.truncated_at_first or 0.0) > MOSTLY_CUT:
        return (
            f"{fact}, since the first step: {longer}. If the answers go on after their end, the model does not end "
            "them with a token at which engines stop: use the chat template with which it was trained, or "
            "generator.stop."
        )
    return f"{fact}: {longer}, or penalise long answers (algorithm.overlong)."


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"
