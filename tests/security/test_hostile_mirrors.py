"""`asyncrl resume URL` on a mirror that another person has made: it ends with one sentence or fetches the run. It
writes no file outside of the run's directory, and reads none outside of the mirror. The same holds for the commands
that read a mirror."""

import os
import re
import resource
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import xxhash
from fsspec.implementations.memory import MemoryFileSystem
from mirrored_scene import URL, mirror_of, new_run, save
from typer.testing import CliRunner

from asyncrl.checkpoints.directory import FileEntry, RunManifest
from asyncrl.cli import resume
from asyncrl.cli.main import app

SECRET = b"a line of a file that is not in the mirror\n"
LIMIT_BYTES = 2**28
ELSEWHERE = ("../secret.txt", "../../../secret.txt", "../../../../evil", "/tmp/evil-of-a-mirror", "a/../../b")
READING = (["samples"], ["audit"], ["report"], ["export", "weights"], ["compare"])
"""Commands that fetch a mirror into a temporary folder, with their words after the URL."""
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mirror in a folder."""
    place = tmp_path_factory.mktemp("written")
    with new_run(place / "runs") as run:
        (run.path / "steps.jsonl").write_text("")
        (run.path / "samples" / "step-1.jsonl").write_text("{}\n")
        save(run, 1)
        run.stopped()
        mirror_of(run, url=f"file://{place}/mirror").pass_once()
    return place / "mirror"


@pytest.fixture
def here(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The mirror to change, a secret beside it, and an empty working directory."""
    shutil.copytree(written, tmp_path / "mirror")
    (tmp_path / "secret.txt").write_bytes(SECRET)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setattr(
        resume, "prepared", lambda layers, overrides, **_: (resume.load_config(layers, overrides), None)
    )
    monkeypatch.setattr(resume, "run_in_terminal", lambda *_, **__: None)
    return tmp_path


def checkpoint(mirror: Path) -> Path:
    [folder] = (mirror / "checkpoints").iterdir()
    return folder


def replaced(name: str, make: Callable[[Path], object]) -> Change:
    def change(mirror: Path) -> None:
        path = checkpoint(mirror) / name.removeprefix("step/") if name.startswith("step/") else mirror / name
        path.unlink(missing_ok=True)
        make(path)

    return change


def linked(name: str) -> Change:
    return replaced(name, lambda path: path.symlink_to(Path(os.getcwd()).parent / "secret.txt"))


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 10**12)


def listed(name: str) -> Change:
    """Returns a change: the manifest lists a file of this name, and the folder's name has the checksum of the
    manifest."""

    def change(mirror: Path) -> None:
        folder = checkpoint(mirror)
        manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=RunManifest)
        entry = FileEntry(nbytes=len(SECRET), xxh3=xxhash.xxh3_128_hexdigest(SECRET))
        files = {name: entry, **manifest.files}
        content = msgspec.json.encode(msgspec.structs.replace(manifest, files=files))
        (folder / "manifest.json").write_bytes(content)
        marker = msgspec.json.decode((folder / "COMPLETE").read_bytes())
        marker["files"]["manifest.json"] = len(content)
        (folder / "COMPLETE").write_bytes(msgspec.json.encode(marker))
        folder.rename(folder.with_name(f"step-1-{xxhash.xxh3_128_hexdigest(content)[:16]}"))

    return change


def configured(key: str, value: str) -> Change:
    def change(mirror: Path) -> None:
        text = (mirror / "config.yaml").read_text()
        changed, count = re.subn(rf"(?m)^  {key}: .*$", f"  {key}: {value}", text, count=1)
        assert count == 1
        (mirror / "config.yaml").write_text(changed)

    return change


def escapes_in_complete(mirror: Path) -> None:
    path = checkpoint(mirror) / "COMPLETE"
    marker = msgspec.json.decode(path.read_bytes())
    marker["files"]["x\x1b[2J\nerror: passed"] = 1
    path.write_bytes(msgspec.json.encode(marker))


def link_in_checkpoint(mirror: Path) -> None:
    listed("elsewhere/secret.txt")(mirror)
    (checkpoint(mirror) / "elsewhere").symlink_to(mirror.parent)


INPUTS: dict[str, Change] = {
    "nothing": lambda mirror: None,
    **{
        f"{kind} {name}": replaced(name, make)
        for name in (
            *("config.yaml", "run.json", "steps.jsonl", "samples/step-1.jsonl"),
            *("lineage.json", "latest.json", "sent.json"),
        )
        for kind, make in {
            "pipe": os.mkfifo,
            "large": sparse,
            "nested": lambda path: path.write_bytes(b"[" * 100_000),
            "bytes": lambda path: path.write_bytes(bytes(range(256))),
            "folder": Path.mkdir,
        }.items()
    },
    **{
        f"link {name}": linked(name)
        for name in ("config.yaml", "run.json", "samples/x", "audit/x", "step/policy/weights", "step/manifest.json")
    },
    "a pipe as weights": replaced("step/policy/weights", os.mkfifo),
    "large weights": replaced("step/policy/weights", sparse),
    "a large COMPLETE": replaced("step/COMPLETE", sparse),
    "escapes of a terminal in COMPLETE": escapes_in_complete,
    **{
        f"listed {name!r}": listed(name)
        for name in (
            "../secret.txt",
            "../../../../evil",
            "/tmp/evil-of-a-mirror",
            "a/../../b",
            "policy/weights/x",
            "x\ny",
            "",
        )
    },
    "another name": configured("name", "../../evil"),
    "another folder": configured("dir", "/tmp/evil-of-a-mirror"),
    "a link as a folder": lambda mirror: (mirror / "samples" / "x").symlink_to(mirror.parent),
    "a link as a folder of a checkpoint": link_in_checkpoint,
    "many folders": lambda mirror: (mirror / "samples" / "/".join("abcdefgh" * 10)).mkdir(parents=True),
}


def outside(here: Path) -> dict[str, bytes]:
    files = (path for path in here.rglob("*") if path.is_file() and not path.is_symlink())
    return {
        str(path): path.read_bytes() for path in files if path.stat().st_size < 10**9 and "runs/quick/" not in str(path)
    }


@pytest.mark.parametrize("name", INPUTS)
def test_a_hostile_mirror_makes_one_sentence_and_touches_nothing_outside(
    name: str, here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    INPUTS[name](here / "mirror")
    before = outside(here)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, limits[1]))
    try:
        result = CliRunner().invoke(app, ["resume", f"file://{here}/mirror"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert result.exit_code in (0, 1, 2)
    assert "Traceback" not in result.output
    said = result.output + caplog.text
    assert result.exit_code == 0 or len([line for line in said.splitlines() if line.startswith("error:")]) == 1
    assert "\x1b" not in said
    assert outside(here) == before
    assert not Path("/tmp/evil-of-a-mirror").exists()
    fetched = [path for path in here.rglob("runs/quick/**/*") if path.is_file()]
    assert all(SECRET not in path.read_bytes() for path in fetched)
    if name == "nothing":
        assert result.exit_code == 0, result.output
        assert {path.name for path in fetched} >= {"config.yaml", "run.json", "weights", "manifest.json", "COMPLETE"}


@pytest.mark.parametrize(("number", "name"), list(enumerate(INPUTS)))
def test_a_command_that_reads_a_hostile_mirror_leaves_nothing_of_it(
    number: int, name: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each input gets two of the commands."""
    INPUTS[name](here / "mirror")
    (here / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(here / "temporary"))
    before = outside(here)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for words in (READING[number % len(READING)], READING[(number + 1) % len(READING)]):
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, limits[1]))
        try:
            result = CliRunner().invoke(app, [words[0], f"file://{here}/mirror", *words[1:]])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert isinstance(result.exception, SystemExit | None), result.exception
        assert result.exit_code in (0, 1, 2)
        assert "Traceback" not in result.output
        errors = [line for line in result.output.splitlines() if "error:" in line]
        assert len(errors) <= 1, errors
        assert result.exit_code == 0 or errors or "FAILED" in result.output, result.output
        assert SECRET.decode().strip() not in result.output
        assert list((here / "temporary").glob("asyncrl-*")) == []
        after = outside(here)
        written = {path: after.pop(path) for path in after.keys() - before.keys()}
        assert after == before
        assert {Path(path).relative_to(here).parts[0] for path in written} <= {"work"}
        assert all(SECRET not in content for content in written.values())
        assert not Path("/tmp/evil-of-a-mirror").exists()
        for path in written:
            Path(path).unlink()


@pytest.mark.parametrize(
    "name", ["samples/../../../evil", "samples//x", "audit/./x", "samples/a\nb", "../evil", "lock"]
)
def test_a_name_in_an_object_store_cannot_lead_elsewhere(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys of an object store are any text."""
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    fs = MemoryFileSystem()
    for path in (here / "mirror").rglob("*"):
        if path.is_file():
            fs.pipe_file(f"/bucket/quick/{path.relative_to(here / 'mirror')}", path.read_bytes())
    fs.store[f"/bucket/quick/{name}"] = fs.store["/bucket/quick/run.json"]
    before = outside(here)
    for command in ("resume", "audit" if name.startswith("audit") else "report"):
        result = CliRunner().invoke(app, [command, URL])
        Path("report.html").unlink(missing_ok=True)
        assert outside(here) == before
        if name.startswith(("samples", "audit")):
            assert result.exit_code == 1
            assert "and no file of a run has such a name" in result.stderr
    assert not (here / "work" / "runs" / "quick" / "lock").exists()
