"""A batch of prompts through one engine: every row is a request of its own, and comes back as it was asked for.

Legend: B rows, S' tokens of the longest row, prompt and response.
"""

import asyncio
from collections.abc import Sequence

import torch

from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import NO_VERSION
from asyncrl.errors import DataError
from asyncrl.generation.interfaces import Completion, InferenceEngine
from asyncrl.generation.rollout import check_completion, sample_rows


async def continue_rows(
    engine: InferenceEngine, data: BatchedDataDict, *, config: Config, greedy: bool, pad_token_id: int
) -> BatchedDataDict:
    """`GenerationOutputSpec` of right-padded rows (`GenerationDatumSpec`), in their order.

    The first row that fails ends the others, and is raised: DataError for a prompt without room for a response.
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
    """The rows of several outputs, as wide as the longest."""
    return BatchedDataDict.from_batches(
        outputs, pad_value_dict={"output_ids": pad_token_id, "weight_versions": NO_VERSION}
    )


async def _continue_row(
    engine: InferenceEngine, row: BatchedDataDict, *, config: Config, greedy: bool
) -> BatchedDataDict:
    prompt_ids: list[int] = row["input_ids"][0, : int(row["input_lengths"][0])].tolist()
    room = config.model.max_length - len(prompt_ids)
    if not prompt_ids or room < 1:
        raise DataError(
            f"a prompt has {len(prompt_ids)} tokens; 1 to {config.model.max_length - 1} leave room for a response "
            "(model.max_length)",
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
    check_completion(completion)
    return _output(prompt_ids, completion)


def _output(prompt_ids: Sequence[int], completion: Completion) -> BatchedDataDict:
    rows = sample_rows(prompt_ids, [completion])
    return BatchedDataDict(
        output_ids=rows["input_ids"],
        generation_lengths=rows["input_lengths"] - len(prompt_ids),
        unpadded_sequence_lengths=rows["input_lengths"],
        logprobs=rows["generation_logprobs"],
        truncated=torch.tensor([completion.truncated]),
        weight_versions=rows["weight_versions"],
    )
