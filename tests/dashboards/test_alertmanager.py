"""The example of an Alertmanager's configuration is valid, and its routes and inhibitions name alerts that exist."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from queries import PROMETHEUS, alerts

FILE = PROMETHEUS / "alertmanager.yml"
CONFIG: dict[str, Any] = yaml.safe_load(FILE.read_text())
MATCHER = re.compile(r'(?P<label>\w+)(?P<how>=~|=)"(?P<value>[^"]+)"')


def routes(route: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a route and all routes below it."""
    yield route
    for child in route.get("routes", []):
        yield from routes(child)


def chosen(matchers: list[str]) -> set[str]:
    """Returns the names of the alerts that all of the matchers choose."""
    found = {rule["alert"]: {"alertname": rule["alert"]} | rule["labels"] for rule in alerts()}
    for matcher in matchers:
        parts = MATCHER.fullmatch(matcher)
        assert parts is not None, matcher
        pattern = parts["value"] if parts["how"] == "=~" else re.escape(parts["value"])
        for part in pattern.split("|"):
            assert any(re.fullmatch(part, labels[parts["label"]]) for labels in found.values()), (matcher, part)
        found = {name: labels for name, labels in found.items() if re.fullmatch(pattern, labels[parts["label"]])}
    return set(found)


def test_amtool_accepts_it() -> None:
    path = shutil.which("amtool")
    if path is None:
        pytest.skip("amtool is not installed: `apt-get install prometheus-alertmanager`")
    done = subprocess.run(
        [path, "check-config", str(FILE)], capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_goes_to_a_receiver_that_exists() -> None:
    receivers = {receiver["name"] for receiver in CONFIG["receivers"]}
    assert {route["receiver"] for route in routes(CONFIG["route"])} == receivers


def test_the_pager_gets_the_critical_alerts_and_no_others() -> None:
    [pager] = [route for route in routes(CONFIG["route"]) if route["receiver"] == "pager"]
    assert chosen(pager["matchers"]) == {rule["alert"] for rule in alerts() if rule["labels"]["severity"] == "critical"}


def test_no_alert_silences_itself_or_an_alert_of_another_run() -> None:
    for rule in CONFIG["inhibit_rules"]:
        assert rule["equal"] == ["run"]
        assert not chosen(rule["source_matchers"]) & chosen(rule["target_matchers"])
        assert chosen(rule["target_matchers"])
