"""The table of vLLM's internals has everything that asyncrl uses of vLLM, and the installed vLLM has all of it."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl import vllm_internals
from asyncrl.generation.vllm_adapters import VLLM_RANKS
from asyncrl.policy.model_directory import CPU_HEAD_SIZES
from asyncrl.vllm_internals import INTERNALS, PUBLIC, Name, Text, installed, main, missing

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "asyncrl"
TABLE = PACKAGE / "vllm_internals.py"
PAGE = ROOT / "docs" / "library.md"
ENGINE = sorted((PACKAGE / "generation").glob("vllm_*.py"))
NAMES = [entry for entry in (*INTERNALS, *PUBLIC) if isinstance(entry, Name)]
TEXTS = [entry for entry in (*INTERNALS, *PUBLIC) if isinstance(entry, Text)]
OF_VLLM = {"llm", "_llm", "processor", "state", "output", "final", "found", "request_states"}
"""How asyncrl calls the objects of vLLM: variables and attributes with these names hold one."""
OTHERS = {"cancel", "decode", "get"}
"""Methods of Python's and transformers' objects that vLLM holds."""
needs_vllm = pytest.mark.skipif(installed() is None, reason="vLLM is not installed")


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields (module, name) of each import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def unlisted_names(tree: ast.AST) -> list[str]:
    """Returns the names of vLLM in a module that are not in the table: its imports, and texts such as
    "vllm.module.Class" or "VLLM_VARIABLE"."""
    public = {(entry.module, entry.name) for entry in PUBLIC if isinstance(entry, Name)}
    found = [
        f"{module}:{name}"
        for module, name in imports(tree)
        if module.split(".")[0] == "vllm" and (module, name) not in public
    ]
    texts = {entry.module for entry in NAMES} | {entry.name for entry in NAMES}
    texts |= {entry.text.strip('"') for entry in TEXTS}
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    named = [
        text for text in constants if isinstance(text, str) and re.fullmatch(r"vllm(\.\w+)+|VLLM_[A-Z0-9_]+", text)
    ]
    return found + [text for text in named if text not in texts]


def unlisted_members(tree: ast.AST) -> list[str]:
    """Returns the attributes of vLLM's objects in a module that are not in the table."""
    members = {member.partition("(")[0] for entry in NAMES for member in entry.members.split()}
    found = []
    for node in ast.walk(tree):
        chain: list[str] = []
        link = node
        while isinstance(link, ast.Attribute):
            chain.insert(0, link.attr)
            link = link.value
        chain.insert(0, link.id if isinstance(link, ast.Name) else "")
        first = next((i for i, name in enumerate(chain) if name in OF_VLLM), len(chain))
        found += [".".join(chain) for name in chain[first + 1 :] if name not in members | OTHERS]
    return found


@pytest.mark.slow
def test_no_module_uses_a_name_of_vllm_that_the_table_does_not_have() -> None:
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if file != TABLE]
    found = {str(file.relative_to(ROOT)): unlisted_names(ast.parse(file.read_text())) for file in files}
    assert {file: names for file, names in found.items() if names} == {}


def test_no_attribute_of_vllms_objects_is_used_that_the_table_does_not_have() -> None:
    found = {file.name: unlisted_members(ast.parse(file.read_text())) for file in ENGINE}
    assert len(found) > 4
    assert {file: names for file, names in found.items() if names} == {}


def test_what_the_weights_engine_inherits_is_in_the_table() -> None:
    tree = ast.parse((PACKAGE / "weights" / "vllm_plugin.py").read_text())
    [engine] = [node for node in tree.body if isinstance(node, ast.ClassDef) and "WeightTransferEngine" in node.name]
    text = ast.unparse(engine)
    own = set(re.findall(r"^    (?:def )?(\w+)", text, re.MULTILINE))
    members = {member.partition("(")[0] for entry in NAMES for member in entry.members.split()}
    assert set(re.findall(r"self\.(\w+)", text)) - own - members == set()
    assert set(re.findall(r"self\.parallel_config\.(\w+)", text)) <= members


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import vllm.v1.engine.core", ["vllm.v1.engine.core:"]),
        ("def f():\n    from vllm.envs import enable_envs_cache", ["vllm.envs:enable_envs_cache"]),
        ("from vllm import SamplingParams", []),
        ("x = 'vllm.v1.worker.Worker'", ["vllm.v1.worker.Worker"]),
        ("x = {'VLLM_USE_V1': '1', 'VLLM_PLUGINS': 'a'}", ["VLLM_USE_V1"]),
    ],
)
def test_a_name_that_is_not_in_the_table_is_found(code: str, found: list[str]) -> None:
    assert unlisted_names(ast.parse(code)) == found


@pytest.mark.parametrize("code", ["self._llm.scheduler", "llm.engine_core.pid", "parent.output.stop_reason + 1"])
def test_an_attribute_that_is_not_in_the_table_is_found(code: str) -> None:
    assert unlisted_members(ast.parse(code)) == [code.removesuffix(" + 1")]


def test_type_checkers_see_each_name_in_the_module_of_its_entry() -> None:
    internals = {(entry.module, entry.name) for entry in INTERNALS if isinstance(entry, Name)}
    typed = {found for found in imports(ast.parse(TABLE.read_text())) if found[0].split(".")[0] == "vllm"}
    assert typed
    assert typed <= internals


def test_the_numbers_of_vllm_that_asyncrl_has_too_are_those_of_the_table() -> None:
    texts = {entry.text for entry in TEXTS}
    assert {str(list(VLLM_RANKS)), str(list(CPU_HEAD_SIZES))} <= texts


def test_a_name_that_is_not_in_the_table_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="its table has no such name"):
        _ = vllm_internals.LLM  # type: ignore[attr-defined]


# -- looking up the entries ------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_vllm
def test_the_installed_vllm_has_every_entry() -> None:
    folder = installed()
    assert folder is not None
    lines = list(missing(folder))
    assert not lines, "\n".join(["the installed vLLM lacks names that asyncrl uses:", *lines])


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """Returns the folder of a small vLLM."""
    modules = {
        "__init__": "if TYPE_CHECKING:\n    from vllm.engine.core import Core as Engine",
        "engine/__init__": "from .core import run",
        "engine/base": "class Base(ABC):\n    def __init__(self):\n        self.model: int = other.device",
        "engine/core": """
from vllm.engine.base import Base as Parent

def run(): ...

class Core(Parent[int], Generic[T]):
    field: int

    async def pause(self, mode, *, clear_cache=True):
        self.state, self.rest = mode, 1
        local.name = 1

    def call(self, **arguments): ...
""",
        "engine/client": """
from vllm.engine import core
from vllm.engine.worker import Worker

try:
    from fast import parse
except ImportError:
    parse = None

class Client(core.Core): ...
""",
        "engine/worker": "from vllm.engine.client import Worker",
        "engine/newer": "def broken(:",
    }
    for name, code in modules.items():
        file = tmp_path / "vllm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    return tmp_path / "vllm"


@pytest.mark.parametrize(
    "entry",
    [
        Name("vllm", "Engine", "field pause(mode,clear_cache) call(anything) state rest model", ""),
        Name("vllm.engine", "run", "", ""),
        Name("vllm.engine.core", "Core", "", ""),
        Name("vllm.engine.client", "Client", "field model", ""),
        Name("vllm.engine.client", "parse", "", ""),
        Text("vllm.engine.core", "self.state, self.rest", ""),
    ],
)
def test_an_entry_is_found(vllm: Path, monkeypatch: pytest.MonkeyPatch, entry: Name | Text) -> None:
    monkeypatch.setattr(vllm_internals, "INTERNALS", (entry,))
    monkeypatch.setattr(vllm_internals, "PUBLIC", ())
    assert list(missing(vllm)) == []


def test_each_missing_part_is_named_with_what_asyncrl_does_with_it(
    vllm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    internals = (
        Name("vllm.engine.core", "Core", "field name device pause(mode,timeout) field(mode)", "runs"),
        Name("vllm.engine.gone", "Gone", "", "goes"),
        Name("vllm.engine.core", "Gone", "field", "goes"),
        Text("vllm.engine.core", "self.gone", "reads"),
        Name("vllm.engine.worker", "Worker", "", "works"),
        Name("vllm.engine.newer", "Newer", "", "waits"),
    )
    monkeypatch.setattr(vllm_internals, "INTERNALS", internals)
    monkeypatch.setattr(vllm_internals, "PUBLIC", ())
    monkeypatch.setattr(vllm_internals, "installed", lambda: vllm)
    assert main() == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines == [
        "vllm.engine.core: Core.name is missing; asyncrl runs",
        "vllm.engine.core: Core.device is missing; asyncrl runs",
        "vllm.engine.core: Core.pause(mode,timeout) is missing; asyncrl runs",
        "vllm.engine.core: Core.field(mode) is missing; asyncrl runs",
        "vllm.engine.gone: Gone is missing; asyncrl goes",
        "vllm.engine.core: Gone.field is missing; asyncrl goes",
        "vllm.engine.core: self.gone is missing; asyncrl reads",
        "vllm.engine.worker: Worker is missing; asyncrl works",
        "vllm.engine.newer: this Python cannot read a module that Newer needs: invalid syntax (<unknown>, line 1)",
    ]
    assert last.startswith("9 of 10 internals and 0 public names are missing in vLLM ")


@pytest.mark.slow
def test_the_command_needs_the_standard_library_only(vllm: Path) -> None:
    def run(*paths: Path) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-S", "-m", "asyncrl.vllm_internals"],  # -S: without the installed packages
            env={"PYTHONPATH": ":".join(map(str, paths))}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    code, shown = run(ROOT)
    assert (code, shown[:21]) == (2, "vLLM is not installed")
    code, shown = run(ROOT, vllm.parent)
    assert code == 1
    assert "vllm.envs: enable_envs_cache is missing; asyncrl makes vLLM read environment variables once" in shown


def test_the_page_has_the_table() -> None:
    parts: dict[str, dict[str, list[str]]] = {}
    for entry in INTERNALS:
        parts.setdefault(entry.use, {}).setdefault(entry.module, []).extend(f"`{part}`" for part in entry.parts)
    rows = []
    for use, modules in parts.items():
        cells = [f"`{module}`: {', '.join(names)}" for module, names in modules.items()]
        rows.append(f"| {use} | {'; '.join(cells)} |")
    page = PAGE.read_text()
    shown = re.search(r"\| what asyncrl does .*\n\|.*\n((?:\|.*\n)+)", page)
    wanted = "\n".join(rows)
    assert shown is not None
    assert shown[1].strip() == wanted, f"docs/library.md must have this table:\n{wanted}"


def test_the_page_has_the_pinned_version_and_the_sizes_of_the_table() -> None:
    pins = set(re.findall(r'"vllm(?:-cpu)?==([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    [pin] = pins
    internals, public = (sum(len(entry.parts) for entry in entries) for entries in (INTERNALS, PUBLIC))
    page = " ".join(PAGE.read_text().split())
    assert f"exactly one version of vLLM, {pin} " in page
    assert f"of {internals} internals and none of {public} documented names" in page
