"""`make` alone lists the targets. `make` announces an installation, which takes minutes, before it begins."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def make(*arguments: str, folder: Path = REPOSITORY) -> str:
    """Returns what `make` prints in `folder`."""
    done = subprocess.run(
        ["make", *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=True
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


def test_unit_tests_and_checks_need_no_vllm_and_keep_it_where_it_is(tmp_path: Path) -> None:
    """A new environment gets no vLLM. One that has it is brought up to date with it."""
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints-cpu.txt", "constraints-gpu.txt", "deploy/install.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for target in ("unit", "check"):
        assert "--extra light --also docs,lint,test" in make("--dry-run", target, folder=tmp_path)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed-cpu").touch()
    assert "--extra cpu --also dev" in make("--dry-run", "unit", "EXTRA=cpu", folder=tmp_path)


def test_each_test_is_run_by_make_test_or_by_make_campaign() -> None:
    assert '-m "not campaign"' in make("--dry-run", "--always-make", "test")
    assert "pytest --dist=loadfile -m campaign" in make("--dry-run", "--always-make", "campaign")


def test_only_the_campaign_installs_its_s3_server() -> None:
    assert "--also dev,campaign" in make("--dry-run", "--always-make", "campaign")
    assert "--also dev,campaign" not in make("--dry-run", "--always-make", "test")
