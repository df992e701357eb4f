"""Between two runs an engine drops all state of the first one, or is refused. That of the next run begins anew."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.common.version import Version
from asyncrl.config.load import load_config
from asyncrl.demo.directory import TINY_RECIPE
from asyncrl.errors import RunError
from asyncrl.generation import vllm_engine
from asyncrl.generation.prefixes import engine_seed
from asyncrl.generation.vllm_engine import NO_VERSION, VLLMEngine

pytestmark = pytest.mark.slow  # imports torch


class IdleLLM:
    """Stands for `AsyncLLM` without a request. `calls` lists the calls that change it."""

    errored = False

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.unfinished, self.paused, self.empty = 0, False, True

    def get_num_unfinished_requests(self) -> int:
        return self.unfinished

    async def is_paused(self) -> bool:
        return self.paused

    async def reset_prefix_cache(self) -> bool:
        self.calls.append(("reset_prefix_cache",))
        return self.empty

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> None:
        self.calls.append((method, *args))

    async def update_weight_version(self, label: str) -> None:
        self.calls.append(("label", label))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the directory of a model without a tokenizer."""
    monkeypatch.setattr(vllm_engine, "load_tokenizer", lambda *_, **__: None)
    monkeypatch.setattr(vllm_engine, "further_end", lambda _: 7)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("weights")
    return tmp_path


def engine_of(llm: IdleLLM, model: Path, *overrides: str) -> VLLMEngine:
    """Returns the engine of a run that has loaded step 5 by its third update."""
    config = load_config([], list(overrides))
    settings = vllm_engine._settings(config, model_path=str(model), load_weights=False, sleep_mode=False)
    engine = VLLMEngine(llm, config=config, processes=[], settings=settings)
    engine.weights.version, engine.weights.loads = Version(2, 5), 3
    return engine


@pytest.mark.asyncio
async def test_an_engine_that_rests_has_an_empty_cache_and_no_version_and_its_workers_forget_updates(
    model: Path,
) -> None:
    llm = IdleLLM()
    await engine_of(llm, model).rest()
    assert sorted(llm.calls) == [("forget_updates",), ("label", NO_VERSION), ("reset_prefix_cache",)]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "spoil",
    [
        lambda engine, llm: setattr(llm, "unfinished", 1),
        lambda engine, llm: setattr(llm, "paused", True),
        lambda engine, llm: setattr(llm, "empty", False),
        lambda engine, llm: setattr(llm, "errored", True),
        lambda engine, llm: setattr(engine.weights, "is_whole", False),
        lambda engine, llm: setattr(engine, "_adapters", SimpleNamespace()),
        lambda engine, llm: engine._running.add("asyncrl-1"),
        lambda engine, llm: engine._sleeping.add("weights"),
    ],
    ids=["unfinished", "paused", "cache", "dead", "torn", "adapters", "running", "sleeping"],
)
async def test_an_engine_that_is_not_in_order_does_not_rest(
    spoil: Callable[[VLLMEngine, IdleLLM], None], model: Path
) -> None:
    llm = IdleLLM()
    engine = engine_of(llm, model)
    spoil(engine, llm)
    with pytest.raises(RunError):
        await engine.rest()
    assert ("label", NO_VERSION) not in llm.calls


@pytest.mark.asyncio
async def test_the_engine_of_the_next_run_has_its_seed_and_no_weights_and_counts_loads_on(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = [vllm_engine.PromptTokens(9, 4)]
    monkeypatch.setattr(vllm_engine, "prompt_tokens", lambda: counted[-1])
    llm = IdleLLM()
    before = engine_of(llm, model)
    await before.rest()
    llm.calls.clear()
    other = load_config([], ["run.seed=3", "algorithm.loss=opsm", "run.name=next"])
    after = await before.taken_over(other, model_path=str(model), name="generator-a.1")
    assert llm.calls == [("seed_samples", engine_seed(3, "generator-a.1"))]
    assert after.weights.version is None
    assert after.weights.loads == 3, "a salt of the prefix cache of the first run must not come again"
    assert after.prompt_tokens == (0, 0)
    counted.append(vllm_engine.PromptTokens(30, 5))
    assert after.prompt_tokens == (21, 1)
    assert next(after._requests) == 0


@pytest.mark.asyncio
async def test_an_argument_that_the_next_run_does_not_set_is_another_setting_too(model: Path) -> None:
    before = engine_of(IdleLLM(), model, "generator.engine_args={max_num_partial_prefills: 1}")
    await before.rest()
    with pytest.raises(RunError, match="max_num_partial_prefills"):
        await before.taken_over(load_config([], []), model_path=str(model), name="a")


@pytest.mark.asyncio
async def test_the_recipe_of_a_tiny_model_may_differ(model: Path) -> None:
    """It changes with the questions of the seed, and no engine reads it."""
    (model / TINY_RECIPE).write_text("1")
    before = engine_of(IdleLLM(), model)
    await before.rest()
    (model / TINY_RECIPE).write_text("2")
    await before.taken_over(load_config([], ["run.seed=3"]), model_path=str(model), name="a")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.dtype=bfloat16", "dtype"),
        ("model.max_length=17", "max_model_len"),
        ("generator.engine_args={max_num_seqs: 3}", "max_num_seqs"),
        ("generator.kv_cache_gib=1", "kv_cache_memory_bytes"),
        ("learner.group_size=2", "max_num_seqs"),
    ],
)
async def test_a_run_whose_engine_would_start_with_other_arguments_gets_none(
    override: str, key: str, model: Path
) -> None:
    before = engine_of(llm := IdleLLM(), model)
    await before.rest()
    llm.calls.clear()
    with pytest.raises(RunError, match=key):
        await before.taken_over(load_config([], [override]), model_path=str(model), name="a")
    assert llm.calls == []


@pytest.mark.asyncio
async def test_a_model_whose_files_have_changed_gets_a_new_engine_but_not_one_with_new_weights(model: Path) -> None:
    before = engine_of(IdleLLM(), model)
    await before.rest()
    (model / "model.safetensors").write_text("other weights")
    before = await before.taken_over(load_config([], []), model_path=str(model), name="a")
    (model / "config.json").write_text('{"layers": 9}')
    with pytest.raises(RunError, match="files of the model"):
        await before.taken_over(load_config([], []), model_path=str(model), name="a")
