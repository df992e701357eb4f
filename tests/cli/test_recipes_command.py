"""`asyncrl recipes` lists the recipes, and writes copies that run; `-c` takes a recipe's name in every command."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from asyncrl.cli.main import app
from asyncrl.config.load import load_config
from asyncrl.config.recipes import recipe_names

REPOSITORY = Path(__file__).parents[2]
runner = CliRunner()


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*words: str) -> Result:
    return runner.invoke(app, list(words))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_list_has_a_line_for_each_recipe_with_its_gpus_and_says_how_to_run_and_copy_one() -> None:
    listed = command("recipes")
    assert listed.exit_code == 0
    *lines, _, last = listed.stdout.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    by_name = {line.split()[0]: line for line in lines}
    assert by_name["quickstart"].split(maxsplit=1)[1].strip() == "no GPU   A tiny Qwen3 learns to spell words backward."
    assert " 1 GPU " in by_name["one_gpu"]
    assert " 16 GPUs " in by_name["two_nodes"]
    assert "asyncrl up -c NAME" in last
    assert "asyncrl recipes copy NAME" in last
    assert "run your copy" in command("recipes", "--help").stdout


@pytest.mark.parametrize("name", recipe_names())
def test_a_copy_has_all_files_that_the_recipe_needs_and_is_not_changed(name: str, here: Path) -> None:
    source = (REPOSITORY / "configs" / name).parent
    assert command("recipes", "copy", name).exit_code == 0
    written = contents(here)
    assert written == {file: (source / file).read_bytes() for file in written}
    config = load_config([f"{Path(name).name}.yaml"])
    assert config.data.path is None or config.data.dataset == "hf" or config.data.path.is_file()
    modules = {file.stem for file in source.glob("*.py")}
    values = [each for each in _values(config.model_dump(mode="json")) if isinstance(each, str)]
    named = {module for each in values for module, colon, _ in [each.partition(":")] if colon}
    assert all((here / f"{module}.py").is_file() for module in modules & named)
    for file in here.glob("*.py"):
        imported = {node.module for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)}
        assert all((here / f"{module}.py").is_file() for module in modules & imported)


def _values(tree: Any) -> Iterator[Any]:
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    yield tree
    for child in children:
        yield from _values(child)


@pytest.mark.parametrize(("name", "to", "files", "run"), [
    ("quickstart", [], {"quickstart.yaml"}, "asyncrl up -c quickstart.yaml"),
    ("tiny_chat", ["a b"], {"tiny_chat.yaml", "larger.csv"}, "asyncrl up -c 'a b/tiny_chat.yaml'"),
    ("own_task", [], {"own_task.yaml", "own_task.py"}, "asyncrl up -c own_task.yaml"),
    ("own_task", ["x/y"], {"own_task.yaml", "own_task.py"}, "asyncrl up -c x/y/own_task.yaml"),
    (
        "calculator", [],
        {"calculator.yaml", "arithmetic.py", "langgraph_agent.py", "openai_agents.py", "openai_client.py"},
        "asyncrl up -c calculator.yaml",
    ),
])  # fmt: skip
def test_the_last_line_of_a_copy_is_the_command_that_runs_it(
    name: str, to: list[str], files: set[str], run: str, here: Path
) -> None:
    done = command("recipes", "copy", name, *to)
    assert set(contents(here.joinpath(*to))) == files
    assert done.stdout.splitlines()[-1] == f"run it: {run}"


def test_a_file_of_two_recipes_is_written_once_and_several_machines_have_commands_of_their_own(here: Path) -> None:
    assert command("recipes", "copy", "eight_gpus").exit_code == 0
    done = command("recipes", "copy", "two_nodes")
    assert done.exit_code == 0, done.output
    assert "questions.jsonl is there already, with the same text" in done.stdout
    assert done.stdout.splitlines()[-1] == "the commands for several machines are at the top of two_nodes.yaml"
    (here / "questions.jsonl").write_text("mine")
    assert command("recipes", "copy", "eight_gpus").exit_code == 2
    assert (here / "questions.jsonl").read_text() == "mine"


@pytest.mark.parametrize("existing", ["own_task.yaml", "own_task.py"])
def test_no_file_is_overwritten_and_nothing_is_written_beside_it(existing: str, here: Path) -> None:
    (here / existing).write_text("mine")
    done = command("recipes", "copy", "own_task")
    assert done.exit_code == 2
    assert f"nothing was written: {existing} exists with other text" in done.stderr
    assert contents(here) == {existing: b"mine"}


def test_a_folder_that_cannot_be_made_is_an_error_with_its_path(here: Path) -> None:
    (here / "file").touch()
    done = command("recipes", "copy", "ppo", "file/below")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: file/below/ppo.yaml: cannot be written (")


def test_an_unknown_recipe_is_answered_with_a_similar_one() -> None:
    done = command("recipes", "copy", "quickstrt")
    assert done.exit_code == 2
    assert "there is no recipe 'quickstrt'" in done.stderr
    assert "did you mean 'quickstart'?" in done.stderr


def test_dashboards_are_written_as_they_are_and_not_twice(here: Path) -> None:
    assert command("recipes", "dashboards").exit_code == 0
    source = REPOSITORY / "dashboards"
    assert contents(here / "monitoring/dashboards") == {file.name: file.read_bytes() for file in source.glob("*.json")}
    again = command("recipes", "dashboards")
    assert "wrote" not in again.stdout
    next((here / "monitoring/dashboards").iterdir()).write_text("mine")
    assert command("recipes", "dashboards").exit_code == 2
    assert command("recipes", "dashboards", "other").exit_code == 0


@pytest.mark.parametrize("to", [[], ["prom"], ["deploy/a/prometheus"]], ids=str)
def test_prometheus_gets_its_rules_and_looks_for_runs_of_the_working_directory(to: list[str], here: Path) -> None:
    done = command("recipes", "prometheus", *to)
    folder = here.joinpath(*(to or ["monitoring/prometheus"]))
    source = REPOSITORY / "deploy/prometheus"
    rules = {f"rules/{file.name}": file.read_bytes() for file in (source / "rules").glob("*.yml")}
    written = contents(folder)
    own = yaml.safe_load(written.pop("prometheus.yml"))
    assert written.pop("alertmanager.yml") == (source / "alertmanager.yml").read_bytes()
    assert written == rules
    for job in own["scrape_configs"]:
        [found] = [file for files in job["file_sd_configs"] for file in files["files"]]
        assert (folder / found).resolve() == here / "runs/quickstart/metrics/targets.json"
    assert f"--config.file={folder.relative_to(here)}/prometheus.yml" in done.stdout.splitlines()[-1]


def test_a_command_takes_the_name_of_a_recipe_and_notes_a_file_that_it_does_not_read(here: Path) -> None:
    assert command("config", "check", "-c", "quickstart").stderr == ""
    (here / "quickstart.yaml").write_text("run: {name: mine}\n")
    done = command("config", "check", "-c", "quickstart")
    assert (done.exit_code, done.stdout.partition("\n")[0]) == (0, "ok")
    assert "-c quickstart is the recipe that comes with asyncrl; -c quickstart.yaml is the file in this" in done.stderr
    assert "run: {name: mine}" not in command("config", "show", "-c", "quickstart").stdout
    assert "comes with" not in command("config", "check", "-c", "quickstart.yaml").stderr


def test_a_module_of_a_recipe_by_name_is_tried_without_a_search_path() -> None:
    done = command("config", "check", "-c", "own_task")
    assert (done.exit_code, done.stdout.partition("\n")[0]) == (0, "ok"), done.stderr
