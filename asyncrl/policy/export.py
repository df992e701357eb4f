"""Exports the policy's weights as a Hugging Face directory, which vLLM and transformers can load.

The weights are those of a checkpoint, so an export can run beside training, and needs no whole model in a process.
"""

import copy
import json
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from transformers import AutoTokenizer, PreTrainedModel

from asyncrl import complete_directory
from asyncrl.errors import CheckpointError
from asyncrl.ranks.collectives import on_all_ranks, on_first_rank
from asyncrl.ranks.shard_files import SavedTensors, write_tensors
from asyncrl.weights.manifest import ParameterSpec

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
    file_bytes: int | None = None,
) -> None:
    """Writes safetensors, config and tokenizer, with the weights that `ShardedState.write` wrote to `weights_path`. An
    earlier export at `path` is replaced after the new one is complete.

    `specs` are the model's parameters in the precision `dtype`. Only the configurations of `model` are read, so its
    weights may change meanwhile. Above `file_bytes` (default: `FILE_BYTES`), the weights are in several files with an
    index, as transformers writes them. The files are divided among the ranks, and each rank holds one file in memory
    at a time. All ranks must see both paths.

    This is a collective, and may run in a thread of its own if `group` has no other traffic. Raises CheckpointError on
    all ranks if the export cannot be written, or if something other than an export or a checkpoint is at `path`.
    """
    rank, unfinished = dist.get_rank(group), complete_directory.unfinished(path)
    on_first_rank(lambda: complete_directory.prepare(path), group=group)

    def write_weights() -> None:
        saved = SavedTensors(weights_path)
        split = split_state_dict_into_shards_factory(
            {spec.name: spec for spec in specs if spec.name in saved},  # a tied weight is saved under one name
            get_storage_size=lambda spec: spec.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=file_bytes or FILE_BYTES,
        )
        for file in list(split.filename_to_tensors)[rank :: dist.get_world_size(group)]:
            # no variable for the tensors: it would keep them while those of the next file are read
            write_tensors(
                {name: saved.read(name, dtype=dtype) for name in split.filename_to_tensors[file]}, unfinished / file
            )
        if rank == 0 and split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (unfinished / _INDEX).write_text(json.dumps(index, indent=2))

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


def _write_rest(model: PreTrainedModel, *, tokenizer_path: str, path: Path, dtype: torch.dtype) -> None:
    """Writes configs and tokenizer to `path`, beside the files of the weights.

    It does not use `model.save_pretrained`, because FSDP renames the model's class, and the config would then name a
    class that does not exist elsewhere. The config object itself still has the original class name.
    """
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.save_pretrained(path)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(path)
    AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=False).save_pretrained(path)
