import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.import_path import (
    BUILT_IN_NAMES,
    call_with_options,
    is_import_path,
    missing_module,
    resolve,
    search_folders,
    suggest,
)
from asyncrl.errors import ConfigError, Terminated
from asyncrl.user_code import USER_FOLDERS


def test_an_import_path_is_told_from_a_name() -> None:
    assert is_import_path("package.module:callable")
    assert not is_import_path("exact_match")


def test_a_path_resolves_to_its_callable_and_dots_reach_into_classes() -> None:
    assert resolve("pytest:Module", key="k") is pytest.Module
    assert resolve("pytest:Module.collect", key="k") is pytest.Module.collect


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_package.module:f", "no module 'no_such_package'"),
        ("pytest:Modlue", "did you mean 'Module'"),
        ("pytest:__all__", "is a list, not a callable"),
    ],
)
def test_what_cannot_be_resolved_names_key_value_and_reason(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(value, key="environment.reward")
    assert "environment.reward" in str(caught.value)
    assert repr(value) in str(caught.value)
    assert str(caught.value).startswith("environment.reward: ")


@pytest.mark.parametrize("value", ["pathlib:", ":f", ".relative:f", "exact_macth"])
@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("environment.reward", f"one of {', '.join(BUILT_IN_NAMES['environment.reward'])}, or an import path"),
        ("algorithm.loss", "an import path"),
    ],
)
def test_what_is_neither_a_built_in_name_nor_an_import_path_is_refused(value: str, key: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(value, key=key)
    assert key in str(caught.value)
    assert str(caught.value).startswith(f"{key} = {value}: must be {wanted} like package.module:callable")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Creates the package `pkg.mod`, the namespace package `ns.inner.mod` and the module `single`; each raises when it
    is imported."""
    for file in ("pkg/__init__.py", "pkg/mod.py", "ns/inner/mod.py", "single.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("raise RuntimeError('was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    "value",
    [
        "single:f",
        "pkg:f",
        "pkg.mod:f",
        "ns.inner.mod:f",
        "os.path:join",  # os is not a package; os puts os.path into sys.modules itself
        "sys:path",
        "builtins:print",
        "__main__:f",
        "mine..x:f",  # malformed: another rule refuses it
        "s3://bucket/reward.py",  # the same
    ],
)
def test_a_module_that_is_there_or_may_be_is_not_missed_and_not_imported(value: str) -> None:
    assert missing_module(value, key="k") is None


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("value", "module"), [("no_such:f", "no_such"), ("pkg.no:f", "pkg.no"), ("single.sub.mod:f", "single.sub")]
)
def test_a_module_that_is_not_there_is_missed_in_the_words_of_an_import(value: str, module: str) -> None:
    message = missing_module(value, key="environment.reward")
    assert message is not None
    assert f"environment.reward: {value!r} cannot be imported, there is no module {module!r}" in message
    if value == "no_such:f":
        with pytest.raises(ConfigError) as caught:
            resolve(value, key="environment.reward")
        assert str(caught.value) == message


def test_a_module_that_raises_and_one_with_a_missing_import_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "raises_on_import.py").write_text("1 / 0\n")
    (tmp_path / "lacks_an_import.py").write_text("import not_installed_here\n")
    (tmp_path / "exits.py").write_text("import sys\n\nsys.exit('usage: …')\n")
    with pytest.raises(ConfigError, match=r"raised ZeroDivisionError: division by zero \(.*raises_on_import\.py:1\)"):
        resolve("raises_on_import:f", key="k")
    with pytest.raises(ConfigError, match=r"raised SystemExit: usage: … \(.*exits\.py:3\)"):
        resolve("exits:f", key="k")
    with pytest.raises(ConfigError, match=r"No module named 'not_installed_here' \(.*lacks_an_import\.py:1\)"):
        resolve("lacks_an_import:f", key="k")
    assert "lacks_an_import" not in sys.modules
    (tmp_path / "is_interrupted.py").write_text("from asyncrl.errors import Terminated\n\nraise Terminated\n")
    with pytest.raises(Terminated):  # by SIGTERM during the import
        resolve("is_interrupted:f", key="k")


def test_options_that_do_not_fit_are_refused_before_the_call_and_its_own_errors_pass() -> None:
    def function(*, count: int) -> int:
        return [10, 20][count]

    assert call_with_options(function, {"count": 1}, key="k") == 20
    with pytest.raises(ConfigError, match=r"^k\.cuont: the callable has no .* are count; did you mean 'count'\?"):
        call_with_options(function, {"cuont": 1}, key="k")
    with pytest.raises(ConfigError, match="needs a value for count, which is missing"):
        call_with_options(function, {}, key="k")
    with pytest.raises(IndexError):
        call_with_options(function, {"count": 2}, key="k")


def test_suggest_says_nothing_when_nothing_is_near() -> None:
    assert suggest("exact_macth", ["exact_match"]) == "; did you mean 'exact_match'?"
    assert suggest("zzz", ["exact_match"]) == ""


def test_the_pages_name_each_built_in_reward() -> None:
    docs = Path(__file__).parents[2] / "docs"
    table = (docs / "rewards.md").read_text().partition("| built in | returns |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == [*BUILT_IN_NAMES["environment.rewards"]]
    rows = (docs / "configuration.md").read_text().splitlines()
    [row] = [row for row in rows if row.startswith("| `environment.reward` |")]
    assert all(f"`{name}`" in row for name in BUILT_IN_NAMES["environment.reward"])


def test_modules_that_no_other_place_has_are_found_in_the_given_folders_also_by_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without such a module is not added, and no file of a folder hides a module of Python or of a package."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(USER_FOLDERS, "before")
    beside, other, unused = tmp_path / "beside", tmp_path / "other", tmp_path / "unused"
    for folder, module in (
        (beside, "found_beside"),
        (other, "found_beside"),
        (other, "found_other"),
        (other, "json"),
        (other, "msgspec"),
        (unused, "json"),
    ):
        folder.mkdir(exist_ok=True)
        (folder / f"{module}.py").write_text(f"def where():\n    return {folder.name!r}\n")
    values = ["found_beside:where", "found_other:where", "json:loads", "no_such_module:f"]
    search_folders([unused, beside, other], values)
    assert os.environ[USER_FOLDERS] == os.pathsep.join(["before", str(beside), str(other)])
    assert sys.path[-2:] == [str(beside), str(other)]
    assert resolve("found_beside:where", key="k")() == "beside"
    assert resolve("found_other:where", key="k")() == "other"
    search_folders([beside, other], values)
    assert sys.path.count(str(beside)) == 1
    code = "import asyncrl, found_other, json, msgspec; print(found_other.where(), json.__file__, msgspec.__file__)"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.startswith("other ")
    assert str(tmp_path) not in done.stdout


@pytest.mark.parametrize(
    "source",
    [
        "from __future__ import annotations\n\ndef f(rows: callable | None = None, cap: float = 1.0): return cap",
        "def f(rows: 'list[Undefined]' = (), cap=1.0): return cap",
        "def f(cap: list['Undefined'] = 1.0): return cap",
        "def f(cap: float = 1.0, size: int = None): return cap",
    ],
)
def test_annotations_that_cannot_be_judged_judge_nothing(source: str) -> None:
    made: dict[str, Any] = {}
    exec(compile(source, "made", "exec", dont_inherit=True), made)
    options = {"cap": 2.0} | ({"size": None} if "size" in source else {})
    assert call_with_options(made["f"], options, key="k") == 2.0
