"""Paths of the model for the processes of a Ray cluster, which run in another working directory than the command."""

import asyncio
from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.deployment.inputs import Inputs, Prompts

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def paths(*overrides: str) -> set[str]:
    """Returns the paths of the model that the engines and the ranks get."""
    config = load_config([QUICKSTART], [*overrides])

    async def both() -> set[str]:
        async with Inputs(config, loaded=Prompts(train=(), heldout=())) as inputs:
            return {await inputs.engine_model, await inputs.learner_model}

    return asyncio.run(both())


@pytest.mark.usefixtures("in_tmp_path")
def test_a_folder_goes_by_its_whole_path_and_a_model_of_the_hub_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert paths("model.tiny=null", "model.path=mine") == {str(tmp_path / "mine")}
    assert paths("model.tiny=null", "model.path=Qwen/Qwen2.5-0.5B") == {"Qwen/Qwen2.5-0.5B"}


@pytest.mark.slow
@pytest.mark.usefixtures("in_tmp_path")
def test_a_tiny_model_that_is_built_here_goes_by_its_whole_path(tmp_path: Path) -> None:
    tiny = ["model.tiny.warmup_steps=0", "model.tiny.hidden_size=32", "model.tiny.layers=1", "model.tiny.heads=1"]
    told = paths("model.path=models/mine", *tiny)
    assert all(Path(path).is_absolute() and Path(path).is_dir() for path in told), told
    assert str(tmp_path / "models" / "mine") in told
