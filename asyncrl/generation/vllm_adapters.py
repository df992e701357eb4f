"""The LoRA adapters of one vLLM engine (`model.lora`): a directory for each version, and the requests that use it.

vLLM loads an adapter from a directory, while it decodes with others. A request keeps the adapter with which it began,
so all of its tokens have one version, and generation never pauses.

Invariants:

- A request begins with the newest adapter that is loaded whole.
- A directory is never written again: vLLM's prefix cache knows an adapter by its name and its path.
- A directory stays as long as a request may need it: vLLM reads an adapter again that it has dropped from its memory.
"""

import asyncio
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncrl.common.version import Version
from asyncrl.config.schema import Config, LoraSection
from asyncrl.errors import WeightError
from asyncrl.generation.interfaces import LoadTimes
from asyncrl.generation.shared_memory import ADAPTERS, SHARED_MEMORY
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.staging import StagedWeights
from asyncrl.weights.tensor_views import view_of

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's `max_lora_rank`. Adapters of a smaller rank are padded."""


def engine_arguments(config: Config, lora: LoraSection, modules: list[str]) -> dict[str, Any]:
    """Returns vLLM's arguments for adapters of the layers `modules`."""
    return {
        "enable_lora": True,
        "max_loras": slots(config),
        "max_lora_rank": vllm_rank(lora),
        # Otherwise vLLM also computes an adapter of zeros for each other layer, such as the output head.
        "lora_target_modules": modules,
    }


def slots(config: Config) -> int:
    """Returns the number of adapters that an engine holds: η + 2, the most that running requests use at the same time.
    η is `staleness.max_versions`.

    Each group that is generated is due at the learner's step v or later, so it began with version v − η or newer
    (docs/guarantees.md), and the newest version is at most v + 1. Groups whose tickets have ended may have older ones
    for a moment. Then vLLM lets new requests wait, or reads an adapter again from its directory.
    """
    return config.staleness.max_versions + 2


def vllm_rank(lora: LoraSection) -> int:
    """Returns the rank to which vLLM pads the adapters: the smallest one that it supports and that is large enough."""
    return next(rank for rank in VLLM_RANKS if rank >= lora.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A loaded adapter. `name` is unique in its engine, also among adapters of one version that was loaded again.
    `request` is vLLM's `LoRARequest` for it."""

    name: str
    version: Version
    path: Path
    request: Any


class VLLMAdapters:
    """Loads adapters into one `AsyncLLM`, one at a time. `make_request` is vLLM's `LoRARequest`, and `base` the model
    to which the adapters belong."""

    def __init__(self, llm: Any, *, make_request: Callable[..., Any], lora: LoraSection, base: str) -> None:
        self._llm = llm
        self._make_request = make_request
        self._lora = lora
        self._base = base
        self.folder = SHARED_MEMORY / f"{ADAPTERS}{uuid.uuid4().hex}"
        """The folder of the directories. It is in memory, and must be removed when the engine has ended."""
        self._loads = 0
        self._loaded: list[Adapter] = []
        self._dropped: list[Adapter] = []
        self._users = Counter[str]()
        self.newest: Adapter | None = None
        """The adapter with which requests begin; None before the first one."""

    async def load(
        self, manifest: Manifest, staged: StagedWeights, *, on_paused: Callable[[], None] | None = None
    ) -> LoadTimes:
        """Loads the adapter in `staged`, which the caller has verified. Later requests begin with it. `on_paused` is
        called right before the first of them may begin.

        Raises WeightError if there is no room for it, or if vLLM does not load it. Later requests then still begin with
        the adapter before it.
        """
        started_s = time.monotonic()
        await self._drop_unused()
        self._loads += 1
        name = f"{manifest.version}-{self._loads}"
        path = self.folder / name
        request = self._make_request(lora_name=name, lora_int_id=self._loads, lora_path=str(path))
        try:
            await asyncio.to_thread(self._write, path, manifest, staged)
            loaded = await self._llm.add_lora(request)
        except Exception as error:
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            raise WeightError(
                f"the adapter {manifest.version} could not be loaded ({type(error).__name__}: {error}); check that "
                f"{SHARED_MEMORY} has room, and that vLLM supports LoRA for this model"
            ) from error
        if not loaded:
            raise WeightError(f"vLLM did not load the adapter {manifest.version}, and gives no reason")
        if on_paused is not None:
            on_paused()
        self.newest = Adapter(name=name, version=manifest.version, path=path, request=request)
        self._loaded.append(self.newest)
        return LoadTimes(pause_s=0.0, load_s=time.monotonic() - started_s, resume_s=0.0)

    @contextmanager
    def used(self) -> Iterator[Adapter]:
        """Yields the newest adapter for a request, and keeps it from being dropped until the end of the block."""
        adapter = self.newest
        assert adapter is not None, "a replica starts no request before it has loaded a version"
        self._users[adapter.name] += 1
        try:
            yield adapter
        finally:
            self._users[adapter.name] -= 1

    async def _drop_unused(self) -> None:
        """Lets vLLM drop the adapters that no request uses, except the newest, so that it has room for another one.

        The directory of a dropped adapter stays until the next call. A request that was cancelled may still be in a
        decoding step for which vLLM reads its adapter.
        """
        for adapter in self._dropped:
            await asyncio.to_thread(shutil.rmtree, adapter.path, ignore_errors=True)
        self._dropped = [each for each in self._loaded if each is not self.newest and not self._users[each.name]]
        for adapter in self._dropped:
            await self._llm.remove_lora(adapter.request.lora_int_id)
            self._loaded.remove(adapter)
            del self._users[adapter.name]

    def _write(self, path: Path, manifest: Manifest, staged: StagedWeights) -> None:
        from asyncrl.policy.adapter import write_adapter  # imports peft, which engines without adapters do not need

        self.folder.mkdir(mode=0o700, exist_ok=True)  # every user of the machine can enter /dev/shm
        path.mkdir()
        flat = torch.from_numpy(staged.flat)
        tensors = {entry.name: view_of(entry, flat) for entry in manifest.tensors}
        write_adapter(path, tensors, self._lora, base=self._base)
