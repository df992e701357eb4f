"""Checks the Dockerfile: versions are pinned, the user is not root, and the copied files exist.

The tests have no Docker daemon, so they do not build the image.
"""

import re
from pathlib import Path

import pytest

_PINNED = re.compile(r"\S+:\d+\.\d+\.\d+\S*")


@pytest.fixture
def instructions(deploy: Path) -> list[tuple[str, str]]:
    """Returns (instruction, arguments) of the Dockerfile, with continued lines joined and without comments."""
    text = (deploy / "docker" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined)]


def stages(instructions: list[tuple[str, str]]) -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """Returns for each stage the image that it starts from, and its instructions."""
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    for name, rest in instructions:
        if name == "FROM":
            image, _, stage = rest.partition(" AS ")
            found[stage] = (image, [])
        else:
            found[list(found)[-1]][1].append((name, rest))
    return found


def test_images_from_elsewhere_are_pinned_by_version(instructions: list[tuple[str, str]]) -> None:
    parsed = stages(instructions)
    assert list(parsed) == ["base", "gpu", "cpu"], "without --target, Docker builds the last stage, which is for CPUs"
    for image, _ in parsed.values():
        assert image in parsed or _PINNED.fullmatch(image), image


@pytest.mark.parametrize("target", ["gpu", "cpu"])
def test_nothing_runs_as_root_and_versions_are_those_of_the_tests(
    target: str, instructions: list[tuple[str, str]]
) -> None:
    _, body = stages(instructions)[target]
    assert body[-1] == ("USER", "10001:10001")
    [install] = [rest for name, rest in body if name == "RUN"]
    assert install == f"python deploy/install.py --here --copy --hashes --extra {target} --also hf,s3,gs,az"


def test_a_mounted_tasks_folder_is_on_pythons_search_path(instructions: list[tuple[str, str]]) -> None:
    assert [rest for name, rest in instructions if name == "ENV" and "PYTHONPATH=/tasks " in rest]
    assert [rest for name, rest in instructions if name == "RUN" and " /tasks " in rest], "the folder exists"


def test_what_is_copied_is_there_and_is_all_that_is_sent(
    instructions: list[tuple[str, str]], deploy: Path, repository: Path
) -> None:
    copied = {source for name, rest in instructions if name == "COPY" for source in rest.split()[:-1]}
    assert copied
    assert [source for source in copied if not (repository / source).exists()] == []
    ignore = (deploy / "docker" / "Dockerfile.dockerignore").read_text().split("\n")
    assert "*" in ignore
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
