"""The constraints are those that `make constraints` has tried with pyproject.toml, for each Python and processor."""

import doctest
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).parents[2] / "deploy"))
import constraints
import install


def test_the_examples_hold() -> None:
    assert doctest.testmod(constraints).failed == 0


def test_torch_has_one_version(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    [required] = [each for each in project["project"]["dependencies"] if each.startswith("torch==")]
    assert required in project["tool"]["uv"]["override-dependencies"]
    for extra in constraints.FILES:
        assert f"torch=={install.pinned(extra)['torch']}" == required


@pytest.mark.parametrize("extra", constraints.FILES)
def test_each_package_of_an_extra_has_a_version(extra: str, repository: Path) -> None:
    extras = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    required = [each for name in extras.keys() - {*constraints.FILES} for each in extras[name]]
    names = {canonicalize_name(Requirement(each).name) for each in required} - {"asyncrl"}
    assert {"s3fs", "gcsfs", "adlfs", "moto"} <= names <= install.pinned(extra).keys()


@pytest.mark.parametrize("extra", constraints.FILES)
def test_the_versions_were_tried_with_what_pyproject_requires(extra: str) -> None:
    tried, versions = constraints.written(extra)
    assert tried == constraints.digest(extra, versions), "run `make constraints`"


@pytest.mark.parametrize("extra", constraints.FILES)
@pytest.mark.parametrize("change", ["a dependency", "an extra", "a version"])
def test_a_change_after_the_trial_is_found(
    extra: str, change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, repository: Path
) -> None:
    tried, versions = constraints.written(extra)
    project = (repository / "pyproject.toml").read_text()
    if change == "a dependency":
        project = project.replace("dependencies = [", "dependencies = [\n    'another',", 1)
    elif change == "an extra":
        project = project.replace("[project.optional-dependencies]", "[project.optional-dependencies]\nmore = ['a']")
    else:
        versions = versions.replace("torch==", "torch==1", 1)
    (tmp_path / "pyproject.toml").write_text(project)
    monkeypatch.setattr(constraints, "ROOT", tmp_path)
    assert constraints.digest(extra, versions) != tried
