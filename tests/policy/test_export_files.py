"""An export holds one file's tensors in memory, or one tensor that is larger."""

import json
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from asyncrl.policy import export
from asyncrl.ranks.gather import parameter_specs
from asyncrl.ranks.shard_files import STATE

pytestmark = pytest.mark.slow  # imports transformers

SHARDS = 3
FILE_BYTES = 2**16


class AllocatedBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations have made and that are alive. Views of a file are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._users: dict[int, int] = {}
        self._lock = threading.RLock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if torch.is_tensor(tensor) else None
            if storage and (storage.data_ptr() in self._users or storage.data_ptr() not in given):
                self._count(tensor, storage.data_ptr(), storage.nbytes())
        return result

    def _count(self, tensor: torch.Tensor, address: int, nbytes: int) -> None:
        if address not in self._users:
            self.now += nbytes
            self.most = max(self.most, self.now)
        self._users[address] = self._users.get(address, 0) + 1
        weakref.finalize(tensor, self._drop, address, nbytes)

    def _drop(self, address: int, nbytes: int) -> None:
        self._users[address] -= 1
        if not self._users[address]:
            del self._users[address]
            self.now -= nbytes


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()


def write_shards(model: torch.nn.Module, folder: Path) -> None:
    """Writes the weights as `SHARDS` ranks would."""
    (folder / STATE).mkdir(parents=True)
    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(SHARDS)]
    offsets: list[dict[str, Any]] = [{} for _ in range(SHARDS)]
    for name, parameter in model.named_parameters():
        start = 0
        for rank, part in enumerate(parameter.detach().chunk(SHARDS)):
            shards[rank][name] = part.contiguous()
            offsets[rank][name] = {SAVED_OFFSETS_KEY: [start, *(0 for _ in part.shape[1:])]}
            start += len(part)
    for rank in range(SHARDS):
        metadata = {CUSTOM_METADATA_KEY: json.dumps(offsets[rank])}
        save_file(shards[rank], folder / STATE / f"shard-{rank}.safetensors", metadata=metadata)


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="a").save_pretrained(folder)


@pytest.mark.parametrize("vocabulary", [64, 1024])  # the larger embedding has a file of its own
def test_an_export_in_several_files_holds_one_file_or_its_largest_tensor(
    vocabulary: int, group: dist.ProcessGroup, tmp_path: Path
) -> None:
    described = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(described)  # type: ignore[no-untyped-call]
    specs = parameter_specs(model, dtype=torch.bfloat16)
    write_shards(model, tmp_path / "weights")
    write_tokenizer(tmp_path / "tokenizer")
    with AllocatedBytes() as allocated:
        export.convert_to_hf(
            model,
            specs,
            weights_path=tmp_path / "weights",
            tokenizer_path=str(tmp_path / "tokenizer"),
            path=tmp_path / "hf",
            dtype=torch.bfloat16,
            group=group,
            file_bytes=FILE_BYTES,
        )
    largest = max(spec.nbytes for spec in specs)
    assert (largest > FILE_BYTES) == (vocabulary > 64)
    limit = max(FILE_BYTES, largest)
    assert limit / 2 < allocated.most <= limit + 2**12, "messages between the ranks are tensors, too"
    files = list((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 4
    assert max(file.stat().st_size for file in files) < limit + 2**13, "beside the weights, a file has only a header"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded[name], weight.to(torch.bfloat16)), name
