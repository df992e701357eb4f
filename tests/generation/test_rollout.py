"""Edge cases of a rollout: empty texts, prompts that do not fit, and engine outputs without all columns."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine
from pool import LengthScorer, Tokenizer, manifest_of

from asyncrl.buffer.records import Ticket
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.data_plane.codec import encode
from asyncrl.environments.scores import Score
from asyncrl.errors import DataError
from asyncrl.generation.episodes import Episode, single_turn
from asyncrl.generation.interfaces import Completion
from asyncrl.generation.rollout import GENERATED_FIELDS, Rollouts, finished_group
from asyncrl.weights.staging import StagedWeights

TICKET = Ticket(
    group=3, attempt=1, task=Task(question="q", prompt="q", answer="a"), seed=0, version=Version(1, 7),
    max_staleness_versions=2, replica="a",
)  # fmt: skip


def completion(*tokens: int, text: str = "") -> Completion:
    return Completion(
        token_ids=list(tokens), logprobs=[-1.0] * len(tokens), versions=[Version(1, 8)] * len(tokens), text=text,
        truncated=False,
    )  # fmt: skip


def episodes(*completions: Completion) -> list[Episode]:
    return [single_turn([4, 5], each) for each in completions]


@pytest.mark.fault("F24")
def test_a_group_of_empty_completions_is_as_old_as_its_ticket_and_has_no_token() -> None:
    group = finished_group(
        TICKET, episodes=episodes(completion(), completion()), rewards=[0.0, 0.0], replica="a",
        scoring_s=0.0,
    )  # fmt: skip
    assert (group.meta.oldest, group.meta.newest, group.meta.generated_tokens) == (7, 7, 0)
    assert group.rows["input_lengths"].tolist() == [2, 2]
    assert not group.rows["token_mask"].any()


def test_rows_are_prompt_completion_padding_and_only_what_was_sampled_has_a_version() -> None:
    group = finished_group(
        TICKET, episodes=episodes(completion(6), completion(7, 8)), rewards=[0.0, 1.0], replica="a",
        scoring_s=0.0,
    )  # fmt: skip
    assert {name: column.tolist() for name, column in group.rows.items()} == {
        "input_ids": [[4, 5, 6, 0], [4, 5, 7, 8]],
        "weight_versions": [[-1, -1, 8, -1], [-1, -1, 8, 8]],
        "generation_logprobs": [[0.0, 0.0, -1.0, 0.0], [0.0, 0.0, -1.0, -1.0]],
        "token_mask": [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]],
        "input_lengths": [3, 4],
    }
    assert set(group.rows) == set(GENERATED_FIELDS)
    columns = encode(group.rows).values()
    assert group.meta.row_bytes == sum(column.values.nbytes for column in columns), "the booked size is the sent size"


@pytest.mark.fault("F24")
def test_a_completion_of_only_the_end_token_is_one_token() -> None:
    group = finished_group(
        TICKET, episodes=episodes(completion(1), completion()), rewards=[0.0, 0.0], replica="a",
        scoring_s=0.0,
    )  # fmt: skip
    assert (group.meta.oldest, group.meta.newest, group.meta.completion_tokens) == (8, 8, (1, 0))


@pytest.mark.parametrize("prompt", ["", "abcdefgh"])
@pytest.mark.asyncio
@pytest.mark.fault("F24")
async def test_a_prompt_that_leaves_no_room_or_says_nothing_is_a_data_failure(prompt: str) -> None:
    config = Config.model_validate({"model": {"max_length": 8}, "data": {"max_prompt_tokens": 40}})
    rollouts = Rollouts(
        config=config, engine=None, tokenizer=Tokenizer(), scorer=LengthScorer(), replica="a"
    )  # type: ignore[arg-type]  # fmt: skip
    with pytest.raises(DataError, match="must have 1 to 7;"):
        await rollouts.answers(
            Task(question="q", prompt=prompt, answer=""), config.eval.each_set()["heldout"], number=0
        )


@pytest.mark.asyncio
async def test_a_group_says_how_long_its_scores_took() -> None:
    now_s = 5.0

    class SlowScorer(LengthScorer):
        async def score(self, task: Task, completions: Sequence[str]) -> list[Score]:
            nonlocal now_s
            now_s += 2.0
            return await super().score(task, completions)

    engine = FakeEngine()
    await engine.load(manifest_of(7), StagedWeights())
    rollouts = Rollouts(
        config=Config(), engine=engine, tokenizer=Tokenizer(), scorer=SlowScorer(), replica="a", clock=lambda: now_s
    )
    assert (await rollouts.run(TICKET)).scoring_s == 2.0


@pytest.mark.parametrize(
    ("limit", "seeded", "expected"), [(0, None, [8]), (1, None, [None]), (1, True, [8]), (0, False, [None])]
)
@pytest.mark.asyncio
async def test_samples_have_seeds_of_their_own_in_a_synchronous_run_or_if_asked_for(
    limit: int, seeded: bool | None, expected: list[int | None]
) -> None:
    config = Config.model_validate({"staleness": {"max_versions": limit}, "generator": {"seeded": seeded}})
    engine, seeds = FakeEngine(), list[int | None]()
    await engine.load(manifest_of(7), StagedWeights())
    generate = engine.generate

    async def noted(*arguments: Any, seed: int | None, **options: Any) -> list[Completion]:
        seeds.append(seed)
        return await generate(*arguments, seed=seed, **options)

    engine.generate = noted  # type: ignore[method-assign, assignment]
    rollouts = Rollouts(config=config, engine=engine, tokenizer=Tokenizer(), scorer=LengthScorer(), replica="a")
    await rollouts.run(msgspec.structs.replace(TICKET, seed=8))
    assert seeds == expected
