"""Folders for temporary files that Ray or vLLM cannot use are refused in one line before anything starts."""

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asyncrl.cli.main import app
from asyncrl.deployment import temporary_folders
from asyncrl.deployment.temporary_folders import (
    LONGEST_FOLDERS,
    make_private_folder,
    private_folder,
    ray_folder,
    temporary_folder_problems,
)
from asyncrl.errors import RunError

SetVariable = Callable[[str, str], None]


@pytest.fixture(autouse=True)
def set_variable(monkeypatch: pytest.MonkeyPatch) -> SetVariable:
    """Returns the function that sets a variable of the environment. None of those that name the folders is set."""
    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)  # Python chooses the folder once
    return monkeypatch.setenv


def texts(**uses: bool) -> list[str]:
    return [str(problem) for problem in temporary_folder_problems(**uses)]


def long_folder(size: int) -> str:
    """Returns the path of a new folder with `size` bytes."""
    base = tempfile.mkdtemp(dir="/tmp")
    folder = Path(base, "x" * (size - len(base) - 1))
    folder.mkdir(mode=0o700)
    return str(folder)


@pytest.fixture
def base(tmp_path: Path, set_variable: SetVariable) -> Path:
    """The folder of RAY_TMPDIR, in which every user may make files, as in /tmp."""
    folder = tmp_path / "t"
    folder.mkdir()
    folder.chmod(0o1777)
    set_variable("RAY_TMPDIR", str(folder))
    return folder


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o770, 0o701, 0o1777])
def test_ray_starts_below_a_folder_that_only_its_user_can_enter(
    mode: int, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning says if another user could rename that folder."""
    base.chmod(mode)
    wanted = base / f"asyncrl-{os.getuid()}"
    assert private_folder() == wanted
    for _ in range(2):
        assert make_private_folder() == wanted
        assert wanted.stat().st_mode & 0o7777 == 0o700
        wanted.chmod(0o755)  # another program has opened it
    warned = f"the right to write in {base} can rename it, because that has no sticky bit" in caplog.text
    assert warned == (mode == 0o777) == bool(caplog.records), "the group of 0o770 is that of this user"


@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
def test_a_folder_of_another_user_above_that_of_ray_is_named(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.chown(base, 12345, -1)
    make_private_folder()
    assert f"({base} is of another user, who can rename it); set RAY_TMPDIR" in caplog.text
    caplog.clear()
    os.chown(base, os.getuid(), 12345)
    base.chmod(0o770)
    make_private_folder()
    assert f"the right to write in {base} can rename it" in caplog.text


def test_a_folder_that_only_its_user_can_enter_is_used_as_it_is(base: Path) -> None:
    base.chmod(0o700)
    assert make_private_folder() == private_folder() == base
    assert list(base.iterdir()) == []


def test_a_link_to_a_folder_that_only_its_user_can_enter_is_used_as_it_is(
    base: Path, tmp_path: Path, set_variable: SetVariable
) -> None:
    base.chmod(0o700)
    (tmp_path / "link").symlink_to(base)
    set_variable("RAY_TMPDIR", str(tmp_path / "link"))
    assert make_private_folder() == private_folder() == tmp_path / "link"
    assert list(base.iterdir()) == []


@pytest.mark.parametrize("kind", ["a link", "a file", "of another user"])
def test_a_folder_that_another_user_has_prepared_is_refused(
    kind: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = base / f"asyncrl-{os.getuid()}"
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o777)
        place.symlink_to(tmp_path / "elsewhere")
    elif kind == "a file":
        place.touch()
    else:
        place.mkdir(mode=0o777)
        other = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: other)
        place.rename(base / f"asyncrl-{os.getuid()}")
    with pytest.raises(RunError, match=r"belongs to user \d+ or is not a folder: set RAY_TMPDIR"):
        make_private_folder()


def test_a_folder_without_modes_is_named(
    base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_modes(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", no_modes)
    folder = make_private_folder()
    assert f"Ray's files in {folder} (Operation not permitted); set RAY_TMPDIR" in caplog.text
    folder.rmdir()
    folder.mkdir(mode=0o755)
    monkeypatch.setattr(Path, "chmod", lambda *_: None)
    make_private_folder()
    assert f"Ray's files in {folder} (its file system ignores modes); set RAY_TMPDIR" in caplog.text


def test_the_sockets_of_a_private_folder_count_with_its_name(tmp_path: Path, set_variable: SetVariable) -> None:
    folder = Path(long_folder(LONGEST_FOLDERS["Ray"]))
    set_variable("RAY_TMPDIR", str(folder))
    assert texts(vllm=False) == []
    folder.chmod(0o755)
    longest = LONGEST_FOLDERS["Ray"] - len(f"/asyncrl-{os.getuid()}")
    assert f"(at most {longest})" in texts(vllm=False)[0]


@pytest.mark.parametrize("variable", ["", "TMPDIR", "RAY_TMPDIR"])
def test_the_address_of_the_last_ray_start_is_read_where_ray_writes_it(
    variable: str, set_variable: SetVariable, tmp_path: Path
) -> None:
    utils = pytest.importorskip("ray._common.utils")
    if variable:
        set_variable(variable, str(tmp_path))
    file = Path(utils.get_ray_address_file(None))
    assert file.is_relative_to(tmp_path) == bool(variable)
    assert file.parent == ray_folder()[0] / "ray"


def test_the_longest_folder_is_what_ray_itself_allows() -> None:
    utils = pytest.importorskip("ray._private.utils")
    path = (
        "/"
        + "x" * (LONGEST_FOLDERS["Ray"] - 1)
        + "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
    )
    utils.validate_socket_filepath(path)
    with pytest.raises(OSError, match="path length cannot exceed"):
        utils.validate_socket_filepath(f"/x{path[1:]}")


@pytest.mark.parametrize("size", [40, 55, 90])
@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
def test_a_long_folder_is_refused_with_the_variables_that_change_it(
    variable: str, size: int, set_variable: SetVariable
) -> None:
    folder = long_folder(size)
    set_variable(variable, folder)
    [text] = texts()
    assert text.startswith(f"{variable} = {folder}: has {size} bytes, so Ray cannot make its sockets there (at most")
    assert "set RAY_TMPDIR (for Ray) or TMPDIR (for all programs) to a shorter path" in text
    assert bool(texts(ray=False)) is (variable == "TMPDIR" and size > 70), "vLLM's sockets have shorter names"


def test_bytes_count_and_not_characters(set_variable: SetVariable) -> None:
    set_variable("RAY_TMPDIR", "/tmp/" + "ü" * 20)
    assert re.search("has 45 bytes", texts()[0])


def test_a_folder_of_ray_that_differs_from_the_one_of_vllm_is_a_problem_of_its_own(
    set_variable: SetVariable,
) -> None:
    set_variable("TMPDIR", long_folder(72))
    set_variable("RAY_TMPDIR", long_folder(41))
    assert [re.findall(r"^\w+|has \d+ bytes|Ray cannot|vLLM cannot", text) for text in texts()] == [
        ["RAY_TMPDIR", "has 41 bytes", "Ray cannot"],
        ["TMPDIR", "has 72 bytes", "vLLM cannot"],
    ]
    set_variable("RAY_TMPDIR", "/tmp")
    assert [text[:6] for text in texts()] == ["TMPDIR"]


def a_file(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file"


def rays_folder_is_a_file(folder: Path) -> Path:
    (folder / "ray").write_text("")
    return folder


UNUSABLE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a file": (a_file, "Ray cannot write there"),
    "below a file": (lambda folder: a_file(folder) / "below", "Not a directory"),
    "ray is a file": (rays_folder_is_a_file, r"/ray: Not a directory"),
    "a pseudo file system": (lambda folder: Path("/proc/self"), "Ray cannot write there"),
    "relative": (lambda folder: Path("tmp"), "not an absolute path"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_folder_that_cannot_be_used_is_refused_with_the_reason(name: str, set_variable: SetVariable) -> None:
    make, says = UNUSABLE[name]
    set_variable("RAY_TMPDIR", str(make(Path(tempfile.mkdtemp(dir="/tmp")))))
    [text] = texts()
    assert re.search(says, text)
    assert "set RAY_TMPDIR" in text


@pytest.mark.parametrize("errno", ["EACCES", "ENOSPC", "EROFS", "EDQUOT"])
def test_a_disk_that_refuses_the_file_is_named_with_its_reason(errno: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno as numbers

    def refuse(**_: Any) -> Any:
        raise OSError(getattr(numbers, errno), os.strerror(getattr(numbers, errno)))

    monkeypatch.setattr(temporary_folders.tempfile, "TemporaryFile", refuse)
    [text] = texts(vllm=False)
    assert os.strerror(getattr(numbers, errno)) in text
    assert text.startswith("the folder for temporary files, /tmp")


@pytest.mark.parametrize("free_mib", [0, 12, 63])
def test_a_full_disk_is_refused_before_the_workers_die_of_it(free_mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs("/tmp")
    full = os.statvfs_result((1024, 1024, real.f_blocks, 0, free_mib * 1024, *tuple(real)[5:]))
    monkeypatch.setattr(temporary_folders.os, "statvfs", lambda path: full)
    [text] = texts()
    assert f"has {free_mib} MiB free, and Ray needs 64 MiB; delete files there" in text


def test_a_folder_that_does_not_exist_yet_is_made_by_ray(tmp_path: Path, set_variable: SetVariable) -> None:
    set_variable("RAY_TMPDIR", tempfile.mkdtemp(dir="/tmp") + "/new")
    assert texts() == []


@pytest.mark.slow
@pytest.mark.parametrize("command", ["config check", "up", "head"])
@pytest.mark.usefixtures("in_tmp_path")
def test_each_command_that_starts_ray_says_so_in_one_line(
    command: str, tmp_path: Path, set_variable: SetVariable
) -> None:
    set_variable("TMPDIR", long_folder(90))
    set_variable("HOME", str(tmp_path))
    done = CliRunner().invoke(app, [*command.split(), "-c", "quickstart"])
    assert done.exit_code != 0
    said = str(done.exception) if done.exception and not isinstance(done.exception, SystemExit) else done.output
    assert [line for line in said.splitlines() if "has 90 bytes, so Ray" in line and "RAY_TMPDIR" in line], said
    assert not (tmp_path / "runs").exists()
