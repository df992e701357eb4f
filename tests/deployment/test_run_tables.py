"""Tables of a run's records: one column a field, missing values, and errors for records that cannot be used."""

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from made_up_run import make_step
from written_runs import write_run

import asyncrl
from asyncrl.common.device_time import Device, DeviceTime, Pool
from asyncrl.errors import RunError
from asyncrl.learner.records import EvalRecord, StepRecord


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three steps, of which the second was skipped."""
    steps = [
        make_step(0, token_staleness={10: 1, 2: 5}, diagnostics={"a.b": 0.5}),
        make_step(1, trained=False, reward_mean=None, oldest_replica_version=None, token_staleness={}),
        make_step(
            1,
            reward_components={"format": 0.25},
            witness={"advantages": "formula"},
            device_time=(DeviceTime(pool=Pool.GENERATORS, device=Device.GPU, waiting_s=2.5),),
        ),
    ]
    return write_run(tmp_path, steps)


def test_each_field_and_each_name_of_a_field_is_a_column(run: Path) -> None:
    table = asyncrl.load_run(run).steps
    assert {len(column) for column in table.values()} == {3}
    assert set(StepRecord.__struct_fields__) - set(table) == {
        field.name for field in msgspec.structs.fields(StepRecord) if str(field.type).startswith(("dict", "tuple"))
    }
    assert table["step"].tolist() == [0, 1, 1]
    assert table["trained"].tolist() == [True, False, True]
    np.testing.assert_equal(table["reward_mean"], [0.5, np.nan, 0.505])
    np.testing.assert_equal(table["token_staleness.10"], [1, np.nan, np.nan])
    np.testing.assert_equal(table["diagnostics.a.b"], [0.5, np.nan, np.nan])
    np.testing.assert_equal(table["reward_components.format"], [np.nan, np.nan, 0.25])
    np.testing.assert_equal(table["device_time.generators.gpu.waiting_s"], [np.nan, np.nan, 2.5])
    assert table["witness.advantages"].tolist() == [None, None, "formula"]
    assert [name for name in table if name.startswith("token_staleness")] == [
        "token_staleness.0", "token_staleness.1", "token_staleness.2", "token_staleness.10"
    ]  # fmt: skip


def test_the_type_of_a_column_is_that_of_its_values(run: Path) -> None:
    table = asyncrl.load_run(run).steps
    names = ("step", "trained", "wall_s", "oldest_replica_version", "mfu_ratio", "witness.advantages")
    assert [table[name].dtype.name for name in names] == ["int64", "bool", "float64", "float64", "float64", "object"]


def test_evaluations_configuration_and_totals_come_with_the_steps(run: Path) -> None:
    with (run / "evals.jsonl").open("ab") as file:
        file.write(
            msgspec.json.encode(EvalRecord(version=3, wall_s=2, prompts=4, reward_mean=1, pass_at={4: 0.5})) + b"\n"
        )
    found = asyncrl.load_run(str(run))
    assert found.evals["name"].tolist() == ["heldout", "heldout"]
    assert found.evals["version"].tolist() == [0, 3]
    np.testing.assert_equal(found.evals["pass_at.4"], [np.nan, 0.5])
    assert (found.config.run.name, found.info.state, found.directory) == ("quick", "failed", run)
    assert found.summary is not None
    assert found.summary.steps == 2


def test_a_run_without_evaluations_and_summary_and_with_an_unfinished_line_is_loaded(tmp_path: Path) -> None:
    run = write_run(tmp_path, [make_step(0)], finish=False, evals=False, end=None)
    with (run / "steps.jsonl").open("ab") as file:
        file.write(b'{"step": 1, "wa')
    found = asyncrl.load_run(run)
    assert found.steps["step"].tolist() == [0]
    assert {column.shape for column in found.evals.values()} == {(0,)}
    assert found.evals["name"].dtype == object
    assert found.summary is not None
    assert found.summary.steps == 1


def test_a_run_is_found_by_its_name(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    assert asyncrl.load_run("mine").steps["step"].tolist() == [0, 1, 1]
    with pytest.raises(RunError, match="there is no run absent in runs/"):
        asyncrl.load_run("absent")


def test_damaged_records_are_errors_with_the_file(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = run / "steps.jsonl"
    good = steps.read_bytes()
    steps.write_bytes(good + b"{}\n")
    with pytest.raises(RunError, match=r"steps\.jsonl, line 4 is not a StepRecord"):
        asyncrl.load_run(run)
    steps.write_bytes(good + msgspec.json.encode(msgspec.to_builtins(make_step(2)) | {"step": 10**400}) + b"\n")
    with pytest.raises(RunError, match=r"quick cannot be loaded \(OverflowError: .*its files are damaged"):
        asyncrl.load_run(run)
    steps.write_bytes(good)
    monkeypatch.setattr("asyncrl.deployment.run_tables.MOST_VALUES", 50)
    with pytest.raises(RunError, match=r"steps\.jsonl would make a table of \d+ values, and at most 50 are made"):
        asyncrl.load_run(run)


def test_a_table_becomes_a_data_frame_if_the_library_is_installed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = asyncrl.load_run(run).steps
    for name in ("pandas", "polars"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)  # an import of it fails
            with pytest.raises(
                RunError, match=f"needs the package {name}, which is not installed: run `pip install {name}`"
            ):
                getattr(table, name)()
    frame = pytest.importorskip("pandas").DataFrame
    assert isinstance(table.pandas(), frame)
    assert list(table.pandas().columns) == list(table)
    assert table.pandas()["reward_mean"].isna().tolist() == [False, True, False]


def test_a_sweep_is_loaded_by_the_names_of_its_runs(tmp_path: Path) -> None:
    folder = tmp_path / "limits"
    for name in ("b", "a"):
        write_run(folder, [make_step(0)]).rename(folder / name)
    (folder / "begun").mkdir()
    (folder / "a.log").touch()
    found = asyncrl.load_sweep(folder)
    assert list(found) == ["a", "b"]
    assert found["a"].steps["step"].tolist() == [0]
    with pytest.raises(RunError, match="name the folder of a sweep"):
        asyncrl.load_sweep(tmp_path)
