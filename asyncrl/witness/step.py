"""What a lease and its masks leave to train: samples, tokens and advantages, from the metadata of the groups."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from asyncrl.config.schema import Config
from asyncrl.witness.advantages import Scored, equal_groups, of_samples, shaped
from asyncrl.witness.objective import Axes, Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sample of a lease. `reward` is None if it failed. `stale` is the number of its tokens that are too old to
    train. A component that it lacks counts as 0."""

    group: int
    reward: float | None
    tokens: int
    stale: int
    truncated: bool
    components: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the samples of a step must be trained with, in their order. `advantages` is None without `axes`: each token
    then has its own, or the user's own estimator computes them."""

    trained: list[bool]
    advantages: list[float] | None

    def teaches(self, n: int) -> bool:
        """Returns False if sample n is masked or has an advantage of 0."""
        return self.trained[n] and (self.advantages is None or self.advantages[n] != 0)


def expected(completions: Sequence[Completion], *, axes: Axes | None, config: Config) -> Expected:
    """Returns which samples the filters of `algorithm` leave, and their advantages. `axes` are those of an estimator
    that gives each sample one advantage."""
    known = [n for n, completion in enumerate(completions) if completion.reward is not None]
    scored = [_scored(completions[n], config) for n in known]
    equal, found = [False] * len(completions), [0.0] * len(completions)
    if axes is not None:
        for n, same, advantage in zip(known, equal_groups(axes, scored), of_samples(axes, scored), strict=True):
            equal[n], found[n] = same, advantage
    algorithm = config.algorithm
    trained = [
        completion.reward is not None
        and completion.tokens > completion.stale
        and not (algorithm.overlong == "mask" and completion.truncated)
        and not (algorithm.zero_variance == "mask" and equal[n])
        for n, completion in enumerate(completions)
    ]
    return Expected(trained=trained, advantages=None if axes is None else found)


def _scored(completion: Completion, config: Config) -> Scored:
    reward = completion.reward
    assert reward is not None, "the caller leaves failed rewards out"
    if config.algorithm.overlong == "penalise":
        reward = shaped(
            reward,
            tokens=completion.tokens,
            truncated=completion.truncated,
            limit_tokens=config.generator.max_completion_tokens,
            buffer_tokens=config.algorithm.overlong_buffer_tokens,
        )
    return Scored(group=completion.group, reward=reward, tokens=completion.tokens, components=completion.components)


def counts(completions: Sequence[Completion], trained: Sequence[bool], *, rows_per_update: int) -> tuple[Counts, ...]:
    """Returns the counts of each update, which takes the next `rows_per_update` samples."""
    found = []
    for start in range(0, len(completions), rows_per_update):
        by_group: dict[int, float] = defaultdict(float)
        tokens = samples = positive = 0
        for n in range(start, min(start + rows_per_update, len(completions))):
            completion = completions[n]
            if trained[n]:
                left = completion.tokens - completion.stale
                samples += 1
                tokens += left
                by_group[completion.group] += left
                positive += left if (completion.reward or 0.0) > 0 else 0
        found.append(Counts(tokens=tokens, sequences=samples, tokens_by_group=dict(by_group), positive_tokens=positive))
    return tuple(found)
