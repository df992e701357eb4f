"""The two sides of the comparison with TRL get the same task, and its table shows what the runs recorded."""

import ast
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import against_trl
import pytest
import rewards
import trl_run
from against_trl import Result, Series

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.data.prompts import PromptSource, Task
from asyncrl.environments.interfaces import build_environment, build_tasks

CURVE = [(0.0, 0.2), (10.0, 0.4), (20.0, 0.6), (30.0, 0.5), (40.0, 0.8)]
RESULT = Result(samples_per_s=1000, first_step_s=10, to_first_target_s=20, to_second_target_s=30, heldout=0.9)


@pytest.fixture
def config() -> Config:
    return load_config(
        [against_trl.REPOSITORY / against_trl.CONFIG],
        ["environment.options.size=200", "learner.total_steps=30", "learner.groups_per_step=8", "run.seed=3"],
    )


# --- the same task -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["{}", " {} ", "{}\n", "{}x", "x{}", "", "{} {}"])
@pytest.mark.parametrize("change", [str, str.upper, str.lower, lambda text: text[::-1]])
def test_both_sides_give_a_completion_the_same_reward(config: Config, form: str, change: Callable[[str], str]) -> None:
    score = build_environment(config.environment).score
    for task in build_tasks(config)[0][:20]:
        completion = form.format(change(task.answer), change(task.answer))
        assert trl_run.exact_match([completion], [task.answer]) == [score(task, completion)]


def test_both_sides_give_a_completion_the_same_checksum(config: Config) -> None:
    for task in build_tasks(config)[0][:20]:
        assert trl_run.by_checksum([task.prompt], [task.answer]) == [rewards.by_checksum(task, task.answer)]


def test_trl_gets_the_questions_of_all_steps_in_the_order_of_the_run(config: Config, tmp_path: Path) -> None:
    train, _ = build_tasks(config)
    against_trl.write_questions(config, train, tmp_path / "questions")
    source = PromptSource(train, seed=3)
    expected = [task for _ in range(30 * 8) if (task := source.next())]
    assert len(expected) > len(train), "the questions are needed more than once"
    written = [json.loads(line) for line in (tmp_path / "questions").read_text().splitlines()]
    assert written == [{"prompt": task.prompt, "answer": task.answer} for task in expected]


def test_trl_gets_a_learning_rate_for_each_step(config: Config) -> None:
    settings = against_trl.trl_settings(config, questions=Path("q"), output=Path("o"), threads=1)
    rates = settings.learning_rates
    assert len(rates) == 30
    assert rates[0] == pytest.approx(5e-4 / 20), "asyncrl's warm-up does not begin at zero"
    assert max(rates) == rates[19] == rates[20] == pytest.approx(5e-4)
    assert rates[-1] == pytest.approx(0.2 * 5e-4)


def test_trls_side_imports_nothing_of_asyncrl() -> None:
    tree = ast.parse(Path(trl_run.__file__).read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported
    assert not {name for name in imported if name.split(".")[0] == "asyncrl"}


@pytest.mark.slow
def test_the_evaluator_scores_what_the_model_completes_alone(config: Config, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from asyncrl.demo.tiny_model import ensure_description

    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path / "model")})})
    ensure_description(config)
    torch.manual_seed(0)
    described = Qwen3Config.from_pretrained(tmp_path / "model")
    described.initializer_range = 0.5  # larger than usual, so that completions depend on the prompt
    Qwen3ForCausalLM(described).save_pretrained(tmp_path / "weights")
    tasks = [Task(question=text, prompt=text, answer="") for text in ("abcdef>", "ab>", "x", "word>")]
    heard: dict[str, str] = {}

    def score(task: Task, completion: str) -> float:
        heard[task.prompt] = completion
        return float(len(heard))

    reward = against_trl.heldout_reward(tmp_path / "weights", config=config, tasks=tasks, score=score)
    assert reward == (1 + 2 + 3 + 4) / 4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    for prompt, completion in heard.items():
        ids_BT = tokenizer(prompt, return_tensors="pt")["input_ids"]
        for _ in range(6):
            ids_BT = torch.cat([ids_BT, model(ids_BT).logits[:, -1:].argmax(-1)], dim=1)
            if ids_BT[0, -1] == tokenizer.eos_token_id:
                break
        assert completion == tokenizer.decode(ids_BT[0, len(prompt) :], skip_special_tokens=True)
    assert len(set(heard.values())) == 4, "the prompts have different completions"


# --- the measurements --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "seconds"), [(0.3, 5.0), (0.4, 10.0), (0.5, 15.0), (0.7, 10 * 2 / 3 + 30)])
def test_a_target_is_reached_on_the_line_between_two_points(target: float, seconds: float) -> None:
    assert against_trl.time_to(target, CURVE) == pytest.approx(seconds)


def test_a_target_may_be_reached_before_training_or_never() -> None:
    assert against_trl.time_to(0.1, CURVE) == 0.0
    assert against_trl.time_to(0.9, CURVE) == math.inf


def test_the_speed_leaves_out_the_first_steps() -> None:
    slow, fast = [100.0 * (step + 1) for step in range(20)], [2000.0 + step + 1 for step in range(25)]
    series = Series(begun_s=0.0, ends_s=[*slow, *fast], samples=[7] * 20 + [10] * 25, weights={})
    assert against_trl.samples_per_s(series) == 10.0


def test_the_speed_of_a_short_run_is_that_of_its_second_half() -> None:
    series = Series(begun_s=0.0, ends_s=[50.0, 100.0, 102.0, 104.0], samples=[8] * 4, weights={})
    assert against_trl.samples_per_s(series) == 4.0


def test_times_to_a_target_count_from_the_beginning_of_the_first_step(tmp_path: Path) -> None:
    for steps in (10, 20, 100):
        (tmp_path / f"step-{steps}" / "hf").mkdir(parents=True)
    weights = against_trl.saved_weights(tmp_path, below="hf")
    assert list(weights) == [10, 20, 100], "by number, not by name"
    rewards = {"model": 0.2, "step-10": 0.8, "step-20": 0.9, "step-100": 0.7}
    series = Series(begun_s=5.0, ends_s=[6.0 + step for step in range(100)], samples=[1] * 100, weights=weights)
    result = against_trl.result_of(
        series, evaluate=lambda path: rewards[(path.parent if path.name == "hf" else path).name], model=Path("model")
    )
    assert result.first_step_s == 6.0
    assert result.to_first_target_s == pytest.approx(10.0)
    assert result.to_second_target_s == pytest.approx(15.0)
    assert result.heldout == 0.7


def test_a_workload_that_does_not_learn_has_no_times_to_a_reward() -> None:
    series = Series(begun_s=5.0, ends_s=[6.0, 8.0, 10.0, 12.0], samples=[4] * 4, weights={4: Path("weights")})
    result = against_trl.result_of(series, evaluate=None, model=Path("model"))
    assert (result.samples_per_s, result.first_step_s) == (2.0, 6.0)
    [*_, row] = against_trl.table({"0": {"TRL": result}})
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["0", "TRL", "2", "1.00", "6.0", "–", "–", "–", "–"]


# --- the table ---------------------------------------------------------------------------------------------------


def test_ratios_are_over_the_first_side_of_the_same_seed() -> None:
    slow = replace(RESULT, samples_per_s=500, to_second_target_s=90)
    rows = against_trl.table({"0": {"TRL": RESULT, "ours": slow}, "1": {"TRL": slow, "ours": RESULT}})
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert (cells[0][3], cells[0][7]) == ("over TRL", "time over TRL")
    ratios = {(row[0], row[1]): (row[3], row[7]) for row in cells[2:]}
    assert ratios == {
        ("0", "TRL"): ("1.00", "1.00"),
        ("0", "ours"): ("0.50", "3.00"),
        ("1", "TRL"): ("1.00", "1.00"),
        ("1", "ours"): ("2.00", "0.33"),
    }


def test_a_target_that_was_not_reached_is_a_dash() -> None:
    never = replace(RESULT, to_second_target_s=math.inf)
    rows = against_trl.table({"0": {"TRL": never, "ours": never}})
    assert [cell.strip() for cell in rows[-1].split("|")][7:9] == ["–", "–"]


def test_the_median_is_taken_for_each_side() -> None:
    runs = [{"TRL": replace(RESULT, heldout=value), "ours": RESULT} for value in (0.3, 0.1, 0.2)]
    assert against_trl.medians(runs) == {"TRL": replace(RESULT, heldout=0.2), "ours": RESULT}
