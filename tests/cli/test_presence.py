"""What a configuration names and this machine lacks: missed before anything starts, only where it is needed."""

import os
import shutil
from collections.abc import Collection
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncrl.buffer.membership import Role
from asyncrl.cli.main import app
from asyncrl.cli.presence import check_presence
from asyncrl.config.load import load_config
from asyncrl.errors import ConfigError

pytestmark = pytest.mark.slow

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def missing(*overrides: str, roles: Collection[Role] = tuple(Role)) -> list[str]:
    try:
        check_presence(load_config([QUICKSTART], overrides), roles=roles)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def test_the_quickstart_lacks_nothing() -> None:
    assert missing() == []


def test_f28_a_dataset_file_that_does_not_exist_is_missed(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    overrides = ("data.dataset=jsonl", f"data.path={file}")
    assert missing(*overrides) == [f"data.path = {file}: there is no such file; name one with a JSON object a line"]
    file.touch()
    assert missing(*overrides) == []
    assert missing("data.dataset=jsonl", f"data.path={tmp_path}") != [], "a folder is no file"


def test_f28_a_model_s_directory_that_does_not_exist_is_missed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    [line] = missing("model.tiny=null", f"model.path={model}")
    assert line.startswith(f"model.path = {model}: there is no such directory")
    assert missing(f"model.path={model}") == [], "a tiny one is built there"
    model.mkdir()
    assert missing("model.tiny=null", f"model.path={model}") == []
    assert missing("model.tiny=null", "model.path=Qwen/Qwen3-0.6B") == [], "the hub's, as far as can be told"


def test_f28_a_run_does_not_begin_with_what_its_own_start_moves_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "runs" / "quickstart" / "checkpoints" / "step-20" / "hf"
    model.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for path in (model, model.relative_to(tmp_path)):
        [line] = missing("model.tiny=null", f"model.path={path}")
        assert line.startswith(f"model.path = {path}: it is in runs/quickstart, which is moved aside")
        assert missing("model.tiny=null", f"model.path={path}", "run.name=second") == []


@pytest.mark.parametrize(
    ("key", "roles"),
    [
        ("data.dataset", [Role.LEARNER, Role.GENERATOR]),
        ("environment.name", [Role.LEARNER, Role.GENERATOR]),
        ("environment.reward", [Role.GENERATOR]),
        ("algorithm.loss", [Role.LEARNER]),
        ("algorithm.advantage", [Role.LEARNER]),
    ],
)
def test_f28_a_module_that_does_not_exist_is_missed_by_the_roles_that_import_it(key: str, roles: list[Role]) -> None:
    [problem] = missing(f"{key}=no_such_module:f")
    assert f"{key}: 'no_such_module:f' cannot be imported" in problem
    assert "PYTHONPATH" in problem
    assert [role for role in Role if missing(f"{key}=no_such_module:f", roles=[role])] == roles
    assert missing(f"{key}=pathlib:Path") == []


def test_f28_a_module_is_missed_where_an_advantage_has_options() -> None:
    [problem] = missing("algorithm.advantage={name: no_such_module:f, factor: 2}")
    assert "algorithm.advantage: 'no_such_module:f' cannot be imported" in problem
    assert missing("algorithm.advantage={name: group_norm, eps: 1e-4}") == []


@pytest.mark.parametrize("override", ["environment.name=no_such_module:f", "environment.options.task=spell"])
def test_an_environment_that_nobody_builds_is_not_missed(override: str) -> None:
    elsewhere = (override, "data.dataset=pathlib:Path")
    assert missing(*elsewhere) != []
    assert missing(*elsewhere, roles=[Role.LEARNER]) == [], (
        "prompts come from elsewhere, rewards are the generators' to give"
    )
    assert missing(*elsewhere, "environment.reward=exact_match") == []


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("environment.options.task=spell_backwards", "has no 'spell_backwards'; did you mean 'spell_backward'?"),
        ("environment.options.task=null", "is missing; name one of reasoning-gym's"),
        ("environment.options.task=[3]", "has no [3]"),
    ],
)
def test_f28_a_task_that_reasoning_gym_lacks_is_missed(override: str, says: str) -> None:
    [problem] = missing(override)
    assert problem.startswith("environment.options.task: ")
    assert says in problem


def test_gpus_that_this_machine_lacks_are_a_warning_where_ray_is_to_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def warnings(*overrides: str, roles: Collection[Role] = tuple(Role)) -> list[str]:
        return check_presence(load_config([QUICKSTART], overrides), roles=roles)

    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert warnings() == []
    wanted = ("generator.gpus=1", "learner.gpus=0.5")
    assert [line.partition(",")[0] for line in warnings(*wanted)] == ["generator.gpus = 1", "learner.gpus = 0.5"]
    assert warnings(*wanted, "ray.address='10.0.0.7:6379'") == []
    assert warnings(*wanted, roles=[Role.LEARNER]) == [], "it joins a cluster, whose machines have their own"
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert warnings(*wanted) == []


def test_parts_of_engines_without_a_core_each_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def warnings(*overrides: str) -> list[str]:
        return check_presence(load_config([QUICKSTART], overrides), roles=tuple(Role))

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    two_parts = "generator.tensor_parallel_size=2"
    assert warnings(two_parts, "generator.replicas=2") == []
    [warning] = warnings(two_parts, "generator.replicas=3")
    assert "2 × 3 on CPUs needs 6 cores, and this machine has 4" in warning
    assert warnings("generator.replicas=6") == [], "whole engines take turns"
    assert warnings(two_parts, "generator.replicas=3", "ray.address='10.0.0.7:6379'") == []
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert warnings(two_parts, "generator.replicas=3", "generator.gpus=2") == []


def test_f28_config_check_reports_what_is_missing_beside_the_rules_that_are_broken() -> None:
    mistakes = ["environment.reward=no_such_module:f", "environment.options.task=spell", "learner.ranks=5"]
    result = CliRunner().invoke(app, ["config", "check", "-c", str(QUICKSTART), *mistakes])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 3
