"""`asyncrl init` measures prompts with the model's tokenizer and writes a configuration that can run."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asyncrl.cli import init, preflight
from asyncrl.cli.gpu_checks import Gpu, Gpus
from asyncrl.cli.main import app
from asyncrl.cli.preflight import checked_config
from asyncrl.config.load import load_config, parse_yaml
from asyncrl.data.prompts import Task, split
from asyncrl.demo.chat_tokenizer import build_chat_tokenizer
from asyncrl.environments.interfaces import build_reward, build_tasks, read_tasks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("in_tmp_path")]

runner = CliRunner()
GPU = Gpu(name="NVIDIA A10G", memory_mib=24576, used_mib=0, compute_mode="Default")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory with a character tokenizer, a config.json, and a weight of shape (3, 5)."""
    import torch
    from safetensors.torch import save_file

    from asyncrl.demo.tiny_model import build_tokenizer

    folder = tmp_path / "models" / "small"
    build_tokenizer(max_length=200).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 200}))
    save_file({"weight": torch.zeros(3, 5)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(120)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_the_file_that_it_writes_holds_what_it_measured(model: Path, questions: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["init", "models/small", "sums.jsonl"])
    assert result.exit_code == 0, result.output
    _, heldout = build_tasks(load_config([tmp_path / "run.yaml"], []))
    words = f"wrote run.yaml: 120 prompts of at most 8 tokens, {len(heldout)} of them held out for evaluation, "
    assert heldout
    assert words in result.stdout
    assert "no held-out evaluation" not in result.stderr
    assert f"mean of only {len(heldout)} questions" in result.stderr
    assert "start it with: asyncrl up -c run.yaml" in result.stdout
    config = load_config([tmp_path / "run.yaml"], [])
    assert (config.run.name, config.model.path, str(config.data.path)) == ("sums", "models/small", "sums.jsonl")
    assert config.data.max_prompt_tokens == len("119+119=")
    assert config.generator.max_completion_tokens == 4 * (len("238") + 1)


def test_on_a_machine_with_a_gpu_the_numbers_are_those_of_its_memory(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiny_groups import make_model

    make_model(tmp_path / "small")
    monkeypatch.setattr(init, "query_gpus", lambda: Gpus(driver="580", cuda="13.0", gpus=(GPU,)))
    monkeypatch.setattr(preflight, "_gpus", lambda config: [])  # this machine has none
    result = runner.invoke(app, ["init", "small", "sums.jsonl"])
    assert result.exit_code == 0, result.output
    assert "1 GPU" in result.stdout
    config = load_config([tmp_path / "run.yaml"], [])
    assert (config.learner.gpus, config.learner.micro_batch_tokens) == (0.5, 32768)
    assert "of a GPU of 24 GiB" in (tmp_path / "run.yaml").read_text()


def test_a_dataset_may_be_a_function_that_yields_dicts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    Path("init_tasks.py").write_text(
        "def sums():\n    for n in range(9):\n        yield {'prompt': f'{n}+{n}=', 'answer': str(2 * n)}\n"
    )
    result = runner.invoke(app, ["init", "models/small", "init_tasks:sums"])
    assert result.exit_code == 0, result.output
    config = load_config([tmp_path / "run.yaml"], [])
    assert (config.run.name, config.data.dataset, config.data.path) == ("init-tasks", "init_tasks:sums", None)


def test_a_run_without_a_held_out_evaluation_is_noted(model: Path) -> None:
    sums = [f"{n}+{n}=" for n in range(9)]
    train, heldout = split([Task(question=each, prompt=each, answer="0") for each in sums], 0.1)
    assert heldout
    rows = [{"prompt": task.question, "answer": task.answer} for task in train]
    Path("few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = runner.invoke(app, ["init", "models/small", "few.jsonl"])
    assert result.exit_code == 0, result.output
    words = f"wrote run.yaml: {len(train)} prompts of at most 4 tokens, 0 of them held out for evaluation, "
    assert words in result.stdout
    assert "note: the run will have no held-out evaluation, because none of the prompts is held out" in result.stderr


def test_a_file_that_is_there_is_written_over_only_when_that_is_asked_for(model: Path, questions: Path) -> None:
    Path("run.yaml").write_text("mine")
    refused = runner.invoke(app, ["init", "models/small", "sums.jsonl"])
    assert refused.exit_code == 2
    assert "run.yaml exists already" in refused.stderr
    assert Path("run.yaml").read_text() == "mine"
    assert runner.invoke(app, ["init", "models/small", "sums.jsonl", "--force"]).exit_code == 0
    assert Path("run.yaml").read_text() != "mine"


def test_a_model_or_data_that_is_not_there_is_refused_before_anything_is_written(model: Path, questions: Path) -> None:
    asked_for = (
        ["models/smal", "sums.jsonl"],
        ["models/small", "nosuch.jsonl"],
        ["models/small", "nosuch_module:tasks"],
    )
    for arguments, said in zip(asked_for, ("did you mean models/small?", "nosuch", "nosuch"), strict=True):
        result = runner.invoke(app, ["init", *arguments])
        assert result.exit_code in (1, 2)
        assert said in result.stderr
        assert "Traceback" not in result.stderr
    assert not Path("run.yaml").exists()


def test_a_configuration_that_cannot_run_is_refused_and_no_file_is_left(model: Path, questions: Path) -> None:
    arguments = ["init", "models/small", "sums.jsonl", "--reward", "exact_mach"]
    refused = runner.invoke(app, arguments)
    assert refused.exit_code == 2
    assert "did you mean 'exact_match'?" in refused.stderr
    assert not Path("run.yaml").exists()
    Path("run.yaml").write_text("mine")
    assert runner.invoke(app, [*arguments, "--force"]).exit_code == 2
    assert Path("run.yaml").read_text() == "mine"


@pytest.mark.parametrize("reward", ["judge", "regex", "length"])
def test_a_reward_that_needs_options_is_refused_with_lines_that_can_be_used(
    reward: str, model: Path, questions: Path
) -> None:
    refused = runner.invoke(app, ["init", "models/small", "sums.jsonl", "--reward", reward, "-o", "mine.yaml"])
    assert refused.exit_code == 2
    found = re.search(rf"--reward {reward}: needs options .* leave --reward out, and write `(.*?)`", refused.stderr)
    assert found is not None
    assert not Path("mine.yaml").exists()
    assert runner.invoke(app, ["init", "models/small", "sums.jsonl", "-o", "mine.yaml"]).exit_code == 0
    written = Path("mine.yaml").read_text()
    Path("mine.yaml").write_text(re.sub(r"reward: exact_match.*", lambda _: found[1], written))
    section = checked_config([Path("mine.yaml")], [])[0].environment
    assert [(term.name, term.fn) for term in section.rewards] == [(reward, reward)]
    build_reward(section)  # raises ConfigError for options that the reward does not take


def test_a_model_as_short_as_the_quickstarts_is_enough_for_short_answers(model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 16}))
    rows = [{"prompt": f"word{n}>", "answer": "abcd"} for n in range(40)]
    Path("words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = runner.invoke(app, ["init", "models/small", "words.jsonl"])
    assert result.exit_code == 0, result.output
    config = load_config([tmp_path / "run.yaml"], [])
    assert config.model.max_length == 16
    assert config.data.max_prompt_tokens + config.generator.max_completion_tokens == 16


def csv_of(path: Path, *, head: str = "question,solution") -> Path:
    path.write_text(f"{head}\n" + "".join(f"{n}+{n}=,{2 * n}\n" for n in range(120)))
    return path


def test_the_columns_of_a_csv_file_are_found_and_written(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    csv_of(tmp_path / "my sums.csv")
    result = runner.invoke(app, ["init", "models/small", "my sums.csv"])
    assert result.exit_code == 0, result.output
    assert "data.columns: prompt is the column question\ndata.columns: answer is the column solution\n" in result.stdout
    config = load_config([tmp_path / "run.yaml"], [])
    assert (config.data.dataset, str(config.data.path), config.run.name) == ("hf", "my sums.csv", "my-sums")
    assert config.data.columns == {"prompt": "question", "answer": "solution"}
    assert config.generator.max_completion_tokens == 4 * (len("238") + 1)
    assert config.eval.every_steps > 0
    train, _ = build_tasks(config)
    assert {task.prompt: task.answer for task in train}["7+7="] == "14"


def test_rows_that_cannot_be_used_are_skipped_if_that_is_asked_for(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n) if n != 7 else None} for n in range(120)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused = runner.invoke(app, ["init", "models/small", "sums.jsonl"])
    assert refused.exit_code == 1
    assert "row 8" in refused.output
    assert "add --on-bad-row skip" in refused.output
    written = runner.invoke(app, ["init", "models/small", "sums.jsonl", "--on-bad-row", "skip"])
    assert written.exit_code == 0, written.output
    assert "mean of only" in written.output, "119 rows have few held-out ones"
    config = load_config([tmp_path / "run.yaml"], [])
    assert config.data.on_bad_row == "skip"
    assert len(read_tasks(config)) == 119


def test_columns_may_be_named_and_answers_may_be_left_out(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    csv_of(tmp_path / "sums.csv", head="left,right")
    unknown = runner.invoke(app, ["init", "models/small", "sums.csv"])
    assert unknown.exit_code == 2
    assert "has no column `prompt`, but left, right; name its column with --prompt COLUMN" in unknown.stderr
    wrong = runner.invoke(app, ["init", "models/small", "sums.csv", "--prompt", "lft"])
    assert wrong.exit_code == 2
    named = ["init", "models/small", "sums.csv", "--prompt", "left", "--answer"]
    assert runner.invoke(app, [*named, "none"]).exit_code == 0
    assert load_config([tmp_path / "run.yaml"], []).data.columns == {"prompt": "left", "answer": None}
    assert runner.invoke(app, [*named, "right", "--force"]).exit_code == 0
    assert load_config([tmp_path / "run.yaml"], []).data.columns == {"prompt": "left", "answer": "right"}


def test_a_jsonl_file_and_a_folder_may_have_columns_of_their_own(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    Path("sums").mkdir()
    rows = [{"problem": f"{n}+{n}=", "answer": str(2 * n)} for n in range(120)]
    Path("sums/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for data, dataset in (("sums/a.jsonl", "jsonl"), ("sums", "hf")):
        result = runner.invoke(app, ["init", "models/small", data, "--force"])
        assert result.exit_code == 0, result.output
        config = load_config([tmp_path / "run.yaml"], [])
        assert (config.data.dataset, config.data.columns) == (dataset, {"prompt": "problem"})


def test_data_that_is_not_there_or_has_no_columns_is_refused(model: Path) -> None:
    absent = runner.invoke(app, ["init", "models/small", "absent.csv"])
    assert absent.exit_code == 1
    assert "data.path = absent.csv: there is no such file" in absent.stderr
    code = runner.invoke(app, ["init", "models/small", "tasks:sums", "--prompt", "question"])
    assert code.exit_code == 2
    assert "are for files and datasets, not for the function tasks:sums" in code.stderr
    hub = runner.invoke(app, ["init", "models/small", "sums.jsonl", "--subset", "main"])
    assert hub.exit_code in (1, 2)
    assert not Path("run.yaml").exists()


@pytest.mark.parametrize(
    ("rows", "templated"),
    [
        ([{"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}], False),
        (
            [{"messages": [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}], "answer": "2"}],
            False,
        ),
        ([{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}], False),
        (
            [{"prompt": "1+1=", "answer": "2"}, {"messages": [{"role": "user", "content": "2+2="}], "answer": "4"}],
            False,
        ),
        ([{"prompt": "1+1=", "answer": "2"}], True),
    ],
    ids=["messages", "system message", "prompts", "mixed", "texts"],
)
def test_rows_with_messages_get_no_prompt_template(rows: list[dict[str, Any]], templated: bool, model: Path) -> None:
    build_chat_tokenizer(max_length=512).save_pretrained(model)
    assert ("prompt_template" in written(model, rows)) is templated


def written(model: Path, rows: Sequence[Mapping[str, Any]], *options: str) -> str:
    """Returns the configuration that the command writes for these rows."""
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = runner.invoke(app, ["init", str(model), "rows.jsonl", *options])
    assert result.exit_code == 0, result.output
    return Path("run.yaml").read_text()


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (
            [{"prompt": None, "answer": None, "question": "a", "solution": "b"}],
            {"prompt": "question", "answer": "solution"},
        ),
        ([{"prompt": None, "messages": [], "answer": None}, {"prompt": "a", "messages": None, "answer": "b"}], None),
        (
            [{"problem": "a", "prompt": None, "answer": None}, {"problem": "a", "prompt": None, "answer": "b"}],
            {"prompt": "problem"},
        ),
    ],
)
def test_a_column_of_nulls_is_not_chosen(
    rows: list[dict[str, Any]], columns: dict[str, str] | None, model: Path
) -> None:
    data = parse_yaml(written(model, rows, "--on-bad-row", "skip"), source="the file")["data"]
    assert data.get("columns") == columns


def test_the_nested_answers_of_datasets_for_verl_are_found(model: Path) -> None:
    build_chat_tokenizer(max_length=512).save_pretrained(model)
    asked = [{"role": "user", "content": "1+1="}]
    rows = [{"data_source": "sums", "prompt": asked, "reward_model": {"style": "rule", "ground_truth": "2"}}]
    data = parse_yaml(written(model, rows), source="the file")["data"]
    assert data["columns"] == {"answer": "reward_model.ground_truth"}


def test_other_columns_that_may_have_the_answers_are_named(model: Path) -> None:
    rows = [{"prompt": f"{n}+{n}=", "solution": f"{n} and {n}", "final_answer": 2 * n, "id": n} for n in range(9)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = "data.columns: the answer may also be the column"
    chosen = runner.invoke(app, ["init", str(model), "rows.jsonl"])
    assert f"answer is the column solution\n{words} final_answer: choose with --answer COLUMN" in chosen.stdout
    none = runner.invoke(app, ["init", str(model), "rows.jsonl", "--answer", "none", "--force"])
    assert none.exit_code == 0, none.output
    assert words not in none.stdout


ADD = "Add the numbers, and answer with a number only."


def system_prompts(texts: Sequence[str | None], model: Path, *options: str) -> tuple[str | None, str]:
    """Returns the system prompt in the configuration for rows with these texts in the column `System`, and what the
    command says about it. Checks that the prompts of a run begin with it."""
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "System": text} for n, text in enumerate(texts)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = runner.invoke(app, ["init", str(model), "rows.jsonl", "--force", *options])
    assert result.exit_code == 0, result.output
    config = load_config([Path("run.yaml")], [])
    begin = {task.messages[0]["content"] for task in read_tasks(config) if task.messages}
    assert begin == ({config.data.system_prompt} if config.data.system_prompt else set())
    said = [line for line in result.stdout.splitlines() if line.startswith("data.system_prompt: ")]
    return config.data.system_prompt, "".join(said).removeprefix("data.system_prompt: ")


def test_a_system_prompt_that_all_rows_share_is_taken_from_its_column(model: Path) -> None:
    left_out = "not taken from the column System, "
    assert system_prompts([ADD] * 9, model) == (None, f"{left_out}because {model} has no chat template")
    build_chat_tokenizer(max_length=512).save_pretrained(model)
    assert system_prompts([ADD] * 9, model) == (ADD, "the text of the column System")
    assert "--system-prompt" not in Path("run.yaml").read_text()
    for texts in ([ADD] * 8 + ["Subtract."], [ADD] * 8 + [None]):
        prompt, said = system_prompts(texts, model)
        assert prompt is None
        assert said.startswith(f"{left_out}whose values are not the same text in all rows: ")
        assert "`asyncrl init … --system-prompt TEXT --force`" in Path("run.yaml").read_text()


def test_a_system_prompt_may_be_given_and_counts_in_the_length_of_prompts(model: Path) -> None:
    build_chat_tokenizer(max_length=512).save_pretrained(model)
    assert system_prompts([None] * 9, model) == (None, "")
    without = load_config([Path("run.yaml")], []).data.max_prompt_tokens
    assert system_prompts(["Subtract."] * 9, model, "--system-prompt", ADD) == (ADD, "")
    assert load_config([Path("run.yaml")], []).data.max_prompt_tokens > without
