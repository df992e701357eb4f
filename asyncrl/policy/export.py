"""Exports the policy's weights as a Hugging Face directory, which vLLM and transformers can load."""

import copy
import shutil
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedModel

from asyncrl import complete_directory
from asyncrl.errors import CheckpointError
from asyncrl.ranks.checkpoint import on_first_rank
from asyncrl.ranks.gather import gather_weights

_WEIGHTS = "model.safetensors"


def save_hf(
    model: PreTrainedModel, *, tokenizer_path: str, path: Path, dtype: torch.dtype, group: dist.ProcessGroup
) -> None:
    """Writes safetensors, config and tokenizer from rank 0. An earlier export at `path` is replaced after the new one
    is complete.

    This is a collective. Raises CheckpointError on all ranks if the export cannot be written, or if something else is
    at `path`.
    """
    on_first_rank(lambda: complete_directory.prepare(path), group=group)
    weights: dict[str, torch.Tensor] = {}
    pointers: set[int] = set()
    for name, tensor in gather_weights(model, dtype=dtype):
        # safetensors refuses tensors that share memory, so a tied weight is written under its first name only
        if dist.get_rank(group) == 0 and tensor.data_ptr() not in pointers:
            pointers.add(tensor.data_ptr())
            weights[name] = tensor

    def write() -> None:
        unfinished = complete_directory.unfinished(path)
        try:
            _write_hf(model, weights, tokenizer_path=tokenizer_path, path=unfinished, dtype=dtype)
            complete_directory.finish(path, save_id=uuid.uuid4().hex)
            complete_directory.publish(path)
        except Exception as error:
            shutil.rmtree(unfinished, ignore_errors=True)  # frees its space: a full disk may be the cause
            raise CheckpointError(f"cannot write {path}: {type(error).__name__}: {error}") from error

    on_first_rank(write, group=group)


def _write_hf(
    model: PreTrainedModel, weights: dict[str, torch.Tensor], *, tokenizer_path: str, path: Path, dtype: torch.dtype
) -> None:
    """Writes weights, configs and tokenizer to `path`.

    It does not use `model.save_pretrained`, because FSDP renames the model's class, and the config would then name a
    class that does not exist elsewhere. The config object itself still has the original class name.
    """
    save_file(weights, path / _WEIGHTS, metadata={"format": "pt"})
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.save_pretrained(path)
    # safetensors makes its file readable only for the owner; this gives it the mode of the other files, so that another
    # user can serve the model
    (path / _WEIGHTS).chmod((path / "config.json").stat().st_mode)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(path)
    AutoTokenizer.from_pretrained(tokenizer_path).save_pretrained(path)
