"""The deployment README has few commands for each target, and all of its commands and files exist."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncrl.cli.main import app

_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)


@pytest.fixture
def text(deploy: Path) -> str:
    return (deploy / "README.md").read_text()


@pytest.fixture
def commands(text: str) -> dict[str, list[str]]:
    """Returns for each section the lines of its shell blocks."""
    _, *parts = _SECTION.split(text)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    return {
        title: [line for block in re.findall(r"```sh\n(.*?)```", body, re.DOTALL) for line in block.splitlines()]
        for title, body in sections.items()
    }


def test_every_way_takes_at_most_five_commands_and_the_table_counts_them(
    text: str, commands: dict[str, list[str]]
) -> None:
    anchors = {re.sub(r"[^a-z -]", "", title.lower()).replace(" ", "-"): title for title in commands}
    rows = re.findall(r"^\|[^|]+\|[^|]*?\(#([a-z-]+)\)[^|]*\| (\d) \|", text, re.MULTILINE)
    assert [anchor for anchor, _ in rows] == ["a-laptop", "one-gpu-box", "slurm", "kubernetes", "rays-launcher"]
    for anchor, count in rows:
        assert len(commands[anchors[anchor]]) == int(count) <= 5, anchor


def test_what_is_typed_is_there(commands: dict[str, list[str]], repository: Path) -> None:
    lines = [line for block in commands.values() for line in block]
    assert lines
    named = {
        path for line in lines for path in re.findall(r"deploy/(?:docker|compose|kuberay|slurm|ray)/[\w./-]+", line)
    }
    made = {"deploy/compose/.env"}  # the command itself creates this file
    assert [path for path in sorted(named - made) if not (repository / path).exists()] == []
    makefile = (repository / "Makefile").read_text()
    for line in lines:
        program, *words = line.split()
        if program == "make":
            assert f"\n{words[0]}:" in makefile, line
        if program == "asyncrl":
            result = CliRunner().invoke(app, [words[0], "--help"])
            assert result.exit_code == 0, line


def test_no_token_is_kept_in_the_repository(repository: Path) -> None:
    ignored = (repository / ".gitignore").read_text().splitlines()
    assert {".env", ".asyncrl-slurm-*/"} <= set(ignored)
