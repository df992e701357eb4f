"""Exports the policy's weights as a Hugging Face directory, which vLLM and transformers can load.

`save_hf` gathers the live weights on rank 0. `convert_to_hf` reads them from a checkpoint, and can run beside training.
"""

import copy
import json
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedModel

from asyncrl import complete_directory
from asyncrl.errors import CheckpointError
from asyncrl.ranks.collectives import on_first_rank
from asyncrl.ranks.gather import gather_weights
from asyncrl.ranks.shard_files import SavedTensors
from asyncrl.weights.manifest import ParameterSpec

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
FILE_BYTES = 2**30
"""`convert_to_hf` begins another file when one has this size, and holds one file in memory."""


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
            save_file(weights, unfinished / _WEIGHTS, metadata={"format": "pt"})
            _write_rest(model, tokenizer_path=tokenizer_path, path=unfinished, dtype=dtype)
            complete_directory.finish(path, save_id=uuid.uuid4().hex)
            complete_directory.publish(path)
        except Exception as error:
            shutil.rmtree(unfinished, ignore_errors=True)  # frees its space: a full disk may be the cause
            raise CheckpointError(f"cannot write {path}: {type(error).__name__}: {error}") from error

    on_first_rank(write, group=group)


def convert_to_hf(
    model: PreTrainedModel,
    specs: Sequence[ParameterSpec],
    *,
    weights_path: Path,
    tokenizer_path: str,
    path: Path,
    dtype: torch.dtype,
) -> None:
    """Writes the same directory as `save_hf`, with the weights that `ShardedState.write` wrote to `weights_path`. Not a
    collective. Of `model`, whose weights may change meanwhile, only the configuration is read.

    `specs` are the model's parameters in the precision `dtype`. Above `FILE_BYTES`, the weights are in several files
    with an index, as transformers writes them.
    """
    complete_directory.prepare(path)
    unfinished = complete_directory.unfinished(path)
    saved = SavedTensors(weights_path)
    files = list(_by_file([spec for spec in specs if spec.name in saved]))  # a tied weight is saved under one name
    names = [_WEIGHTS] if len(files) == 1 else [_part_name(at, of=len(files)) for at in range(1, len(files) + 1)]
    for name, parameters in zip(names, files, strict=True):
        weights = {spec.name: saved.read(spec.name).to(dtype) for spec in parameters}
        save_file(weights, unfinished / name, metadata={"format": "pt"})
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(spec.nbytes for parameters in files for spec in parameters)},
            "weight_map": {spec.name: name for name, file in zip(names, files, strict=True) for spec in file},
        }
        (unfinished / _INDEX).write_text(json.dumps(index, indent=2))
    _write_rest(model, tokenizer_path=tokenizer_path, path=unfinished, dtype=dtype)
    complete_directory.finish(path, save_id=uuid.uuid4().hex)
    complete_directory.publish(path)


def _part_name(at: int, *, of: int) -> str:
    return f"model-{at:05d}-of-{of:05d}.safetensors"


def _by_file(specs: Sequence[ParameterSpec]) -> Iterator[list[ParameterSpec]]:
    """Divides parameters into files of at most `FILE_BYTES`. A larger parameter has a file of its own."""
    file: list[ParameterSpec] = []
    for spec in specs:
        if file and sum(each.nbytes for each in file) + spec.nbytes > FILE_BYTES:
            yield file
            file = []
        file.append(spec)
    yield file


def _write_rest(model: PreTrainedModel, *, tokenizer_path: str, path: Path, dtype: torch.dtype) -> None:
    """Writes configs and tokenizer to `path`, beside the files of the weights.

    It does not use `model.save_pretrained`, because FSDP renames the model's class, and the config would then name a
    class that does not exist elsewhere. The config object itself still has the original class name.
    """
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.save_pretrained(path)
    # safetensors makes its files readable only for the owner; this gives them the mode of the other files, so that
    # another user can serve the model
    for weights in path.glob("*.safetensors"):
        weights.chmod((path / "config.json").stat().st_mode)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(path)
    AutoTokenizer.from_pretrained(tokenizer_path).save_pretrained(path)
