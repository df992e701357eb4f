"""Finds in the records of a run what the health notes report. Each function belongs to a rule of
`asyncrl.views.health`.

A function returns what it found, or None. Its limits are data with a reason each, which docs/health.md shows. They were
chosen with the records of the campaign of healthy runs (tests/campaign/run_healthy.py) and of broken runs: no healthy
run of the table in docs/guarantees.md may have a note.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from asyncrl.buffer.ledger import OPEN_FATES, Fate
from asyncrl.learner.records import EvalRecord, StepRecord, largest, mean
from asyncrl.metrics.numbers import LEAST_PUBLISHED_BITS
from asyncrl.views import quantities
from asyncrl.views.evidence import BLOCK_STEPS, RECENT_STEPS, Evidence, Level, Number, blocks, distance, level, since


@dataclass(frozen=True, slots=True)
class Limit:
    """A threshold of a rule, and the reason for its value."""

    value: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault that a rule has found: the measured number, the fact as a sentence without its full stop, and the step
    since which it holds. The step is None if the fact does not belong to a step."""

    number: float
    fact: str
    since_step: int | None = None


LEAST_STEPS = Limit(3, "in one or two steps, a mean says little about the run")
LEAST_SAMPLES = Limit(256, "a model that is right once in 100 answers has a right one among so many")
MANY_STEPS = Limit(8, "so many steps are enough also if they have few samples")
MOSTLY_CUT = Limit(0.7, "reasoning models start with up to half of their answers cut, and learn to end them")
MOSTLY_EQUAL = Limit(0.9, "with fewer groups that teach, a step has almost no gradient")
MANY_FAILURES = Limit(0.05, "some failures are normal where rewards call other services")
ACCEPTED = Limit(1.0, "the difference is measured as a share of the accepted one")
LOW_ESS = Limit(0.3, "few tokens dominate a step; the alert AsyncrlESSCollapse has the same limit")
HIGH_KL = Limit(0.3, "healthy recipes with a staleness of 3 versions have at most 0.1 nats as the median of 20 steps")
FEW_BITS = Limit(LEAST_PUBLISHED_BITS, "in bfloat16, a rate of 1e-6 changes about 1 % of the elements in a step")
TINY_RATE = Limit(1e-10, "AdamW moves a weight by about the rate, and float32 has no smaller steps near 0.001")
MANY_SKIPPED = Limit(0.5, "a run that skips fewer steps still trains")
NO_CALLS = Limit(0.02, "with one call in 50 episodes, almost no group compares an episode with a call to one without")
ONE = Limit(1.02, "with a second turn in one of 50 episodes, almost no group compares several turns with one")
LOST_ENTROPY = Limit(0.3, "healthy recipes that lose as much have higher rewards by then")
GROWN_ENTROPY = Limit(2.0, "a policy that learns becomes more certain; twice the entropy is noise")
LOST_LENGTH = Limit(0.4, "answers of less than half of their length leave out parts of the solution")
EMPTY = Limit(1.1, "tokens: one token is the end alone, so the answer is empty, and higher rewards do not excuse it")
GROWN_LENGTH = Limit(2.0, "answers of twice the length cost twice the time, and higher rewards do not pay for it")
LEAST_GAIN = Limit(0.1, "a smaller gain, as a share of the range of rewards, is not progress")
FALLEN = Limit(0.25, "a component that lost less of its mean may vary with the questions")
CLEAR = Limit(3.0, "standard errors: a smaller difference of two means is often chance")
CLEAR_PART = Limit(4.0, "standard errors; the best of up to 40 means is compared, and is often high by chance")
WORSE = Limit(2.0, "standard errors of the difference; the questions are the same, so chance moves them less")


def steps_in_words(number: int) -> str:
    """Returns `the last step` or `the last N steps`."""
    return "the last step" if number == 1 else f"the last {number} steps"


def percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _from_to(start: float, now: float) -> str:
    return f"{quantities.number(start)} → {quantities.number(now)}"


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


def _enough(seen: Evidence) -> bool:
    """Whether there are enough recent steps for a statement about their mean."""
    return len(seen.recent) >= LEAST_STEPS.value


@dataclass(frozen=True, slots=True)
class _Above:
    """Whether a number of a step is above a limit, or below it with `below`. None for a step that does not have the
    number."""

    number: str
    limit: Limit
    below: bool = False

    def __call__(self, record: StepRecord) -> bool | None:
        value = record.number(self.number)
        if value is None or not math.isfinite(value):
            return None
        return value < self.limit.value if self.below else value > self.limit.value


# Training: whether groups and steps are trained, and whether the updates are right.


def nothing_trained(seen: Evidence) -> Finding | None:
    skipped = len(seen.steps)
    if not skipped or seen.all_trained:
        return None
    return Finding(
        number=skipped,
        fact="No step was trained: every step was skipped, because a loss or a gradient was not finite",
        since_step=seen.steps[0].step,
    )


def not_verified(seen: Evidence) -> Finding | None:
    ratio = largest([record.witness_ratio for record in seen.steps])
    if ratio is None or ratio <= ACCEPTED.value:
        return None
    first = next(record.step for record in seen.steps if (record.witness_ratio or 0.0) > ACCEPTED.value)
    return Finding(
        number=ratio,
        fact="The witness has found that an update is not the one that the configuration describes",
        since_step=first,
    )


def parity(seen: Evidence) -> Finding | None:
    ratio = largest([record.number("parity_ratio") for record in seen.recent])
    nats = largest([record.parity_nats for record in seen.recent])
    if ratio is None or nats is None or ratio <= ACCEPTED.value:
        return None
    above = _Above("parity_ratio", ACCEPTED)
    last = max(record.step for record in seen.recent if above(record))
    return Finding(
        number=ratio,
        fact=f"The log-probs of generators and learner differ by {ratio:.3g} times the accepted difference "
        f"(weights.parity_tolerance_nats, in bfloat16 weights.parity_factor), and by up to {nats:.3g} nats, so "
        "importance weights are wrong",
        since_step=since([record for record in seen.steps if record.step <= last], above),
    )


def failures(seen: Evidence) -> Finding | None:
    if (share := failed_share(seen.groups)) > MANY_FAILURES.value:
        reasons = f" ({by_reason(seen.failures)})" if seen.failures else ""
        return Finding(number=share, fact=f"{percent(share)} of the groups failed and were not trained{reasons}")
    ratio = seen.recent_mean("failed_samples_ratio")
    if ratio is None or ratio <= MANY_FAILURES.value:
        return None
    return Finding(
        number=ratio,
        fact=f"The reward failed for {percent(ratio)} of the trained groups' samples, which are left out of the loss",
        since_step=since(seen.steps, _Above("failed_samples_ratio", MANY_FAILURES)),
    )


def unchanged(seen: Evidence) -> Finding | None:
    """Finds skipped steps, and updates that do not change the weights. With a learning rate of 0, unchanged weights are
    what the configuration asks for, so they are no fault. A message at the start of the run says that they stay."""
    if (skipped := _skipped(seen)) is not None or seen.setting.learning_rate == 0:
        return skipped
    return _few_bits(seen) or _tiny_rate(seen)


def _skipped(seen: Evidence) -> Finding | None:
    records = seen.steps[-RECENT_STEPS:]
    skipped = [record for record in records if not record.trained]
    if len(skipped) < LEAST_STEPS.value or len(skipped) < MANY_SKIPPED.value * len(records):
        return None
    return Finding(
        number=len(skipped) / len(records),
        fact=f"{len(skipped)} of {steps_in_words(len(records))} were skipped and did not change the weights, because a "
        "loss or a gradient was not finite",
        since_step=skipped[0].step,
    )


def _few_bits(seen: Evidence) -> Finding | None:
    """Finds updates that change almost no bits of the published weights. Two kinds of steps do not count: those whose
    learning rate is low because of the schedule, as in the learner's own warning, and those without a gradient, which
    another note reports."""
    rate = seen.setting.learning_rate or 0.0
    published = [
        record
        for record in seen.recent
        if record.number("published_bits_ratio") is not None and record.learning_rate >= rate / 2 and record.grad_norm
    ]
    ratio = largest([record.number("published_bits_ratio") for record in published])
    if ratio is None or len(published) < LEAST_STEPS.value or ratio >= FEW_BITS.value:
        return None
    return Finding(
        number=ratio,
        fact=f"At most {100 * ratio:.2g} % of the published weights have other bits after a step, so the policy does "
        "not change",
        since_step=since(seen.steps, _Above("published_bits_ratio", FEW_BITS, below=True)),
    )


def _tiny_rate(seen: Evidence) -> Finding | None:
    """Finds a learning rate that is too small. A rate that is low only because of the schedule does not count."""
    rate = largest([record.learning_rate for record in seen.recent])
    if rate is None or not _enough(seen) or max(rate, seen.setting.learning_rate or 0.0) >= TINY_RATE.value:
        return None
    return Finding(
        number=rate,
        fact=f"The learning rate is {rate:.3g}, so the weights do not change",
        since_step=since(seen.steps, _Above("learning_rate", TINY_RATE, below=True)),
    )


# Answers and rewards.


def cut(seen: Evidence) -> Finding | None:
    ratio = seen.recent_mean("truncated_ratio")
    if ratio is None or not _enough(seen) or ratio <= MOSTLY_CUT.value:
        return None
    return Finding(
        number=ratio,
        fact=f"{percent(ratio)} of the answers of {steps_in_words(len(seen.recent))} are cut at their length limit",
        since_step=since(seen.steps, _Above("truncated_ratio", MOSTLY_CUT)),
    )


def cut_at_first(seen: Evidence) -> bool:
    """Whether answers were cut in the first step already, by the same limit as in `cut`."""
    return bool(seen.steps) and bool(_Above("truncated_ratio", MOSTLY_CUT)(seen.steps[0]))


def _all_zero(record: StepRecord) -> bool | None:
    if record.reward_max is None or record.reward_min is None:
        return None
    return record.reward_max <= 0 and record.reward_min == record.reward_max


def zero_rewards(seen: Evidence) -> Finding | None:
    much = seen.samples >= LEAST_SAMPLES.value or len(seen.recent) >= MANY_STEPS.value
    known = [record for record in seen.recent if _all_zero(record) is not None]
    if not (known and _enough(seen) and much and all(map(_all_zero, known))):
        return None
    rewards = {record.reward_max for record in known}
    if len(rewards) > 1 or seen.at_highest_reward is not None:
        return None
    (reward,) = rewards
    return Finding(
        number=reward or 0.0,
        fact=f"All rewards of {steps_in_words(len(known))} are {reward:.3g}",
        since_step=since(seen.steps, _all_zero),
    )


def no_gradient(seen: Evidence) -> Finding | None:
    ratio = None if seen.setting.equal_rewards_teach else seen.recent_mean("zero_variance_ratio")
    much = seen.samples >= LEAST_SAMPLES.value or len(seen.recent) >= MANY_STEPS.value
    if ratio is None or not (_enough(seen) and much) or ratio <= MOSTLY_EQUAL.value:
        return None
    steps = steps_in_words(len(seen.recent))
    fact = f"In {percent(ratio)} of the groups of {steps} all rewards are equal"
    if (highest := seen.at_highest_reward) is not None:
        fact += f", and most are {highest:.3g}, the highest reward that the run has seen"
    else:  # above 0.995, `percent` rounds to 100 %
        fact += f", so there is {'no gradient' if ratio > 0.995 else 'hardly any gradient'}"
    return Finding(number=ratio, fact=fact, since_step=since(seen.steps, _Above("zero_variance_ratio", MOSTLY_EQUAL)))


def no_tool_calls(seen: Evidence) -> Finding | None:
    calls = seen.recent_mean("tool_calls_mean") if seen.setting.tools else None
    if calls is None or not _enough(seen) or calls >= NO_CALLS.value:
        return None
    return Finding(
        number=calls,
        fact=f"The model calls no tool: {calls:.2g} calls in an episode of {steps_in_words(len(seen.recent))}",
        since_step=since(seen.steps, _Above("tool_calls_mean", NO_CALLS, below=True)),
    )


def one_turn(seen: Evidence) -> Finding | None:
    turns = seen.recent_mean("turns_mean") if seen.setting.several_turns else None
    if turns is None or not _enough(seen) or turns >= ONE.value:
        return None
    return Finding(
        number=turns,
        fact=f"The agent's episodes have one turn ({turns:.3g} in the mean of {steps_in_words(len(seen.recent))})",
        since_step=since(seen.steps, _Above("turns_mean", ONE, below=True)),
    )


# Trends.


def components(seen: Evidence) -> Finding | None:
    """Finds a component of the reward that fell from its best block of steps to the last one, while another one rose.
    With three blocks or more, there must also be such components without the last block, because one block may be
    chance."""
    found = _components_of(seen, seen.trend)
    short = len(seen.trend) < 3 * BLOCK_STEPS
    return found if short or _components_of(seen, seen.trend[:-BLOCK_STEPS]) is not None else None


def _components_of(seen: Evidence, trend: Sequence[StepRecord]) -> Finding | None:
    parts = blocks(trend)
    names = sorted({name for record in trend for name in record.reward_components})
    if len(parts) < 2 or len(names) < 2:
        return None
    levels = {name: [_component(seen, name, part) for part in parts] for name in names}
    for name in names:
        known = [(place, found) for place, found in enumerate(levels[name][:-1]) if found is not None]
        now = levels[name][-1]
        if now is None or not known:
            continue
        place, best = max(known, key=lambda each: each[1].mean)
        lost = best.mean - now.mean
        if distance(best, now) > -CLEAR_PART.value or lost < FALLEN.value * abs(best.mean):
            continue
        for other in names:
            then, later = levels[other][place], levels[other][-1]
            if other != name and then is not None and later is not None and distance(then, later) >= CLEAR_PART.value:
                start = parts[place][-1].step + 1
                return Finding(
                    number=now.mean,
                    fact=f"The reward's component {name} falls ({_from_to(best.mean, now.mean)}) while {other} rises "
                    f"({_from_to(then.mean, later.mean)}), each with its weight",
                    since_step=start,
                )
    return None


def _component(seen: Evidence, name: str, steps: Sequence[StepRecord]) -> Level | None:
    """Returns the mean and the standard error of a reward component times its weight, over `steps`. Returns None if the
    weight is 0, or if fewer than three steps have the component."""
    weight = seen.setting.reward_weights.get(name, 1.0)
    if not weight:
        return None

    def weighted(record: StepRecord) -> float | None:
        value = record.reward_components.get(name)
        return None if value is None else weight * value

    return level(steps, weighted)


def entropy(seen: Evidence) -> Finding | None:
    return _changed(
        seen,
        attrgetter("entropy_nats"),
        lost=LOST_ENTROPY,
        grown=GROWN_ENTROPY,
        what="The entropy",
        unit="nats a token",
    )


def length(seen: Evidence) -> Finding | None:
    return _empty(seen) or _changed(
        seen,
        attrgetter("completion_tokens_mean"),
        lost=LOST_LENGTH,
        grown=GROWN_LENGTH,
        what="The mean length of the answers",
        unit="tokens",
    )


def _empty(seen: Evidence) -> Finding | None:
    """Finds answers that became empty. Higher rewards do not excuse them: then the reward pays for empty answers."""
    tokens = [record.completion_tokens_mean for record in seen.trend[-BLOCK_STEPS:]]
    now, longest = mean(tokens), largest([record.completion_tokens_mean for record in seen.steps])
    if now is None or longest is None or len(tokens) < BLOCK_STEPS or longest < 2 or now >= EMPTY.value:
        return None
    return Finding(
        number=now,
        fact=f"The answers became empty: in the last {BLOCK_STEPS} steps they have {quantities.number(now)} tokens on "
        "average, with the one that ends them",
        since_step=since(seen.steps, _Above("completion_tokens_mean", EMPTY, below=True)),
    )


def _changed(seen: Evidence, number: Number, *, lost: Limit, grown: Limit, what: str, unit: str) -> Finding | None:
    """Returns a finding if a number is far below or above its first values, and the rewards are not higher."""
    start, now = level(seen.first, number), level(seen.last, number)
    if start is None or now is None or start.mean <= 0:
        return None
    ratio = now.mean / start.mean
    falls, rises = ratio < lost.value, ratio > grown.value

    def beyond(record: StepRecord) -> bool | None:
        value = number(record)
        if value is None or not math.isfinite(value):
            return None
        return value < lost.value * start.mean if falls else value > grown.value * start.mean

    # A number that collapses within the first steps makes the error of their mean large.
    clear = abs(distance(start, now)) >= CLEAR.value or all(beyond(record) for record in seen.last)
    if not (falls or rises) or not clear or _learns(seen):
        return None
    return Finding(
        number=now.mean,
        fact=f"{what} {'fell' if falls else 'rose'} from {quantities.number(start.mean)} to "
        f"{quantities.number(now.mean)} {unit}, and the rewards are not higher",
        since_step=since(seen.steps, beyond),
    )


def _learns(seen: Evidence) -> bool:
    """Whether the rewards are clearly higher than the first ones, or cannot become much higher."""
    start, now = level(seen.first, attrgetter("reward_mean")), level(seen.last, attrgetter("reward_mean"))
    higher = start is not None and now is not None and distance(start, now) >= CLEAR.value
    return higher or seen.improves(least=LEAST_GAIN.value) or seen.at_highest_reward is not None


def falls(seen: Evidence, number: Number) -> bool:
    """Whether the last values of a number are below the first ones."""
    start, now = level(seen.first, number), level(seen.last, number)
    return start is not None and now is not None and now.mean < start.mean


def stale_data(seen: Evidence) -> Finding | None:
    """Finds a small effective sample size. Uses the median of the recent steps, because the first step of a run always
    has fresh data."""
    ratios = [record.ess_ratio for record in seen.recent if record.ess_ratio is not None]
    if len(ratios) < LEAST_STEPS.value or (median := statistics.median(ratios)) >= LOW_ESS.value:
        return None
    return Finding(
        number=median,
        fact=f"The effective sample size is {percent(median)}: the policy is far from the policy that sampled the data",
        since_step=since(seen.steps, _Above("ess_ratio", LOW_ESS, below=True)),
    )


def high_kl(seen: Evidence) -> Finding | None:
    """Finds a large KL divergence. Uses the median of the recent steps, because one token with a large ratio makes the
    estimator k3 of a step large."""
    values = [
        value
        for record in seen.recent
        if (value := record.number("kl_to_behaviour_nats")) is not None and math.isfinite(value)
    ]
    if len(values) < LEAST_STEPS.value or (median := statistics.median(values)) <= HIGH_KL.value:
        return None
    return Finding(
        number=median,
        fact=f"The KL divergence between the policies that sampled and that train is {quantities.number(median)} "
        "nats a token",
        since_step=since(seen.steps, _Above("kl_to_behaviour_nats", HIGH_KL)),
    )


def heldout(seen: Evidence) -> Finding | None:
    for name, evals in groupby(sorted(seen.evals, key=attrgetter("name")), key=attrgetter("name")):
        known = [record for record in evals if record.reward_mean is not None and record.covers]
        if (best := _falls_since(known)) is not None and _trained_reward_rises(seen, best.step):
            now = known[-1].reward_mean
            return Finding(
                number=now or 0.0,
                fact=f"The held-out reward{'' if name == 'heldout' else f' of {name}'} falls "
                f"({_from_to(best.reward_mean or 0.0, now or 0.0)}) while the training reward rises",
                since_step=best.step,
            )
    return None


def _falls_since(evals: Sequence[EvalRecord]) -> EvalRecord | None:
    """Returns the best evaluation before the last two, if the rewards fall after it: the last but one is below the best
    one, and the last one is below both, and below the best one by `WORSE`. Or the last two are below the best one by
    `CLEAR`, because a reward that is near 0 falls no further. Returns None otherwise, and without standard errors."""
    if len(evals) < 3:
        return None
    best = max(evals[:-2], key=lambda record: record.reward_mean or -math.inf)
    rewards = [record.reward_mean or 0.0 for record in (best, *evals[-2:])]
    errors = [math.hypot(best.reward_stderr or 0.0, record.reward_stderr or 0.0) for record in evals[-2:]]
    if not all(errors):
        return None
    middle, last = ((rewards[0] - now) / error for now, error in zip(rewards[1:], errors, strict=True))
    falling = rewards[0] > rewards[1] > rewards[2] and last >= WORSE.value
    return best if falling or min(middle, last) >= CLEAR.value else None


def _trained_reward_rises(seen: Evidence, step: int) -> bool:
    at_best = [record for record in seen.trend if record.step < step][-BLOCK_STEPS:]
    before = at_best if len(at_best) == BLOCK_STEPS else seen.trend[:BLOCK_STEPS]
    then, now = level(before, attrgetter("reward_mean")), level(seen.trend[-BLOCK_STEPS:], attrgetter("reward_mean"))
    return then is not None and now is not None and distance(then, now) >= CLEAR.value
