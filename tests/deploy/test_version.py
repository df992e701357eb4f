"""The version stands in pyproject.toml. Other files that name it agree: tags of images, CITATION.cff, CHANGELOG.md."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

NAMED = re.compile(r"(?:asyncrl:|tag `)(\d[\w.]*)-(?:cpu|gpu)\b")
"""Matches a tag of an image, as in `asyncrl:0.2.0-cpu`. The group is the version."""


@pytest.fixture(scope="module")
def version() -> str:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    return str(project["project"]["version"])


def test_the_images_have_the_version_as_their_tag(repository: Path, deploy: Path, version: str) -> None:
    files = [file for file in deploy.rglob("*") if file.is_file() and file.suffix != ".pyc"]
    found = {file: NAMED.findall(file.read_text(errors="replace")) for file in [*files, repository / "README.md"]}
    named = {str(file.relative_to(repository)): set(versions) for file, versions in found.items() if versions}
    assert named == {name: {version} for name in named}
    assert {
        "deploy/README.md", "deploy/compose/compose.yaml", "deploy/docker/Dockerfile", "deploy/ray/cluster.yaml",
        "deploy/kuberay/quickstart/values.yaml", "deploy/kuberay/gpu-1/values.yaml", "deploy/kuberay/gpu-8/values.yaml",
    } == set(named)  # fmt: skip


def test_the_changelog_begins_with_the_version(repository: Path, version: str) -> None:
    first = re.search(r"^## (\S+)", (repository / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first is not None
    assert first[1] == version


def test_the_citation_has_the_version(repository: Path, version: str) -> None:
    assert str(yaml.safe_load((repository / "CITATION.cff").read_text())["version"]) == version


def test_the_entry_of_a_version_is_short_enough_to_be_read(repository: Path) -> None:
    _, *entries = re.split(r"^(?=## )", (repository / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert [entry.splitlines()[0] for entry in entries if len(entry.splitlines()) > 80] == []
