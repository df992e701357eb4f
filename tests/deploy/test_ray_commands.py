"""The texts that tell a user how to start Ray: its token is private, nodes require it, and no statistics are sent."""

import re
from pathlib import Path

import pytest

from asyncrl.config.schema import RunSection

TEXTS = ("README.md", "configs", "deploy", "docs", "asyncrl")
MAKES_A_TOKEN = re.compile(r"get-auth-token --generate|openssl rand -hex 32\)?\"? *>")


@pytest.fixture
def lines(repository: Path) -> list[str]:
    """Returns the lines of all texts that a user reads."""
    files = [file for name in TEXTS for file in sorted((repository / name).rglob("*")) or [repository / name]]
    suffixes = {".md", ".yaml", ".yml", ".py", ".sh", ".sbatch"}
    return [line for file in files if file.suffix in suffixes for line in file.read_text().splitlines()]


def test_each_text_that_makes_a_token_keeps_it_from_other_users(lines: list[str]) -> None:
    made = [line for line in lines if MAKES_A_TOKEN.search(line)]
    assert len(made) >= 6
    assert [line for line in made if "umask 077" not in line] == []


def test_each_head_that_a_text_starts_sends_no_statistics_of_its_use(lines: list[str]) -> None:
    heads = [line for line in lines if re.search(r"ray start --head .*--\w", line)]
    assert len(heads) >= 3
    assert [line for line in heads if "--disable-usage-stats" not in line] == []


def test_both_nodes_of_two_use_the_token(repository: Path) -> None:
    header = (repository / "configs" / "two_nodes.yaml").read_text().splitlines()
    steps = [line for line in header if re.match(r"#   (first|second|both) nodes?: ", line)]
    assert "umask 077" in steps[0]
    assert steps[1].startswith("#   both nodes:   export RAY_AUTH_MODE=token")
    assert [step.split()[3:5] for step in steps[3:5]] == [["ray", "start"], ["ray", "start"]]


def test_each_node_that_the_files_start_leaves_time_for_a_checkpoint_when_a_job_is_stopped(repository: Path) -> None:
    """Ray's default is 3 s. A learner has `run.shutdown_grace_s`."""
    wait = re.compile(r"RAY_JOB_STOP_WAIT_TIME_S=(\d+)")
    launcher = (repository / "deploy" / "ray" / "cluster.yaml").read_text().splitlines()
    nodes = [line for line in launcher if re.match(r"  - .*ray start", line)]
    header = (repository / "configs" / "two_nodes.yaml").read_text().splitlines()
    nodes += [line for line in header if re.match(r"#   both nodes: +export RAY_JOB", line)]
    found = [wait.search(line) for line in nodes]
    assert [match and int(match[1]) for match in found] == [120, 120, 120]
    assert RunSection().shutdown_grace_s + 30 <= 120
