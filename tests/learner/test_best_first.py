"""The order of checkpoints by their evaluations."""

from asyncrl.learner.records import EvalRecord, best_first


def evaluated(step: int, reward: float | None, *, version: int | None = None, name: str = "heldout") -> EvalRecord:
    newer = version is not None and version != step
    return EvalRecord(
        name=name,
        version=version if version is not None else step,
        due=step if newer else None,
        wall_s=1,
        prompts=8,
        reward_mean=reward,
    )


def steps_of(*evals: EvalRecord, saved: range = range(10, 60, 10)) -> list[int]:
    return [record.step for record in best_first(evals, saved)]


def test_the_highest_reward_comes_first_and_of_equal_ones_the_newer_checkpoint() -> None:
    assert steps_of(evaluated(10, 0.2), evaluated(20, 0.9), evaluated(30, 0.5), evaluated(40, 0.9)) == [40, 20, 30, 10]


def test_an_evaluation_belongs_to_the_checkpoint_of_the_step_after_which_it_was_due() -> None:
    assert steps_of(evaluated(10, 0.9, version=20), evaluated(20, 0.3, version=21)) == [10, 20]


def test_only_checkpoints_that_exist_and_have_a_reward_count() -> None:
    assert steps_of(evaluated(0, 0.9), evaluated(10, None), evaluated(25, 0.8), evaluated(30, 0.1)) == [30]


def test_the_later_evaluation_of_a_step_counts() -> None:
    assert steps_of(evaluated(10, 0.9), evaluated(20, 0.5), evaluated(10, 0.1)) == [20, 10]


def test_evaluations_on_other_sets_do_not_count() -> None:
    assert steps_of(evaluated(10, 0.9, name="sums"), evaluated(20, 0.5)) == [20]
    assert [record.step for record in best_first([evaluated(10, 0.9, name="sums")], [10], name="sums")] == [10]
