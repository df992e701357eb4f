"""From groups to micro-batches: alignment, the last staleness check, and no row lost."""

import dataclasses
from typing import Literal

import numpy as np
import pytest
import torch
from tiny_groups import STEP, make_group, make_groups

from asyncrl.config.schema import LearnerSection
from asyncrl.errors import RunError, StalenessViolation
from asyncrl.policy.batching import (
    NO_VERSION,
    count_trained,
    empty_micro_batch,
    micro_batches,
    rank_batch,
    staleness_counts,
    token_batch,
    trained_mask,
)
from asyncrl.policy.interfaces import TrainGroup, deal_groups

PADDED = LearnerSection()


def versions(group: TrainGroup, values: list[int]) -> TrainGroup:
    return dataclasses.replace(group, rows={**group.rows, "weight_versions": np.array(values, dtype=np.int64)})


def test_every_column_stands_at_its_own_token() -> None:
    group = make_group(1, lengths=(2, 0, 3))
    batch = rank_batch([group], step=STEP)
    prompt, output = group.rows["prompt_ids"].tolist(), group.rows["output_ids"].tolist()
    p = len(prompt)
    assert batch["input_ids"].tolist() == [[*prompt, *output[:2], 0], [*prompt, 0, 0, 0], [*prompt, *output[2:]]]
    assert batch["input_lengths"].tolist() == [p + 2, p, p + 3]
    assert batch["token_mask"].tolist() == [[0] * p + [1, 1, 0], [0] * p + [0, 0, 0], [0] * p + [1, 1, 1]]
    logprobs = group.rows["logprobs"].tolist()
    assert batch["generation_logprobs"].tolist() == [
        [0] * p + [*logprobs[:2], 0],
        [0] * (p + 3),
        [0] * p + logprobs[2:],
    ]
    assert batch["weight_versions"][0, p + 2] == NO_VERSION
    assert batch["weight_versions"][2, p:].tolist() == group.rows["weight_versions"][2:].tolist()
    assert torch.equal(batch["advantages"][:, p], torch.from_numpy(group.advantages_G))


def test_groups_of_unequal_width_are_padded_with_no_version() -> None:
    batch = rank_batch([make_group(0, lengths=(1,)), make_group(1, lengths=(9,))], step=STEP)
    assert batch["weight_versions"][0, -1] == NO_VERSION
    assert batch.size == 2


def test_f17_a_token_older_than_its_ticket_allows_stops_the_run() -> None:
    group = make_group(0, lengths=(2, 1), staleness=0)
    rank_batch([versions(group, [STEP - 2, STEP, STEP])], step=STEP)
    with pytest.raises(StalenessViolation, match=r"group 0\.0.* 3 versions old.*staleness.max_versions.* is 2"):
        rank_batch([versions(group, [STEP - 3, STEP, STEP])], step=STEP)


def test_a_token_newer_than_the_weights_stops_the_run() -> None:
    group = make_group(0, lengths=(2,), staleness=0)
    with pytest.raises(StalenessViolation, match="-1 versions old"):
        rank_batch([versions(group, [STEP, STEP + 1])], step=STEP)


def test_an_old_token_of_a_sample_that_is_not_trained_is_no_violation() -> None:
    group = make_group(0, lengths=(2, 1), sample_mask=(1.0, 0.0), staleness=0)
    rank_batch([versions(group, [STEP, STEP, STEP - 9])], step=STEP)


@pytest.mark.parametrize("column", ["output_ids", "logprobs", "weight_versions"])
def test_f25_columns_that_disagree_in_length_are_named(column: str) -> None:
    group = make_group(0)
    broken = dataclasses.replace(group, rows={**group.rows, column: group.rows[column][:-1]})
    with pytest.raises(RunError, match=rf"group 0\.0.*{column}"):
        rank_batch([broken], step=STEP)


def test_trained_tokens_and_their_staleness_are_counted_by_mask() -> None:
    group = versions(
        make_group(2, lengths=(2, 3, 0), sample_mask=(1.0, 0.0, 1.0)), [STEP, STEP - 2, STEP, STEP, STEP - 1]
    )
    batch = rank_batch([group], step=STEP)
    assert count_trained(batch) == (2, 2)
    assert staleness_counts(batch, step=STEP) == {0: 1, 2: 1}


def test_f24_no_groups_make_an_empty_batch() -> None:
    batch = rank_batch([], step=STEP)
    assert (count_trained(batch), staleness_counts(batch, step=STEP), micro_batches(batch, PADDED)) == ((0, 0), {}, [])


def test_f24_a_group_of_empty_completions_has_rows_but_no_token() -> None:
    batch = rank_batch([make_group(0, lengths=(0, 0))], step=STEP)
    assert count_trained(batch) == (0, 2)


def test_f24_a_prompt_without_tokens_never_trains_its_first_token() -> None:
    group = make_group(0, lengths=(3,))
    bare = dataclasses.replace(group, rows={**group.rows, "prompt_ids": np.zeros(0, dtype=np.int32)})
    assert count_trained(rank_batch([bare], step=STEP)) == (2, 1)


@pytest.mark.parametrize("batching", ["padded", "dynamic", "packed"])
@pytest.mark.parametrize("tokens", [16, 32, 1000])
def test_micro_batches_hold_every_row_once_within_their_limit_and_no_wider_than_needed(
    tokens: int, batching: Literal["padded", "dynamic", "packed"]
) -> None:
    batch = rank_batch(make_groups(), step=STEP)
    batch["row"] = torch.arange(batch.size)
    learner = LearnerSection(batching=batching, micro_batch_tokens=tokens, micro_batch_size=tokens // 8)
    parts = micro_batches(batch, learner)
    assert sorted(row for part in parts for row in part["row"].tolist()) == list(range(batch.size))
    for part in parts:
        width = part["input_ids"].shape[1]
        size = {"padded": part.size * 8, "dynamic": part.size * width, "packed": int(part["input_lengths"].sum())}
        assert size[batching] <= tokens
        assert width - part["input_lengths"].max() in ((0, 1) if batching == "dynamic" else (0,))
    assert sum(int(trained_mask(part).sum()) for part in parts) == count_trained(batch)[0]
    assert len(parts) == 1 or len(parts) < batch.size, "rows share a pass"


@pytest.mark.parametrize("batching", ["padded", "dynamic"])
def test_the_longest_rows_come_first(batching: Literal["padded", "dynamic"]) -> None:
    learner = LearnerSection(batching=batching, micro_batch_tokens=24, micro_batch_size=3)
    parts = micro_batches(rank_batch(make_groups(), step=STEP), learner)
    widths = [part["input_ids"].shape[1] for part in parts]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) > 1


def test_the_empty_micro_batch_trains_nothing_and_has_every_column() -> None:
    empty = empty_micro_batch()
    assert set(empty) == set(rank_batch([make_group(0)], step=STEP))
    assert count_trained(empty) == (0, 0)


def test_sequences_to_score_are_padded_on_the_right() -> None:
    batch = token_batch([[3], [1, 2, 3]])
    assert batch["input_ids"].tolist() == [[3, 0, 0], [1, 2, 3]]
    assert batch["input_lengths"].tolist() == [1, 3]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("updates", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 5, 8])
def test_dealing_gives_each_update_the_same_groups_for_any_number_of_ranks(
    ranks: int, updates: int, count: int
) -> None:
    groups = [make_group(i, lengths=(1,)) for i in range(count)]
    dealt = deal_groups(groups, ranks=ranks, updates=updates)
    alone = deal_groups(groups, ranks=1, updates=updates)[0]
    assert len(dealt) == ranks
    for update in range(updates):
        together = sorted(group.key for rank in dealt for group in rank[update])
        assert together == sorted(group.key for group in alone[update])
        sizes = [len(rank[update]) for rank in dealt]
        assert max(sizes) - min(sizes) <= 1
    assert [group.key for share in alone for group in share] == [group.key for group in groups]
    shares = [len(share) for share in alone]
    assert max(shares) - min(shares) <= 1
