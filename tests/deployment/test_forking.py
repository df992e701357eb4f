"""A new run begins with the weights of a checkpoint of another run, which it names and leaves as it is."""

import shutil
from pathlib import Path

import msgspec
import pytest
from mirrored_scene import config_in, save, train

from asyncrl.checkpoints.directory import folder_of
from asyncrl.cli.options import print_previous
from asyncrl.common.version import Version
from asyncrl.complete_directory import COMPLETE
from asyncrl.config.schema import Config
from asyncrl.deployment.forking import check_new, check_shapes, fork_point, load_fork
from asyncrl.deployment.resuming import no_checkpoint, unfinished_run
from asyncrl.deployment.run_dir import RunDir
from asyncrl.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, ConfigError, RunError
from asyncrl.learner.records import ForkPoint, RunInfo, read_info


@pytest.fixture
def source(tmp_path: Path) -> RunDir:
    """A run that has trained 6 steps, and has checkpoints of three of them."""
    with RunDir.create(config_in(tmp_path / "source")) as run:
        train(run, range(6))
        for step in (2, 4, 6):
            save(run, step)
    return run


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def forked(folder: Path, point: ForkPoint | None) -> RunDir:
    return RunDir.create(config_in(folder), choose=no_checkpoint, forked_from=point)


def test_the_newest_checkpoint_is_taken_or_that_of_a_step_and_the_run_is_only_read(source: RunDir) -> None:
    before = content(source.path)
    newest, manifest = fork_point(source.path, step=None)
    assert newest == ForkPoint(
        run="quick", nonce=source.nonce, directory=str(source.path.absolute()), version=Version(1, 6)
    )
    assert manifest.version == Version(1, 6)
    assert fork_point(source.path, step=4)[0].version == Version(1, 4)
    assert content(source.path) == before


def test_a_checkpoint_that_is_saved_now_is_not_taken(source: RunDir) -> None:
    (folder_of(source.checkpoints, 6) / COMPLETE).unlink()
    assert fork_point(source.path, step=None)[0].version == Version(1, 4)
    with pytest.raises(ConfigError, match=r"no complete checkpoint of this step; there are step-2, step-4$"):
        fork_point(source.path, step=6)


def test_a_damaged_checkpoint_and_one_of_another_run_are_refused(source: RunDir, tmp_path: Path) -> None:
    (folder_of(source.checkpoints, 4) / "policy" / "weights").write_bytes(b"v" * 100)
    with pytest.raises(CheckpointDamaged, match=r"--at step-4: the checkpoint cannot be used"):
        fork_point(source.path, step=4)
    with RunDir.create(config_in(tmp_path / "other")) as other:
        save(other, 8)
    folder_of(other.checkpoints, 8).rename(folder_of(source.checkpoints, 8))
    with pytest.raises(CheckpointError, match=other.nonce):
        fork_point(source.path, step=8)


def test_another_adapter_or_another_tiny_model_is_refused_and_other_settings_are_not(source: RunDir) -> None:
    point, manifest = fork_point(source.path, step=2)

    def check(**sections: object) -> None:
        check_shapes(point, manifest, Config.model_validate(sections))

    check(learner={"group_size": 8, "groups_per_step": 2}, run={"seed": 7}, model={"tiny": None, "max_length": 32})
    with pytest.raises(ConfigError, match=r"model\.lora\.alpha = 32, but step-2 of run quick .* has None"):
        check(model={"lora": {}})
    manifest = msgspec.structs.replace(manifest, settings={**manifest.settings, "model.tiny.hidden_size": 64})
    with pytest.raises(ConfigError, match=r"model\.tiny\.hidden_size = 128, but step-2 of run quick .* has 64"):
        check(model={"tiny": {"hidden_size": 128}})


def test_a_fork_is_a_new_run_that_names_its_checkpoint_also_after_it_was_resumed(
    source: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    point = fork_point(source.path, step=4)[0]
    with forked(tmp_path / "new", point) as run:
        assert (run.resumed, run.forked_from, run.lineage.incarnation) == (None, point, 1)
        print_previous(run)
        assert f"begins with the weights of step-4 of run quick ({source.path.absolute()})" in flat(capsys)
        train(run, range(2))
        save(run, 2)
        run.stopped()
    assert read_info(run.path).nonce != source.nonce
    with RunDir.create(config_in(tmp_path / "new")) as again:
        assert again.resumed is not None
        assert again.resumed.step == 2
        print_previous(again)
        assert "begins with" not in flat(capsys)
    assert read_info(run.path).forked_from == point


def flat(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("steps", [0, 3])
def test_a_fork_that_ended_before_its_first_checkpoint_does_not_begin_with_other_weights_unnoticed(
    source: RunDir, tmp_path: Path, steps: int
) -> None:
    point = fork_point(source.path, step=4)[0]
    with forked(tmp_path / "new", point) as run:
        train(run, range(steps))
        run.stopped()
    check_new(run.path)
    with pytest.raises(RunError, match=r"began with the weights of step-4 of run quick .* --at step-4"):
        RunDir.create(config_in(tmp_path / "new"), choose=unfinished_run)
    with forked(tmp_path / "new", point) as again:
        assert (again.previous, again.forked_from) == (tmp_path / "new" / "quick.1", point)


def test_a_new_run_in_the_place_of_a_fork_is_told_from_it(
    source: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with forked(tmp_path / "new", fork_point(source.path, step=4)[0]) as run:
        train(run, range(2))
    with forked(tmp_path / "new", None) as plain:
        print_previous(plain)
    printed = " ".join("".join(capsys.readouterr()).split())
    assert f"the previous run is now {run.path}.1, which began with step-4 of run quick" in printed
    assert "this run begins with the model at model.path" in printed


def test_a_directory_with_a_run_or_with_other_files_is_refused(source: RunDir, tmp_path: Path) -> None:
    check_new(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    check_new(tmp_path / "empty")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").touch()
    with forked(tmp_path / "new", fork_point(source.path, step=4)[0]) as run:
        save(run, 1)
    for directory in (source.path, tmp_path / "notes", run.path, tmp_path / "notes" / "todo.txt"):
        with pytest.raises(ConfigError, match=f"{directory} exists"):
            check_new(directory)


def test_the_error_of_weights_that_cannot_be_loaded_says_what_to_do(source: RunDir) -> None:
    point, loaded = fork_point(source.path, step=4)[0], []

    class Refusing:
        def load_weights(self, path: Path, *, critic: bool) -> None:
            assert not critic, "the other run has none"
            loaded.append(path)
            raise CheckpointMismatch("head is (2, 3) in the checkpoint and (3, 3) here")

    with pytest.raises(CheckpointError, match=r"step-4 of run quick .* \(3, 3\) here.* set model\.path to the model"):
        load_fork(Refusing(), point)  # type: ignore[arg-type]
    assert loaded == [folder_of(source.checkpoints, 4).absolute()]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_checkpoint_that_is_replaced_after_it_was_chosen_is_refused(source: RunDir, when: str) -> None:
    """The other run has gone back, and has saved the same step again."""
    point = fork_point(source.path, step=6)[0]

    def replace() -> None:
        shutil.rmtree(folder_of(source.checkpoints, 6))
        save(source, 6, content=b"other", incarnation=2)

    class Loading:
        def load_weights(self, path: Path, *, critic: bool) -> None:
            if when == "meanwhile":
                replace()

    if when == "before":
        replace()
    with pytest.raises(CheckpointError, match=r"step-6 has been replaced: it is of version 2\.6 now"):
        load_fork(Loading(), point)  # type: ignore[arg-type]


def test_a_record_of_a_run_without_a_fork_is_read_as_before(source: RunDir) -> None:
    assert isinstance(info := read_info(source.path), RunInfo)
    assert info.forked_from is None
