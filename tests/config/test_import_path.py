import sys
from pathlib import Path

import pytest

from asyncrl.config.import_path import call_with_options, is_import_path, resolve, suggest
from asyncrl.errors import ConfigError


def test_an_import_path_is_told_from_a_name() -> None:
    assert is_import_path("package.module:callable")
    assert not is_import_path("exact_match")


def test_a_path_resolves_to_its_callable_and_dots_reach_into_classes() -> None:
    assert resolve("pathlib:Path", key="k") is Path
    assert resolve("pathlib:Path.cwd", key="k") == Path.cwd


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_package.module:f", "no module 'no_such_package'"),
        ("pathlib:Paht", "did you mean 'Path'"),
        ("sys:path", "is a list, not a callable"),
        ("pathlib:", "not an import path"),
        (":f", "not an import path"),
        (".relative:f", "not an import path"),
    ],
)
def test_what_cannot_be_resolved_names_key_value_and_reason(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(value, key="environment.reward")
    assert caught.value.key == "environment.reward"
    assert repr(value) in str(caught.value)
    assert str(caught.value).startswith("environment.reward: ")


def test_a_module_that_raises_and_one_with_a_missing_import_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "raises_on_import.py").write_text("1 / 0\n")
    (tmp_path / "lacks_an_import.py").write_text("import not_installed_here\n")
    with pytest.raises(ConfigError, match="raised ZeroDivisionError"):
        resolve("raises_on_import:f", key="k")
    with pytest.raises(ConfigError, match="no module 'not_installed_here'"):
        resolve("lacks_an_import:f", key="k")
    assert "lacks_an_import" not in sys.modules


def test_options_that_do_not_fit_are_refused_before_the_call_and_its_own_errors_pass() -> None:
    def function(*, count: int) -> int:
        return [10, 20][count]

    assert call_with_options(function, {"count": 1}, key="k") == 20
    with pytest.raises(ConfigError, match=r"did you mean 'count'\?; there are \['count'\]"):
        call_with_options(function, {"cuont": 1}, key="k")
    with pytest.raises(ConfigError, match="missing"):
        call_with_options(function, {}, key="k")
    with pytest.raises(IndexError):
        call_with_options(function, {"count": 2}, key="k")


def test_suggest_says_nothing_when_nothing_is_near() -> None:
    assert suggest("exact_macth", ["exact_match"]) == "; did you mean 'exact_match'?"
    assert suggest("zzz", ["exact_match"]) == ""
