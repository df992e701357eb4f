"""Checks the rules with promtool: they load, and each alert has a test in which it fires and one in which it does
not."""

import shutil
import subprocess

import pytest
import yaml
from queries import PROMETHEUS, RULES, alerts

TESTS = {path.name: yaml.safe_load(path.read_text()) for path in sorted((PROMETHEUS / "tests").glob("*.yml"))}


def promtool(*arguments: str) -> None:
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("promtool is not installed: `apt-get install prometheus`, as .ci/run does")
    done = subprocess.run(
        [path, *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_and_all_rules_are_valid() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", *(f"rules/{name}" for name in RULES))


@pytest.mark.parametrize("name", TESTS)
def test_alerts_fire_when_they_should_and_only_then(name: str) -> None:
    promtool("test", "rules", f"tests/{name}")


def test_every_rule_file_has_its_tests() -> None:
    assert set(TESTS) == set(RULES)
    assert all(tests["rule_files"] == [f"../rules/{name}"] for name, tests in TESTS.items())


def test_every_alert_is_seen_to_fire_for_one_and_not_for_another() -> None:
    tests = {test["name"].split()[0].strip(","): test for file in TESTS.values() for test in file["tests"]}
    assert set(tests) == {rule["alert"] for rule in alerts()}
    for name, test in tests.items():
        asked = [query for query in test["promql_expr_test"] if f'alertname="{name}"' in query["expr"]]
        fired = [sample["labels"] for query in asked for sample in query["exp_samples"]]
        assert fired, name
        assert all('alertstate="firing"' in labels and "good" not in labels for labels in fired), name
        assert any('"good"' in series["series"] for series in test["input_series"]), f"{name} has no quiet series"
