"""A scorer runs the examples of docs/rewards.md."""

import re
from pathlib import Path

import msgspec
import pytest

from asyncrl.config.load import load_config
from asyncrl.config.schema import EnvironmentSection
from asyncrl.data.prompts import Task
from asyncrl.environments.interfaces import build_reward
from asyncrl.environments.scoring import Scorer
from asyncrl.errors import ConfigError

pytestmark = pytest.mark.integration

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
RECIPES = Path(__file__).parents[2] / "configs"
TASK = Task(question="3+4", prompt="3+4=", answer="7")
COMPLETIONS = ["7", "so 7", "8", "seven"]


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards_page.py").write_text("\n\n".join(examples("python")))
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "rewards"),
    [
        ("exact", [1.0, 0.0, 0.0, 0.0]),
        ("judge", [1.0, 1.0, 0.0, 0.0]),
        ("shortest", [1.0, 0.0, 1.0, 0.0]),
        ("ranked", [0.0, 0.5, 0.25, 0.75]),
        ("trl_style_of_task", [1.0, 0.0, 0.0, 0.0]),
    ],
)
@pytest.mark.asyncio
async def test_each_example_scores_a_group(tasks: None, name: str, rewards: list[float]) -> None:
    scorer = Scorer(EnvironmentSection(reward=f"rewards_page:{name}"))
    try:
        assert await scorer.score(TASK, COMPLETIONS) == rewards
    finally:
        await scorer.close()


@pytest.mark.parametrize("begin", ["<think>\n", "", "Let me see: "])
@pytest.mark.asyncio
async def test_the_reward_on_thoughts_reads_the_generation_prompt(tasks: None, begin: str) -> None:
    scorer = Scorer(EnvironmentSection(reward="rewards_page:thinks"))
    task = msgspec.structs.replace(TASK, generation_prompt=f"<|im_start|>assistant\n{begin}")
    try:
        scores = await scorer.score(task, ["3 + 4</think> 7", "<think>3 + 4</think>7", "7", "3 + 4</think> 8"])
    finally:
        await scorer.close()
    assert scores == [float("<think>" in begin), 1.0, 0.0, 0.0]


@pytest.mark.asyncio
async def test_the_reward_for_trl_is_refused_with_the_lines_of_the_page(tasks: None) -> None:
    scorer = Scorer(EnvironmentSection(reward="rewards_page:trl_style"))
    with pytest.raises(ConfigError) as caught:
        await scorer.start()
    await scorer.close()
    adapter = "\n".join(line.removeprefix("    ") for line in str(caught.value).splitlines()[1:])
    assert adapter in PAGE.read_text()


def test_the_configuration_with_a_secret_is_one(tmp_path: Path) -> None:
    several, judged, local, secret = examples("yaml")
    for name, text in {"several": several, "judged": judged, "local": local, "secret": secret}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    assert load_config([tmp_path / "secret.yaml"], []).environment.secrets == ["JUDGE_API_KEY"]
    names = [term.name for term in load_config([tmp_path / "several.yaml"], []).environment.rewards]
    assert names == ["right", "format", "brief", "polite"]
    config = load_config([tmp_path / "judged.yaml"], [])
    assert config.environment.secrets == [config.environment.rewards[0].options["key_variable"]]
    build_reward(config.environment)
    config = load_config([RECIPES / "tiny_chat.yaml", tmp_path / "local.yaml"], [])
    assert [term.fn for term in config.environment.rewards] == ["judge"]
    build_reward(config.environment)
