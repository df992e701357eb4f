"""targets.json has the format of Prometheus' file_sd_configs and is replaced as a whole."""

import json
from pathlib import Path

import pytest

from asyncrl import atomic_write
from asyncrl.metrics.catalogue import Role
from asyncrl.metrics.discovery import Target, ray_targets, write_targets

LEARNER = Target(role=Role.LEARNER, replica="learner-0", address="127.0.0.1:9400")
GENERATOR = Target(role=Role.GENERATOR, replica="generator-0", address="127.0.0.1:40123")


def test_targets_have_prometheus_form_and_our_three_labels(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "targets.json"
    write_targets(path, run="quickstart", targets=[LEARNER, GENERATOR])
    assert json.loads(path.read_text()) == [
        {
            "targets": ["127.0.0.1:40123"],
            "labels": {"run": "quickstart", "role": "generator", "replica": "generator-0"},
        },
        {"targets": ["127.0.0.1:9400"], "labels": {"run": "quickstart", "role": "learner", "replica": "learner-0"}},
    ]


def test_rays_nodes_are_targets_while_they_live_and_serve_metrics() -> None:
    nodes = [
        {"NodeID": "b" * 56, "Alive": True, "NodeManagerAddress": "fd00::2", "MetricsExportPort": 8080},
        {"NodeID": "a" * 56, "Alive": True, "NodeManagerAddress": "10.0.0.1", "MetricsExportPort": 41587},
        {"NodeID": "c" * 56, "Alive": False, "NodeManagerAddress": "10.0.0.3", "MetricsExportPort": 8080},
        {"NodeID": "d" * 56, "Alive": True, "NodeManagerAddress": "10.0.0.4", "MetricsExportPort": -1},
    ]
    assert ray_targets(nodes) == [
        Target(role="ray", replica="ray-aaaaaaaa", address="10.0.0.1:41587"),
        Target(role="ray", replica="ray-bbbbbbbb", address="[fd00::2]:8080"),
    ]


def test_a_later_list_replaces_the_earlier_one_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    write_targets(path, run="r", targets=[LEARNER, GENERATOR])
    write_targets(path, run="r", targets=[GENERATOR])
    assert [entry["labels"]["role"] for entry in json.loads(path.read_text())] == ["generator"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_that_dies_half_way_leaves_the_old_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "targets.json"
    write_targets(path, run="r", targets=[LEARNER])
    before = path.read_bytes()

    def die(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic_write.os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        write_targets(path, run="r", targets=[])
    assert path.read_bytes() == before
