"""`make` announces an installation, which takes minutes, before it begins."""

import subprocess
from pathlib import Path


def test_a_first_train_announces_the_installation_before_it_begins() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "train"],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    before, _, _ = done.stdout.partition("deploy/install.py")
    assert 'echo "installing into .venv: this takes one to ten minutes' in before
