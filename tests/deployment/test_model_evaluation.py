"""`asyncrl eval`: what is asked of the engine, the numbers of a set, and the models that it refuses."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine
from pool import LengthScorer, Tokenizer, manifest_of
from typer.testing import CliRunner

from asyncrl.cli.main import app
from asyncrl.config.schema import Config
from asyncrl.data.prompts import Task
from asyncrl.deployment import model_evaluation
from asyncrl.deployment.model_evaluation import AnsweredPrompt, SetResult, evaluate_set, result_lines
from asyncrl.environments.scores import Score
from asyncrl.environments.scoring_messages import Components
from asyncrl.errors import DataError, RunError
from asyncrl.generation.episodes import Played
from asyncrl.generation.interfaces import Completion
from asyncrl.generation.rollout import Rollouts
from asyncrl.weights.staging import StagedWeights

TASKS = [Task(question=f"q{index}", prompt=f"q{index}", answer="a") for index in range(6)]
runner = CliRunner()


class ByPrompt(LengthScorer):
    """Rewards the n-th completion of prompt q<k> with 1 if n < k, and fails for q5."""

    async def score(self, task: Task, completions: Sequence[str]) -> list[Score]:
        number = int(task.question[1:])
        if number == 5:
            return [DataError("the reward raised", reason="reward_raised", completion="c")] * len(completions)
        right = [float(place < number) for place in range(len(completions))]
        return [Components(total=each, parts={"right": each, "short": 0.5}) for each in right]


async def evaluated(tasks: Sequence[Task], **sections: Any) -> tuple[SetResult, list[tuple[int | None, float]]]:
    """Returns the result for `tasks`, and the seed and the temperature of each request to the engine."""
    config = Config.model_validate({"generator": {"seeded": True}} | sections)
    engine, asked = FakeEngine(), list[tuple[int | None, float]]()
    await engine.load(manifest_of(7), StagedWeights())
    generate = engine.generate

    async def noted(*arguments: Any, seed: int | None, temperature: float, **options: Any) -> list[Completion]:
        asked.append((seed, temperature))
        return await generate(*arguments, seed=seed, temperature=temperature, **options)

    engine.generate = noted  # type: ignore[method-assign, assignment]
    rollouts = Rollouts(config=config, engine=engine, tokenizer=Tokenizer(), scorer=ByPrompt(), replica="eval")  # type: ignore[arg-type]
    return await evaluate_set("heldout", tasks, rollouts=rollouts, config=config), asked


@pytest.mark.asyncio
async def test_the_numbers_of_a_set_are_those_of_its_answers() -> None:
    result, _ = await evaluated(TASKS, eval={"samples": 4, "temperature": 0.5})
    assert (result.prompts, result.failed, result.samples, result.temperature) == (5, 1, 4, 0.5)
    assert result.reward_mean == pytest.approx((0 + 1 + 2 + 3 + 4) / 4 / 5)
    assert result.pass_at == pytest.approx({1: 0.5, 2: (0 + 3 / 6 + 5 / 6 + 1 + 1) / 5, 4: 0.8}), (
        "of the pairs of 4 completions, 3 have the first one"
    )
    assert result.components == {"right": 0.5, "short": 0.5}
    tokens = [len(text) for each in result.answers for text in each.completions]
    assert result.completion_tokens_mean == pytest.approx(mean(tokens) + 0.95), "one of 20 is cut before its end token"
    assert (result.truncated_ratio, result.turns_mean) == (0.05, None)
    assert [each.rewards for each in result.answers[:2]] == [(0.0,) * 4, (1.0, 0.0, 0.0, 0.0)]
    assert all(len(each.completions) == 4 for each in result.answers[:5])
    assert result.answers[5].rewards == ()
    assert "the reward raised" in (result.answers[5].failure or "")


@pytest.mark.asyncio
async def test_every_sample_has_its_own_seed_and_one_completion_is_greedy() -> None:
    result, asked = await evaluated(TASKS, eval={"samples": 3})
    assert result.non_greedy_tokens is None
    assert sorted(asked) == [(seed, 1.0) for seed in (0, 3, 6, 9, 12, 15)]
    result, asked = await evaluated(TASKS)
    assert asked == [(None, 0.0)] * len(TASKS)
    assert result.non_greedy_tokens == 0


@pytest.mark.asyncio
async def test_an_evaluation_without_any_reward_says_why() -> None:
    with pytest.raises(RunError, match=r"no prompt of heldout got a reward\. The first cause: the reward raised"):
        await evaluated(TASKS[5:])


@pytest.mark.asyncio
async def test_a_prompt_that_takes_too_long_fails_alone() -> None:
    slow = ByPrompt.score

    async def score(self: ByPrompt, task: Task, completions: Sequence[str]) -> list[Score]:
        if task.question == TASKS[2].question:
            raise TimeoutError
        return await slow(self, task, completions)

    ByPrompt.score = score  # type: ignore[method-assign]
    try:
        result, _ = await evaluated(TASKS[:4])
    finally:
        ByPrompt.score = slow  # type: ignore[method-assign]
    assert (result.prompts, result.failed) == (3, 1)
    assert "generator.rollout_timeout_s = 120 s" in (result.answers[2].failure or "")


def test_a_result_of_greedy_completions_in_words() -> None:
    result = SetResult(
        name="heldout", prompts=1, failed=0, samples=1, temperature=0.0, reward_mean=0.25, reward_stderr=None,
        pass_reward=0.5, pass_at={1: 0.0}, components={}, completion_tokens_mean=8, truncated_ratio=1, turns_mean=1.5,
        answers=[],
    )  # fmt: skip
    assert result_lines(result) == [
        "heldout: reward 0.250 (1 prompts, 1 greedy completion each)",
        "  pass@1 0.000  (a completion passes with a reward of at least 0.5)",
        "  a completion has 8.0 tokens and 1.50 turns on average; 100 % are cut at their length limit",
    ]
    *_, last = result_lines(msgspec.structs.replace(result, non_greedy_tokens=3))
    assert last.startswith("  not greedy: 3 tokens are not the most probable ones")


@pytest.mark.asyncio
async def test_three_answers_are_printed_if_all_rewards_are_0_and_none_otherwise() -> None:
    result, _ = await evaluated(TASKS[:1])
    long = AnsweredPrompt(prompt="p" * 900, answer="a", completions=("first\n", "second"), rewards=(0.0, 0.0))
    failed = AnsweredPrompt(prompt="f", answer="a", failure="it failed")
    dead = msgspec.structs.replace(result, answers=[failed, *[long] * 5])
    start, *shown = result_lines(dead)[-10:]
    assert start == "  all rewards are 0; compare the first answers with what the reward looks for:"
    assert shown[:3] == shown[3:6] == shown[6:]
    assert shown[0] == f"    prompt: '{'p' * 200} … {'p' * 200}'"
    assert shown[1:3] == ["      answer of the data: 'a'", "      the model's answer: 'first\\n'"]
    right = msgspec.structs.replace(long, rewards=(0.0, 0.5))
    for answers in ([long, right], [failed], []):
        assert "rewards are 0" not in "".join(result_lines(msgspec.structs.replace(result, answers=answers)))


@pytest.mark.asyncio
async def test_a_sampled_completion_is_found_if_it_must_be_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Rollouts._played

    async def sampled(*arguments: Any, temperature: float, **options: Any) -> Played:
        return await played(*arguments, temperature=1.0, **options)

    monkeypatch.setattr(Rollouts, "_played", sampled)
    result, _ = await evaluated(TASKS[:5])
    assert (result.non_greedy_tokens or 0) > 0


def folder_of_model(path: Path) -> Path:
    """Makes a folder with the files of a model, all of them empty."""
    path.mkdir(parents=True)
    for name in ("tokenizer.json", "model.safetensors"):
        (path / name).touch()
    (path / "tokenizer.json").write_text('{"model": {"vocab": {}}, "added_tokens": []}')
    (path / "config.json").write_text('{"vocab_size": 10, "hidden_size": 64, "num_attention_heads": 2}')
    return path


def answered(config: Config, seen: list[Config]) -> list[SetResult]:
    seen.append(config)
    return [
        SetResult(
            name="heldout", prompts=8, failed=0, samples=config.eval.samples, temperature=1.0, reward_mean=0.5,
            reward_stderr=0.1, pass_reward=1.0, pass_at={1: 0.5}, components={}, completion_tokens_mean=8,
            truncated_ratio=0, answers=[],
        )
    ]  # fmt: skip


def test_a_checkpoint_of_the_run_itself_is_evaluated_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []

    async def evaluate_model(config: Config, **_: Any) -> list[SetResult]:
        return answered(config, seen)

    monkeypatch.setattr(model_evaluation, "evaluate_model", evaluate_model)
    checkpoint = tmp_path / "quick" / "checkpoints" / "step-3"
    folder_of_model(checkpoint / "hf")
    result = tmp_path / "result.json"
    arguments = [f"run.dir={tmp_path}", "run.name=quick", f"model.path={checkpoint}", "model.tiny={}"]
    done = runner.invoke(app, ["eval", *arguments, "--samples", "4", "--json", str(result)])
    assert done.exit_code == 0, done.output
    [config] = seen
    assert config.model.path == str(checkpoint / "hf")
    assert (config.model.tiny, config.eval.samples) == (None, 4)
    assert "heldout: reward 0.500 ± 0.100 (8 prompts, 4 completions each at temperature 1)" in done.output
    written = json.loads(result.read_bytes())
    assert written["model"] == str(checkpoint / "hf")
    assert [each["name"] for each in written["sets"]] == ["heldout"]


@pytest.mark.parametrize(
    ("prepare", "overrides", "words"),
    [
        (lambda path: None, ["model.tiny={}"], "there is no such folder; build the tiny model with `asyncrl model`"),
        (lambda path: None, [], "there is no such folder"),
        (lambda path: (folder_of_model(path) / "model.safetensors").unlink(), [], "it lacks weights"),
        (lambda path: (folder_of_model(path) / "adapter_config.json").touch(), [], "has an adapter, not a whole model"),
        (folder_of_model, ["eval.prompts=0"], "there would be no prompt to evaluate"),
        (folder_of_model, ["eval.sampels=2"], "did you mean eval.samples?"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_an_engine_starts(
    tmp_path: Path, prepare: Any, overrides: list[str], words: str
) -> None:
    prepare(tmp_path / "model")
    done = runner.invoke(app, ["eval", f"model.path={tmp_path / 'model'}", *overrides])
    assert done.exit_code == 2
    assert words in done.output
