"""The constraints are those that `make constraints` has tried with pyproject.toml, for each Python and processor."""

import doctest
import re
import sys
import tomllib
from importlib import metadata
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
    tried, versions = constraints.written(constraints.FILES[extra])
    assert tried == constraints.digest(extra, versions), "run `make constraints`"
    made_for, _ = constraints.written(constraints.HASHES[extra])
    assert made_for == tried, "run `make constraints`"


@pytest.mark.parametrize("extra", constraints.FILES)
def test_an_image_takes_only_packages_of_the_constraints_and_knows_their_files(extra: str) -> None:
    _, lines = constraints.written(constraints.HASHES[extra])
    hashed = {}
    for line in lines.splitlines():
        package, *found = line.split()
        assert found
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in found), line
        name, _, hashed[name] = package.partition("==")
    pinned = install.pinned(extra)
    pinned |= {name: pinned.get(other) for name, other in constraints.PINNED_BY_OTHERS.items()}
    assert hashed == {name: pinned[name] for name in hashed}
    assert ("intel-cmplr-lib-ur" in hashed) == ("intel-openmp" in hashed)
    assert {"ray", "transformers", "s3fs", "gcsfs", "adlfs"} <= hashed.keys()
    assert ("torch" in hashed) == (extra == "gpu")


def test_all_packages_that_asyncrl_requires_here_have_checksums() -> None:
    """Follows the metadata of the installed packages that have the versions of the constraints. Those for the storages
    of a mirror may not be installed."""
    pinned = install.pinned("cpu")
    _, lines = constraints.written(constraints.HASHES["cpu"])
    hashed = {line.partition("==")[0] for line in lines.splitlines()}
    found, left = set[str](), [("asyncrl", frozenset({"cpu", "hf"}))]
    while left:
        name, extras = left.pop()
        for each in map(Requirement, metadata.requires(name) or ()):
            taken = each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in (*extras, ""))
            required = canonicalize_name(each.name)
            versions = {here.version.partition("+")[0] for here in metadata.distributions(name=required)}
            if taken and required not in found and pinned.get(required) in versions:
                found.add(required)
                left.append((required, frozenset(each.extras)))
    assert len(found) > 100
    assert found - hashed == {"torch", "torchvision"} & found


@pytest.mark.parametrize("extra", constraints.FILES)
@pytest.mark.parametrize("change", ["a dependency", "an extra", "a version"])
def test_a_change_after_the_trial_is_found(
    extra: str, change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, repository: Path
) -> None:
    tried, versions = constraints.written(constraints.FILES[extra])
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
