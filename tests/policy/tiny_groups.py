"""A random tiny Qwen3 and hand-made groups: uneven lengths, an empty completion, a masked sample."""

from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.policy.interfaces import TrainGroup

VOCABULARY = 40
STEP = 5
TEMPERATURE = 0.7


def make_model(path: Path) -> Path:
    """Writes the model, tied embeddings included, and a tokenizer."""
    import torch
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
            "learner": {"total_steps": 10, "collective_timeout_s": 30.0, **learner},
            "generator": {"temperature": TEMPERATURE},
            "model": {"max_length": 32},
            "algorithm": {"loss": loss},
        }
    )


def make_group(
    key: int, *, lengths: tuple[int, ...] = (5, 2, 7), sample_mask: tuple[float, ...] | None = None, staleness: int = 2
) -> TrainGroup:
    """Random tokens; log-probs about those of a uniform policy, so that some weights fall outside the band."""
    draw = np.random.default_rng(key)
    tokens = sum(lengths)
    rows = {
        "prompt_ids": draw.integers(0, VOCABULARY, 3 + key % 3, dtype=np.int32),
        "output_ids": draw.integers(0, VOCABULARY, tokens, dtype=np.int32),
        "output_lengths": np.array(lengths, dtype=np.int32),
        "logprobs": (-3.5 + draw.normal(0, 0.7, tokens)).astype(np.float32),
        "weight_versions": (STEP - draw.integers(0, staleness + 1, tokens)).astype(np.int64),
        "truncated": np.zeros(len(lengths), dtype=bool),
    }
    return TrainGroup(
        key=f"{key}.0",
        rows=rows,
        advantages_G=draw.normal(0, 1, len(lengths)).astype(np.float32),
        sample_mask_G=np.array(sample_mask or (1.0,) * len(lengths), dtype=np.float32),
        max_staleness_versions=2,
    )


def make_groups() -> list[TrainGroup]:
    return [
        make_group(0),
        make_group(1, lengths=(1, 0, 9)),
        make_group(2, lengths=(4, 4, 4), sample_mask=(1.0, 0.0, 1.0)),
        make_group(3, lengths=(8, 1, 3)),
    ]
