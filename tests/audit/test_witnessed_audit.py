"""Check 6 of the audit passes on a run that torch trained, finds what a run did otherwise, and needs only its files."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from plain_run import STEPS, Faults, record_plainly
from typer.testing import CliRunner

import asyncrl
from asyncrl.audit.audit import checked
from asyncrl.audit.history import Outcome, Verdict, read_history
from asyncrl.audit.witnessed import chosen_steps, steps_witnessed
from asyncrl.cli.main import app
from asyncrl.common.version import Version
from asyncrl.learner.records import ForkPoint


def witnessed(directory: Path, *, steps: int = STEPS, trust: bool = False) -> Outcome:
    check = partial(steps_witnessed, steps=steps, progress=lambda text: None, trust=trust)
    return checked("6 witness", check, read_history(directory))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_plainly(tmp_path_factory.mktemp("healthy") / "run")


def test_a_run_that_torch_trained_passes_and_all_checks_compare_something(healthy: Path) -> None:
    outcome = witnessed(healthy)
    assert outcome.verdict is Verdict.PASSED, outcome.detail
    found = outcome.witnessed
    assert found is not None
    assert found.optimizer_steps == tuple(range(STEPS))
    assert [each.partition(" changes")[0] for each in found.left_out] == [
        "the rewards, because the run did not keep all texts of any group in samples/ (learner.groups_logged)",
        "47",
    ]
    numbers = {each.check: each.number for each in found.comparisons}
    assert numbers["counts"] == numbers["rows"] == numbers["advantages"] == 6 * STEPS
    assert numbers["sampling"] == 3 * (STEPS + 1), "the other tokens are of the version before"
    assert numbers["gradient"] == numbers["rate"] == STEPS
    assert numbers["optimizer"] > 30_000 * STEPS
    worst = {each.check: each.worst for each in found.comparisons}
    assert worst["gradient"] < 1e-5
    assert worst["optimizer"] < 1e-3


FAULTS: dict[str, tuple[Faults, str, str]] = {
    "a sample that its filters keep is not trained": (
        Faults(untrained_sample=2), "counts", "step 2 trained 4 tokens by its record, and its filters keep 6",
    ),
    "log-probs of the start are those of other weights": (
        Faults(wrong_start=2), "rows", "trained token 1 of sample 1 of group 4 in step 2 has the log-prob",
    ),
    "two samples have each other's advantage": (
        Faults(exchanged_advantages=2), "advantages", "sample 0 of group 5 in step 2 has the advantage 0.5",
    ),
    "the gradient has another norm": (Faults(wrong_norm=2), "gradient", "the gradient of step 2 has the recorded norm"),
    "the learning rate is twice that of the schedule": (Faults(double_rate=2), "optimizer", "step 2 changed "),
    "a row of one tensor moves by itself": (
        Faults(moved_tensor=2), "optimizer", "step 2 changed model.layers.1.mlp.up_proj.weight by",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_its_check(name: str, tmp_path: Path) -> None:
    faults, check, words = FAULTS[name]
    outcome = witnessed(record_plainly(tmp_path / "run", faults=faults))
    assert outcome.verdict is Verdict.FAILED, outcome.detail
    assert outcome.detail.startswith(f"{check}: ")
    assert words in outcome.detail
    assert outcome.witnessed is not None
    assert check in [each.check for each in outcome.witnessed.comparisons if each.failed]


def test_an_own_optimizer_is_called_again_with_trust_and_left_out_without(tmp_path: Path) -> None:
    run = record_plainly(tmp_path / "run", rate=1.0, momentum=0.9)
    outcome = witnessed(run, trust=True)
    assert outcome.verdict is Verdict.PASSED, outcome.detail
    assert outcome.witnessed is not None
    assert outcome.witnessed.optimizer_steps == tuple(range(STEPS))
    found = {each.check: each for each in outcome.witnessed.comparisons}
    assert found["optimizer"].number > 30_000 * STEPS
    assert found["optimizer"].worst < 1e-3
    untrusted = witnessed(run)
    assert untrusted.verdict is Verdict.PASSED, untrusted.detail
    assert untrusted.witnessed is not None
    assert untrusted.witnessed.optimizer_steps == ()
    assert any("learner.optimizer.name = torch.optim:SGD is code" in each for each in untrusted.witnessed.left_out)
    assert {each.check: each.number for each in untrusted.witnessed.comparisons}["gradient"] == STEPS
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("momentum: 0.9", "momentum: 0.8"))
    outcome = witnessed(run, trust=True)
    assert outcome.verdict is Verdict.FAILED, outcome.detail
    assert re.match(
        r"optimizer: step [1-3] changed .* in the kept weights, and by .* by torch\.optim:SGD;", outcome.detail
    )


def test_a_fork_whose_reference_was_not_kept_is_not_possible_and_another_fork_passes(
    healthy: Path, tmp_path: Path
) -> None:
    """The reference policy of a fork is not the one with which it began."""
    point = ForkPoint(run="base", nonce="9e", directory="/runs/base", version=Version(1, 50))
    check = partial(steps_witnessed, steps=1, progress=lambda text: None)
    fork = dataclasses.replace(read_history(healthy), forked_from=point)
    assert checked("6 witness", check, fork).verdict is Verdict.PASSED
    with_kl = record_plainly(tmp_path / "run", overrides={"penalties": [{"beta": 0.1, "kind": "k3"}]})
    assert checked("6 witness", check, read_history(with_kl)).verdict is not Verdict.NOT_POSSIBLE
    outcome = checked("6 witness", check, dataclasses.replace(read_history(with_kl), forked_from=point))
    assert outcome.verdict is Verdict.NOT_POSSIBLE
    assert "began with the weights of step-50 of run base (/runs/base), and its reference policy" in outcome.detail


def test_a_rate_of_another_step_of_the_schedule_is_found_in_steps_that_are_not_computed(tmp_path: Path) -> None:
    outcome = witnessed(record_plainly(tmp_path / "run", faults=Faults(schedule_counted_twice=True)), steps=1)
    assert outcome.verdict is Verdict.FAILED, outcome.detail
    assert outcome.detail.startswith(
        "rate: step 1 has the learning rate 0.0075 in steps.jsonl, and its schedule gives 0.005"
    )


CONTROLLED = {"kind": "k3", "q": "behaviour", "beta": 3.0, "control": {"target": 0.005, "gain": 2.0}}


def test_a_run_whose_beta_follows_the_kl_passes_and_a_wrong_beta_or_kl_is_found(tmp_path: Path) -> None:
    overrides = {"penalties": [CONTROLLED]}
    healthy = witnessed(record_plainly(tmp_path / "healthy" / "run", overrides=overrides))
    assert healthy.verdict is Verdict.PASSED, healthy.detail
    assert healthy.witnessed is not None
    numbers = {each.check: each.number for each in healthy.witnessed.comparisons}
    assert numbers["penalty"] == numbers["kl"] == numbers["gradient"] == STEPS
    for name, faults, words in (
        ("left", Faults(beta_left_in=1), "penalty: a penalty of step 2 has β = "),
        ("twice", Faults(beta_twice_in=1), "penalty: a penalty of step 2 has β = "),
        ("kl", Faults(wrong_kl=1), "kl: step 1 has the KL "),
    ):
        outcome = witnessed(record_plainly(tmp_path / name / "run", faults=faults, overrides=overrides))
        assert outcome.verdict is Verdict.FAILED, name
        assert outcome.detail.startswith(words), outcome.detail


def test_a_wrong_beta_is_found_in_steps_that_are_not_computed_and_without_its_record(tmp_path: Path) -> None:
    run = record_plainly(tmp_path / "run", faults=Faults(beta_left_in=2), overrides={"penalties": [CONTROLLED]})
    outcome = witnessed(run, steps=1)
    assert outcome.detail.startswith("penalty: a penalty of step 3 has β = "), outcome.detail
    lines = (run / "steps.jsonl").read_text().replace('"penalty_beta"', '"other"')
    (run / "steps.jsonl").write_text(lines)
    outcome = witnessed(run, steps=1)
    assert outcome.detail.startswith("penalty: a penalty of step 0 has β = None in steps.jsonl"), outcome.detail


def test_a_run_with_a_rate_of_0_passes_and_a_tensor_that_moves_is_found(tmp_path: Path) -> None:
    outcome = witnessed(record_plainly(tmp_path / "fixed" / "run", rate=0.0))
    assert outcome.verdict is Verdict.PASSED, outcome.detail
    assert outcome.witnessed is not None
    assert {each.check: each.number for each in outcome.witnessed.comparisons}["rate"] == STEPS
    outcome = witnessed(record_plainly(tmp_path / "moved" / "run", rate=0.0, faults=Faults(moved_tensor=2)))
    assert outcome.detail.startswith("optimizer: step 2 changed model.layers.1.mlp.up_proj.weight by")


def test_tokens_that_the_ranks_leave_out_are_left_out_and_named(tmp_path: Path) -> None:
    outcome = witnessed(record_plainly(tmp_path / "run", has_broken_token=True))
    assert outcome.verdict is Verdict.PASSED, outcome.detail
    assert "not witnessed: the rewards" in outcome.detail
    assert "1 tokens with a number that is not finite, which the ranks left out" in outcome.detail
    found = outcome.witnessed
    assert found is not None
    numbers = {each.check: each.number for each in found.comparisons}
    assert numbers["counts"] == numbers["rows"] == numbers["advantages"] == 6 * STEPS - 1
    assert max(each.worst for each in found.comparisons if each.check == "gradient") < 1e-5


def test_rewards_that_cannot_be_compared_are_counted_and_named(healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(None, "first"), (0.0, "second"), (None, "third")]
    monkeypatch.setattr("asyncrl.audit.witnessed.reward_differences", lambda *_: iter(found))
    outcome = witnessed(healthy, steps=1)
    assert outcome.verdict is Verdict.PASSED, outcome.detail
    assert "; rewards: 1 rewards agree; " in outcome.detail
    assert (
        "not witnessed: 2 rewards that failed now or in the run, but not both: time limits depend on" in outcome.detail
    )


def test_advantages_of_tokens_are_whitened_over_the_step(tmp_path: Path) -> None:
    estimator = {"name": "reinforce_pp_baseline", "gamma": 0.5}
    healthy = witnessed(record_plainly(tmp_path / "healthy" / "run", advantage=estimator))
    assert healthy.verdict is Verdict.PASSED, healthy.detail
    assert healthy.witnessed is not None
    [compared] = [each for each in healthy.witnessed.comparisons if each.check == "advantages"]
    assert (compared.number, compared.limit) == (6 * STEPS, 1e-4)
    tripled = witnessed(
        record_plainly(tmp_path / "tripled" / "run", faults=Faults(tripled_advantages=2), advantage=estimator)
    )
    assert tripled.verdict is Verdict.FAILED, tripled.detail
    assert tripled.detail.startswith("advantages: the advantages of the tokens of sample 0 of group 4 in step 2")
    assert "differs by 0.667 of the largest advantage, and 0.0001 is accepted" in tripled.detail


def test_the_first_steps_are_consecutive_and_the_others_reach_the_end_of_the_run(healthy: Path) -> None:
    assert chosen_steps(24, 5) == ([0, 1, 2], [12, 23])
    assert chosen_steps(24, 1) == ([0], [])
    assert chosen_steps(24, 2) == ([0], [23])
    assert chosen_steps(3, 9) == ([0, 1, 2], [])
    for count in range(1, 30):
        for wanted in range(1, 40):
            first, others = chosen_steps(count, wanted)
            chosen = [*first, *others]
            assert len({*chosen}) == len(chosen) == min(count, wanted)
            assert 0 <= min(chosen) <= max(chosen) < count
    found = witnessed(healthy, steps=3).witnessed
    assert found is not None
    assert (found.steps, found.optimizer_steps) == ((0, 1, 3), (0, 1))


def test_what_has_no_formula_is_named_and_not_passed_over(tmp_path: Path) -> None:
    directory = record_plainly(tmp_path / "run")
    config = (directory / "config.yaml").read_text()
    own = config.replace("loss: decoupled_icepop", "loss: mine:loss").replace(
        "advantage: group_mean", "advantage: mine:a"
    )
    assert own != config
    (directory / "config.yaml").write_text(own)
    outcome = witnessed(directory)
    assert outcome.verdict is Verdict.PASSED, outcome.detail
    assert "the gradient and the optimizer's step, because algorithm.loss is your own code" in outcome.detail
    assert "the advantages, because algorithm.advantage is your own code" in outcome.detail
    found = outcome.witnessed
    assert found is not None
    assert [each.check for each in found.comparisons if each.number] == ["counts", "rows", "sampling", "rate"]


def test_a_run_that_kept_no_model_says_what_is_missing(healthy: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(healthy, tmp_path / "copy")
    shutil.rmtree(directory / "audit" / "model")
    outcome = witnessed(directory)
    assert outcome.verdict is Verdict.NOT_POSSIBLE
    assert "has no config.json of its model" in outcome.detail


def test_damaged_weights_are_found(healthy: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(healthy, tmp_path / "copy")
    [file] = (directory / "audit" / "weights" / "1.2").glob("state/*.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    outcome = witnessed(directory)
    assert outcome.verdict is Verdict.FAILED
    assert "audit/weights/1.2 cannot be read" in outcome.detail


def test_the_certificate_says_what_was_compared_in_words(healthy: Path, tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    words = ["audit", str(healthy), "--witness-steps", "3", "--certificate", str(path)]
    done = CliRunner().invoke(app, words)
    assert f"certificate: {path}" in done.stdout
    assert "6 witness: computing step 3 plainly (3 of 3)" in done.stderr
    found = json.loads(path.read_text())
    assert found["how_to_repeat_it"].startswith("asyncrl audit run --witness-steps 3,")
    assert any("direction of a gradient" in each for each in found["not_checked"])
    assert found["run"]["training_steps"] == STEPS
    assert found["digests"]["weights_before_the_first_step_xxh3_64"] == f"{read_history(healthy).steps[0].before:016x}"
    assert found["configuration_of_the_run"]["settings_that_say_what_was_trained"]["learner.optimizer.learning_rate"]
    assert [each["check"][0] for each in found["checks"]] == ["1", "2", "3", "4", "5", "6"]
    second = found["second_plain_computation_of_training_steps"]
    assert second["training_steps_computed"] == [0, 1, 3]
    assert second["training_steps_of_which_the_new_weights_were_computed"] == [0, 1]
    compared = {each["check"]: each for each in second["comparisons"]}
    assert compared["gradient"]["verdict"] == "passed"
    assert compared["gradient"]["largest_difference"] <= compared["gradient"]["largest_accepted_difference"]
    assert compared["sampling"]["unit_of_the_difference"] == "nats"
    assert compared["rewards"]["verdict"] == "nothing to compare: see `not_computed`"
    assert compared["counts"]["where_the_largest_difference_is"] is None, "there is no difference"
    assert "half of K steps" in second["how_they_were_chosen"]
    assert {"step", "nats", "plain"} <= {word for words in found["words"] for word in words.split(", ")}
    assert "secrets" not in path.read_text()


def test_a_certificate_without_a_place_is_refused_before_the_audit(healthy: Path, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "certificate.json"
    done = CliRunner().invoke(app, ["audit", str(healthy), "--certificate", str(path)])
    assert done.exit_code == 2
    assert "its folder is missing or cannot be written" in done.stderr
    assert "exactly once" not in done.stdout


def test_without_the_option_there_is_no_sixth_check_and_no_certificate(healthy: Path) -> None:
    done = CliRunner().invoke(app, ["audit", str(healthy)])
    assert "6 witness" not in done.stdout
    assert not (healthy / "audit" / "certificate.json").exists()


AS_ANOTHER_USER = """
import os, sys
from typer.testing import CliRunner
from asyncrl.cli.main import app

words = ["audit", sys.argv[1], "--witness-steps", "2"]
# imports everything first, because other users may not be able to read the folder of this Python
CliRunner().invoke(app, [*words, "--certificate", sys.argv[2]])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
print(CliRunner().invoke(app, words).output)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_moved_run_is_witnessed_by_another_user_who_cannot_write_to_it(healthy: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        moved = shutil.copytree(healthy, Path(folder) / "elsewhere")
        environment = os.environ | {"HOME": "/nonexistent", "PYTHONPATH": str(Path(asyncrl.__file__).parents[1])}
        words = [sys.executable, "-c", AS_ANOTHER_USER, str(moved), f"{folder}/certificate.json"]
        done = subprocess.run(words, cwd="/", env=environment, capture_output=True, text=True, timeout=600)
    assert "passed: 6 witness: 2 of 4 steps" in done.stdout, done.stderr
    assert f"there is no certificate, because {moved}/audit/certificate.json cannot be written" in done.stdout
    assert "place, e.g. --certificate " in done.stdout
