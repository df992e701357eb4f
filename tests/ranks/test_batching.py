"""From rows to micro-batches: the last staleness check, and every row is in exactly one micro-batch."""

from typing import Literal

import pytest
import torch
from tiny_groups import STEP, make_batch, make_group

from asyncrl.config.schema import LearnerSection
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import trained_mask
from asyncrl.errors import StalenessViolation
from asyncrl.ranks.batching import (
    check_token_staleness,
    empty_micro_batch,
    staleness_counts,
    token_batch,
    tokens_passed,
    without_nonfinite,
    without_stale,
)
from asyncrl.ranks.plan import BatchingPlan, plan_of

PADDED = LearnerSection()


def count_trained(batch: BatchedDataDict) -> tuple[int, int]:
    """Returns the numbers of trained tokens and samples."""
    plan = plan_of(batch)
    return plan.tokens, plan.samples


def with_versions(group: BatchedDataDict, values: list[int]) -> BatchedDataDict:
    """Returns the group with one weight version for each sampled token, sample after sample."""
    group["weight_versions"][group["token_mask"] > 0] = torch.tensor(values)
    return group


def check(group: BatchedDataDict, *, limit: int = 2) -> None:
    names = [f"7.0_g{i}" for i in range(group.size)]
    check_token_staleness(group, step=STEP, limits=[limit] * group.size, sample_ids=names)


@pytest.mark.fault("F17")
def test_a_token_older_than_its_ticket_allows_stops_the_run_and_its_sample_is_named() -> None:
    check(with_versions(make_group(0, lengths=(2, 1)), [STEP, STEP, STEP - 2]))
    with pytest.raises(StalenessViolation, match=r"sample 7\.0_g1.* 3 versions old.*staleness.max_versions.* is 2"):
        check(with_versions(make_group(0, lengths=(2, 1)), [STEP, STEP, STEP - 3]))


@pytest.mark.fault("F17")
def test_each_row_has_the_limit_of_its_own_ticket() -> None:
    group = with_versions(make_group(0, lengths=(1, 1)), [STEP - 1, STEP - 2])
    check_token_staleness(group, step=STEP, limits=[1, 2], sample_ids=["a", "b"])
    with pytest.raises(StalenessViolation, match="sample b"):
        check_token_staleness(group, step=STEP, limits=[2, 1], sample_ids=["a", "b"])


@pytest.mark.fault("F17")
def test_old_tokens_are_masked_in_the_rows_that_say_so_and_stop_the_run_in_all_others() -> None:
    group = with_versions(make_group(0, lengths=(2, 2)), [STEP - 3, STEP - 2, STEP - 3, STEP])
    masked = without_stale(group, step=STEP, limits=[2, 2], masks=[True, False])
    assert staleness_counts(masked, step=STEP) == {0: 1, 2: 1, 3: 1}
    assert group["token_mask"].sum() == 4, "the rows themselves stay as they are"
    with pytest.raises(StalenessViolation, match="sample b"):
        check_token_staleness(masked, step=STEP, limits=[2, 2], sample_ids=["a", "b"])
    both = without_stale(group, step=STEP, limits=[2, 1], masks=[True, True])
    assert staleness_counts(both, step=STEP) == {0: 1, 2: 1}
    check_token_staleness(both, step=STEP, limits=[2, 1], sample_ids=["a", "b"])


def test_what_passes_through_the_model_is_as_wide_as_the_longest_row_unless_it_is_packed() -> None:
    parts = [token_batch([[1, 2, 3, 4], [1]]), token_batch([[1, 2]])]
    assert tokens_passed(parts, packed=False) == (7, 10)
    assert tokens_passed(parts, packed=True) == (7, 6), "the token 1 is shared"


def test_a_token_newer_than_the_weights_stops_the_run() -> None:
    with pytest.raises(StalenessViolation, match="-1 versions old"):
        check(with_versions(make_group(0, lengths=(2,)), [STEP, STEP + 1]))


def test_an_old_token_of_a_sample_that_is_not_trained_is_no_violation() -> None:
    check(with_versions(make_group(0, lengths=(2, 1), sample_mask=(1.0, 0.0)), [STEP, STEP, STEP - 9]))


def test_trained_tokens_and_their_staleness_are_counted_by_mask() -> None:
    group = make_group(2, lengths=(2, 3, 0), sample_mask=(1.0, 0.0, 1.0))
    batch = with_versions(group, [STEP, STEP - 2, STEP, STEP, STEP - 1])
    assert count_trained(batch) == (2, 2)
    assert staleness_counts(batch, step=STEP) == {0: 1, 2: 1}


@pytest.mark.fault("F24")
def test_a_rank_without_rows_counts_nothing() -> None:
    batch = BatchedDataDict()
    assert (staleness_counts(batch, step=STEP), BatchingPlan.of(PADDED).micro_batches(batch)) == ({}, [])
    check(batch)
    assert count_trained(make_group(0).slice(0, 0)) == (0, 0)


@pytest.mark.fault("F24")
def test_a_group_of_empty_completions_has_rows_but_no_token() -> None:
    assert count_trained(make_group(0, lengths=(0, 0))) == (0, 2)


@pytest.mark.fault("F24")
def test_a_prompt_without_tokens_never_trains_its_first_token() -> None:
    group = make_group(0, lengths=(3,))
    bare = BatchedDataDict({k: c[:, 3:] if c.ndim == 2 else c for k, c in group.items()})
    assert count_trained(bare) == (2, 1)


@pytest.mark.parametrize("batching", ["padded", "dynamic", "packed"])
@pytest.mark.parametrize("tokens", [16, 32, 1000])
def test_micro_batches_hold_every_row_once_within_their_limit_and_no_wider_than_needed(
    tokens: int, batching: Literal["padded", "dynamic", "packed"]
) -> None:
    batch = make_batch()
    batch["row"] = torch.arange(batch.size)
    learner = LearnerSection(batching=batching, micro_batch_tokens=tokens, micro_batch_size=tokens // 8)
    parts = BatchingPlan.of(learner).micro_batches(batch)
    assert sorted(row for part in parts for row in part["row"].tolist()) == list(range(batch.size))
    for part in parts:
        width = part["input_ids"].shape[1]
        size = {"padded": part.size * 8, "dynamic": part.size * width, "packed": int(part["input_lengths"].sum())}
        assert size[batching] <= tokens
        assert width - part["input_lengths"].max() in ((0, 1) if batching == "dynamic" else (0,))
    assert sum(int(trained_mask(part).sum()) for part in parts) == count_trained(batch)[0]
    assert len(parts) == 1 or len(parts) < batch.size, "rows must share a pass"


@pytest.mark.parametrize("batching", ["padded", "dynamic"])
def test_the_longest_rows_come_first(batching: Literal["padded", "dynamic"]) -> None:
    learner = LearnerSection(batching=batching, micro_batch_tokens=24, micro_batch_size=3)
    parts = BatchingPlan.of(learner).micro_batches(make_batch())
    widths = [part["input_ids"].shape[1] for part in parts]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) > 1


def test_the_empty_micro_batch_trains_nothing_and_has_every_column() -> None:
    empty = empty_micro_batch()
    only_counted = {"group_ids", "rewards"}  # needed only to count tokens, and an empty micro-batch has none
    assert set(empty) | only_counted == set(make_group(0))
    assert count_trained(empty) == (0, 0)


def test_sequences_to_score_are_padded_on_the_right() -> None:
    batch = token_batch([[3], [1, 2, 3]])
    assert batch["input_ids"].tolist() == [[3, 0, 0], [1, 2, 3]]
    assert batch["input_lengths"].tolist() == [1, 3]


@pytest.mark.parametrize("column", ["generation_logprobs", "prev_logprobs", "reference_policy_logprobs", "advantages"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_token_without_a_number_leaves_loss_and_denominator_and_is_counted(column: str, value: float) -> None:
    batch = make_group(0, lengths=(2, 3))
    for name in ("prev_logprobs", "reference_policy_logprobs", "advantages"):
        batch[name] = torch.zeros_like(batch["token_mask"])
    last = int(batch["input_lengths"][0]) - 1
    batch[column][0, last] = value
    batch[column][1, 0] = value  # a token of the prompt is not trained, so it is not counted as left out
    clean, count = without_nonfinite(batch)
    assert count == 1
    assert count_trained(clean) == (4, 2)
    assert not trained_mask(clean)[0, last]
    assert clean[column][0, last] == 0
    assert count_trained(batch) == (5, 2), "the caller's rows are unchanged"


def test_numbers_are_left_alone() -> None:
    batch = make_batch()
    del batch["advantages"]
    clean, count = without_nonfinite(batch)
    assert clean is batch
    assert count == 0
    assert without_nonfinite(BatchedDataDict()) == (BatchedDataDict(), 0)


def test_a_loss_divides_by_sums_of_masks_and_tokens_are_counted_by_those_above_0() -> None:
    group = make_group(0, lengths=(2, 3))
    group["sample_mask"] = torch.tensor([0.5, 0.0])
    assert count_trained(group) == (2, 1)
    assert (plan_of(group).valid_toks, plan_of(group).valid_seqs) == (1.0, 0.5)
    group["token_mask"] = group["token_mask"] * 0.5
    group["token_mask"][:, 0] = 1.0  # the first token is never trained
    assert (plan_of(group).valid_toks, plan_of(group).valid_seqs) == (0.5, 0.5)
