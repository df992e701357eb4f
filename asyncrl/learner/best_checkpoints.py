"""The best checkpoints of a run: those whose held-out evaluations have the highest rewards (`checkpoint.keep_best`)."""

from collections.abc import Collection, Sequence

from asyncrl.config.schema import HELDOUT
from asyncrl.learner.records import EvalRecord


def best_first(evals: Sequence[EvalRecord], steps: Collection[int], *, name: str = HELDOUT) -> list[EvalRecord]:
    """Returns the evaluations on the set `name` that belong to the checkpoints after `steps`, the best one first.

    A checkpoint without an evaluation is left out, and so is an evaluation in which too many prompts got no reward
    (`EvalRecord.covers`). If a step was evaluated
    twice, the later evaluation counts. Of equal rewards, that of the newer checkpoint comes first.
    """
    found = {each.step: each for each in evals if each.name == name and each.step in steps}
    rewarded = [
        (each.reward_mean, each.step) for each in found.values() if each.reward_mean is not None and each.covers
    ]
    return [found[step] for _, step in sorted(rewarded, reverse=True)]
