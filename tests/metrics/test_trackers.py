"""The real trackers without a network: each tracker's own reader reads the logged numbers back."""

import doctest
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.metrics import trackers as module
from asyncrl.metrics.trackers import Going, TrackerRun, Trackers

pytestmark = pytest.mark.slow

REWARDS = {1: 0.25, 2: 0.5}


PATIENCE_S = 600.0
"""A tracker may need more than `CLOSE_S` on a busy machine."""


@pytest.fixture
def mlflow_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = f"file://{tmp_path}/mlruns"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow's default store is a server or a database
    return uri


@pytest.fixture
def offline_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def follow(name: str, folder: Path) -> None:
    """Logs a run of two steps and an evaluation to the tracker `name`."""
    settings = {"staleness.max_versions": 3}
    trackers = Trackers([name], project="tests", run="quick", folder=folder, settings=settings, close_s=PATIENCE_S)
    for step, reward in REWARDS.items():
        trackers.log(
            step, {"reward/mean": reward, "staleness/parity_nats": None, "critic/explained_variance": float("nan")}
        )
    trackers.log(2, {"reward/heldout_mean": 0.75})
    trackers.log_samples(2, ["prompt", "completion", "reward"], [["tree>", "ee|rt\n", 1.0], ["lamp>", "lamp", 0.0]])
    trackers.close()


def test_doctest() -> None:
    assert doctest.testmod(module).failed == 0


def test_tensorboard_has_a_scalar_a_step_and_the_settings(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    follow("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard" / "quick"))
    events.Reload()
    assert {event.step: event.value for event in events.Scalars("reward/mean")} == REWARDS
    assert [event.value for event in events.Scalars("reward/heldout_mean")] == [0.75]
    assert not {"staleness/parity_nats", "critic/explained_variance"} & set(events.Tags()["scalars"]), (
        "unmeasured numbers are not logged"
    )
    [table] = events.Tensors("samples/text_summary")
    assert table.step == 2
    assert "| tree> | ee\\|rt\\n | 1.0 |" in table.tensor_proto.string_val[0].decode()
    (settings,) = tmp_path.glob("tensorboard/quick/*/hparams.yml")
    assert settings.read_text() == "staleness.max_versions: 3\n"


def test_mlflow_has_the_history_of_every_metric(tmp_path: Path, mlflow_uri: str) -> None:
    import mlflow

    follow("mlflow", tmp_path)
    client: Any = mlflow.MlflowClient(tracking_uri=mlflow_uri)
    (experiment,) = client.search_experiments(filter_string="name = 'tests'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "quick"
    assert run.info.status == "FINISHED"
    assert run.data.params["staleness.max_versions"] == "3"
    samples = Path(client.download_artifacts(run.info.run_id, "samples/step-2.md"))
    assert "| lamp> | lamp | 0.0 |" in samples.read_text()
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert {point.step: point.value for point in history} == REWARDS


@pytest.mark.usefixtures("offline_wandb")
def test_wandb_writes_an_offline_run(tmp_path: Path) -> None:
    import wandb

    follow("wandb", tmp_path)
    wandb.teardown()  # its process writes the log's end after `finish` has returned; Python's exit waits for it too
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = log.read_bytes()
    for text in (b"quick", b"staleness.max_versions", b"reward/mean", b"reward/heldout_mean"):
        assert text in content, text
    assert b"staleness/parity_nats" not in content
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    assert json.loads(table.read_text())["data"][0] == ["tree>", "ee|rt\n", 1.0]


def in_a_process(code: str, folder: Path) -> str:
    """Returns the last line that `code` prints in another process, whose trackio keeps its files in `folder`."""
    folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    # Tests that were a rank leave these variables in the environment.
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    inherited = {name: value for name, value in os.environ.items() if name not in ranks}
    environment = inherited | {"TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1", "PYTHONPATH": folders}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_trackio_keeps_the_run_in_its_own_database(tmp_path: Path) -> None:
    """Runs in another process, because trackio reads the path of its database at import."""
    code = f"""
from pathlib import Path
from test_trackers import follow
from trackio.sqlite_storage import SQLiteStorage
follow("trackio", Path({str(tmp_path)!r}))
(run,) = SQLiteStorage.get_runs("tests")
logs = SQLiteStorage.get_logs("tests", run)
tables = [log["samples"] for log in logs if "samples" in log]
print(run, [log["reward/mean"] for log in logs if "reward/mean" in log], "tree>" in str(tables))
"""
    assert in_a_process(code, tmp_path) == "quick [0.25, 0.5] True"


def follow_twice(name: str, folder: Path, *, went_back: bool = False) -> None:
    """Logs 4 steps, and then those after step 2 again with other rewards, as a resumed run does.

    The run is resumed two times: at the first time, it is killed before its first step.
    """
    last_back = 2 if went_back else 0
    steps: dict[Going | None, dict[int, float]] = {
        None: {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4},
        Going(2, 2, last_back): {},
        Going(2, 3, last_back): {3: 0.33, 4: 0.44, 5: 0.55},
    }
    for going, rewards in steps.items():
        if going is not None and name in ("tensorboard", "wandb"):
            time.sleep(1.0)  # they name a file or the folder of an offline run by the second of its start
        settings = {"learner.total_steps": 4 if going is None else 5}
        trackers = Trackers(
            [name], project="tests", run="quick", folder=folder, settings=settings, going=going, close_s=PATIENCE_S
        )
        for step, reward in rewards.items():
            trackers.log(step, {"reward/mean": reward})
        trackers.close()


def known_run(folder: Path, name: str) -> TrackerRun:
    return msgspec.json.decode((folder / "trackers.json").read_bytes(), type=dict[str, TrackerRun])[name]


AGAIN = {1: 0.1, 2: 0.2, 3: 0.33, 4: 0.44, 5: 0.55}
"""The new numbers of the steps that were trained again."""
KEPT = AGAIN | {3: 0.3, 4: 0.4}
"""The old numbers of these steps."""


@pytest.mark.parametrize("went_back", [False, True])
def test_tensorboard_shows_the_new_numbers_of_steps_that_are_trained_again(went_back: bool, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    follow_twice("tensorboard", tmp_path, went_back=went_back)
    assert [path.name for path in (tmp_path / "tensorboard").iterdir()] == ["quick"]
    events = EventAccumulator(str(tmp_path / "tensorboard" / "quick"))
    events.Reload()
    found = [(event.step, pytest.approx(event.value)) for event in events.Scalars("reward/mean")]
    assert found == list(AGAIN.items())


@pytest.mark.parametrize("went_back", [False, True])
def test_mlflow_goes_on_in_its_run_and_has_each_step_once(went_back: bool, tmp_path: Path, mlflow_uri: str) -> None:
    import mlflow

    follow_twice("mlflow", tmp_path, went_back=went_back)
    client: Any = mlflow.MlflowClient(tracking_uri=mlflow_uri)
    (experiment,) = client.search_experiments(filter_string="name = 'tests'")
    histories = {
        run.info.run_name: [
            (point.step, point.value) for point in client.get_metric_history(run.info.run_id, "reward/mean")
        ]
        for run in client.search_runs([experiment.experiment_id])
    }
    if went_back:
        assert histories == {
            "quick": [(step, KEPT[step]) for step in (1, 2, 3, 4)],
            "quick-2": [(step, AGAIN[step]) for step in (3, 4, 5)],
        }
    else:
        assert histories == {"quick": list(KEPT.items())}


@pytest.mark.usefixtures("offline_wandb")
@pytest.mark.parametrize("went_back", [False, True])
def test_wandb_goes_on_under_its_id(went_back: bool, tmp_path: Path) -> None:
    import wandb

    follow_twice("wandb", tmp_path, went_back=went_back)
    wandb.teardown()
    logs = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    ids = [log.stem.removeprefix("run-") for log in logs]
    assert len(ids) == 3
    known = known_run(tmp_path, "wandb")
    assert (known.id in ids, known.sent) == (True, 5)
    assert (len(set(ids)), known.name) == ((2, "quick-2") if went_back else (1, "quick"))
    # wandb cannot take numbers back.
    again = [(3, 0.33), (4, 0.44), (5, 0.55)] if went_back else [(5, 0.55)]
    assert [wandb_rewards(log) for log in logs] == [list(enumerate([0.1, 0.2, 0.3, 0.4], 1)), [], again]


def wandb_rewards(log: Path) -> list[tuple[int, float]]:
    """Returns the step and the mean reward of each record of history in the file of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    store: Any = DataStore()
    store.open_for_scan(str(log))
    rewards = []
    while (data := store.scan_data()) is not None:
        record: Any = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            rewards.append((values["_step"], values["reward/mean"]))
    return rewards


def test_trackio_goes_on_in_its_run_and_has_each_step_once(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from test_trackers import follow_twice
from trackio.sqlite_storage import SQLiteStorage
follow_twice("trackio", Path({str(tmp_path)!r}))
runs = SQLiteStorage.get_runs("tests")
print(runs, [(log["step"], log["reward/mean"]) for log in SQLiteStorage.get_logs("tests", runs[0])])
"""
    assert in_a_process(code, tmp_path) == f"['quick'] {list(KEPT.items())}"


def test_a_tracker_that_does_not_start_is_said_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tensorboard"
    file.write_text("a file where a folder should be")
    with caplog.at_level(logging.INFO, logger=module.__name__):
        follow("tensorboard", tmp_path)
    said, logged = caplog.records
    assert "tensorboard did not start" in said.getMessage()
    assert "Error: " in said.getMessage(), "the message contains the error"
    assert (said.levelname, said.exc_info, logged.levelname) == ("WARNING", None, "INFO")
    assert logged.exc_info is not None, "the traceback is for the log"


class Failing:
    """A tracker that fails at the second step."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def store_init_configuration(self, settings: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append(f"log {step}")
        if step == 2:
            raise OSError("no way to the server")

    def finish(self) -> None:
        self.calls.append("finish")


class Working(Failing):
    def log(self, values: dict[str, float], step: int) -> None:
        self.calls.append(f"log {step}")


def fed(folder: Path, *, close_s: float = PATIENCE_S, **made: Any) -> Trackers:
    """Returns the trackers that were `made`, by their names, as those of a run."""
    classes = {name: lambda tracker=tracker, **_: tracker for name, tracker in made.items()}
    return Trackers(
        [*made], project="tests", run="quick", folder=folder, settings={}, classes=lambda: classes, close_s=close_s
    )


def test_a_tracker_that_fails_is_fed_no_more_and_the_others_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing, working = Failing(), Working()
    with caplog.at_level(logging.WARNING):
        trackers = fed(tmp_path, a=failing, b=working)
        for step in (1, 2, 3):
            trackers.log(step, {"reward/mean": 0.5})
        trackers.close()
    assert failing.calls == ["start", "log 1", "log 2"]
    assert working.calls == ["start", "log 1", "log 2", "log 3", "finish"]
    assert ["the tracker a failed" in record.getMessage() for record in caplog.records] == [True]


def test_a_tracker_that_hangs_holds_up_neither_the_steps_nor_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    released, begun = threading.Event(), threading.Event()

    class Hanging(Failing):
        def log(self, values: dict[str, float], step: int) -> None:
            begun.set()
            released.wait(60)

    trackers = fed(tmp_path, a=Hanging(), close_s=0.1)
    try:
        for step in range(100):
            trackers.log(step, {"reward/mean": 0.5})
        assert begun.wait(60)
        with caplog.at_level(logging.WARNING):
            trackers.close()
        assert "did not send all numbers" in caplog.text
    finally:
        released.set()


def test_a_process_whose_tracker_hangs_for_ever_ends_all_the_same(tmp_path: Path) -> None:
    """Runs in another process, which has to exit: at exit, Python waits for every thread that is not a daemon."""
    code = f"""
import threading
from pathlib import Path
from test_trackers import Failing, fed

begun = threading.Event()

class Hanging(Failing):
    def log(self, values, step):
        begun.set()
        threading.Event().wait()

trackers = fed(Path({str(tmp_path)!r}), a=Hanging(), close_s=0.1)
trackers.log(1, {{"reward/mean": 0.5}})
assert begun.wait(60)
trackers.close()
print("closed")
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr
