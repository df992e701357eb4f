"""`make` alone lists the targets. `make` announces an installation, which takes minutes, before it begins."""

import re
import subprocess
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def make(*arguments: str) -> str:
    """Returns what `make` prints."""
    done = subprocess.run(
        ["make", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )  # fmt: skip
    return done.stdout


def test_make_without_a_target_lists_every_target_with_a_line_and_does_nothing_else() -> None:
    [phony] = re.findall(r"^\.PHONY: (.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    listed = dict(re.findall(r"^  (\w+) +(\S.*)$", make(), re.MULTILINE))
    assert sorted(listed) == sorted(phony.split())
    assert "install.py" not in make("--dry-run", "--always-make")


def test_a_first_train_announces_the_installation_before_it_begins() -> None:
    before, _, _ = make("--dry-run", "--always-make", "train").partition("deploy/install.py")
    assert 'echo "installing into .venv: this takes one to ten minutes' in before


def test_images_have_the_version_as_their_tag() -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    for target in ("cpu", "gpu"):
        assert f"--target {target} --tag place/asyncrl:{version}-{target} ." in make(
            "--dry-run", "images", "IMAGE=place/asyncrl"
        )
