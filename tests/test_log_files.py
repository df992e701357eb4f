"""The logs of a run's processes: in the run's directory if it is there, in files that rotate, with who writes them."""

import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl import log_files, shown_text
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.coordinator.client import CoordinatorActor
from asyncrl.data.prompts import Task
from asyncrl.environments.secrets import Secrets
from asyncrl.errors import RunError
from asyncrl.gateway import server
from asyncrl.generation import actor
from asyncrl.log_files import LogFile, append_line, logs_folder, make_room
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.actor import RankActor

pytestmark = pytest.mark.slow  # imports torch

logger = logging.getLogger("asyncrl.tried")


@pytest.fixture(autouse=True)
def no_facts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores the facts, the level and the handlers of the root logger after each test."""
    monkeypatch.setattr(shown_text, "_facts", {})
    level = logging.root.level
    logging.root.setLevel(logging.INFO)
    yield
    close_all()
    logging.root.setLevel(level)


def close_all() -> None:
    """Closes the log files of this process, so that all lines are written."""
    for handler in [*logging.root.handlers]:
        if isinstance(handler, LogFile):
            handler.close()


def test_a_log_goes_to_the_folder_as_soon_as_it_exists_and_to_the_present_one_when_it_was_moved(tmp_path: Path) -> None:
    folder = logs_folder(tmp_path / "quick")
    log = LogFile(folder / "generator-h-1.log", form="text")
    stderr = os.readlink("/proc/self/fd/2")
    assert log.path == (stderr if os.path.isfile(stderr) else ""), "stderr is the only place before"
    log.emit(record("before"))
    log.close()

    log = LogFile(folder / "generator-h-1.log", form="text")
    folder.mkdir(parents=True)
    log.emit(record("first run"))
    log.close()
    assert log.path == str(folder / "generator-h-1.log")

    (tmp_path / "quick").rename(tmp_path / "quick.1")
    folder.mkdir(parents=True)
    log = LogFile(folder / "generator-h-1.log", form="text")
    log.emit(record("second run"))
    log.close()
    texts = [(tmp_path / name / "logs" / "generator-h-1.log").read_text() for name in ("quick.1", "quick")]
    assert ["before" in text for text in texts] == [False, False]
    assert [text.count("first run") for text in texts] == [1, 0]
    assert [text.count("second run") for text in texts] == [0, 1]


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("asyncrl", logging.INFO, __file__, 1, text, (), None)


def test_the_error_that_ends_a_command_is_in_its_log_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(RunError), LogFile(tmp_path / "a.log", form="text"):
        raise RunError("the learner is gone")
    text = (tmp_path / "a.log").read_text()
    assert "Traceback" in text
    assert text.endswith("RunError: the learner is gone\n")


def test_a_log_that_cannot_be_written_is_reported_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.log").mkdir()
    with LogFile(tmp_path / "a.log", form="text") as log:
        for number in range(3):
            log.emit(record(f"lost {number}"))
    assert [each.levelname for each in caplog.records if "cannot write" in each.message] == ["WARNING"]


def test_a_log_of_several_processes_continues_in_a_new_file_and_old_files_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "LOG_BYTES", 20)
    monkeypatch.setattr(log_files, "LOG_FILES", 2)
    path = tmp_path / "reward-h.log"
    for number in range(9):
        append_line(path, b"line %d abc\n" % number)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {
        "reward-h.log": b"line 8 abc\n",
        "reward-h.log.1": b"line 6 abc\nline 7 abc\n",
        "reward-h.log.2": b"line 4 abc\nline 5 abc\n",
    }


def test_a_full_log_is_renamed_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "LOG_BYTES", 10)
    path = tmp_path / "reward-h.log"
    path.write_bytes(b"0123456789\n")
    with path.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)  # another process is about to rename it
        append_line(path, b"meanwhile\n")
        path.rename(tmp_path / "reward-h.log.1")
        append_line(path, b"new\n")
    assert (tmp_path / "reward-h.log.1").read_bytes() == b"0123456789\nmeanwhile\n"
    assert path.read_bytes() == b"new\n"

    opened_to_append = log_files.opened_to_append

    def renamed_by_another(opened: Path, **how: Any) -> Any:
        file = opened_to_append(opened, **how)
        if path.read_bytes() == b"0123456789":
            path.rename(tmp_path / "reward-h.log.1")
            path.write_bytes(b"other\n")
        return file

    path.write_bytes(b"0123456789")
    monkeypatch.setattr(log_files, "opened_to_append", renamed_by_another)
    append_line(path, b"mine\n")
    assert path.read_bytes() == b"other\nmine\n", "a file of another process is not renamed because its name was full"


def test_a_log_makes_room_before_a_process_has_it_as_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_files, "LOG_BYTES", 10)
    (tmp_path / "seed-0.log").write_bytes(b"0123456789")
    for _ in range(2):
        make_room(tmp_path / "seed-0.log")
    assert (tmp_path / "seed-0.log.1").read_bytes() == b"0123456789"
    assert (tmp_path / "seed-0.log").read_bytes() == b""


def test_a_message_whose_arguments_do_not_fit_is_no_error_of_its_caller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs_folder(tmp_path).mkdir()
    with LogFile(logs_folder(tmp_path) / "up-0.log", form="text") as log:
        log.emit(logging.LogRecord("a", logging.WARNING, "", 1, "deprecated", (FutureWarning,), None))
        log.emit(record("the next one"))
    assert "Logging error" in capsys.readouterr().err
    assert log.path == str(logs_folder(tmp_path) / "up-0.log")
    assert Path(log.path).read_text().endswith("the next one\n")


def test_a_link_in_place_of_a_log_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a.log").symlink_to(tmp_path / "elsewhere")
    with LogFile(tmp_path / "a.log", form="text") as log:
        log.emit(record("secret"))
    assert not (tmp_path / "elsewhere").exists()


def test_a_link_in_place_of_the_folder_of_logs_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other, run = tmp_path / "other" / "logs", tmp_path / "run"
    other.mkdir(parents=True)
    run.mkdir()
    (run / "logs").symlink_to(other)
    with LogFile(run / "logs" / "a.log", form="text") as log:
        log.emit(record("secret"))
    actor.RewardLog(run / "logs" / "reward-h.log", replica="a")("secret")
    assert [*other.iterdir()] == []
    assert caplog.text.count("is a symbolic link") == 2


def replica(config: Config, logs: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    def no_scorer(*_: object, **__: object) -> None:
        raise RunError("nothing starts in this test")

    for name, stands_in in {"prepare_environment": str, "preload": str, "PartScorers": no_scorer}.items():
        monkeypatch.setattr(actor, name, stands_in if name != "preload" else lambda: None)
    made = actor.GeneratorActor(config=config, name="generator-a.2", deployment="d")
    with pytest.raises(RunError, match="nothing starts"):
        made.start("model", secrets=Secrets({}), logs=logs).send(None)
    made._updates = SimpleNamespace(version=Version(2, 5))  # type: ignore[assignment]
    return made


def coordinator(config: Config, logs: Path, _: pytest.MonkeyPatch) -> object:
    return CoordinatorActor(config, [Task(question="1", prompt="1", answer="")], logs)


def rank(config: Config, logs: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    made = RankActor(worker=PolicyWorker, rank=3, world_size=4)
    monkeypatch.setattr(made, "node_address", lambda: "127.0.0.1")
    made.begin(config, incarnation=2, logs=logs)
    made._step = 5
    return made


def gateway(config: Config, logs: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(server.ray, "get_actor", lambda *_, **__: None)
    monkeypatch.setattr(server, "load_tokenizer", lambda *_, **__: None)
    monkeypatch.setattr(server, "Renderer", lambda *_, **__: SimpleNamespace(stop_token_ids=()))
    return server.GatewayActor(config=config, model_path="model", replica="generator-a.2", logs=logs)


@pytest.mark.parametrize(
    ("made", "name", "facts"),
    [
        (
            replica,
            "replica-generator-a.2",
            {"role": "generator", "replica": "generator-a.2", "incarnation": 2, "step": 5},
        ),
        (coordinator, "coordinator", {"role": "coordinator", "incarnation": 1, "step": 0}),
        (rank, "learner-rank-3.2", {"role": "learner", "rank": 3, "incarnation": 2, "step": 5}),
        (gateway, "gateway-generator-a.2", {"role": "gateway", "replica": "generator-a.2"}),
    ],
)
def test_each_actor_logs_to_a_file_of_its_own_with_its_name_and_position(
    made: Callable[..., object], name: str, facts: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config.model_validate({"run": {"name": "quick", "log_format": "json"}})
    alive = made(config, tmp_path, monkeypatch)
    logger.error("the engine is gone")
    close_all()
    assert [each.name for each in tmp_path.iterdir()] == [f"{name}.log"], alive
    last = json.loads((tmp_path / f"{name}.log").read_text().splitlines()[-1])
    assert last["message"] == "the engine is gone"
    keys = ("run", "role", "replica", "rank", "incarnation", "step")
    assert {key: last[key] for key in keys if key in last} == {"run": "quick", **facts}
