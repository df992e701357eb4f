"""Only files that Python's shared memory or asyncrl makes in /dev/shm are removed there, whatever run.json names."""

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
from run_from_elsewhere import rewrite, run_of

from asyncrl.deployment.known_runs import clear, remains_of
from asyncrl.generation import shared_memory
from asyncrl.generation.shared_memory import removable, sweep_shared_memory

SEGMENT, POINTER, ADAPTERS = "psm_0123abcd", "asyncrl-weights-0123456789abcdef", f"asyncrl-lora-{'0' * 32}"


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm."""
    folder = tmp_path / "dev" / "shm"
    folder.mkdir(parents=True)
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", folder)
    return folder


def everything_below(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_segments_pointers_and_folders_of_adapters_are_removed(shm: Path) -> None:
    (shm / SEGMENT).touch()
    (shm / POINTER).touch()
    (shm / ADAPTERS / "1-1").mkdir(parents=True)
    sweep_shared_memory([SEGMENT, POINTER, ADAPTERS, "psm_ffffffff"])
    assert everything_below(shm) == []


@pytest.mark.parametrize(
    "name",
    [
        "../../home", "../../home/thesis.txt", "{home}", "{home}/thesis.txt", "..", ".", "", "./psm_other", "psm_other",
        "psm_other/../../../home", "psm_0123abcd/../../../home", "asyncrl-lora-../../../home", "PSM_0123ABCD",
        "psm_0123abcd\n", "sem.mp-1", "foreign", "psm_٠١٢٣٤٥٦٧", "psm_*",
        f"asyncrl-lora-{'0' * 32}/../../../home", "psm_0123abcd\0", "asyncrl-weights-", "asyncrl-lora-",
    ],
)  # fmt: skip
def test_names_of_others_and_paths_are_not_removed(name: str, shm: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").touch()
    for other in ("psm_other", "PSM_0123ABCD", "psm_0123abcd\n", "sem.mp-1", "foreign", "psm_٠١٢٣٤٥٦٧", "psm_*"):
        (shm / other).touch()
    for other in ("asyncrl-weights-", "asyncrl-lora-"):
        (shm / other).mkdir()
    before = everything_below(tmp_path)
    sweep_shared_memory([name.format(home=home)])
    assert everything_below(tmp_path) == before


@pytest.mark.parametrize("kind", ["link to a file", "link to a folder", "folder", "fifo", "file for a folder"])
def test_what_has_another_type_is_not_removed(kind: str, shm: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").touch()
    name = ADAPTERS if kind in ("link to a folder", "file for a folder") else SEGMENT
    match kind:
        case "link to a file":
            (shm / name).symlink_to(tmp_path / "home" / "thesis.txt")
        case "link to a folder":
            (shm / name).symlink_to(tmp_path / "home")
        case "folder":
            (shm / name / "below").mkdir(parents=True)
        case "fifo":
            os.mkfifo(shm / name)
        case _:
            (shm / name).touch()
    before = everything_below(tmp_path)
    sweep_shared_memory([name])
    assert everything_below(tmp_path) == before
    assert removable(name) is None


@pytest.mark.parametrize("name", [SEGMENT, POINTER, ADAPTERS])
def test_what_another_user_owns_is_not_removed(name: str, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shm / name).mkdir() if name == ADAPTERS else (shm / name).touch()
    own = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: own + 1)
    sweep_shared_memory([name])
    assert (shm / name).exists()


@pytest.fixture
def segment() -> Iterator[SharedMemory]:
    memory = SharedMemory(create=True, size=16)
    yield memory
    memory.close()
    memory.unlink()


@pytest.mark.slow
def test_a_segment_that_another_process_has_mapped_stays(segment: SharedMemory, tmp_path: Path) -> None:
    run = run_of(tmp_path, shared_memory=[segment.name])
    assert remains_of(run).shared_memory == []
    clear(run)
    assert Path("/dev/shm", segment.name).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        {"started": (datetime.now(UTC) + timedelta(hours=1)).isoformat()},
        {"started": "soon"},
        {"boot": "of-another-boot", "state": "failed"},
        {"host": "another.host", "state": "failed"},
    ],
    ids=["older", "no-time", "boot", "host"],
)
def test_a_segment_that_this_run_did_not_make_stays(changed: dict[str, str], shm: Path, tmp_path: Path) -> None:
    (shm / SEGMENT).touch()
    run = run_of(tmp_path, shared_memory=[SEGMENT])
    assert remains_of(run).shared_memory == [SEGMENT]
    rewrite(run, **changed)
    assert remains_of(run).shared_memory == []
    clear(run)
    assert (shm / SEGMENT).exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../../home", "{home}", f"{SEGMENT}/../../../home"])
def test_down_removes_no_folder_that_run_json_names(name: str, shm: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "papers").mkdir(parents=True)
    (shm / SEGMENT).touch()
    run = run_of(tmp_path, shared_memory=[name.format(home=home), SEGMENT])
    assert "home" not in str(remains_of(run))
    clear(run)
    assert (home / "papers").is_dir()
    assert not (shm / SEGMENT).exists()
