"""Sends a batch of prompts through one engine. Every row is a request of its own. Outputs keep the order of the rows.

Shape letters: B rows, S' tokens (prompt and response) of the longest row.
"""

import asyncio
from collections.abc import Sequence

import torch

from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import WIDE_FIELDS
from asyncrl.data_plane.codec import PAD_VALUES
from asyncrl.errors import DataError
from asyncrl.generation.episodes import episode_rows, single_turn
from asyncrl.generation.interfaces import InferenceEngine


async def continue_rows(
    engine: InferenceEngine, data: BatchedDataDict, *, config: Config, greedy: bool, pad_token_id: int
) -> BatchedDataDict:
    """Generates a response to each right-padded prompt (`GenerationDatumSpec`). Returns a `GenerationOutputSpec` in the
    same order.

    The first failure cancels the other rows and is raised. DataError is raised for an empty prompt and for a prompt
    that leaves no room for a response.
    """
    try:
        async with asyncio.TaskGroup() as requests:
            rows = [
                requests.create_task(_continue_row(engine, data.slice(row, row + 1), config=config, greedy=greedy))
                for row in range(data.size)
            ]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return join_outputs([row.result() for row in rows], pad_token_id=pad_token_id)


def join_outputs(outputs: Sequence[BatchedDataDict], *, pad_token_id: int) -> BatchedDataDict:
    """Joins the rows of several outputs, padded to the longest row."""
    return BatchedDataDict.from_batches(outputs, pad_value_dict={**PAD_VALUES, "output_ids": pad_token_id})


async def _continue_row(
    engine: InferenceEngine, row: BatchedDataDict, *, config: Config, greedy: bool
) -> BatchedDataDict:
    prompt_ids: list[int] = row["input_ids"][0, : int(row["input_lengths"][0])].tolist()
    room = config.model.max_length - len(prompt_ids)
    if not prompt_ids or room < 1:
        raise DataError(
            f"a prompt has {len(prompt_ids)} tokens, but only prompts of 1 to {config.model.max_length - 1} tokens "
            "leave room for a response; shorten the prompt or raise model.max_length",
            reason="prompt_length",
        )
    stop = row["stop_strings"][0] if "stop_strings" in row else None
    [completion] = await engine.generate(
        prompt_ids,
        n=1,
        seed=None,
        temperature=0.0 if greedy else config.generator.temperature,
        max_tokens=min(config.generator.max_completion_tokens, room),
        stop=stop or (),
    )
    rows = episode_rows([single_turn(prompt_ids, completion, widths={} if greedy else config.widths)])
    return BatchedDataDict(
        output_ids=rows["input_ids"],
        generation_lengths=rows["input_lengths"] - len(prompt_ids),
        unpadded_sequence_lengths=rows["input_lengths"],
        logprobs=rows["generation_logprobs"],
        truncated=torch.tensor([completion.truncated]),
        weight_versions=rows["weight_versions"],
        **{name: rows[name] for name in WIDE_FIELDS if name in rows},
    )
