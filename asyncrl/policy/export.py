"""Exports the policy's weights as a Hugging Face directory, which vLLM and transformers can load.

The weights are those of a checkpoint, so an export can run beside training, and needs no whole model in a process.
"""

import copy
import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedModel

from asyncrl import complete_directory
from asyncrl.atomic_write import sync
from asyncrl.errors import CheckpointError
from asyncrl.ranks.collectives import on_all_ranks, on_first_rank
from asyncrl.ranks.shard_files import SavedTensors
from asyncrl.weights.manifest import ParameterSpec

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
FILE_BYTES = 2**30
"""Largest size of a file, unless one tensor alone is larger."""


def convert_to_hf(
    model: PreTrainedModel,
    specs: Sequence[ParameterSpec],
    *,
    weights_path: Path,
    tokenizer_path: str,
    path: Path,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
) -> None:
    """Writes safetensors, config and tokenizer, with the weights that `ShardedState.write` wrote to `weights_path`. An
    earlier export at `path` is replaced after the new one is complete.

    `specs` are the model's parameters in the precision `dtype`. Of `model`, whose weights may change meanwhile, only
    the configuration is read. Above `FILE_BYTES`, the weights are in several files with an index, as transformers
    writes them. The ranks write the files in turn, and each holds one file in memory. All must see both paths.

    This is a collective, and may run in a thread of its own if `group` has no other traffic. Raises CheckpointError on
    all ranks if the export cannot be written, or if something else is at `path`.
    """
    rank, unfinished = dist.get_rank(group), complete_directory.unfinished(path)
    on_first_rank(lambda: complete_directory.prepare(path), group=group)

    def write_weights() -> None:
        saved = SavedTensors(weights_path)
        files = _by_file([spec for spec in specs if spec.name in saved])  # a tied weight is saved under one name
        for name in list(files)[rank :: dist.get_world_size(group)]:
            # no variable for the tensors: it would keep them while those of the next file are read
            save_file(
                {spec.name: saved.read(spec.name, dtype=dtype) for spec in files[name]},
                unfinished / name,
                metadata={"format": "pt"},
            )
            sync(unfinished / name)
        if rank == 0 and len(files) > 1:
            _write_index(unfinished / _INDEX, files)

    def write_rest() -> None:
        _write_rest(model, tokenizer_path=tokenizer_path, path=unfinished, dtype=dtype)
        complete_directory.finish(path, save_id=uuid.uuid4().hex)
        complete_directory.publish(path)

    try:
        on_all_ranks(write_weights, group=group)
        on_first_rank(write_rest, group=group)
    except Exception as error:
        if rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)  # frees its space: a full disk may be the cause
        raise CheckpointError(f"cannot write {path}: {error}") from error


def _by_file(specs: Sequence[ParameterSpec]) -> dict[str, list[ParameterSpec]]:
    """Divides parameters into files of at most `FILE_BYTES`, by name. A larger parameter has a file of its own."""
    files: list[list[ParameterSpec]] = [[]]
    for spec in specs:
        if files[-1] and sum(each.nbytes for each in files[-1]) + spec.nbytes > FILE_BYTES:
            files.append([])
        files[-1].append(spec)
    if len(files) == 1:
        return {_WEIGHTS: files[0]}
    return {f"model-{at:05d}-of-{len(files):05d}.safetensors": file for at, file in enumerate(files, start=1)}


def _write_index(path: Path, files: Mapping[str, Sequence[ParameterSpec]]) -> None:
    index = {
        "metadata": {"total_size": sum(spec.nbytes for file in files.values() for spec in file)},
        "weight_map": {spec.name: name for name, file in files.items() for spec in file},
    }
    path.write_text(json.dumps(index, indent=2))


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
