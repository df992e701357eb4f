"""A mirror in S3, whose server throttles, refuses keys or deletions, or loses its client between parts of a file."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from mirrored_scene import mirror_of, new_run, save
from s3_server import BUCKET, Call, Refusal, S3Server

from asyncrl.complete_directory import COMPLETE
from asyncrl.deployment import mirror as module
from asyncrl.deployment.fetching import fetched
from asyncrl.deployment.mirror import Mirror, Store, complete_names, step_of_name
from asyncrl.errors import RunError

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(600)]

URL = f"s3://{BUCKET}/quick"
SLOW_DOWN = Refusal(503, "SlowDown")
LIMIT_S = 300.0
"""Time limit until the mirror has noticed a fault, or its end. A client repeats a refused call for some seconds."""


@pytest.fixture(autouse=True)
def quick_retries(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.2)
    monkeypatch.setattr(module, "LONGEST_RETRY_S", 0.2)


def steps_in_mirror() -> set[int]:
    return {*map(step_of_name, complete_names(Store(URL).sizes()))}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.message for each in caplog.records if each.levelno >= logging.WARNING and each.name == module.__name__]


class Failures:
    """Stands for the metrics of a learner. `failed` and `succeeded` are set by the next failed or complete pass."""

    def __init__(self) -> None:
        self.failed, self.succeeded = threading.Event(), threading.Event()

    def mirrored(self) -> None:
        self.succeeded.set()

    def mirror_failed(self) -> None:
        self.failed.set()


def warning_of_outage(s3: S3Server, folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Starts the mirror of a run with a checkpoint. Lets the server work again after the first failed pass, and waits
    for a complete one. Returns the only warning."""
    metrics = Failures()
    with new_run(folder, steps=3) as run:
        save(run, 3)
        mirror = mirror_of(run, url=URL)
        mirror.start(within_s=0.0)
        mirror.report_to(metrics)  # type: ignore[arg-type]
        assert metrics.failed.wait(LIMIT_S), "a refused call is a failed pass"
        metrics.succeeded.clear()
        s3.before = lambda call: None
        assert metrics.succeeded.wait(LIMIT_S)
        mirror.finish(within_s=LIMIT_S)
        assert mirror.missing() == ""
    assert steps_in_mirror() == {3}
    [text] = warnings(caplog)
    return text


def test_calls_that_are_throttled_now_and_then_are_repeated(
    s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = iter(range(10**6))
    s3.before = lambda call: SLOW_DOWN if call.writes and next(calls) % 3 != 2 else None
    with new_run(tmp_path, steps=3) as run:
        save(run, 3)
        mirror_of(run, url=URL).pass_once()
    assert next(calls) > 10
    assert steps_in_mirror() == {3}
    assert warnings(caplog) == []


def test_an_outage_is_said_once_and_the_mirror_is_complete_after_it(
    s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    s3.before = lambda call: SLOW_DOWN if call.writes else None
    text = warning_of_outage(s3, tmp_path, caplog)
    assert "nothing can be sent to" in text
    assert "reduce your request rate" in text or "SlowDown" in text


def test_wrong_keys_do_not_end_the_run_and_a_reader_gets_a_sentence(
    s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from s3fs import S3FileSystem

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong")
    S3FileSystem.clear_instance_cache()  # the cached one has the right key
    s3.before = lambda call: Refusal(403, "InvalidAccessKeyId") if call.key_id != "right" else None
    with pytest.raises(RunError, match=r"cannot be read \(PermissionError: .*check the URL, and the keys"):
        fetched(URL, [f"run.dir={tmp_path / 'elsewhere'}"], step=None, report=print)
    text = warning_of_outage(s3, tmp_path, caplog)
    assert "PermissionError" in text
    assert "Training goes on" in text


def test_a_bucket_that_allows_no_deletions_keeps_old_checkpoints_and_a_warning_says_so(
    s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """S3 answers a deletion of several objects with 200 and an error for each, which s3fs does not raise."""
    allow_no_deletions(s3)
    with new_run(tmp_path) as run:
        mirror = mirror_of(run, url=URL, keep=1)
        for step in (1, 2, 3):
            shutil.rmtree(run.checkpoints, ignore_errors=True)
            save(run, step, content=bytes([step]))
            mirror.pass_once()
    assert steps_in_mirror() == {1, 2, 3}
    [text] = warnings(caplog)
    assert f"old files in {URL} cannot be deleted (PermissionError" in text
    directory = fetched(URL, [f"run.dir={tmp_path / 'elsewhere'}"], step=None, report=print)
    assert [path.name for path in (directory / "checkpoints").iterdir()] == ["step-3"]


def allow_no_deletions(s3: S3Server) -> None:
    import boto3

    denied = {"Effect": "Deny", "Principal": "*", "Action": "s3:DeleteObject", "Resource": f"arn:aws:s3:::{BUCKET}/*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [denied]})
    boto3.client("s3", endpoint_url=s3.url).put_bucket_policy(Bucket=BUCKET, Policy=policy)


def test_a_kill_between_two_parts_leaves_no_part_of_a_file_and_the_next_process_sends_it(
    s3: S3Server, tmp_path: Path
) -> None:
    first_stored, second_arrived, killed = threading.Event(), threading.Event(), threading.Event()

    def hold(call: Call) -> Refusal | None:
        if call.query.get("partNumber", ["1"]) != ["1"]:
            second_arrived.set()
            killed.wait(LIMIT_S)
            return Refusal(500, "InternalError")
        return None

    def stored(call: Call) -> None:
        if "partNumber" in call.query:
            first_stored.set()

    s3.before, s3.after = hold, stored
    content = os.urandom(2**27)  # s3fs sends 100 MiB and more in parts of 50 MiB
    with new_run(tmp_path / "runs", steps=3) as run:
        save(run, 3, content=content)
        code = f"from test_s3_faults import send; send({str(run.path)!r}, {run.nonce!r})"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen([sys.executable, "-c", code], env=environment) as process:
            assert first_stored.wait(LIMIT_S)
            assert second_arrived.wait(LIMIT_S)
            process.kill()
        killed.set()
        s3.before = lambda call: None
        there = Store(URL).sizes()
        assert not any(name.endswith(("policy/weights", COMPLETE)) for name in there)
        assert "steps.jsonl" in there
        mirror_of(run, url=URL).pass_once()
    directory = fetched(URL, [f"run.dir={tmp_path / 'elsewhere'}"], step=None, report=print)
    assert (directory / "checkpoints" / "step-3" / "policy" / "weights").read_bytes() == content


def send(path: str, nonce: str) -> None:
    """Sends a run's directory, in the process that is killed."""
    from asyncrl.common.version import Lineage
    from asyncrl.config.schema import CheckpointSection

    Mirror(Store(URL), Path(path), nonce=nonce, lineage=Lineage(), keep=CheckpointSection()).pass_once()
