"""`make` announces an installation, which takes minutes, before it begins, and `make test` leaves out the campaign."""

import subprocess
from pathlib import Path


def commands_of(target: str) -> str:
    """Returns the commands of a target, as if nothing were made yet."""
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", target],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout


def test_a_first_train_announces_the_installation_before_it_begins() -> None:
    before, _, _ = commands_of("train").partition("deploy/install.py")
    assert 'echo "installing into .venv: this takes one to ten minutes' in before


def test_each_test_is_run_by_make_test_or_by_make_campaign() -> None:
    assert '-m "not campaign"' in commands_of("test")
    assert "pytest --dist=loadfile -m campaign" in commands_of("campaign")
