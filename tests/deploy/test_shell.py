"""Checks the shell scripts with shellcheck."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

CI = [path for path in sorted((REPOSITORY / ".ci").iterdir()) if "bash" in path.read_text().splitlines()[0]]
SCRIPTS = [*CI, *sorted((REPOSITORY / "deploy").rglob("*.sbatch"))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert shellcheck is not None, "shellcheck is missing: it comes with the extra `test`"
    done = subprocess.run([shellcheck, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
