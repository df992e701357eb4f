"""A wheel has the package, the recipes, the dashboards and the alert rules, and no other file."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import asyncrl

REPOSITORY = Path(__file__).parents[1]
BUILT_FROM = ("asyncrl", "configs", "dashboards", "deploy", "tests/buffer")
FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
STRAY = (
    "configs/__pycache__/own_task.cpython-311.pyc", "configs/runs/quickstart/config.yaml", "configs/.env",
    "configs/models/tiny/config.json", "asyncrl/views/__pycache__/live.cpython-311.pyc", "models/tiny/config.json",
    "runs/quickstart/config.yaml", "deploy/prometheus/rules/backup.yml~",
)  # fmt: skip
"""Files that a folder has after it was used."""
VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from a copy of the repository with the files `STRAY`. Needs no network."""
    copy, built = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("built")
    for folder in BUILT_FROM:
        shutil.copytree(REPOSITORY / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        shutil.copy(REPOSITORY / file, copy / file)
    for stray in STRAY:
        (copy / stray).parent.mkdir(parents=True, exist_ok=True)
        (copy / stray).write_text("stray")
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(built)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, timeout=300, check=True)
    [found] = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the files of the wheel."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def expected() -> dict[str, Path]:
    """Returns for each path in the wheel the file of the repository that it is a copy of."""
    files = [file for file in (REPOSITORY / "asyncrl").rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    found = {str(file.relative_to(REPOSITORY)): file for file in files}
    for target, source, pattern in (
        ("recipes", "configs", "*.*"),
        ("recipes/agents", "configs/agents", "*.*"),
        ("dashboards", "dashboards", "*.json"),
        ("prometheus", "deploy/prometheus", "*.yml"),
        ("prometheus/rules", "deploy/prometheus/rules", "*.yml"),
    ):
        found |= {f"asyncrl/{target}/{file.name}": file for file in (REPOSITORY / source).glob(pattern)}
    return found


@pytest.mark.slow
def test_the_wheel_has_each_file_byte_for_byte_and_no_other(installed: Path) -> None:
    kept = {str(file.relative_to(installed)): file for file in installed.rglob("*") if file.is_file()}
    ours = {name: file for name, file in kept.items() if ".dist-info/" not in name}
    assert sorted(ours) == sorted(expected())
    assert [name for name, file in expected().items() if ours[name].read_bytes() != file.read_bytes()] == []


@pytest.mark.slow
def test_an_installed_package_finds_its_recipes_and_its_version_in_any_folder(installed: Path, tmp_path: Path) -> None:
    code = (
        "import asyncrl, asyncrl.recipes as found\n"
        "from asyncrl.config.import_path import resolve\n"
        "print(asyncrl.__version__, found.RECIPES, found.DASHBOARDS, found.PROMETHEUS, sep='\\n')\n"
        "print(asyncrl.load_config(['tiny_chat']).data.path)\n"
        "print(resolve(asyncrl.load_config(['own_task']).environment.reward, key='k').__code__.co_filename)\n"
        "from asyncrl.cli.main import app\n"
        "app(['--version'])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    package = installed / "asyncrl"
    assert done.stdout.splitlines() == [
        VERSION, str(package / "recipes"), str(package / "dashboards"), str(package / "prometheus"),
        str(package / "recipes/larger.csv"), str(package / "recipes/own_task.py"), f"asyncrl {VERSION}",
    ], done.stderr  # fmt: skip


def test_the_version_is_that_of_the_installed_package_and_unknown_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    monkeypatch.setattr(metadata, "version", {"asyncrl": "1.2.3"}.__getitem__)
    assert asyncrl.__version__ == "1.2.3"

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert asyncrl.__version__ == "unknown"
