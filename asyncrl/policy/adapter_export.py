"""Exports the adapter of a policy (`model.lora`) as a directory that peft, transformers and vLLM load, and merges an
adapter into its base model.

The directory of an adapter has these files:

adapter_model.safetensors  adapter_config.json  tokenizer.json …  COMPLETE
"""

import shutil
import uuid
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl import complete_directory
from asyncrl.config.schema import LoraSection
from asyncrl.errors import CheckpointError
from asyncrl.policy.adapter import WEIGHTS, is_of_adapter, write_adapter
from asyncrl.ranks.shard_files import SavedTensors


def convert_adapter(
    lora: LoraSection,
    *,
    weights_path: Path,
    base: str,
    tokenizer_path: str,
    path: Path,
    dtype: torch.dtype,
) -> None:
    """Exports the adapter of the checkpoint that `ShardedState.write` wrote to `weights_path`, to the directory `path`.

    `base` is the path or the Hub id of the model to which the adapter belongs, and `tokenizer_path` the folder of its
    tokenizer. Not a collective. Raises CheckpointError if the checkpoint has no adapter, if something other than an
    export or a checkpoint is at `path`, or if the directory cannot be written.
    """
    saved = SavedTensors(weights_path)
    weights = {name: saved.read(name, dtype=dtype) for name in saved if is_of_adapter(name)}
    if not weights:
        raise CheckpointError(f"{weights_path} has no tensors of an adapter; export another checkpoint")
    complete_directory.prepare(path)
    unfinished = complete_directory.unfinished(path)
    try:
        write_adapter(unfinished, weights, lora, base=base)
        AutoTokenizer.from_pretrained(tokenizer_path, trust_remote_code=False).save_pretrained(unfinished)
        _finish(path)
    except Exception as error:
        shutil.rmtree(unfinished, ignore_errors=True)  # frees its space: a full disk may be the cause
        raise CheckpointError(f"cannot write {path}: {type(error).__name__}: {error}") from error


def merge_adapter(adapter: Path, path: Path, *, base: str, dtype: torch.dtype) -> None:
    """Writes the model at `base` with the adapter in the directory `adapter` added to its weights, as a Hugging Face
    directory at `path`. It computes the sums in float32, in the memory of this process. Raises CheckpointError if the
    model at `base` lacks a layer of the adapter, or if something other than an export or a checkpoint is at `path`."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    adapted = PeftModel.from_pretrained(model, str(adapter))
    with safe_open(adapter / WEIGHTS, framework="pt") as file:
        # peft leaves out tensors without a layer, and only warns
        lacking = file.keys() - get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    if lacking:
        raise CheckpointError(
            f"the model at model.path = {base} has no layer for {len(lacking)} tensors of the adapter, such as "
            f"{min(lacking)}; name the model with which the run was started"
        )
    complete_directory.prepare(path)
    unfinished = complete_directory.unfinished(path)
    merged = adapted.merge_and_unload().to(dtype)
    merged.save_pretrained(unfinished)
    for weights in unfinished.glob("*.safetensors"):
        weights.chmod((unfinished / "config.json").stat().st_mode)  # safetensors makes it readable only for the owner
    AutoTokenizer.from_pretrained(base, trust_remote_code=False).save_pretrained(unfinished)
    _finish(path)


def _finish(path: Path) -> None:
    complete_directory.finish(path, save_id=uuid.uuid4().hex)
    complete_directory.publish(path)
