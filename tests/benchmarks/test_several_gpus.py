"""The command for several GPUs asks for runs that are possible, and sees what is wrong with one."""

import json
import sys
from pathlib import Path

import pytest
from gpu import several
from gpu.several import STEPS, Check, Outcome, checks, recorded_problem, report, run_directory, settings

from asyncrl.config.load import config_origins, load_config
from asyncrl.config.rules import check_config
from asyncrl.demo.directory import why_not_built


@pytest.mark.parametrize("gpus", [0, *range(2, 9)])
def test_each_run_is_possible_and_needs_no_more_gpus(gpus: int, tmp_path: Path) -> None:
    found = list(checks(gpus))
    assert len({check.name for check in found}) == len(found)
    for check in found:
        overrides = settings(check, tmp_path)
        config = load_config(["quickstart"], overrides)
        check_config(config)  # raises an error
        assert config.run.dir / config.run.name == run_directory(check, tmp_path)
        assert why_not_built(config, config_origins(["quickstart"], overrides)) is None
        used = config.learner.ranks * config.learner.gpus + config.generator.replicas * config.generator.gpus
        assert used <= gpus


def test_with_more_gpus_more_is_checked() -> None:
    names = {gpus: {check.name for check in checks(gpus)} for gpus in (2, 3, 5)}
    assert "ranks" not in names[2]
    assert {"ranks", "tensor parallel"} <= names[3]
    assert "hsdp" in names[5] - names[3]


def steps(**changes: object) -> list[dict[str, object]]:
    return [{"trained": True, "diagnostics": {"parity_ratio": 0.4}, **changes} for _ in range(STEPS)]


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        (steps(), ""),
        (steps()[1:], f"{STEPS - 1} of {STEPS} steps were trained"),
        (steps(trained=False), f"0 of {STEPS} steps were trained"),
        (steps(diagnostics={"parity_ratio": 3.0}), "parity was 3 times its limit"),
        (steps(diagnostics={}), ""),
    ],
)
def test_what_is_wrong_with_a_run_is_read_from_its_records(
    records: list[dict[str, object]], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert recorded_problem(tmp_path) == problem


def test_a_run_without_records_has_failed(tmp_path: Path) -> None:
    assert "does not exist" in recorded_problem(tmp_path)


def test_the_report_has_the_command_and_the_log_of_what_failed() -> None:
    check = Check(name="ranks", what="", overrides=("learner.ranks=2",))
    text = "\n".join(report([Outcome(check=check, seconds=1.0, problem="ended with 3", log="NCCL error\n")]))
    assert "ranks: ended with 3\n  asyncrl up -c quickstart learner.ranks=2\nNCCL error" in text
    assert "torch 2" in text


@pytest.mark.integration
@pytest.mark.campaign
def test_the_command_passes_on_cpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["several.py", "--gpus", "0", "--only", "one and one"])
    assert several.main() == 0
    assert "one and one: one rank and one engine on GPUs of their own … passed" in capsys.readouterr().out
