"""A config names functions and classes of the user's own modules, and not those of Python, under any name."""

import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.import_path import call_with_options, malformed, resolve
from asyncrl.config.rules import check_config
from asyncrl.config.schema import Config, EnvironmentSection
from asyncrl.environments.interfaces import build_environment, build_reward, build_tasks
from asyncrl.errors import ConfigError

OWN = """
import contextlib
import functools
import operator
import os
import os as files
import shutil
import subprocess
import types
from builtins import eval as compute
from pathlib import Path
from subprocess import Popen as Runner, check_output

import psutil

marks = []


def reward(task, completion):
    return 1.0


class Reward:
    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, task, completion):
        return self.scale

    def of(self, task, completion):
        return self.scale


class Longer(Path):
    pass


def mine(function):
    @functools.wraps(function)
    def called(*given, **named):
        return function(*given, **named)
    return called


class Program(psutil.Popen):
    pass


made = Reward(2.0)
scaled = functools.partial(reward)
cached = functools.lru_cache(reward)
wrapped = mine(reward)
nested = functools.partial(functools.partial(reward), None)
ran = functools.partial(check_output, shell=True)
ran_again = functools.partial(functools.partial(os.system))
cached_system = functools.lru_cache(os.system)
wrapped_rmtree = mine(shutil.rmtree)
bound = types.MethodType(subprocess.getoutput, "true")
caller = operator.methodcaller("unlink")
remove = {"a": 1}.pop
table = {}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_of_imports.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_of_imports", raising=False)


OF_PYTHON = [
    "subprocess:check_output",
    "os:system",
    "posix:system",
    "shutil:rmtree",
    "builtins:eval",
    "importlib:import_module",
    "ctypes.util:find_library",
    "webbrowser:open",
    "antigravity:webbrowser.open",
    "runpy:run_path",
    "os.path:join",
    "xml.dom.minidom:parse",
    "_posixsubprocess:fork_exec",
]
RE_EXPORTED = [
    "own_of_imports:check_output",
    "own_of_imports:Runner",
    "own_of_imports:Runner.communicate",
    "own_of_imports:files.remove",
    "own_of_imports:files.path.exists",
    "own_of_imports:compute",
    "own_of_imports:Path",
    "own_of_imports:Path.unlink",
    "own_of_imports:Longer.unlink",
    "own_of_imports:ran",
    "own_of_imports:ran_again",
    "own_of_imports:ran.func",
    "own_of_imports:cached_system",
    "own_of_imports:wrapped_rmtree",
    "own_of_imports:bound",
    "own_of_imports:caller",
    "own_of_imports:remove",
    "own_of_imports:table.update",
    "own_of_imports:check_output.__call__",
    "own_of_imports:functools.partial",
    "psutil:subprocess.check_call",
    "psutil:os.environ.pop",
    "torch:sys.path.append",
    "yaml:io.open",
]
OF_OTHERS = [
    "own_of_imports:reward",
    "own_of_imports:Reward",
    "own_of_imports:made",
    "own_of_imports:made.of",
    "own_of_imports:reward.__call__",
    "own_of_imports:scaled",
    "own_of_imports:nested",
    "own_of_imports:cached",
    "own_of_imports:wrapped",
    "math_verify:verify",
    "numpy:add",
    "torch:sigmoid",
    "torch.nn.functional:softmax",
    "msgspec.json:decode",
    "psutil:Process.name",
]


@pytest.mark.parametrize("value", OF_PYTHON)
@pytest.mark.parametrize("key", ["environment.name", "data.dataset", "environment.tools", "algorithm.loss"])
def test_a_module_of_python_is_refused_and_not_imported(value: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_import(name: str) -> Any:
        raise AssertionError(f"{name} was imported")

    monkeypatch.setattr("asyncrl.config.import_path.importlib.import_module", no_import)
    assert malformed(value, key=key) is not None
    with pytest.raises(ConfigError) as caught:
        resolve(value, key=key)
    module = value.partition(":")[0]
    assert str(caught.value).startswith(f"{key}: {value!r} is of Python's own module {module!r}, ")


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("value", RE_EXPORTED)
def test_a_callable_of_python_is_refused_under_the_name_of_another_module(value: str) -> None:
    with pytest.raises(ConfigError, match="is of Python's own module"):
        resolve(value, key="environment.reward")


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("value", OF_OTHERS)
def test_callables_of_other_modules_resolve(value: str) -> None:
    assert callable(resolve(value, key="environment.reward"))


@pytest.mark.parametrize(
    "changed",
    [
        {"environment": {"name": "shutil:rmtree", "options": {"path": "x"}}},
        {"data": {"dataset": "subprocess:check_output", "options": {"args": ["true"]}}},
        {"environment": {"name": "math", "rewards": [{"name": "a", "fn": "os:system"}]}},
        {"environment": {"name": "math", "agent": "pty:spawn"}},
        {"environment": {"name": "math", "reward": "math:fsum"}},
    ],
    ids=["environment", "dataset", "rewards", "agent", "reward"],
)
def test_a_config_that_names_a_module_of_python_is_refused_before_an_import(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is of Python's own module"):
        check_config(Config.model_validate(changed))


PROGRAM = ["touch", "left"]


@pytest.mark.usefixtures("in_tmp_path")
@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("value", ["psutil:Popen", "own_of_imports:Program", "tempfile:NamedTemporaryFile"])
def test_a_class_that_is_no_environment_no_dataset_and_no_reward_is_not_called(value: str, tmp_path: Path) -> None:
    options = {"args": PROGRAM}
    with pytest.raises(ConfigError, match=r"environment\.name"):
        build_environment(EnvironmentSection(name=value, options=options))
    with pytest.raises(ConfigError, match=r"data\.dataset"):
        build_tasks(Config.model_validate({"data": {"dataset": value, "options": options}}))
    with pytest.raises(ConfigError, match=r"environment\.reward"):
        build_reward(EnvironmentSection(name="math", reward=value))
    assert not (tmp_path / "left").exists()


@pytest.mark.parametrize("function", [dict, print, max], ids=["dict", "print", "max"])
def test_a_callable_without_a_signature_gets_no_options(
    function: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(_: object) -> None:
        raise ValueError("no signature")

    monkeypatch.setattr("asyncrl.config.import_path.inspect.signature", none)
    with pytest.raises(ConfigError, match="does not say which options it has"):
        call_with_options(function, {"file": None}, key="data.options")
    assert capsys.readouterr().out == ""
