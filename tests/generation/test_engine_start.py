"""The error of a failed engine start names the cause in one sentence, wherever vLLM's processes wrote it."""

from pathlib import Path

import pytest

from asyncrl.errors import PlacementError, RunError
from asyncrl.generation.engine_start import cause_of_death, engine_starts

CORE = """\
WARNING [cpu.py:224] Triton is not installed.
Traceback (most recent call last):
  File "core.py", line 1, in run
    raise ValueError("No memory")
ValueError: No available memory for the cache blocks.
"""


@pytest.fixture
def stderr(tmp_path: Path) -> Path:
    path = tmp_path / "worker.err"
    path.write_text("OSError: of an earlier engine\n")
    return path


def failed(stderr: Path, error: Exception, *, said: str = "") -> str:
    """Returns the message that is raised when vLLM raises `error` after its processes have written `said`."""

    def start() -> None:
        with engine_starts(memory_knob="generator.kv_cache_gib", stderr=stderr):
            if said:
                stderr.write_text(stderr.read_text() + said)
            raise error

    with pytest.raises(RunError) as caught:
        start()
    return str(caught.value)


def test_the_cause_is_what_an_engine_s_process_said_last_not_what_its_parent_raised(stderr: Path) -> None:
    message = failed(stderr, RuntimeError("Engine core initialization failed. See root cause above."), said=CORE)
    cause, knob, rest = message.splitlines()
    assert knob == "in the configuration of asyncrl this memory is set by generator.kv_cache_gib"
    assert cause == "vLLM did not start: ValueError: No available memory for the cache blocks."
    assert str(stderr) in rest


def test_without_a_word_of_its_processes_it_is_what_was_raised(stderr: Path) -> None:
    assert "did not start: RuntimeError: -9\n" in failed(stderr, RuntimeError("-9"))


def test_a_stderr_that_is_no_file_is_above(tmp_path: Path) -> None:
    assert failed(tmp_path / "pipe", RuntimeError("broken")).endswith(
        "RuntimeError: broken\nthe whole output of its processes is above"
    )


def test_our_own_errors_stay_what_they_are(stderr: Path) -> None:
    assert failed(stderr, PlacementError("no room")) == "no room"


DEAD = """\
(EngineCore pid=7) ERROR 11-22 21:04:45 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-22 21:04:45 [core.py:1512]   File "cpu_attn.py", line 253, in build
(EngineCore pid=7) ERROR 11-22 21:04:45 [core.py:1512] RuntimeError: Unsupported CPU attention: head_dim=16
(MainProcess pid=6) ERROR 11-22 21:04:45 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: See above.
"""


def test_the_cause_of_a_dead_engine_is_what_its_own_process_logged(tmp_path: Path) -> None:
    stdout = tmp_path / "worker.out"
    stdout.write_text("x" * 2**21 + "\n" + DEAD)
    cause, rest = cause_of_death("RuntimeError: EngineDeadError", stdout=stdout).splitlines()
    assert cause == "RuntimeError: Unsupported CPU attention: head_dim=16"
    assert str(stdout) in rest
    stdout.write_text("nothing\n")
    assert cause_of_death("RuntimeError: gone", stdout=stdout) == "RuntimeError: gone"
    assert cause_of_death("RuntimeError: gone", stdout=tmp_path / "pipe") == "RuntimeError: gone"
