"""Rows that go through an engine keep their order, and each row has its own prompt, budget and stop strings."""

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import FakeEngine

from asyncrl.colocated.batch import continue_rows
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import NO_VERSION, SUPPORT
from asyncrl.errors import DataError, HandshakeError
from asyncrl.generation.interfaces import Completion, verify_right_padding

pytestmark = pytest.mark.asyncio

PAD = 7
CONFIG = Config.model_validate(
    {"model": {"max_length": 8}, "generator": {"max_completion_tokens": 4, "temperature": 0.5}}
)
PROMPTS = BatchedDataDict(
    input_ids=torch.tensor([[5, 6, PAD], [8, 9, 10], [11, PAD, PAD]]), input_lengths=torch.tensor([2, 3, 1])
)


def completion(tokens: int, *, logprobs: int | None = None) -> Completion:
    return Completion(
        token_ids=list(range(20, 20 + tokens)),
        logprobs=[-0.5] * (tokens if logprobs is None else logprobs),
        versions=[Version(1, 3)] * tokens,
        text="",
        truncated=tokens == 4,
    )


class Recorded:
    """Answers a prompt of n tokens with n + 1 tokens, the longest prompt first, and records the requests."""

    def __init__(self) -> None:
        self.asked: dict[tuple[int, ...], dict[str, Any]] = {}
        self.answer = lambda prompt: completion(len(prompt) + 1)
        self.cancelled = 0

    async def generate(self, prompt_ids: list[int], **options: Any) -> list[Completion]:
        self.asked[tuple(prompt_ids)] = options
        try:
            for _ in range(10 - len(prompt_ids)):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [self.answer(prompt_ids)]


async def run(engine: Any, data: BatchedDataDict = PROMPTS, *, greedy: bool = False) -> BatchedDataDict:
    return await continue_rows(engine, data, config=CONFIG, greedy=greedy, pad_token_id=PAD)


async def test_the_output_is_prompt_and_response_right_padded_with_what_sampled_each_token() -> None:
    output = await run(Recorded())
    verify_right_padding(output, pad_value=PAD)
    assert output["output_ids"].tolist() == [
        [5, 6, 20, 21, 22, PAD, PAD],
        [8, 9, 10, 20, 21, 22, 23],
        [11, 20, 21, PAD, PAD, PAD, PAD],
    ]
    assert output["generation_lengths"].tolist() == [3, 4, 2]
    assert output["unpadded_sequence_lengths"].tolist() == [5, 7, 3]
    sampled = torch.tensor([[0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0, 0]], dtype=torch.bool)
    assert torch.equal(output["logprobs"], -0.5 * sampled)
    assert torch.equal(output["weight_versions"], torch.where(sampled, 3, NO_VERSION))
    assert output["truncated"].tolist() == [False, True, False]


async def test_a_row_asks_for_what_fits_the_model_and_for_its_own_stop_texts() -> None:
    engine = Recorded()
    rows = BatchedDataDict(**PROMPTS, stop_strings=[["x", "y"], None, []])
    rows["input_ids"] = torch.tensor([[5, 6, PAD, PAD, PAD, PAD], [1, 2, 3, 4, 5, 6], [11, PAD, PAD, PAD, PAD, PAD]])
    rows["input_lengths"] = torch.tensor([2, 6, 1])
    await run(engine, rows)
    assert [asked["max_tokens"] for asked in engine.asked.values()] == [4, 2, 4]
    assert [list(asked["stop"]) for asked in engine.asked.values()] == [["x", "y"], [], []]
    assert {asked["temperature"] for asked in engine.asked.values()} == {0.5}
    await run(engine, rows, greedy=True)
    assert {asked["temperature"] for asked in engine.asked.values()} == {0.0}


@pytest.mark.parametrize("length", [0, 8])
async def test_a_prompt_without_room_is_refused_and_ends_the_other_rows(length: int) -> None:
    engine = Recorded()
    rows = BatchedDataDict(input_ids=torch.ones((3, 8), dtype=torch.int64), input_lengths=torch.tensor([2, 3, length]))
    with pytest.raises(DataError, match=rf"{length} tokens, but only prompts of 1 to 7 .*model\.max_length"):
        await run(engine, rows)
    assert engine.cancelled == 2


async def test_with_top_k_the_output_has_supports_unless_it_is_greedy() -> None:
    config = CONFIG.model_copy(update={"generator": CONFIG.generator.model_copy(update={"top_k": 2})})
    engine = Recorded()

    def answer(prompt: list[int]) -> Completion:
        sampled = completion(len(prompt) + 1)
        supports = np.array([[token, 5] for token in sampled.token_ids], dtype=np.int32)
        return dataclasses.replace(sampled, wide={SUPPORT: supports})

    greedy = await continue_rows(engine, PROMPTS, config=config, greedy=True, pad_token_id=PAD)
    assert SUPPORT not in greedy
    engine.answer = answer
    output = await continue_rows(engine, PROMPTS, config=config, greedy=False, pad_token_id=PAD)
    assert output[SUPPORT].shape == (3, 7, 2)
    sampled_BS = output["weight_versions"] != NO_VERSION
    assert torch.equal(output[SUPPORT][..., 0], torch.where(sampled_BS, output["output_ids"], -1).int())


@pytest.mark.fault("F25")
async def test_a_token_without_a_log_prob_is_refused() -> None:
    engine = Recorded()
    engine.answer = lambda prompt: completion(3, logprobs=2)
    with pytest.raises(HandshakeError, match=r"3 tokens \(sampled\) has 2 log-probs"):
        await run(engine)


async def test_the_fake_engine_continues_rows_too() -> None:
    engine = FakeEngine()
    engine.version = Version(1, 2)
    output = await run(engine, greedy=True)
    again = await run(engine, PROMPTS.select_indices([2, 0, 1]), greedy=True)
    order = [2, 0, 1]
    assert torch.equal(again["generation_lengths"], output["generation_lengths"][order])
