"""`asyncrl config`: show, check, schema."""

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from asyncrl.cli import preflight
from asyncrl.cli.config import summary
from asyncrl.cli.main import app
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config

ON_POLICY = ["staleness.max_versions=0", "weights.publish_every_steps=1"]
runner = CliRunner()
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def test_show_prints_a_file_that_loads_as_the_same_config(tmp_path: Path) -> None:
    result = runner.invoke(app, ["config", "show", "-c", str(QUICKSTART), "staleness.max_versions=4"])
    assert result.exit_code == 0
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(result.stdout)
    assert load_config([resolved], []) == load_config([QUICKSTART], ["staleness.max_versions=4"])
    assert yaml.safe_load(result.stdout)["buffer"]["max_attempts"] == 5


def test_several_files_merge_left_to_right(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("run: {name: mine}\n")
    result = runner.invoke(app, ["config", "show", "-c", str(QUICKSTART), "-c", str(mine)])
    shown = yaml.safe_load(result.stdout)
    assert shown["run"]["name"] == "mine"
    assert shown["environment"]["options"]["task"] == "spell_backward"


@pytest.mark.parametrize("file", sorted(QUICKSTART.parent.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_is_ok_on_stdout_with_notes_on_stderr(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(file.parent))  # own_task.yaml names functions of own_task.py in the same folder
    monkeypatch.chdir(file.parents[1])  # paths in the files are relative to the repository
    monkeypatch.setattr(preflight, "_gpus", lambda config: [])  # some configurations need machines with GPUs
    for name in load_config([file], []).environment.secrets:
        monkeypatch.setenv(name, "http://judge.example:8000/v1")
    result = runner.invoke(app, ["config", "check", "-c", str(file)])
    assert result.exit_code == 0
    assert result.stdout.startswith("ok\n  trains ")
    assert all(line.startswith("note: ") for line in result.stderr.splitlines())


@pytest.mark.parametrize(
    ("overrides", "source"),
    [
        ([], "reasoning_gym"),
        (["data.dataset=jsonl", "data.path=rows.jsonl"], "rows.jsonl"),
        (["data.dataset=hf", "data.path=owner/name"], "owner/name"),
    ],
)
def test_the_summary_names_the_environment_or_the_file_or_the_dataset_of_the_hub(
    overrides: list[str], source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "ab", "answer": "ba"}\n' * 20)
    [line, *_] = summary(load_config([QUICKSTART], overrides))
    assert f" on {source}: " in line


def test_check_says_that_a_chosen_loss_has_an_inert_clip_with_one_update_a_step() -> None:
    check = ["config", "check", "-c", str(QUICKSTART)]
    assert runner.invoke(app, check).stderr == ""
    assert "clip" in runner.invoke(app, [*check, "algorithm.loss=decoupled_icepop"]).stderr


@pytest.mark.fault("F28")
def test_check_refuses_an_uncorrected_objective_when_data_may_be_old() -> None:
    result = runner.invoke(app, ["config", "check", "-c", str(QUICKSTART), "algorithm.loss=dapo"])
    assert result.exit_code == 2
    assert "algorithm.loss = dapo has no off-policy correction" in result.stderr
    result = runner.invoke(app, ["config", "check", "-c", str(QUICKSTART), "algorithm.loss=dapo", *ON_POLICY])
    assert result.exit_code == 0


@pytest.mark.fault("F28")
def test_check_refuses_an_override_that_removes_the_correction() -> None:
    result = runner.invoke(app, ["config", "check", "-c", str(QUICKSTART), "algorithm.overrides={weight: null}"])
    assert result.exit_code == 2
    assert "has no off-policy correction" in result.stderr


@pytest.mark.fault("F28")
def test_check_reports_objective_and_rules_at_once() -> None:
    result = runner.invoke(
        app, ["config", "check", "-c", str(QUICKSTART), "algorithm.loss=dappo", "weights.publish_every_steps=9"]
    )
    assert result.exit_code == 2
    errors = result.stderr.splitlines()
    assert len(errors) == 2
    assert "weights.publish_every_steps = 9" in errors[0]
    assert "did you mean 'dapo'" in errors[1]


@pytest.mark.fault("F28")
def test_an_unknown_key_exits_with_2_and_a_hint() -> None:
    result = runner.invoke(app, ["config", "show", "-c", str(QUICKSTART), "learner.group_sz=4"])
    assert result.exit_code == 2
    assert "error: unknown key learner.group_sz" in result.stderr
    assert "did you mean learner.group_size?" in result.stderr


def test_schema_describes_every_field_and_can_be_written_to_a_file(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    assert runner.invoke(app, ["config", "schema", "--output", str(file)]).exit_code == 0
    schema = json.loads(file.read_text())
    assert schema == json.loads(runner.invoke(app, ["config", "schema"]).stdout)
    fields = [field for section in schema["$defs"].values() for field in section["properties"].values()]
    assert all("description" in field for field in fields if "$ref" not in field)


def test_schema_into_a_missing_folder_is_a_config_error(tmp_path: Path) -> None:
    result = runner.invoke(app, ["config", "schema", "--output", str(tmp_path / "no" / "schema.json")])
    assert result.exit_code == 2
    assert re.search(r"--output .*: No such file or directory", result.stderr)


LARGE = {  # the shape of Qwen2.5-32B
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 27648,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


def test_show_prints_and_marks_the_limits_that_follow_the_size_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """65.5 GB in bfloat16: 180 + 328 s to start, 262 s to load."""
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    model = [f"model.path={tmp_path}", "model.dtype=bfloat16", "learner.startup_timeout_s=77"]
    result = runner.invoke(app, ["config", "show", *model])
    marked = [line.strip() for line in result.stdout.splitlines() if "derived from the size of the model" in line]
    assert marked == [
        f"{key}  # unset: derived from the size of the model"
        for key in ("replace_timeout_s: 508.0", "startup_timeout_s: 508.0", "load_timeout_s: 263.0")
    ]
    shown = yaml.safe_load(result.stdout)
    assert shown["learner"]["startup_timeout_s"] == 77.0
    monkeypatch.setattr(preflight, "run_checks", lambda *_: [])  # the folder has no weights and no tokenizer
    checked, _ = preflight.checked_config([{"model": {"path": str(tmp_path), "dtype": "bfloat16"}}], [], roles=())
    assert checked.weights.load_timeout_s == shown["weights"]["load_timeout_s"]


@pytest.mark.parametrize(
    "loss",
    ["algorithm.loss=gspo", "algorithm.loss={surrogate: {kind: linear}, anchor: behaviour}"],
    ids=["preset", "axes"],
)
def test_show_has_all_axes_of_the_objective_in_a_comment_of_the_section(loss: str) -> None:
    given = [loss, "algorithm.overrides.aggregation=prompt_mean", "staleness.max_versions=0"]
    shown = runner.invoke(app, ["config", "show", *given]).stdout
    assert Config.model_validate(yaml.safe_load(shown)) == load_config([], given)
    section = shown.partition("\nalgorithm:\n")[2].partition("\nstaleness:\n")[0]
    comments = [line.removeprefix("  # ") for line in section.splitlines() if line.startswith("  # ")]
    assert comments[1:] == runner.invoke(app, ["losses", "-c", str(QUICKSTART), *given]).stdout.splitlines()
    assert "    aggregation: prompt_mean" in comments


def test_show_prints_a_configuration_with_wrong_axes_and_a_warning() -> None:
    result = runner.invoke(app, ["config", "show", "algorithm.loss=gspo", "algorithm.overrides.surrogate.hi=-1"])
    assert result.exit_code == 0
    assert yaml.safe_load(result.stdout)["algorithm"]["overrides"] == {"surrogate": {"hi": -1}}
    assert "All axes" not in result.stdout
    assert "the comment with the axes of the objective is left out: " in result.stderr


def test_show_has_no_axes_for_a_loss_of_the_user() -> None:
    result = runner.invoke(app, ["config", "show", "algorithm.loss=mine:loss"])
    assert result.exit_code == 0
    assert "axes of the objective" not in result.stdout


def test_show_marks_nothing_for_a_small_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LARGE | {"num_hidden_layers": 2}))
    result = runner.invoke(app, ["config", "show", f"model.path={tmp_path}", "model.dtype=bfloat16"])
    assert "# unset" not in result.stdout
