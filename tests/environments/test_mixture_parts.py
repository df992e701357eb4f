"""The parts of a mixture: their tasks, their rewards, and the rules for their settings."""

from pathlib import Path

import pytest

from asyncrl.config.parts import environment_name, part_configs
from asyncrl.config.rules import check_config
from asyncrl.config.schema import Config
from asyncrl.data.left_out import LeftOutRow
from asyncrl.data.prompts import Task
from asyncrl.deployment.inputs import fitting_of_parts
from asyncrl.environments.interfaces import build_tasks
from asyncrl.environments.scoring import PartScorers
from asyncrl.errors import ConfigError, DatasetError

HERE = "test_mixture_parts"


def words() -> list[dict[str, str]]:
    return [{"prompt": f"word {i}", "answer": f"w{i}"} for i in range(60)]


def sums() -> list[dict[str, str]]:
    return [{"prompt": f"{i}+1", "answer": str(i + 1)} for i in range(40)]


def contains(task: Task, completion: str) -> float:
    return float(task.answer in completion)


WORDS = {
    "name": "words",
    "weight": 3,
    "data": {"dataset": f"{HERE}:words", "prompt_template": "{question}>"},
    "environment": {"reward": "exact_match"},
}
SUMS = {
    "name": "sums",
    "data": {"dataset": f"{HERE}:sums", "heldout_fraction": 0.5},
    "environment": {"reward": f"{HERE}:contains"},
}


def config(*parts: dict[str, object], **sections: object) -> Config:
    return Config.model_validate({"data": {"mixture": list(parts or (WORDS, SUMS))}} | sections)


def violations(*parts: dict[str, object], **sections: object) -> str:
    with pytest.raises(ConfigError) as caught:
        check_config(config(*parts, **sections))
    return str(caught.value)


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_each_part_has_its_own_dataset_template_and_held_out_share() -> None:
    train, heldout = build_tasks(config())
    assert {task.part for task in train} == {task.part for task in heldout} == {"words", "sums"}
    assert all(task.prompt.endswith(">") == (task.part == "words") for task in train + heldout)
    assert sum(task.part == "sums" for task in heldout) > 10
    assert not {task.prompt for task in train} & {task.prompt for task in heldout}
    assert heldout[0].part == "words", "the held-out tasks are mixed in the proportion of the weights"
    assert "sums" in {task.part for task in heldout[:4]}
    assert environment_name(config()) == "words+sums"


@pytest.mark.parametrize(
    ("data", "environment", "name"),
    [
        ({}, {}, "reasoning_gym"),
        ({}, {"tools": ["shop:price"], "reward": "shop:reward"}, "reasoning_gym"),
        ({"dataset": "shop:tasks"}, {"tools": ["shop:price"], "reward": "shop:reward"}, "tools"),
        ({"dataset": "shop:tasks"}, {"mcp_servers": [{"url": "http://shop/mcp"}], "reward": "shop:reward"}, "tools"),
        ({"dataset": "shop:tasks"}, {"agent": "shop:Agent.play"}, "shop:Agent.play"),
        ({}, {"agent": "shop:Agent.play"}, "shop:Agent.play"),
        ({"dataset": "shop:tasks"}, {"reward": "shop:reward"}, "dataset"),
        ({"dataset": "shop:tasks"}, {"name": "math"}, "math"),
    ],
)
def test_metrics_name_what_plays(data: dict[str, object], environment: dict[str, object], name: str) -> None:
    assert environment_name(Config.model_validate({"data": data, "environment": environment})) == name


def test_a_prompt_that_one_part_holds_out_is_not_trained_in_another() -> None:
    again = SUMS | {"name": "again", "data": {"dataset": f"{HERE}:sums", "heldout_fraction": 0.0}}
    train, heldout = build_tasks(config(SUMS, again))
    assert heldout
    assert not {task.prompt for task in train} & {task.prompt for task in heldout}
    assert {task.part for task in train} == {"sums", "again"}


def test_a_configuration_without_a_mixture_is_its_only_part() -> None:
    plain = Config()
    assert part_configs(plain) == {"": plain}
    assert all(task.part == "" for task in build_tasks(config(data={"dataset": f"{HERE}:words"}))[0])


def test_a_part_keeps_the_runs_settings_of_a_section_that_it_does_not_have() -> None:
    own = {"name": "own", "data": {"dataset": f"{HERE}:sums"}}
    run = config(own, WORDS, environment={"reward": f"{HERE}:contains", "on_error": "fail"})
    check_config(run)
    parts = part_configs(run)
    assert parts["own"].environment == run.environment
    assert parts["words"].environment.reward == "exact_match"
    assert parts["words"].environment.on_error == "fail"
    assert parts["words"].data.mixture == []


def test_settings_survive_the_runs_own_file() -> None:
    run = config()
    assert Config.model_validate_json(run.model_dump_json()) == run
    assert part_configs(Config.model_validate_json(run.model_dump_json())) == part_configs(run)


@pytest.mark.usefixtures("importable")
@pytest.mark.asyncio
async def test_each_task_is_scored_by_the_rewards_of_its_part() -> None:
    scorers = PartScorers(part_configs(config()))
    await scorers.start()
    try:
        asked = Task(question="2+1", prompt="2+1", answer="3", part="sums")
        assert await scorers.score(asked, ["is 3", "4"]) == [1.0, 0.0]
        spelled = Task(question="w", prompt="w", answer="3", part="words")
        assert await scorers.score(spelled, ["is 3", "3"]) == [0.0, 1.0]
    finally:
        await scorers.close()


def test_settings_that_no_part_uses_are_refused() -> None:
    found = violations(WORDS, SUMS, environment={"reward": "math_verify"})
    assert "environment.reward = math_verify: has no effect, because each part of data.mixture has its own" in found


def test_rules_name_the_part() -> None:
    no_path = {"name": "file", "data": {"dataset": "jsonl"}}
    assert "data.mixture.file: data.dataset = jsonl: needs data.path" in violations(no_path)
    assert "data.mixture: has 2 parts with the name words" in violations(WORDS, WORDS)
    slow = WORDS | {"environment": {"reward": "exact_match", "score_timeout_s": 500.0}}
    assert "data.mixture.words: environment.score_timeout_s = 500: must be below" in violations(slow)
    nothing_kept = WORDS | {"data": {"dataset": f"{HERE}:words", "heldout_fraction": 0.0}}
    assert "needs held-out questions" in violations(nothing_kept)
    check_config(config(nothing_kept, SUMS))


def test_components_need_the_same_names_in_all_parts() -> None:
    from asyncrl.algorithms.checks import check_algorithm

    two = [{"name": "right", "fn": "exact_match"}, {"name": "short", "fn": f"{HERE}:contains"}]
    parts = [WORDS | {"environment": {"rewards": two}}, SUMS | {"environment": {"rewards": two[:1]}}]
    with pytest.raises(ConfigError, match="rewards with different names"):
        check_algorithm(config(*parts, algorithm={"advantage": "gdpo"}))
    check_algorithm(config(parts[0], algorithm={"advantage": "gdpo"}))


def test_a_mixture_whose_smallest_part_ends_before_a_step_is_refused() -> None:
    settings = {"data": {"mixture": [WORDS, SUMS], "epochs": 1, "drop_last": True}, "learner": {"groups_per_step": 100}}
    with pytest.raises(DatasetError, match="the run ends after"):
        build_tasks(Config.model_validate(settings))


def test_a_held_out_set_beside_a_mixture_needs_its_own_data() -> None:
    sets = {"strict": {"environment": {"reward": "exact_match"}}}
    assert "eval.sets.strict: needs data of its own" in violations(eval={"sets": sets})


def test_prompts_that_do_not_fit_are_skipped_as_their_part_says(caplog: pytest.LogCaptureFixture) -> None:
    run = config(WORDS | {"data": {**WORDS["data"], "on_bad_row": "skip"}}, SUMS)  # type: ignore[dict-item]
    tasks = build_tasks(run)[0]

    def fit(tasks: list[Task], *, config: Config, left_out: list[LeftOutRow], tools: object) -> list[Task]:
        assert config.data.on_bad_row == ("skip" if tasks[0].part == "words" else "refuse")
        return tasks[1:]

    kept = fitting_of_parts(tasks, config=run, fit=fit, left_out={"words": [], "sums": []}, tools={})
    assert len(kept) == len(tasks) - 2
    assert [task for task in tasks if task in kept] == list(kept), "in their order"
