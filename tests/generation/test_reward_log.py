"""Lines that reward code prints go into the run's directory if it exists, and an error there never ends a run."""

import re
from pathlib import Path

import pytest

from asyncrl import log_files
from asyncrl.generation.actor import RewardLog


def test_lines_of_several_replicas_carry_time_and_name(tmp_path: Path) -> None:
    path = tmp_path / "reward-h.log"
    first, second = (RewardLog(path, replica=name) for name in ("generator-a", "generator-b"))
    first("asking")
    second("é \udc80")
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(f"{stamp} generator-a: asking\n{stamp} generator-b: é \\?\n", path.read_text())


def test_without_the_folder_lines_are_logged_until_it_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = RewardLog(tmp_path / "logs" / "reward-h.log", replica="a")
    with caplog.at_level("INFO"):
        log("before")
    assert "reward code: before" in caplog.text
    (tmp_path / "logs").mkdir()
    log("after")
    assert (tmp_path / "logs" / "reward-h.log").read_text().endswith("a: after\n")


def test_a_log_that_cannot_be_written_is_reported_once_and_again_after_it_could(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "reward-h.log"
    log = RewardLog(path, replica="a")
    path.mkdir()  # root can write a file without permissions, but cannot write to a folder
    log("lost")
    log("lost")
    path.rmdir()
    log("kept")
    path.rename(tmp_path / "old")
    path.mkdir()
    log("lost")
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "reward-h.log (" in warnings[0].getMessage()


def test_a_full_log_continues_in_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "LOG_BYTES", 100)
    for number in range(4):
        RewardLog(tmp_path / "reward-h.log", replica="a")(f"line {number} {'x' * 30}")
    files = {each.name: each.read_text() for each in tmp_path.iterdir()}
    assert sorted(files) == ["reward-h.log", "reward-h.log.1"]
    assert [sum(f"line {number}" in text for text in files.values()) for number in range(4)] == [1, 1, 1, 1]
