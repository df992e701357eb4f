"""Descriptions of errors in users' code: type, text, and the line in the user's file."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import asyncrl
from asyncrl.user_code import MAX_TEXT_CHARS, describe_error


def module(path: Path, source: str) -> dict[str, Callable[..., object]]:
    """Writes a user's file, runs it, and returns the names that it defines. The frames of its code have its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    names: dict[str, Callable[..., object]] = {}
    exec(compile(source, str(path), "exec"), names)
    return names


def description(call: Callable[[], object], *, with_this_file: bool = True) -> str:
    """Returns the description of the error that `call` raises.

    The frames in this file count as the user's code. Without `with_this_file`, the first of them is left out.
    """
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        call()
    # The first frame of the traceback is that of this function.
    trace = raised.tb.tb_next
    return describe_error(raised.value if with_this_file else raised.value.with_traceback(trace))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


@pytest.mark.usefixtures("in_tmp_path")
def test_the_line_of_the_users_file_is_named_relative_to_the_working_directory(tmp_path: Path) -> None:
    judge = module(tmp_path / "tasks.py", "import os\n\ndef judge():\n    return {}['JUDGE_API_KEY']\n")["judge"]
    assert description(judge) == "KeyError: 'JUDGE_API_KEY' (tasks.py:4)"


@pytest.mark.usefixtures("elsewhere")
def test_a_file_outside_the_working_directory_is_named_by_its_whole_path(tmp_path: Path) -> None:
    judge = module(tmp_path / "tasks.py", "def judge():\n    raise ValueError('no')\n")["judge"]
    assert description(judge) == f"ValueError: no ({tmp_path / 'tasks.py'}:2)"


@pytest.mark.usefixtures("in_tmp_path")
def test_the_users_line_is_named_when_a_library_or_python_raised(tmp_path: Path) -> None:
    library = module(tmp_path / "site-packages" / "library.py", "def call(f):\n    f()\n    raise OSError('late')\n")
    user = module(
        tmp_path / "tasks.py",
        "import json\n\ndef parse():\n    json.loads('{')\n\ndef through(call):\n    call(lambda: None)\n",
    )
    assert description(user["parse"]).endswith(" (tasks.py:4)")
    assert description(lambda: user["through"](library["call"])).endswith(" (tasks.py:7)")


@pytest.mark.usefixtures("in_tmp_path")
def test_an_installed_package_is_named_when_no_file_of_the_user_is_on_the_way(tmp_path: Path) -> None:
    names = module(tmp_path / "site-packages" / "judges.py", "def judge():\n    raise ValueError('no')\n")
    described = description(names["judge"], with_this_file=False)
    assert described == f"ValueError: no ({Path('site-packages', 'judges.py')}:2)"


def test_an_error_of_python_alone_has_no_place() -> None:
    decode = json.JSONDecoder().decode  # a partial has no frame in this file
    described = description(partial(decode, "{"), with_this_file=False)
    assert described.startswith("JSONDecodeError: Expecting property name")
    assert os.sep not in described


def test_a_long_text_is_cut_and_one_that_cannot_be_written_is_replaced() -> None:
    described = describe_error(ValueError("x" * 10_000 + "\ud800"))
    assert len(described) < MAX_TEXT_CHARS + 50
    assert describe_error(ValueError("\ud800")) == "ValueError: ?"


def test_an_error_whose_own_text_raises_is_described_by_its_type() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe_error(Mute()) == "Mute: (its message cannot be shown)"


def test_the_module_of_a_recipe_in_an_installed_package_counts_as_the_users_code() -> None:
    package = Path(asyncrl.__file__).parent
    for file, place in (("recipes/own_task.py", ":2)"), ("config/load.py", "")):
        names: dict[str, Callable[..., object]] = {}
        exec(compile("def judge():\n    return {}['key']\n", str(package / file), "exec"), names)
        assert description(names["judge"], with_this_file=False).partition("own_task.py")[2] == place
