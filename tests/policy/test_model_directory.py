"""The number of parameters by a model's config.json is near that of the model."""

from pathlib import Path

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from asyncrl.generation.model_parameters import model_without_weights
from asyncrl.policy.model_directory import number_of_parameters

pytestmark = pytest.mark.slow

QWEN2_7B = Qwen2Config(
    hidden_size=3584,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    intermediate_size=18944,
    vocab_size=152064,
    tie_word_embeddings=False,
)
QWEN3_1_7B = Qwen3Config(
    hidden_size=2048,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=6144,
    vocab_size=151936,
    tie_word_embeddings=True,
)
LLAMA = LlamaConfig(hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048)
EXPERTS = Qwen3MoeConfig(
    hidden_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    num_experts=16,
    moe_intermediate_size=256,
    vocab_size=1000,
)


@pytest.mark.parametrize("config", [QWEN2_7B, QWEN3_1_7B, LLAMA, EXPERTS], ids=lambda config: config.model_type)
def test_the_number_is_that_of_the_model_within_one_percent(config: PretrainedConfig, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    exact = sum(parameter.numel() for parameter in model_without_weights(str(tmp_path)).parameters())
    assert number_of_parameters(tmp_path) == pytest.approx(exact, rel=0.01)


def test_a_config_without_sizes_has_no_number(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 64}')
    assert number_of_parameters(tmp_path) is None
