"""A random tiny Qwen3, and groups with chosen properties: uneven lengths, an empty completion, a masked sample."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import BRANCH, NO_TOKEN, NO_VERSION, SUPPORT, TOP_IDS, TOP_LOGPROBS, WIDE_FIELDS

if TYPE_CHECKING:
    from asyncrl.ranks.model_rows import ModelRows

VOCABULARY = 40
STEP = 5
TEMPERATURE = 0.7


def make_model(path: Path) -> Path:
    """Writes the model, with tied embeddings, and a tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(11)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=64,
        initializer_range=0.08,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    vocabulary = {f"t{i}": i for i in range(VOCABULARY)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")), pad_token="t0"
    ).save_pretrained(path)
    return path


def make_config(*, loss: str | dict[str, Any] = "decoupled_icepop", **learner: Any) -> Config:
    return Config.model_validate(
        {
            "learner": {"total_steps": 10, "batching": "padded", "collective_timeout_s": 240.0, **learner},
            "generator": {"temperature": TEMPERATURE},
            "model": {"max_length": 32},
            "algorithm": {"loss": loss},
        }
    )


def make_group(
    key: int, *, lengths: tuple[int, ...] = (5, 2, 7), sample_mask: tuple[float, ...] | None = None, staleness: int = 2
) -> BatchedDataDict:
    """Returns [G, S] random tokens. Their log-probs are near those of a uniform policy, so that some weights are out of
    bounds."""
    draw = np.random.default_rng(key)
    start, tokens = 3 + key % 3, sum(lengths)
    prompt = draw.integers(0, VOCABULARY, start)
    output = draw.integers(0, VOCABULARY, tokens)
    logprobs = (-3.5 + draw.normal(0, 0.7, tokens)).astype(np.float32)
    versions = STEP - draw.integers(0, staleness + 1, tokens)
    shape = (len(lengths), start + max(lengths))
    rows = BatchedDataDict(
        input_ids=torch.zeros(shape, dtype=torch.int64),
        weight_versions=torch.full(shape, NO_VERSION),
        generation_logprobs=torch.zeros(shape),
        token_mask=torch.zeros(shape),
        input_lengths=start + torch.tensor(lengths),
    )
    rows["input_ids"][:, :start] = torch.from_numpy(prompt)
    ends = np.cumsum(lengths)
    for i, length in enumerate(lengths):
        sampled, drawn = slice(start, start + length), slice(ends[i] - length, ends[i])
        rows["input_ids"][i, sampled] = torch.from_numpy(output[drawn])
        rows["generation_logprobs"][i, sampled] = torch.from_numpy(logprobs[drawn])
        rows["weight_versions"][i, sampled] = torch.from_numpy(versions[drawn])
        rows["token_mask"][i, sampled] = 1.0
    rows["advantages"] = torch.from_numpy(draw.normal(0, 1, len(lengths)).astype(np.float32))
    rows["sample_mask"] = torch.tensor(sample_mask or (1.0,) * len(lengths))
    rows["group_ids"] = torch.full((len(lengths),), key)
    rows["rewards"] = rows["advantages"].clone()
    return rows


def make_groups() -> list[BatchedDataDict]:
    return [
        make_group(0),
        make_group(1, lengths=(1, 0, 9)),
        make_group(2, lengths=(4, 4, 4), sample_mask=(1.0, 0.0, 1.0)),
        make_group(3, lengths=(8, 1, 3)),
    ]


def join(groups: Sequence[BatchedDataDict]) -> BatchedDataDict:
    """Returns the rows of the groups, group after group. `advantages` has one value for each row."""
    return BatchedDataDict.from_batches(groups, pad_value_dict={"weight_versions": NO_VERSION})


def with_tops(data: BatchedDataDict, *, listed: int = 4) -> BatchedDataDict:
    """Returns the rows with columns of most likely tokens: random ones, with random log-probs. A sampled token that is
    listed has its own log-prob, if the rows have `generation_logprobs`."""
    draw, shape = torch.Generator().manual_seed(17), data["input_ids"].shape
    ids_BSL = torch.rand(*shape, VOCABULARY, generator=draw).argsort(-1)[..., :listed].int()
    values_BSM = torch.randn(*shape, listed + 1, generator=draw)
    is_own_BSM = torch.nn.functional.pad(ids_BSL == data["input_ids"].unsqueeze(-1), (0, 1))
    if "generation_logprobs" in data:
        own_BS1 = data["generation_logprobs"].unsqueeze(-1)
        others_BSM = values_BSM.masked_fill(is_own_BSM, -torch.inf).log_softmax(-1)
        rest_BS1 = torch.where(is_own_BSM.any(-1, keepdim=True), torch.log(-torch.expm1(own_BS1)), 0.0)
        logprobs_BSL = torch.where(is_own_BSM, own_BS1, others_BSM + rest_BS1)[..., :listed]
    else:
        logprobs_BSL = values_BSM.log_softmax(-1)[..., :listed]
    not_sampled_BS1 = (data["token_mask"] == 0).unsqueeze(-1)
    tops = {TOP_IDS: (ids_BSL, NO_TOKEN), TOP_LOGPROBS: (logprobs_BSL, 0)}
    columns = {name: column.masked_fill(not_sampled_BS1, fill) for name, (column, fill) in tops.items()}
    return BatchedDataDict({**data, **columns})


def make_batch() -> BatchedDataDict:
    return join(make_groups())


def rows_of(
    input_ids_BS: torch.Tensor,
    *,
    packed_lengths_B: torch.Tensor | None = None,
    support_BSK: torch.Tensor | None = None,
    branch_ids_BS: torch.Tensor | None = None,
    tops: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> "ModelRows":
    """Returns rows for a pass of a model. They are packed if they have lengths."""
    from asyncrl.ranks.model_rows import ModelRows  # imports transformers

    columns = {
        "input_ids": input_ids_BS,
        "input_lengths": packed_lengths_B,
        SUPPORT: support_BSK,
        BRANCH: branch_ids_BS,
        **tops,
    }
    batch = BatchedDataDict({name: column for name, column in columns.items() if column is not None})
    return ModelRows.of(batch, packed=packed_lengths_B is not None, wide=WIDE_FIELDS)
