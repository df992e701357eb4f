"""A first configuration fits its GPUs: as few ranks as possible, and nothing is computed twice without need."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from asyncrl.cli.plan import specs_of
from asyncrl.config.schema import Config
from asyncrl.config.starter import GpuNumbers
from asyncrl.deployment.memory_plan import gpu_numbers

pytestmark = pytest.mark.slow  # imports transformers

SIZES: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
    "32B": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40},
}


def chosen(size: str, folder: Path, *, gpus: int, gpu_gib: float, longest: int = 1024) -> GpuNumbers:
    tied = size == "0.5B"
    Qwen2Config(vocab_size=151936, tie_word_embeddings=tied, num_key_value_heads=2, **SIZES[size]).save_pretrained(
        folder
    )
    share = {"gpus": 0.5, "gpu_memory_utilization": 0.35} if gpus == 1 else {"gpus": 1.0}
    config = Config.model_validate(
        {
            "model": {"path": str(folder), "dtype": "bfloat16", "max_length": longest},
            "generator": share,
            "learner": {"gpus": share["gpus"], "groups_per_step": 32},
        }
    )
    return gpu_numbers(config, specs_of(config), gpus=gpus, gpu_gib=gpu_gib, reference=False)


def test_a_small_model_on_a_large_gpu_needs_nothing(tmp_path: Path) -> None:
    found = chosen("0.5B", tmp_path, gpus=1, gpu_gib=140)
    assert (found.ranks, found.activation_checkpointing, found.gradient_sync) == (1, False, "update")
    assert found.micro_batch_tokens == 32768
    assert found.fits


def test_with_less_memory_a_pass_has_fewer_tokens(tmp_path: Path) -> None:
    found = chosen("0.5B", tmp_path, gpus=1, gpu_gib=24)
    assert found.fits
    assert found.micro_batch_tokens == 4096
    assert not found.activation_checkpointing


def test_a_pass_has_room_for_the_longest_sequence(tmp_path: Path) -> None:
    found = chosen("0.5B", tmp_path, gpus=1, gpu_gib=24, longest=8192)
    assert found.micro_batch_tokens >= 8192
    assert found.activation_checkpointing, "the activations of so many tokens do not fit"


def test_a_large_model_gets_more_ranks_which_exchange_gradients_often(tmp_path: Path) -> None:
    found = chosen("7B", tmp_path, gpus=8, gpu_gib=80)
    assert found.fits
    assert (found.ranks, found.gradient_sync, found.activation_checkpointing) == (2, "micro_batch", True)
    assert chosen("32B", tmp_path, gpus=8, gpu_gib=80).ranks == 4, "half of the GPUs stay with the engines"


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    found = chosen("32B", tmp_path, gpus=1, gpu_gib=80)
    assert not found.fits
    assert found.learner_gib > 400
    assert found.activation_checkpointing, "the smallest numbers"
