"""`.ci/house` counts code, and exits with 1 where a limit is broken."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1] / ".ci" / "house"


def counted(folder: Path, files: dict[str, str]) -> tuple[int, dict[str, str], str]:
    """Returns the exit status, the printed figures by name, and the whole output, for a package with these files."""
    for name, text in files.items():
        path = folder / "asyncrl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / ".ci").mkdir()
    script = shutil.copy(HOUSE, folder / ".ci")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=False)
    lines = [line for line in done.stdout.splitlines() if line[:32].strip() and len(line) > 32]
    return done.returncode, {line[:32].strip(): line[32:].strip() for line in lines}, done.stdout


def test_lines_of_code_have_no_comment_and_no_docstring(tmp_path: Path) -> None:
    text = '"""A docstring\nof two lines."""\n\n# a comment\nimport os\n\nTEXT = """a text\nthat is no docstring"""\n'
    _, figures, _ = counted(tmp_path, {"__init__.py": "", "one.py": text})
    assert (figures["files"], figures["code lines"]) == ("2", "3")
    assert figures["comments per 100 code"].startswith("33.3")
    assert figures["imports, % of code"].startswith("33.3")


def test_records_and_abstract_classes_are_counted(tmp_path: Path) -> None:
    text = (
        "import msgspec\nfrom dataclasses import dataclass\nfrom typing import Protocol\n\n"
        "class A(msgspec.Struct, frozen=True):\n    x: int\n\n@dataclass\nclass B:\n    x: int\n\n"
        "class C(Protocol):\n    x: int\n"
    )
    _, figures, _ = counted(tmp_path, {"__init__.py": "", "one.py": text})
    assert (figures["records"], figures["abstract"]) == ("2", "1")


@pytest.mark.parametrize(
    ("files", "limit", "named"),
    [
        ({"one.py": "def long():\n" + "    x = 1\n" * 61}, "functions too long", "asyncrl.one.long"),
        (
            {"one.py": "from asyncrl import two\n", "two.py": "from asyncrl.one import x\n"},
            "modules in a circle of imports",
            "asyncrl.two",
        ),
    ],
)
def test_a_broken_limit_is_named_and_ends_with_1(tmp_path: Path, files: dict[str, str], limit: str, named: str) -> None:
    status, figures, output = counted(tmp_path, {"__init__.py": "", **files})
    assert status == 1
    assert figures[limit].endswith("BROKEN")
    assert named in output


def test_a_function_of_sixty_lines_is_not_too_long(tmp_path: Path) -> None:
    _, figures, _ = counted(tmp_path, {"__init__.py": "", "one.py": "def long():\n" + "    x = 1\n" * 60})
    assert not figures["functions too long"].endswith("BROKEN")
