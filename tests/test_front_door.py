"""`import asyncrl` offers the public names."""

import ast
import pkgutil
import re
from pathlib import Path

import pytest

import asyncrl

PACKAGE = Path(asyncrl.__file__).parent
PUBLIC = sorted({*asyncrl.__all__} - {"__version__"})
PAGES = ("own-loop.md", "library.md", "python.md")
"""Pages for people who write Python. Their code needs no module of asyncrl besides the package itself."""
MODULES = asyncrl._MODULES
"""The module of each public name."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_what_its_module_defines(name: str) -> None:
    found = getattr(asyncrl, name)
    assert found.__name__ == name
    assert found.__module__ == f"asyncrl.{MODULES[name]}"


def test_type_checkers_and_the_interpreter_see_the_same_names() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    [block] = [
        node for node in tree.body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]  # fmt: skip
    imported = {
        alias.name: (node.module or "").removeprefix("asyncrl.")
        for node in block.body if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }  # fmt: skip
    assert imported == MODULES
    assert set(PUBLIC) == set(imported)


def test_no_module_has_the_name_of_a_public_name() -> None:
    """The import of such a module would replace the public name: the package gets an attribute for each module."""
    modules = {module.name for module in pkgutil.iter_modules([str(PACKAGE)])}
    assert modules & set(asyncrl.__all__) == set()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Polciy'"):
        _ = asyncrl.Polciy  # type: ignore[attr-defined]


def test_the_configuration_of_the_page_about_runs_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    codes = re.findall(r"```python\n(.*?)```", (PACKAGE.parent / "docs" / "python.md").read_text(), re.DOTALL)
    [code] = [code for code in codes if "load_config" in code]
    exec(code, {})
    assert "max_completion_tokens: 512" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_needs_no_deep_import(page: str) -> None:
    codes = re.findall(r"```python\n(.*?)```", (PACKAGE.parent / "docs" / page).read_text(), re.DOTALL)
    assert codes
    for code in codes:
        tree = ast.walk(ast.parse(code))
        froms = [
            node for node in tree if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("asyncrl")
        ]
        assert {node.module for node in froms} <= {"asyncrl"}
        assert {alias.name for node in froms for alias in node.names} <= set(PUBLIC)
        assert not re.search(r"^import asyncrl\.", code, re.MULTILINE)
        for name in re.findall(r"\basyncrl\.(\w+)", code):
            assert name in PUBLIC
