"""The log of a run has the error that ended it, and lines go to the present stderr."""

import contextlib
import io
import logging
from pathlib import Path

import pytest

from asyncrl.deployment.launch import log_to
from asyncrl.errors import RunError


def test_the_log_of_a_failed_run_says_why_and_stderr_is_left_to_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunError), log_to(tmp_path / "up-0.log"):
        raise RunError("vLLM did not start") from KeyError("kv_cache")
    log = (tmp_path / "up-0.log").read_text()
    assert " ERROR asyncrl.deployment.launch: " in log
    assert "KeyError: 'kv_cache'" in log
    assert log.endswith("RunError: vLLM did not start\n")
    assert "vLLM did not start" not in capsys.readouterr().err


@pytest.mark.fault("F27")
def test_a_log_that_has_no_room_does_not_hide_why_the_run_ended(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "up-0.log").symlink_to("/dev/full")
    with pytest.raises(RunError, match="nothing moves"), log_to(tmp_path / "up-0.log"):
        raise RunError("nothing moves")
    assert "up-0.log is incomplete: [Errno 28] No space left on device" in caplog.text


def test_what_is_logged_goes_to_the_stderr_of_the_moment_as_a_live_view_replaces_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with log_to(tmp_path / "up-0.log"), contextlib.redirect_stderr(io.StringIO()) as above:
        logging.getLogger("asyncrl").warning("a reward failed")
        logging.getLogger("asyncrl").info("only in the log")
    assert above.getvalue().endswith("WARNING asyncrl: a reward failed\n")
    assert capsys.readouterr().err == ""
    assert "only in the log" in (tmp_path / "up-0.log").read_text()
