"""The samples of a step before training: rewards are shaped, advantages use the whole step, and masks drop no
sample."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from learner_scenes import GROUP_SIZE, GROUPS_PER_STEP, Scene

from asyncrl.algorithms.advantages import resolve_estimator
from asyncrl.buffer.ledger import Fate
from asyncrl.buffer.records import GroupMeta, Lease, LeasedGroup, VersionSpan
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.prompts import Task
from asyncrl.data.specs import BRANCH, NO_VERSION
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.errors import StalenessViolation
from asyncrl.learner.recording import counts_by_staleness
from asyncrl.learner.sample_records import Texts, sample_record
from asyncrl.learner.step import StepSamples, check_staleness, prepare_samples, step_meta
from asyncrl.ranks.named_rows import LIMIT, MASKS_STALE
from asyncrl.ranks.report import StepReport

TEXTS = Texts(tokens=str, answer=lambda ids, _: str(ids))


def leased(
    group: int, rewards: Sequence[float | None], *, tokens: Sequence[int] = (), truncated: Sequence[bool] = ()
) -> LeasedGroup:
    meta = GroupMeta(
        group=group,
        attempt=0,
        incarnation=1,
        replica="a",
        row_bytes=10,
        prompt_tokens=2,
        completion_tokens=tuple(tokens) or (2,) * len(rewards),
        rewards=tuple(rewards),
        truncated=tuple(truncated) or (False,) * len(rewards),
        oldest=0,
        newest=0,
    )
    return LeasedGroup(meta=meta, deadline=9, max_staleness_versions=0, reserved_step=0, ready_step=0)


def judged(
    groups: Sequence[LeasedGroup], *, estimator: Any = "group_mean", step: int = 0, **settings: Any
) -> StepSamples:
    config = Config.model_validate({"algorithm": settings, "generator": {"max_completion_tokens": 10}})
    lease = Lease(incarnation=1, step=step, groups=tuple(groups))
    return prepare_samples(lease, estimator=resolve_estimator(estimator), config=config)


def advantages(samples: StepSamples, *sizes: int) -> list[list[float]]:
    return [part.tolist() for part in torch.split(samples.advantages_B, sizes)]


def masks(samples: StepSamples, *sizes: int) -> list[list[float]]:
    return [part.tolist() for part in torch.split(samples.mask_B, sizes)]


def numbers(samples: StepSamples, *names: str) -> list[float]:
    return [samples.numbers[name] for name in names]


VARIED, EQUAL = leased(7, [1.0, 0.0]), leased(3, [1.0, 1.0, 1.0])


def test_kept_groups_of_equal_rewards_have_advantage_zero_and_stay_in_the_denominators() -> None:
    samples = judged([VARIED, EQUAL])
    assert advantages(samples, 2, 3) == [[0.5, -0.5], [0.0] * 3]
    assert masks(samples, 2, 3) == [[1.0] * 2, [1.0] * 3]
    assert numbers(samples, "zero_variance_ratio", "truncated_ratio", "masked_samples_ratio") == [0.5, 0.0, 0.0]


def test_masked_groups_of_equal_rewards_leave_the_denominators_and_stay_in_the_step() -> None:
    samples = judged([VARIED, EQUAL], zero_variance="mask")
    assert masks(samples, 2, 3) == [[1.0] * 2, [0.0] * 3]
    assert samples.numbers["masked_samples_ratio"] == pytest.approx(3 / 5)


def test_masked_overlong_samples_still_count_in_their_groups_baseline() -> None:
    samples = judged([leased(0, [1.0, 0.0, 0.5], truncated=[False, True, False])], overlong="mask")
    assert advantages(samples, 3) == [[0.5, -0.5, 0.0]]
    assert masks(samples, 3) == [[1.0, 0.0, 1.0]]
    assert numbers(samples, "truncated_ratio", "masked_samples_ratio") == pytest.approx([1 / 3, 1 / 3])


def test_the_length_penalty_is_seen_by_advantages_and_by_the_variance() -> None:
    """Both rewards are 1, with 8 and 10 tokens, and the penalty starts 4 tokens below 10.

    The shaped rewards are 1 − 0.5 and 1 − 1, so the group has a variance and a gradient.
    """
    group = leased(0, [1.0, 1.0], tokens=[8, 10])
    penalised = judged([group], overlong="penalise", overlong_buffer_tokens=4, zero_variance="mask")
    assert advantages(penalised, 2) == [[0.25, -0.25]]
    assert masks(penalised, 2) == [[1.0, 1.0]]
    assert penalised.numbers["zero_variance_ratio"] == 0.0
    assert judged([group]).numbers["zero_variance_ratio"] == 1.0


def test_equal_rewards_are_not_measured_where_a_group_has_one_sample() -> None:
    """With one sample per group, no rewards can differ. A share of 1 would wrongly suggest rewards without signal."""
    alone = judged([leased(0, [1.0]), leased(1, [0.0])])
    assert all(map(math.isnan, numbers(alone, "zero_variance_ratio", "all_right_ratio", "all_wrong_ratio")))
    assert judged([leased(0, [1.0, 1.0]), leased(1, [0.0])]).numbers["zero_variance_ratio"] == 1.0


@pytest.mark.asyncio
async def test_shares_that_were_not_measured_are_no_numbers_in_metrics_and_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unmeasured = dict.fromkeys(("zero_variance_ratio", "all_right_ratio", "all_wrong_ratio"), math.nan)

    def judged_without(*given: Any, **settings: Any) -> StepSamples:
        samples = prepare_samples(*given, **settings)
        return dataclasses.replace(samples, numbers=samples.numbers | unmeasured)

    monkeypatch.setattr("asyncrl.learner.step.prepare_samples", judged_without)
    scene = Scene()
    await scene.run()
    read = scene.metrics.registry.get_sample_value
    assert all(math.isnan(read(f"asyncrl_learner_{name}") or 0.0) for name in unmeasured)
    assert scene.log.steps[0].diagnostics["all_right_ratio"] is None


def test_batch_statistics_are_those_of_the_whole_step() -> None:
    samples = judged([leased(0, [1.0, 0.0]), leased(1, [4.0, 3.0])], estimator="reinforce_pp")
    assert float(samples.advantages_B.std()) == pytest.approx(1.0, rel=1e-5)
    first, second = advantages(samples, 2, 2)
    assert max(first) < 0 < min(second), "the mean of the step lies between the groups"


def test_estimators_have_the_completions_lengths() -> None:
    """The rewards 1 and 0 have 6 and 2 tokens, so the baseline weighted by length is 6/8."""
    group = leased(0, [1.0, 0.0], tokens=[6, 2])
    assert advantages(judged([group], estimator="opo"), 2) == [[0.25, -0.75]]
    whitened = judged([group], estimator={"name": "reinforce_pp", "whiten": "tokens", "divisor": "n", "eps": 0.0})
    std = (6 * 0.25**2 / 8 + 2 * 0.75**2 / 8) ** 0.5
    assert advantages(whitened, 2) == [pytest.approx([0.25 / std, -0.75 / std])]


def test_equal_rewards_that_a_length_penalty_tells_apart_are_not_masked() -> None:
    group = leased(0, [1.0, 1.0], tokens=[6, 2])
    penalised = judged([group], estimator="gr3", zero_variance="mask")
    assert masks(penalised, 2) == [[1.0, 1.0]]
    assert penalised.numbers["zero_variance_ratio"] == 0.0
    assert advantages(penalised, 2)[0][1] > 0
    assert masks(judged([group], estimator="opo", zero_variance="mask"), 2) == [[0.0, 0.0]]


@pytest.mark.fault("F24")
def test_empty_completions_are_masked_and_counted() -> None:
    samples = judged([leased(0, [1.0, 0.0], tokens=[0, 2])])
    assert masks(samples, 2) == [[0.0, 1.0]]
    assert samples.numbers["masked_samples_ratio"] == 0.5


@pytest.mark.fault("F19")
def test_a_sample_whose_reward_failed_is_masked_and_in_no_baseline_and_no_statistic() -> None:
    """Without the failed samples, the step has the rewards 1, 0 and 4, 2."""
    groups = [leased(0, [1.0, None, 0.0]), leased(1, [None, 4.0, 2.0])]
    samples = judged(groups)
    assert advantages(samples, 3, 3) == [[0.5, 0.0, -0.5], [0.0, 1.0, -1.0]]
    assert masks(samples, 3, 3) == [[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]
    assert samples.rewards_B.tolist() == [1.0, 0.0, 0.0, 0.0, 4.0, 2.0]
    assert numbers(samples, "failed_samples_ratio", "masked_samples_ratio") == pytest.approx([1 / 3, 1 / 3])
    whole = judged(groups, estimator="reinforce_pp")
    without = judged([leased(0, [1.0, 0.0]), leased(1, [4.0, 2.0])], estimator="reinforce_pp")
    assert whole.advantages_B[whole.mask_B > 0].tolist() == without.advantages_B.tolist()


@pytest.mark.fault("F19")
def test_failed_samples_do_not_hide_that_the_other_rewards_of_a_group_are_equal() -> None:
    groups = [leased(0, [1.0, None, 1.0]), leased(1, [0.0, 0.0, None]), leased(2, [1.0, 0.0, None])]
    samples = judged(groups, zero_variance="mask")
    assert samples.numbers["zero_variance_ratio"] == pytest.approx(2 / 3)
    assert numbers(samples, "all_right_ratio", "all_wrong_ratio") == pytest.approx([1 / 3, 1 / 3])
    assert masks(samples, 3, 3, 3) == [[0.0] * 3, [0.0] * 3, [1.0, 1.0, 0.0]]


def test_failed_samples_are_in_no_length_weighted_baseline_and_get_no_length_penalty() -> None:
    group = leased(0, [None, 1.0, 0.0], tokens=[100, 6, 2])
    assert advantages(judged([group], estimator="opo"), 3) == [[0.0, 0.25, -0.75]]
    group = leased(0, [None, 1.0, 1.0], tokens=[10, 8, 10], truncated=[True, False, False])
    penalised = judged([group], overlong="penalise", overlong_buffer_tokens=4)
    assert penalised.rewards_B.tolist() == [0.0, 0.5, 0.0]


@pytest.mark.fault("F19")
def test_the_critic_gets_a_mask_for_a_sample_whose_reward_failed() -> None:
    lease = Lease(incarnation=1, step=0, groups=(leased(0, [1.0, None]),))
    samples = prepare_samples(lease, estimator=None, config=Config())
    assert samples.advantages_B is None
    assert (samples.rewards_B.tolist(), samples.mask_B.tolist()) == ([1.0, 0.0], [1.0, 0.0])


@pytest.mark.asyncio
@pytest.mark.parametrize("critic", [False, True])
async def test_rewards_and_groups_go_to_the_ranks_where_the_objective_counts_by_them(critic: bool) -> None:
    axes = {"aggregation": "prompt_mean", "penalties": [{"kind": "positive_nll", "beta": 0.1}]}
    section = {"loss": "tis", "overrides": axes}
    scene = Scene(algorithm=section | {"advantage": "gae"}, critic={}) if critic else Scene(algorithm=section)
    seen: list[list[list[float]]] = []
    train = scene.trainer.train_from_meta

    def watched(meta: KVBatchMeta, *given: Any, **settings: Any) -> dict[str, Any]:
        rows = scene.trainer.read_from_dataplane(meta, select_fields=["group_ids", "rewards"])
        seen.append([rows["group_ids"].tolist(), rows["rewards"].tolist()])
        return train(meta, *given, **settings)

    scene.trainer.train_from_meta = watched  # type: ignore[method-assign]
    await scene.run()
    assert all({"group_ids", "rewards"} <= fields for fields in scene.trainer.fields)
    assert len(seen) == 3
    for (groups, rewards), (_, keys) in zip(seen, scene.trainer.asked, strict=True):
        assert groups == [int(key.split(".")[0]) for key in keys for _ in range(GROUP_SIZE)]
        assert len(set(rewards)) > 1


def extended(group: int, rewards: Sequence[float], *, spans: Sequence[Sequence[tuple[int, int]]]) -> LeasedGroup:
    """Returns a group with η = 1 and an extended deadline. `spans` has (step, tokens) for each sample."""
    made = leased(group, rewards, tokens=[sum(tokens for _, tokens in sample) for sample in spans])
    versions = tuple(tuple(VersionSpan(1, step, tokens) for step, tokens in sample) for sample in spans)
    meta = msgspec.structs.replace(made.meta, version_spans=versions, newest=9)
    return msgspec.structs.replace(made, meta=meta, max_staleness_versions=1, deadline=9, extended=True)


def test_samples_whose_tokens_are_all_too_old_are_masked_but_count_in_their_groups_advantages() -> None:
    """At step 3 with η = 1, tokens of step 2 may be trained, and those of step 1 may not."""
    group = extended(0, [1.0, 0.0, 0.5], spans=[[(1, 2)], [(1, 1), (2, 3)], [(2, 4)]])
    samples = judged([group], step=3)
    assert masks(samples, 3) == [[0.0, 1.0, 1.0]]
    assert advantages(samples, 3) == [[0.5, -0.5, 0.0]]
    assert numbers(samples, "stale_tokens", "stale_samples") == [3, 1]
    assert samples.numbers["masked_samples_ratio"] == pytest.approx(1 / 3)
    fresh = judged([group], step=2)
    assert (masks(fresh, 3), numbers(fresh, "stale_tokens", "stale_samples")) == ([[1.0] * 3], [0, 0])


def test_a_sample_s_record_says_which_of_its_tokens_the_loss_includes() -> None:
    """The last token of the second sample is not sampled, for example a template's end of a turn."""
    spans = [[(1, 1), (2, 2)], [(1, 1), (2, 2)], [(2, 3)]]
    group = extended(0, [1.0, 0.0, 0.5], spans=spans)
    versions = [[-1, -1, *(step for step, tokens in sample for _ in range(tokens))] for sample in spans]
    rows = BatchedDataDict(
        input_ids=torch.arange(15).reshape(3, 5),
        weight_versions=torch.tensor(versions),
        token_mask=torch.tensor([[0.0, 0, 1, 1, 1], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]),
        sample_mask=torch.tensor([1.0, 1.0, 0.0]),
        advantages=torch.zeros(3),
    )
    rows[BRANCH] = torch.tensor([[0] * 5, [0, 0, 0, 1, 1], [0, 1, 1, 2, 2]])
    task = Task(question="q", prompt="q", answer="a")
    recorded = [sample_record(group, task, rows, step=3, row=row, sample=row, texts=TEXTS) for row in range(3)]
    assert [sample.forks for sample in recorded] == [(), (1,), (1,)], "places in the completion"

    def trained(leased: LeasedGroup, sample: int) -> tuple[tuple[bool, int], ...]:
        return sample_record(
            leased,
            task,
            rows,
            step=3,
            row=sample,
            sample=sample,
            texts=TEXTS,
        ).trained_spans

    assert trained(group, 0) == ((False, 1), (True, 2)), "a token of step 1 is too old at step 3 with η = 1"
    assert trained(group, 1) == ((False, 1), (True, 1), (False, 1))
    assert trained(group, 2) == ((False, 3),), "the whole sample is masked"
    assert trained(msgspec.structs.replace(group, extended=False), 0) == ((True, 3),)


@pytest.mark.parametrize(
    ("sampled", "turns", "scored"),
    [
        ([True, True, True], (), "[2, 3, 4]"),
        ([True, False, True], ((0, 1), (1, 1)), "[4]"),
        ([False, True, True], ((1, 2),), "[3, 4]"),
        ([True, True, False], ((0, 2), (1, 0)), "[]"),
    ],
)
def test_the_record_of_an_episode_with_tools_has_its_last_answer(
    sampled: list[bool], turns: tuple[tuple[int, int], ...], scored: str
) -> None:
    count = sum(sampled)
    group = extended(0, [1.0], spans=[[(2, count)]])
    read = (3 - count,) if count < 3 else ()
    group = msgspec.structs.replace(group, meta=msgspec.structs.replace(group.meta, read_tokens=read))
    rows = BatchedDataDict(
        input_ids=torch.arange(5).reshape(1, 5),
        weight_versions=torch.tensor([[NO_VERSION] * 2 + [2 if each else NO_VERSION for each in sampled]]),
        token_mask=torch.ones(1, 5),
        sample_mask=torch.ones(1),
        advantages=torch.zeros(1),
    )
    texts = dataclasses.replace(TEXTS, last_answer=lambda ids, part: str(ids))
    task = Task(question="q", prompt="q", answer="a")
    made = [sample_record(group, task, rows, step=3, row=0, sample=0, texts=each) for each in (texts, TEXTS)]
    assert [sample.scored for sample in made] == [scored, None]
    assert made[0].turns == turns


def test_the_age_of_a_group_is_that_of_its_oldest_trained_token() -> None:
    group = extended(0, [1.0, 0.0], spans=[[(0, 2)], [(2, 3)]])
    assert counts_by_staleness(Lease(incarnation=1, step=3, groups=(group,)))["groups"] == {1: 1}


def test_only_a_group_with_an_extended_deadline_may_have_tokens_that_are_too_old() -> None:
    group = extended(0, [1.0, 0.0], spans=[[(0, 2)], [(2, 3)]])
    check_staleness(Lease(incarnation=1, step=3, groups=(group,)))
    plain = msgspec.structs.replace(group, extended=False)
    with pytest.raises(StalenessViolation, match=r"group 0\.0 is 3 versions old at step 3.*at most 1"):
        check_staleness(Lease(incarnation=1, step=3, groups=(plain,)))
    with pytest.raises(StalenessViolation, match=r"leased at step 10, but its deadline was step 9"):
        check_staleness(Lease(incarnation=1, step=10, groups=(group,)))


def test_a_step_names_its_rows_with_their_lengths_and_limits_in_the_lease_s_order() -> None:
    lease = Lease(incarnation=1, step=4, groups=(VARIED, EQUAL))
    meta = step_meta(lease)
    assert meta.sample_ids == ["7.0_g0", "7.0_g1", "3.0_g0", "3.0_g1", "3.0_g2"]
    assert meta.sequence_lengths == [4] * 5, "two tokens of prompt, two of completion"
    assert meta.tags == [{"max_staleness_versions": 0}] * 5
    assert meta.extra_info == {"step": 4}
    assert step_meta(lease, extra=[BRANCH]).fields == [*(meta.fields or []), BRANCH]
    masked = extended(1, [1.0, 0.0], spans=[[(0, 2)], [(2, 3)]])
    tags = step_meta(Lease(incarnation=1, step=4, groups=(EQUAL, masked))).tags
    assert tags == [{LIMIT: 0}] * 3 + [{LIMIT: 1, MASKS_STALE: True}] * 2


@pytest.mark.asyncio
@pytest.mark.fault("F24")
async def test_a_run_whose_every_sample_is_masked_goes_on_and_accounts_for_every_group() -> None:
    scene = Scene(group={"rewards": (1.0, 1.0)}, algorithm={"zero_variance": "mask"})
    seen: list[float] = []

    def nothing_to_train(meta: KVBatchMeta) -> StepReport:
        seen.extend(scene.trainer.read_from_dataplane(meta, select_fields=["sample_mask"])["sample_mask"].tolist())
        return StepReport()

    scene.trainer.answers = [nothing_to_train] * 3
    totals = await scene.run()
    assert seen == [0.0] * 3 * GROUPS_PER_STEP * GROUP_SIZE
    fates = (await scene.status()).account.fates
    assert (fates[Fate.TRAINED].groups, totals.ledger_closed) == (3 * GROUPS_PER_STEP, True)
    assert [record.trained_samples for record in scene.log.steps] == [0, 0, 0]
    read = scene.metrics.registry.get_sample_value
    assert read("asyncrl_learner_masked_samples_ratio") == 1.0
    assert read("asyncrl_learner_zero_variance_ratio") == 1.0
    assert read("asyncrl_learner_overlong_ratio") == 0.0


@pytest.mark.asyncio
async def test_overlong_samples_are_counted_whatever_becomes_of_them() -> None:
    scene = Scene(group={"truncated": (False, True)})
    await scene.run()
    read = scene.metrics.registry.get_sample_value
    assert read("asyncrl_learner_overlong_ratio") == 0.5
    assert read("asyncrl_learner_masked_samples_ratio") == 0.0


def test_groups_that_are_all_right_and_all_wrong_are_told_apart() -> None:
    verdicts = [VARIED, EQUAL, leased(4, [0.0, 0.0]), leased(5, [-1.0, -1.0]), leased(6, [2.0, 2.0]), leased(8, [3.0])]
    samples = judged(verdicts)
    assert numbers(samples, "all_right_ratio", "all_wrong_ratio") == [3 / 6, 2 / 6]
