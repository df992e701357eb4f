"""The command for GPUs: every part runs on a CPU, and the failure of a part is shown and ends no other part."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu.measure import PARTS, Line, Part, measured

pytestmark = pytest.mark.slow  # imports torch in processes of its own

REPOSITORY = Path(__file__).parents[2]
WITHOUT = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        missing = name.partition(".")[0] in ("ray", "vllm", "pydantic", "accelerate")
        return None if missing else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Without, sys.meta_path)
"""
"""Python does not find these libraries, which a machine with torch and transformers may lack."""


def test_every_part_runs_without_ray_and_vllm(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu/measure.py", "--size", "cpu-check"],
        cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines()]
    assert {row[0].removeprefix("| ") for row in rows} == {part.name for part in PARTS}
    assert "**failed**" not in done.stdout


def test_a_cpu_check_is_never_written_as_a_measurement() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu/measure.py", "--size", "cpu-check", "--write"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--write needs --size gpu" in done.stderr


def test_the_command_ends_with_1_if_a_part_fails() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu/measure.py", "--size", "gpu", "--part", "machine"],
        cwd=REPOSITORY, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "| machine | **failed** | RuntimeError: torch finds no CUDA device" in done.stdout


def wrong(size: object) -> Iterator[tuple[str, str]]:
    yield "before", "1"
    raise ValueError("two | three")


def ended(size: object) -> Iterator[tuple[str, str]]:
    yield "before", "2"
    os._exit(9)


def silent(size: object) -> Iterator[tuple[str, str]]:
    time.sleep(60)
    yield "never", "3"


def right(size: object) -> Iterator[tuple[str, str]]:
    yield "after", "4"


def test_a_part_that_fails_keeps_its_rows_and_the_other_parts_run() -> None:
    parts = [Part(name, __name__) for name in ("wrong", "ended", "right")]
    assert list(measured(parts, size="cpu-check", timeout_s=120.0)) == [
        Line("wrong", "before", "1"),
        Line("wrong", "failed", "ValueError: two \\| three", failed=True),
        Line("ended", "before", "2"),
        Line("ended", "failed", "its process ended without a result", failed=True),
        Line("right", "after", "4"),
    ]
    parts = [Part(name, __name__) for name in ("silent", "right")]
    assert list(measured(parts, size="cpu-check", timeout_s=5.0)) == [
        Line("silent", "failed", "no row within 5 s", failed=True),
        Line("right", "after", "4"),
    ]
