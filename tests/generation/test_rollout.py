"""Edge cases of a rollout: empty texts, prompts that do not fit, and engine outputs without all columns."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from fake_engine import FakeEngine
from pool import LengthScorer, Tokenizer, manifest_of

from asyncrl.algorithms.advantages import resolve_estimator
from asyncrl.buffer.records import Lease, LeasedGroup, Ticket
from asyncrl.common.version import Version
from asyncrl.config.load import load_config
from asyncrl.config.row_bytes import bytes_per_token, worst_case_group_bytes
from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.data.row_checksums import prompt_checksum
from asyncrl.data.specs import GENERATED_FIELDS, SUPPORT
from asyncrl.data_plane.codec import Picked, decode, encode
from asyncrl.environments.scores import Score
from asyncrl.environments.scoring_messages import Components
from asyncrl.errors import DataError, HandshakeError
from asyncrl.generation.episodes import Attempt, Episode, Played, single_turn
from asyncrl.generation.interfaces import Completion
from asyncrl.generation.rollout import FinishedGroup, Rollouts, finished_group
from asyncrl.learner.step import prepare_samples
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


def finished(rewards: list[Score], episodes: list[Episode]) -> FinishedGroup:
    played = Played(episodes=episodes, scores=rewards, environment_s=0.0)
    return finished_group(TICKET, played, config=Config(), replica="a")


@pytest.mark.fault("F24")
def test_a_group_of_empty_completions_is_as_old_as_its_ticket_and_has_no_token() -> None:
    group = finished([0.0, 0.0], episodes(completion(), completion()))
    assert (group.meta.oldest, group.meta.newest, group.meta.generated_tokens) == (7, 7, 0)
    assert group.meta.prompt == prompt_checksum("q")
    assert group.rows["input_lengths"].tolist() == [2, 2]
    assert not group.rows["token_mask"].any()


def test_rows_are_prompt_completion_padding_and_only_what_was_sampled_has_a_version() -> None:
    group = finished([0.0, 1.0], episodes(completion(6), completion(7, 8)))
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


def test_supports_are_a_column_of_sampled_tokens_and_count_in_the_booked_size() -> None:
    first, second = completion(6), completion(7, 8)
    supports = [np.array([[6, 9]], dtype=np.int32), np.array([[3, 7], [8, -1]], dtype=np.int32)]
    group = finished(
        [0.0, 1.0],
        episodes(
            dataclasses.replace(first, wide={SUPPORT: supports[0]}),
            dataclasses.replace(second, wide={SUPPORT: supports[1]}),
        ),
    )
    no = [-1, -1]
    assert group.rows[SUPPORT].tolist() == [[no, no, [6, 9], no], [no, no, [3, 7], [8, -1]]]
    assert group.rows[SUPPORT].dtype == torch.int32
    columns = encode(group.rows)
    assert group.meta.row_bytes == sum(column.values.nbytes for column in columns.values())
    config = load_config([], ["generator.top_k=2", "learner.group_size=2", "model.max_length=4"])
    assert group.meta.row_bytes + bytes_per_token(config) == worst_case_group_bytes(config), "one token is missing"
    picked = {name: [Picked(column, range(2), range(2))] for name, column in columns.items()}
    assert torch.equal(decode(picked)[SUPPORT], group.rows[SUPPORT])
    plain = finished([0.0, 1.0], episodes(first, second))
    assert plain.meta.row_checksums != group.meta.row_checksums, "the audit sees other supports"


@pytest.mark.parametrize("supports", [None, np.zeros((2, 4), dtype=np.int32), np.zeros((1, 3), dtype=np.int32)])
@pytest.mark.fault("F25")
def test_a_completion_without_a_support_for_each_token_does_not_pass(supports: Any) -> None:
    sampled = dataclasses.replace(completion(4, 5), wide={} if supports is None else {SUPPORT: supports})
    with pytest.raises(
        HandshakeError, match=r"with generator\.top_k = 3 it must have 3|has 1 entries in the column support_ids; every"
    ):
        single_turn([1], sampled, widths={SUPPORT: 3})
    single_turn(
        [1], dataclasses.replace(sampled, wide={SUPPORT: np.zeros((2, 3), dtype=np.int32)}), widths={SUPPORT: 3}
    )


@pytest.mark.asyncio
@pytest.mark.fault("F25")
async def test_an_engine_that_returns_no_supports_fails_the_group() -> None:
    engine = FakeEngine()
    await engine.load(manifest_of(7), StagedWeights())
    config = load_config([], ["generator.top_k=3"])
    rollouts = Rollouts(config=config, engine=engine, tokenizer=Tokenizer(), scorer=LengthScorer(), replica="a")
    with pytest.raises(HandshakeError, match=r"has no numbers .* column support_ids; with generator\.top_k = 3"):
        await rollouts.run(TICKET, Attempt())


@pytest.mark.fault("F24")
def test_a_completion_of_only_the_end_token_is_one_token() -> None:
    group = finished([0.0, 0.0], episodes(completion(1), completion()))
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
async def test_a_question_of_a_named_heldout_set_keeps_special_tokens_as_training_does() -> None:
    config = load_config(
        [], ["environment.special_tokens=keep", "eval.sets.exact={environment: {reward: exact_match}, prompts: 4}"]
    )
    engine, texts = FakeEngine(), list[str]()
    await engine.load(manifest_of(7), StagedWeights())

    class Read(LengthScorer):
        async def score(self, task: Task, completions: Sequence[str]) -> list[Score]:
            texts.extend(completions)
            return await super().score(task, completions)

    rollouts = Rollouts(config=config, engine=engine, tokenizer=Tokenizer(), scorer=Read(), replica="a")
    rollouts.__dict__["_answer_text"] = lambda token_ids, *, special_tokens: f"{special_tokens} {len(token_ids)}"
    task = Task(question="q", prompt="q", answer="a", part="eval/exact")
    [answer] = await rollouts.answers(task, config.eval.each_set()["exact"], number=0)
    assert texts == [answer.text]
    assert answer.text.startswith("keep ")


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
    assert (await rollouts.run(TICKET, Attempt())).scoring_s == 2.0


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
    await rollouts.run(msgspec.structs.replace(TICKET, seed=8), Attempt())
    assert seeds == expected


COMPARED = [
    ("group_norm", "keep", (1.0, 1.0), (1, 4), False),
    ("group_norm", "keep", (0.5, 0.0), (1, 1), True),
    ("group_norm", "penalise", (1.0, 1.0), (1, 4), True),
    ("leave_one_out", "penalise", (1.0, 0.5), (4, 3), False),  # 1 - 1 and 0.5 - 0.5
    ("opo", "penalise", (0.0, 0.0, 0.0), (2, 1, 2), False),
    ("gr3", "keep", (1.0, 1.0), (1, 4), True),
    ("gr3", "keep", (0.0, 0.0), (1, 4), False),
    ("reinforce_pp", "keep", (1.0, 1.0), (2, 2), True),
]
"""Estimator, `algorithm.overlong`, rewards, tokens of the completions, and whether the group has a gradient. The limit
is 4 tokens, and the penalty begins after 2."""


@pytest.mark.parametrize(("advantage", "overlong", "rewards", "tokens", "teaches"), COMPARED)
def test_resampling_masking_and_the_ratio_compare_what_the_estimator_compares(
    advantage: str, overlong: str, rewards: tuple[float, ...], tokens: tuple[int, ...], teaches: bool
) -> None:
    section = {"advantage": advantage, "overlong": overlong, "overlong_buffer_tokens": 2, "zero_variance": "resample"}
    config = Config.model_validate({"algorithm": section, "generator": {"max_completion_tokens": 4}})
    made = episodes(*[completion(*range(count)) for count in tokens])
    meta = finished_group(
        TICKET, Played(episodes=made, scores=list(rewards), environment_s=0.0), config=config, replica="a"
    ).meta
    assert meta.equal is not teaches
    other = msgspec.structs.replace(meta, group=9, rewards=(0.25, 1.0, 0.5)[: len(rewards)])
    leased = [
        LeasedGroup(meta=each, deadline=9, max_staleness_versions=2, reserved_step=8, ready_step=8)
        for each in (meta, other)
    ]
    masking = Config.model_validate(
        {"algorithm": section | {"zero_variance": "mask"}, "generator": {"max_completion_tokens": 4}}
    )
    lease = Lease(incarnation=1, step=8, groups=tuple(leased))
    samples = prepare_samples(lease, estimator=resolve_estimator(advantage), config=masking)
    assert bool(samples.mask_B[: len(rewards)].any()) is teaches
    assert samples.numbers["zero_variance_ratio"] == (0.0 if teaches else 0.5)
    if advantage != "reinforce_pp":  # whitened over the whole step
        assert bool(samples.advantages_B[: len(rewards)].any()) is teaches


def test_components_that_differ_make_a_group_different_only_for_an_estimator_of_components() -> None:
    scores: list[Score] = [Components(total=1.0, parts={"a": a, "b": 1 - a}) for a in (1.0, 0.0)]
    made = episodes(completion(1), completion(2))
    equal = {}
    for advantage in ("group_norm", "gdpo"):
        config = Config.model_validate({"algorithm": {"advantage": advantage, "zero_variance": "resample"}})
        played = Played(episodes=made, scores=scores, environment_s=0.0)
        equal[advantage] = finished_group(TICKET, played, config=config, replica="a").meta.equal
    assert equal == {"group_norm": True, "gdpo": False}
