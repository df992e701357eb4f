"""The constraints fit pyproject.toml: both extras resolve for each Python, on the processors that are supported."""

import doctest
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "deploy"))
import constraints
import install

UV = [sys.executable, "-m", "uv"]
NOT_REACHED = ("error sending request", "dns error", "timed out", "Could not connect")
PINNED_BY_OTHERS = {"intel-cmplr-lib-ur"}
"""intel-openmp requires an exact version. Its wheel for Windows does not, and uv reads the metadata of one wheel."""
CASES = [("cpu", "x86_64"), ("cpu", "aarch64"), ("gpu", "x86_64")]


def test_the_examples_hold() -> None:
    assert doctest.testmod(constraints).failed == 0


def test_torch_has_one_version(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    [required] = [each for each in project["project"]["dependencies"] if each.startswith("torch==")]
    assert required in project["tool"]["uv"]["override-dependencies"]
    for extra in constraints.FILES:
        assert f"torch=={install.pinned(extra)['torch']}" == required


@pytest.mark.integration
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("extra", "processor"), CASES)
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_an_installation_finds_versions_that_fit_together(
    python: str, extra: str, processor: str, repository: Path, tmp_path: Path
) -> None:
    """This reads only metadata of packages."""
    command = [*UV, "pip", "compile", "pyproject.toml", "--extra", extra, "--extra", "dev"]
    command += ["--constraint", f"constraints-{extra}.txt", "--python-version", python, "--quiet"]
    command += ["--python-platform", f"{processor}-manylinux_2_28", "--output-file", str(tmp_path / "found.txt")]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=500, check=False)
    if any(words in done.stderr for words in NOT_REACHED):
        pytest.skip("no package registry can be reached")
    assert done.returncode == 0, done.stderr
    found = install.pinned(extra)
    for line in (tmp_path / "found.txt").read_text().splitlines():
        if "==" in line and not line.lstrip().startswith("#"):
            name = line.split("==")[0]
            known = name in found or name in PINNED_BY_OTHERS
            assert known, f"{name} is not in the constraints: run `make constraints`"
