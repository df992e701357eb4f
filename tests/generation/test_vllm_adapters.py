"""The adapters of an engine: which one a request begins with, and how long its directory stays."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asyncrl.common.version import Version
from asyncrl.config.schema import Config, LoraSection
from asyncrl.errors import WeightError
from asyncrl.generation import vllm_adapters
from asyncrl.generation.shared_memory import EngineProcesses, sweep_shared_memory
from asyncrl.generation.vllm_adapters import VLLMAdapters, engine_arguments
from asyncrl.weights.manifest import Bucket, Manifest, ParameterSpec, Piece, Probe, checksum, layout
from asyncrl.weights.staging import StagedWeights

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]  # imports torch and peft

NAMES = [f"model.layers.0.self_attn.q_proj.lora_{side}.default.weight" for side in "AB"]


class Engine:
    """An engine. It refuses adapters with the error `refused`, if there is one."""

    def __init__(self) -> None:
        self.loaded: dict[int, Path] = {}
        self.refused = ""

    async def add_lora(self, request: Any) -> bool:
        if self.refused:
            raise ValueError(self.refused)
        path = Path(request.lora_path)
        assert {*os.listdir(path)} == {"adapter_config.json", "adapter_model.safetensors"}
        assert path.parent.stat().st_mode & 0o777 == 0o700, "other users can read the weights"
        assert path not in self.loaded.values(), "a directory was written again"
        self.loaded[request.lora_int_id] = path
        return True

    async def remove_lora(self, number: int) -> bool:
        return self.loaded.pop(number).exists()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def adapters(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VLLMAdapters:
    monkeypatch.setattr(vllm_adapters, "SHARED_MEMORY", tmp_path)
    return VLLMAdapters(engine, make_request=SimpleNamespace, lora=LoraSection(rank=4, alpha=8), base="base")


def publication(step: int) -> tuple[Manifest, StagedWeights]:
    shapes = [(4, 6), (6, 4)]
    entries = layout(ParameterSpec(name, shape, "float32", 96) for name, shape in zip(NAMES, shapes, strict=True))
    data = torch.full((192,), step, dtype=torch.uint8).numpy()
    pieces = tuple(Piece(entry.offset, 96) for entry in entries)
    manifest = Manifest(
        version=Version(1, step),
        tensors=entries,
        buckets=(Bucket(pieces=pieces, checksum=checksum([data])),),
        probe=Probe(tokens=(), logprobs=()),
    )
    weights = StagedWeights()
    weights.begin(manifest)
    weights.put(weights.missing[0], data)
    return manifest, weights


def folders(adapters: VLLMAdapters) -> list[str]:
    return sorted(os.listdir(adapters.folder))


async def test_requests_keep_their_adapter_and_later_ones_begin_with_the_newest(adapters: VLLMAdapters) -> None:
    await adapters.load(*publication(0))
    with adapters.used() as first:
        await adapters.load(*publication(1))
        with adapters.used() as second:
            assert (first.version, second.version) == (Version(1, 0), Version(1, 1))
            assert first.path != second.path
            await adapters.load(*publication(2))
            await adapters.load(*publication(3))
            assert first.path.exists()
            assert second.path.exists()


async def test_an_adapter_is_dropped_when_no_request_uses_it_and_deleted_one_load_later(
    adapters: VLLMAdapters, engine: Engine
) -> None:
    await adapters.load(*publication(0))
    with adapters.used():
        await adapters.load(*publication(1))
        await adapters.load(*publication(2))
    assert sorted(engine.loaded) == [1, 2, 3], "the newest one may be used until the next one is loaded"
    await adapters.load(*publication(3))
    assert sorted(engine.loaded) == [3, 4]
    assert folders(adapters) == ["1.0-1", "1.1-2", "1.2-3", "1.3-4"], "a decoding step may still read them"
    await adapters.load(*publication(4))
    assert folders(adapters) == ["1.2-3", "1.3-4", "1.4-5"]


async def test_a_version_that_is_loaded_again_has_another_name_and_path(adapters: VLLMAdapters, engine: Engine) -> None:
    await adapters.load(*publication(7))
    await adapters.load(*publication(7))
    assert [path.name for path in engine.loaded.values()] == ["1.7-1", "1.7-2"]


async def test_an_adapter_that_is_refused_leaves_the_one_before_and_no_directory(
    adapters: VLLMAdapters, engine: Engine
) -> None:
    await adapters.load(*publication(0))
    engine.refused = "rank 64 is greater than 16"
    paused: list[bool] = []
    with pytest.raises(WeightError, match=r"adapter 1.1 could not be loaded .ValueError: rank 64"):
        await adapters.load(*publication(1), on_paused=lambda: paused.append(True))
    assert paused == []
    assert folders(adapters) == ["1.0-1"]
    with adapters.used() as used:
        assert used.version == Version(1, 0)


async def test_commits_wait_from_the_first_request_on_that_may_use_a_new_adapter(adapters: VLLMAdapters) -> None:
    seen: list[Version | None] = []
    await adapters.load(*publication(0), on_paused=lambda: seen.append(None))
    await adapters.load(*publication(1), on_paused=lambda: seen.append(adapters.newest and adapters.newest.version))
    assert seen == [None, Version(1, 0)]


async def test_a_killed_engine_s_folder_is_removed_with_its_segments(
    adapters: VLLMAdapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.generation.shared_memory.SHARED_MEMORY", tmp_path)
    (tmp_path / "psm_00000001").touch()
    await adapters.load(*publication(0))
    processes = EngineProcesses.of([], also=[adapters.folder.name])
    await asyncio.to_thread(sweep_shared_memory, [*processes.shared_memory, "psm_00000001", "gone"])
    assert os.listdir(tmp_path) == []


async def test_an_engine_has_room_for_all_adapters_that_the_staleness_limit_allows() -> None:
    config = Config.model_validate({"model": {"lora": {"rank": 9}}, "staleness": {"max_versions": 5}})
    assert config.model.lora is not None
    found = engine_arguments(config, config.model.lora, ["q_proj"])
    assert (found["max_loras"], found["max_lora_rank"], found["lora_target_modules"]) == (7, 16, ["q_proj"])
