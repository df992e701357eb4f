"""`asyncrl mirror RUN URL` completes the mirror of an ended run, and says what it has sent and what is missing."""

import shutil
from functools import partial
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from mirrored_scene import URL, Storage, config_in, content, mirror_of, new_run, save, train
from typer.testing import CliRunner

from asyncrl.cli.main import app
from asyncrl.deployment.mirror import Store, complete_names
from asyncrl.deployment.resuming import chosen_checkpoint
from asyncrl.deployment.run_dir import RunDir


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Storage:
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    return Storage(monkeypatch)


@pytest.fixture
def ended(storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run that has ended. Its mirror lacks the last step and the last checkpoint."""
    monkeypatch.chdir(tmp_path)
    with new_run(tmp_path / "runs", steps=2) as run:
        save(run, 2)
        mirror_of(run).pass_once()
        train(run, range(2, 4))
        save(run, 4)
    storage.written.clear()
    return run.path


def sent(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["mirror", *words])
    assert done.exit_code == code, done.output
    return done.output


def test_what_is_missing_is_sent_and_nothing_else(ended: Path, storage: Storage) -> None:
    assert f"{URL} has everything of the run in runs/quick" in sent("quick", URL)
    assert {name.split("-")[1] for name in complete_names(content())} == {"2", "4"}
    for name in ("run.json", "steps.jsonl", "samples/step-3.jsonl", "audit/steps-1.msgpack"):
        assert content()[name] == (ended / name).read_bytes()
    assert not [name for name in storage.written if "/step-2-" in name or name == "config.yaml"]
    files = [name for name in storage.written if name not in ("owner.json", "latest.json", "sent.json")]
    storage.written.clear()
    assert "sent 0 files (0.0 MiB) to memory://bucket/quick" in sent("runs/quick", URL)
    assert storage.written == ["owner.json", "latest.json"]
    assert len(files) == len({*files}) == 9


def test_a_run_without_a_mirror_gets_one_and_goes_on_from_it(ended: Path, tmp_path: Path) -> None:
    sent("quick", "memory://elsewhere/x")
    assert content("memory://elsewhere/x")["steps.jsonl"] == (ended / "steps.jsonl").read_bytes()
    with RunDir.create(config_in(tmp_path / "runs"), choose=partial(chosen_checkpoint, step=None)) as run:
        mirror_of(run, url="memory://elsewhere/x").pass_once()


def test_a_failure_names_what_is_missing_and_the_next_call_sends_only_that(ended: Path, storage: Storage) -> None:
    def failing(operation: str, name: str) -> None:
        if name.endswith("policy/weights"):
            raise TimeoutError("no answer")

    storage.before = failing
    text = sent("quick", URL, code=1)
    assert "sent 7 files" in text or "sent 8 files" in text
    assert f"error: {URL} may lack checkpoints/step-4, because TimeoutError: no answer. Check the URL" in text
    storage.before = lambda operation, name: None
    storage.written.clear()
    sent("quick", URL)
    assert [name for name in storage.written if name.startswith(("samples", "audit", "steps"))] == []
    assert b"step-4-" in content()["latest.json"]


def test_a_storage_that_does_not_answer_at_all_is_named(ended: Path, storage: Storage) -> None:
    def failing(operation: str, name: str) -> None:
        raise PermissionError("403")

    storage.before = failing
    text = sent("quick", URL, code=1)
    assert f"error: {URL} cannot be used, because PermissionError: 403. Check the URL, the keys" in text


def test_a_run_that_lives_and_the_mirror_of_another_run_are_refused(ended: Path, tmp_path: Path) -> None:
    with RunDir.create(config_in(ended.parent), choose=partial(chosen_checkpoint, step=None)):
        before = content()
        assert "is in use by pid" in sent("quick", URL, code=1)
        assert content() == before
    with new_run(tmp_path / "others", steps=1) as other:
        save(other, 1)
    assert "is mirrored there" in sent(str(other.path), URL, code=2)


@pytest.mark.parametrize("more", ["a checkpoint of step 4, which is later", "more steps"])
def test_an_old_copy_of_a_directory_does_not_take_the_mirror_from_the_run_that_lives(
    more: str, storage: Storage, tmp_path: Path
) -> None:
    with new_run(tmp_path / "runs", steps=2) as run:
        save(run, 2)
        mirror = mirror_of(run)
        mirror.pass_once()
        copy = Path(shutil.copytree(run.path, tmp_path / "old" / "quick"))
        train(run, range(2, 4))
        if "checkpoint" in more:
            save(run, 4)
            shutil.copy(run.path / "steps.jsonl", copy)
        mirror.pass_once()
        before = content()
        assert f"{URL} is ahead of {copy}: it has {more}. The directory may be" in sent(str(copy), URL, code=2)
        assert content() == before
        train(run, range(4, 5))
        mirror.pass_once()
    assert content()["steps.jsonl"].count(b"\n") == 5


@pytest.mark.parametrize("lineage_sent", [False, True])
def test_a_run_that_went_back_is_not_an_old_copy(lineage_sent: bool, ended: Path) -> None:
    """The mirror has more steps and a later checkpoint, from which the run did not go on."""
    sent("quick", URL)
    with RunDir.create(config_in(ended.parent), choose=partial(chosen_checkpoint, step=2)):
        pass
    if lineage_sent:  # by a pass that was killed after its first record
        Store(URL).send(ended / "lineage.json", "lineage.json")
    sent("quick", URL)
    assert content()["steps.jsonl"].count(b"\n") == 2


def test_the_mirror_of_another_run_that_has_no_checkpoint_yet_is_refused(ended: Path, tmp_path: Path) -> None:
    url = "memory://elsewhere/x"
    with new_run(tmp_path / "others", steps=1) as other:
        mirror_of(other, url=url).pass_once()
        before = content(url)
        assert "another run, which may still live, is mirrored there" in sent("quick", url, code=2)
        assert content(url) == before


def test_a_damaged_checkpoint_is_not_sent(ended: Path) -> None:
    (ended / "checkpoints" / "step-4" / "policy" / "weights").write_bytes(b"x" * 100)
    before = content()
    assert "step-4/policy/weights has 100 bytes with the checksum" in sent("quick", URL, code=1)
    assert content() == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "the run has no run.mirror: name the URL of a folder"),
        (("s4://bucket/x",), "s4://bucket/x: asyncrl has no mirrors at s4:// URLs"),
        (("bucket/x",), "bucket/x is not the URL of a folder; write e.g. s3://bucket/quickstart"),
        (("s3://bucket/run[1]",), "s3://bucket/run[1] has one of the characters * ? [ ], which stand for"),
        (("file://mnt/x",), "file://mnt/x names a folder below the working directory; write three slashes"),
        (("sftp://ann:pw@host/x",), "error: the URL of the mirror has a password or a key, and commands show URLs"),
    ],
)
def test_a_url_that_cannot_be_one_is_refused(words: tuple[str, ...], says: str, ended: Path) -> None:
    text = sent("quick", *words, code=2)
    assert says in text
    assert "pw@" not in text


def test_a_url_that_only_the_configuration_names_needs_trust(ended: Path) -> None:
    config = ended / "config.yaml"
    config.write_text(config.read_text().replace("mirror: null", f"mirror: {URL}"))
    before = content()
    assert "only the run's configuration names this URL" in sent("quick", code=2)
    assert content() == before
    sent("quick", "--trust")
    assert b"step-4-" in content()["latest.json"]
