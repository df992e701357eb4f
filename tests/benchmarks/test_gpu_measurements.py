"""The command for GPUs: every part runs on a CPU, and the failure of a part is shown and ends no other part."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from gpu import measure
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


@pytest.mark.campaign
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


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str, lines: Sequence[Line] = ()) -> int:
    """Returns the exit code of the command in this process, whose parts give these lines."""
    monkeypatch.setattr(sys, "argv", ["measure.py", *arguments])
    monkeypatch.setattr(measure, "measured", lambda parts, **_: iter(lines))
    monkeypatch.setattr(measure, "write_section", lambda *_, **__: pytest.fail("docs/gpu.md would be written"))
    context = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(context, "set_forkserver_preload", lambda names: None)  # this process has other tests
    return measure.main()


def test_a_cpu_check_is_never_written_as_a_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, "--size", "cpu-check", "--write")
    assert ended.value.code == 2
    assert "--write needs --size gpu" in capsys.readouterr().err


def test_the_command_ends_with_1_if_a_part_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [Line("machine", "failed", "RuntimeError: no device", failed=True), Line("head", "speed", "1")]
    assert command(monkeypatch, "--size", "gpu", lines=lines) == 1
    said = capsys.readouterr()
    assert "| machine | **failed** | RuntimeError: no device |\n| head | speed | 1 |" in said.out
    assert said.err == "failed: machine\n"
    assert command(monkeypatch, "--size", "gpu", lines=lines[1:]) == 0


def test_the_size_for_gpus_fails_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from gpu.machine import machine
    from gpu.sizes import SIZES

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch finds no CUDA device"):
        list(machine(SIZES["gpu"]))


def wrong(size: object) -> Iterator[tuple[str, str]]:
    yield "before", "1"
    raise ValueError("two | three")


def ended(size: object) -> Iterator[tuple[str, str]]:
    yield "before", "2"
    signal.raise_signal(signal.SIGKILL)


def silent(size: object) -> Iterator[tuple[str, str]]:
    time.sleep(60)
    yield "never", "3"


def right(size: object) -> Iterator[tuple[str, str]]:
    yield "after", "4"


@pytest.mark.campaign
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
