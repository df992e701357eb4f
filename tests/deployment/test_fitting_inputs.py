"""Every deployment gives the buffer the prompts that fit the model: they are measured before a run is entered."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from joined_scene import MadeUpActors

from asyncrl.config.schema import Config, EvalSection, RunSection
from asyncrl.data.left_out import LeftOutRow
from asyncrl.data.prompts import Task
from asyncrl.data.tokenizer import load_tokenizer
from asyncrl.demo.tiny_model import build_tokenizer
from asyncrl.deployment import inputs
from asyncrl.deployment.inputs import Inputs, Prompts
from asyncrl.deployment.pool import GeneratorDeployment
from asyncrl.deployment.shared_actors import JoinedCluster
from asyncrl.errors import DatasetError

pytestmark = pytest.mark.slow

SHORT, LONG = "ab>", "abcd>"


def tasks(*prompts: str) -> list[Task]:
    return [Task(question=prompt, prompt=prompt, answer="", row=row) for row, prompt in enumerate(prompts, start=1)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    build_tokenizer(max_length=16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def settings(model: Path, **data: Any) -> Config:
    sections = {"model": {"max_length": 16, "path": str(model)}, "data": {"max_prompt_tokens": 4} | data}
    return Config.model_validate(sections)


def fitting(config: Config, loaded: Prompts) -> Prompts:
    async def read() -> Prompts:
        async with Inputs(config, loaded=loaded) as made:
            return await made.prompts

    return asyncio.run(read())


@pytest.mark.fault("F33")
def test_prompts_that_are_too_long_are_left_out_of_both_parts(model: Path) -> None:
    loaded = Prompts(train=tasks(LONG, SHORT), heldout=tasks(SHORT, LONG))
    found = fitting(settings(model, on_bad_row="skip"), loaded)
    long = [LeftOutRow(row, "prompt_length", "has 5 tokens, but must have 1 to 4") for row in (1, 2)]
    assert found == Prompts(train=loaded.train[1:], heldout=loaded.heldout[:1], left_out={"": long})


def test_the_prompts_of_a_named_set_are_measured_too(model: Path) -> None:
    sets = EvalSection.model_validate({"sets": {"hard": {"data": {"dataset": "jsonl", "path": "hard.jsonl"}}}})
    loaded = Prompts(train=tasks(SHORT), heldout=tasks(SHORT), sets={"hard": tasks(SHORT, LONG)})
    skips = settings(model, on_bad_row="refuse").model_copy(update={"eval": sets})
    with pytest.raises(DatasetError, match=r"hard\.jsonl, row 2: the prompt 'abcd>' has 5 tokens"):
        fitting(skips, loaded)
    hard = sets.sets["hard"].data
    assert hard is not None
    lenient = hard.model_copy(update={"on_bad_row": "skip"})
    whole = {"hard": sets.sets["hard"].model_copy(update={"data": lenient})}
    found = fitting(skips.model_copy(update={"eval": sets.model_copy(update={"sets": whole})}), loaded)
    assert found.sets == {"hard": loaded.sets["hard"][:1]}


@pytest.mark.parametrize("side", ["train", "heldout"])
@pytest.mark.fault("F33")
def test_a_prompt_that_is_too_long_ends_the_start_with_its_row(model: Path, side: str) -> None:
    loaded = Prompts(**{"train": tasks(SHORT), "heldout": tasks(SHORT)} | {side: tasks(SHORT, LONG)})
    with pytest.raises(DatasetError, match=r"row 2: the prompt 'abcd>' has 5 tokens, but must have 1 to 4 "):
        fitting(settings(model), loaded)


def test_a_run_that_ends_at_a_held_out_reward_needs_held_out_prompts(model: Path) -> None:
    ends = settings(model).model_copy(update={"run": RunSection.model_validate({"stop_when": {"reward": 0.9}})})
    with pytest.raises(
        DatasetError, match=r"run\.stop_when: the hash of the questions holds out none of data\.dataset"
    ):
        fitting(ends, Prompts(train=tasks(SHORT), heldout=()))
    assert fitting(ends, Prompts(train=tasks(SHORT), heldout=tasks(SHORT))).heldout == tasks(SHORT)


def test_the_real_tokenizer_is_loaded_only_for_prompts_whose_length_is_in_doubt(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []

    def noted(path: str, **options: Any) -> Any:
        loads.append(path)
        return load_tokenizer(path, **options)

    monkeypatch.setattr(inputs, "load_tokenizer", noted)
    short, doubtful = tasks("a>"), tasks("abc>")
    config = settings(model, on_bad_row="skip")
    assert fitting(config, Prompts(train=short, heldout=short)) == Prompts(train=short, heldout=short)
    assert loads == []
    assert fitting(config, Prompts(train=doubtful, heldout=doubtful)) == Prompts(train=doubtful, heldout=doubtful)
    assert loads == [str(model)], "once for both parts"
    (model / "tokenizer.json").rename(model / "other.json")
    monkeypatch.setattr(inputs, "load_tokenizer", lambda *_, **__: build_tokenizer(max_length=16))
    assert fitting(config, Prompts(train=tasks(LONG, "a>"), heldout=())).train == tasks(LONG, "a>")[1:]


@pytest.mark.asyncio
@pytest.mark.fault("F33")
async def test_a_generator_deployment_enters_the_run_with_the_prompts_that_fit(
    model: Path,
) -> None:
    """It may be the first deployment of the run, whose prompts the buffer takes."""
    config = settings(model, on_bad_row="skip")

    class Entered(Exception):
        """Ends the deployment when it enters the run."""

    async def enter_run(*_: Any, tasks: Any, **__: Any) -> Any:
        raise Entered(*tasks)

    async with Inputs(config, loaded=Prompts(train=tasks(LONG, SHORT), heldout=())) as made:
        deployment = GeneratorDeployment(
            config,
            model_path=made.engine_model,
            prompts=made.prompts,
            cluster=JoinedCluster(enter_run=enter_run),
            new_actor=MadeUpActors(),
        )
        with pytest.raises(Entered) as caught:
            await deployment.run(asyncio.Event())
    assert [task.prompt for task in caught.value.args] == [SHORT]
