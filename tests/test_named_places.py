"""Pages that lead through the code name files, classes and functions that exist."""

import ast
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from asyncrl.metrics.catalogue import GENERATOR_STATES, LEARNER_STATES

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "asyncrl"
WALK = "docs/how-a-step-works.md"
PAGES = (
    "CONTRIBUTING.md", "SECURITY.md", "examples/README.md", "docs/architecture.md",
    "docs/decisions/0002-ten-decisions.md", WALK,
)  # fmt: skip
FOLDERS = "|".join(sorted(each.name for each in REPOSITORY.iterdir() if each.is_dir() and each.name[0] not in "._"))
FILE = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)`")
METHOD = re.compile(r"`([A-Z]\w+\.\w+)`")
FUNCTION = re.compile(r"`(\w+)\(\)`")


@cache
def defined(file: Path) -> set[str]:
    """Returns the functions of a module, and its methods as `Class.method`."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    body = ast.parse(file.read_text()).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    return {node.name for node in body if isinstance(node, functions)} | {
        f"{each.name}.{node.name}" for each in classes for node in each.body if isinstance(node, functions)
    }


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    named = FILE.findall((REPOSITORY / page).read_text())
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_method_that_a_page_names_is_there(page: str) -> None:
    named = set(METHOD.findall((REPOSITORY / page).read_text()))
    assert sorted(named - {name for file in PACKAGE.rglob("*.py") for name in defined(file)}) == []


def test_the_walk_through_a_step_names_its_functions_with_their_files_and_is_short() -> None:
    text = (REPOSITORY / WALK).read_text()
    named = {*METHOD.findall(text), *FUNCTION.findall(text)}
    files = [REPOSITORY / name for name in FILE.findall(text) if name.endswith(".py")]
    assert len(named) > 30
    assert sorted(named - {name for file in files for name in defined(file)}) == []
    assert len(text.splitlines()) <= 150


@pytest.mark.parametrize(
    ("loop", "states"), [("learner/loop.py", LEARNER_STATES), ("generation/generator.py", GENERATOR_STATES)]
)
def test_the_picture_above_a_loop_has_its_states_and_calls_that_exist(loop: str, states: Sequence[str]) -> None:
    picture = ast.get_docstring(ast.parse((PACKAGE / loop).read_text())) or ""
    words, named = set(re.findall(r"\w+", picture)), set(METHOD.findall(picture))
    assert set(states) <= words
    assert len(named) > 5
    assert sorted(named - {name for file in PACKAGE.rglob("*.py") for name in defined(file)}) == []
