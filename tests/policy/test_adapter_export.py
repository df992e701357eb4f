"""The adapter of a checkpoint is exported from the checkpoint's own files, and merged into its own model only."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from tiny_groups import make_model
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from asyncrl.config.schema import LoraSection
from asyncrl.errors import CheckpointError
from asyncrl.policy.adapter import with_adapter
from asyncrl.policy.adapter_export import convert_adapter, merge_adapter
from asyncrl.ranks.shard_files import STATE

pytestmark = pytest.mark.slow  # imports transformers

ROWS = torch.tensor([[3, 9, 14, 2, 30]])
LORA = LoraSection(rank=4, alpha=8)


def write_state(model: torch.nn.Module, folder: Path) -> None:
    """Writes the trained parameters, and a buffer, as one rank would."""
    tensors = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    tensors["model.positions"] = torch.zeros(2)
    offsets = {name: {SAVED_OFFSETS_KEY: [0] * value.dim()} for name, value in tensors.items()}
    (folder / STATE).mkdir(parents=True)
    save_file(tensors, folder / STATE / "shard.safetensors", metadata={CUSTOM_METADATA_KEY: json.dumps(offsets)})


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=ROWS).logits
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, torch.Tensor]:
    """A model, the export of its adapter, and what the model computes with the adapter."""
    folder = tmp_path_factory.mktemp("exported")
    base = make_model(folder / "model")
    model = with_adapter(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LORA, seed=0)
    draw = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape, generator=draw) * 0.2)
    write_state(model, folder / "saved")
    export(folder / "saved", base, folder / "adapter")
    return Path(base), folder / "adapter", logits(model)


def export(saved: Path, base: object, path: Path) -> None:
    convert_adapter(LORA, weights_path=saved, base=str(base), tokenizer_path=str(base), path=path, dtype=torch.float32)


def test_the_export_has_the_adapter_of_the_checkpoint(exported: tuple[Path, Path, torch.Tensor]) -> None:
    base, adapter, wanted = exported
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(adapter))
    assert torch.allclose(logits(loaded), wanted, atol=1e-5)


def test_it_is_merged_into_its_model(exported: tuple[Path, Path, torch.Tensor], tmp_path: Path) -> None:
    base, adapter, wanted = exported
    merge_adapter(adapter, tmp_path / "whole", base=str(base), dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    assert torch.allclose(logits(merged), wanted, atol=1e-4)


def test_it_is_not_merged_into_a_model_without_its_layers(
    exported: tuple[Path, Path, torch.Tensor], tmp_path: Path
) -> None:
    base, adapter, _ = exported
    config = Qwen3Config.from_pretrained(base, num_hidden_layers=1, layer_types=["full_attention"])
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"has no layer for .* tensors of the adapter, such as"):
        merge_adapter(adapter, tmp_path / "whole", base=str(tmp_path / "other"), dtype=torch.float32)
    assert not (tmp_path / "whole").exists()


def test_a_checkpoint_without_an_adapter_is_refused(exported: tuple[Path, Path, torch.Tensor], tmp_path: Path) -> None:
    base, _, _ = exported
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    write_state(plain.model.norm, tmp_path / "saved")
    with pytest.raises(CheckpointError, match="no tensors of an adapter"):
        export(tmp_path / "saved", base, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
