"""Commands that read a run read it from the URL of its mirror, on a machine that has nothing of the run."""

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

import msgspec
import pytest
import xxhash
from fsspec.implementations.memory import MemoryFileSystem
from hostile_runs import write_run
from mirrored_scene import URL, content, mirror_of, new_run, save
from typer.testing import CliRunner

from asyncrl.cli import eval as eval_command
from asyncrl.cli.main import app
from asyncrl.common.version import Lineage
from asyncrl.config.schema import CheckpointSection
from asyncrl.deployment import fetching
from asyncrl.deployment.mirror import Mirror, Store, complete_names
from asyncrl.deployment.resuming import known_lineage
from asyncrl.learner.records import known_info


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `runs/quick`, its mirror `mirror/quick`, and the run `runs/other`."""
    place = tmp_path_factory.mktemp("written")
    run = asyncio.run(write_run(place / "runs", "quick"))
    send(run, place / "mirror" / "quick")
    shutil.copytree(run, run.with_name("other"))
    return place


def send(run: Path, mirror: Path) -> None:
    info = known_info(run)
    assert info is not None
    lineage = known_lineage(run) or Lineage()
    Mirror(Store(f"file://{mirror}"), run, nonce=info.nonce, lineage=lineage, keep=CheckpointSection()).pass_once()


@pytest.fixture
def mirror(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The mirror, beside an empty working directory and an empty folder for temporary files."""
    shutil.copytree(written / "mirror", tmp_path / "mirror")
    for name in ("work", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "mirror" / "quick"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def stdout_of(*words: str) -> str:
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(
    "command",
    [
        ("audit", "RUN"),
        ("samples", "RUN", "--worst"),
        ("samples", "RUN", "--task"),
        ("report", "RUN", "-o", "page.html"),
        ("compare", "RUN", "OTHER", "-o", "page.html", "--csv", "numbers.csv"),
        ("export", "RUN", "weights"),
        ("export", "RUN", "weights", "--at", "best"),
    ],
    ids=" ".join,
)
def test_a_mirror_is_read_as_the_directory_is_and_nothing_is_left(
    command: tuple[str, ...], mirror: Path, written: Path
) -> None:
    before, here = files_of(mirror), Path.cwd()
    url, local, other = f"file://{mirror}/", str(written / "runs" / "quick"), str(written / "runs" / "other")
    assert any(name.startswith("checkpoints/step-2-") for name in before)
    said = stdout_of(*({"RUN": url, "OTHER": other}.get(word, word) for word in command))
    found = files_of(here)
    for path in here.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    wanted = stdout_of(*({"RUN": local, "OTHER": other}.get(word, word) for word in command))
    if command[0] == "export":
        assert found == files_of(here) != {}
    else:
        assert found.keys() == files_of(here).keys()
    # the share of the time since the start changes from one command to the next, because the run has no end
    differ = ("a row in full", "effective training time")
    of_url, of_run = ([line for line in text.splitlines() if not line.startswith(differ)] for text in (said, wanted))
    assert of_url == of_run
    assert list((mirror.parents[1] / "temporary").iterdir()) == []
    assert files_of(mirror) == before


def test_runs_that_are_compared_have_the_names_of_the_command_line(mirror: Path, written: Path) -> None:
    url, local = f"file://{mirror}", str(written / "runs" / "quick")
    said = stdout_of("compare", url, local, "-o", "page.html", "--csv", "numbers.csv")
    numbers = Path("numbers.csv").read_text()
    assert url in numbers
    assert local in numbers
    assert str(mirror.parents[1] / "temporary") not in said + numbers + Path("page.html").read_text()


def test_an_export_that_finds_no_evaluation_names_the_url(mirror: Path) -> None:
    (mirror / "evals.jsonl").write_bytes(b"")
    done = CliRunner().invoke(app, ["export", f"file://{mirror}", "weights", "--at", "best"])
    assert f"--at best: no checkpoint of the run file://{mirror} has an evaluation heldout" in done.stderr


def test_a_url_that_is_named_twice_is_refused_as_a_directory_is(mirror: Path) -> None:
    done = CliRunner().invoke(app, ["compare", f"file://{mirror}", f"file://{mirror}/"])
    assert done.exit_code == 2
    assert f"file://{mirror}/ is named twice; name each run once" in done.stderr


def test_the_page_and_the_certificate_of_a_mirror_are_written_to_the_working_directory(mirror: Path) -> None:
    assert stdout_of("report", f"file://{mirror}") == "report.html\n"
    assert "<title>quick" in Path("report.html").read_text()
    done = CliRunner().invoke(app, ["audit", f"file://{mirror}", "--witness-steps", "1"])
    assert "certificate: certificate.json" in done.stdout
    assert Path("certificate.json").exists()


def test_the_command_says_what_it_fetches_and_fetches_only_what_it_needs(
    mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = CliRunner().invoke(app, ["samples", f"file://{mirror}"])
    assert done.stderr.startswith("fetching 5 records (0.0 MiB) from file:///")
    assert done.stderr.count("\n") == 1
    monkeypatch.setattr(fetching, "LONG_BYTES", 1)
    done = CliRunner().invoke(app, ["export", f"file://{mirror}", "weights"])
    assert [line for line in done.stderr.splitlines() if "checkpoint step-2" in line][
        -1
    ] == "  checkpoint step-2: 100 %"
    assert "checkpoint step-1" not in done.stderr


def test_the_audit_of_a_mirror_that_is_being_written_is_of_its_last_complete_pass(mirror: Path) -> None:
    """The records for the audit are sent after steps.jsonl, and a machine may be lost between them."""
    whole = (mirror / "steps.jsonl").read_bytes()
    step = msgspec.json.decode(whole.splitlines()[-1])
    more = [msgspec.json.encode(step | {"step": step["step"] + n, "version_after": 2 + n}) + b"\n" for n in (1, 2)]
    (mirror / "steps.jsonl").write_bytes(b"".join([whole, *more]))
    assert "passed: 1 exactly once" in stdout_of("audit", f"file://{mirror}")
    (mirror / "sent.json").unlink()
    assert CliRunner().invoke(app, ["audit", f"file://{mirror}"]).exit_code == 1


def test_a_mirror_cannot_enlarge_the_records_that_were_fetched(mirror: Path) -> None:
    content = (mirror / "steps.jsonl").read_bytes()
    sent = {"steps.jsonl": [10**12, xxhash.xxh3_128_hexdigest(content)]}
    (mirror / "sent.json").write_bytes(msgspec.json.encode(sent))
    assert stdout_of("report", f"file://{mirror}") == "report.html\n"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["report"], "--output report.html: its folder"),
        (["report", "-o", "missing/page.html"], "--output missing/page.html: its folder"),
        (["audit", "--witness-steps", "1"], "--certificate certificate.json: its folder"),
    ],
    ids=str,
)
def test_a_place_that_cannot_be_written_is_refused_before_the_mirror_is_fetched(
    command: list[str], says: str, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    done = CliRunner().invoke(app, [command[0], f"file://{mirror}", *command[1:]])
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert "fetching" not in done.stderr


@pytest.mark.parametrize("name", ["buffer.msgpack", "manifest.json"])
def test_the_audit_of_a_mirror_with_a_damaged_checkpoint_does_not_pass(name: str, mirror: Path) -> None:
    for checkpoint in complete_names(files_of(mirror)):
        path = mirror / "checkpoints" / checkpoint / name
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    done = CliRunner().invoke(app, ["audit", f"file://{mirror}"])
    assert done.exit_code == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "error: checkpoints/step-2-" in line
    assert "is damaged (" in line
    assert "exactly once" not in done.output


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_not_audited(
    mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = fetching._manifest

    def deleting(store: Store, name: str) -> object:
        shutil.rmtree(mirror / "checkpoints" / name)
        return read(store, name)

    assert "; 1 checkpoints have" in stdout_of("audit", f"file://{mirror}")
    monkeypatch.setattr(fetching, "_manifest", deleting)
    assert "; 0 checkpoints have" in stdout_of("audit", f"file://{mirror}")


def test_a_disk_without_space_is_named_with_the_variable_that_chooses_another_one(
    mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(mirror)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    done = CliRunner().invoke(app, ["report", f"file://{mirror}"])
    assert done.exit_code == 1
    assert "there is no space for 5 records from file:///" in done.stderr
    assert "choose another disk (TMPDIR" in done.stderr


@pytest.mark.parametrize(
    ("url", "code", "says"),
    [
        ("s4://bucket/x", 2, "s4://bucket/x: asyncrl has no mirrors at s4:// URLs; use e.g. s3://"),
        ("sftp://server/x", 2, "sftp://server/x: the package for sftp:// URLs is missing: SFTPFileSystem requires"),
        ("sftp://ann:pw@host/x", 2, "the URL of the mirror has a password or a key, and commands show URLs"),
        ("s3://bucket/a::file:///x", 2, "s3://bucket/a::file:///x is not the URL of a folder; write e.g. s3://"),
        ("file:///nothing/here", 1, "file:///nothing/here is not the mirror of a run: it has no config.yaml"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        *(["audit"], ["report"], ["samples"], ["compare"], ["resume"]),
        *(["export", "weights"], ["eval", "-c", "quickstart"]),
    ],
    ids=" ".join,
)
def test_a_url_that_is_not_a_mirror_is_refused_in_a_sentence(
    command: list[str], url: str, code: int, says: str, mirror: Path
) -> None:
    words = [*command, f"model.path={url}"] if command[0] == "eval" else [command[0], url, *command[1:]]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == code, done.output
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert line.startswith(f"error: {says}")
    assert "pw@" not in done.output


@pytest.mark.parametrize(
    ("part", "step"),
    [("", 2), ("/", 2), ("/checkpoints/step-1", 1), ("/checkpoints/step-1/hf", 1), ("/checkpoints/NAME/", 1)],
)
def test_a_checkpoint_of_a_mirror_can_be_evaluated(
    part: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    with new_run(tmp_path, steps=2) as run:
        for saved in (1, 2):
            save(run, saved, content=b"%d" % saved * 40)
        mirror_of(run).pass_once()
    [name] = [name for name in complete_names(content()) if name.startswith("step-1-")]
    url = f"{URL}{part.replace('NAME', name)}"
    with eval_command._with_local_model(["eval.prompts=4", f"model.path={url}"]) as (overrides, shown):
        assert shown == url
        assert overrides[0] == "eval.prompts=4"
        path = Path(overrides[-1].removeprefix("model.path="))
        assert path.name == f"step-{step}"
        assert (path / "policy" / "weights").read_bytes() == b"%d" % step * 40
    assert not path.exists()


def test_a_model_that_is_not_in_a_mirror_is_evaluated_where_it_is() -> None:
    for overrides in (["model.path=models/mine"], ["run.seed=1"]):
        with eval_command._with_local_model(overrides) as found:
            assert found == (overrides, None)
