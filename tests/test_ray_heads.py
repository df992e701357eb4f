"""The commands of the README that start a Ray head are safe, and help texts and errors show the same commands."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.parametrize("path", ["README.md", "asyncrl/cli/generator.py", "asyncrl/deployment/cluster.py"])
def test_a_ray_head_for_two_terminals_listens_on_this_machine_alone(path: str) -> None:
    commands = re.findall(r"(\S*) ?\bray start --head", (REPOSITORY / path).read_text())
    assert [command.lstrip('"`') for command in commands] == ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0"]
