"""accelerate shards layers that a model has, also if transformers names further ones for the family."""

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from tiny_families import tiny_model

from asyncrl.ranks.accelerator import with_present_layers
from asyncrl.value.model import ValueModel

pytestmark = pytest.mark.slow


def sharded(model: torch.nn.Module) -> set[str]:
    """Returns the names of the classes that accelerate shards one by one."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    policy = fsdp2_prepare_auto_wrap_policy(plugin, with_present_layers(model))
    assert policy is not None
    return {type(module).__name__ for module in model.modules() if policy(module)}


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [
        ("gemma4_text", {"Gemma4TextDecoderLayer"}),
        ("qwen3_5_text", {"Qwen3_5DecoderLayer"}),
        ("qwen3_5_moe_text", {"Qwen3_5MoeDecoderLayer"}),
        ("jamba", {"JambaAttentionDecoderLayer", "JambaMambaDecoderLayer"}),
        ("llama", {"LlamaDecoderLayer"}),
        ("openai-gpt", set()),
    ],
)
def test_the_layers_of_the_text_model_are_sharded(model_type: str, layers: set[str]) -> None:
    model = tiny_model(model_type)
    assert sharded(model) == layers
    assert sharded(ValueModel(model.base_model)) == layers


def test_a_layer_kind_that_is_absent_with_this_number_of_layers_is_left_out() -> None:
    assert sharded(tiny_model("jamba", num_hidden_layers=1)) == {"JambaMambaDecoderLayer"}
    assert sharded(tiny_model("zamba2", layers_block_type=["mamba"] * 2)) == {"Zamba2MambaDecoderLayer"}


def test_a_model_without_names_is_sharded_as_a_whole() -> None:
    assert sharded(torch.nn.Sequential(torch.nn.Linear(2, 2))) == set()
