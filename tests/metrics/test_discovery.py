"""targets.json has the format of Prometheus' file_sd_configs and is replaced as a whole."""

import json
from pathlib import Path

import pytest

from asyncrl import atomic_write
from asyncrl.metrics.catalogue import Role
from asyncrl.metrics.discovery import Target, ray_targets, write_targets

LEARNER = Target(role=Role.LEARNER, replica="learner-0", address="127.0.0.1:9400", node="a1")
GENERATOR = Target(role=Role.GENERATOR, replica="generator-0", address="127.0.0.1:40123", node="b2")


def test_targets_have_prometheus_form_and_our_four_labels(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "targets.json"
    write_targets(path, run="quickstart", targets=[LEARNER, GENERATOR])
    assert json.loads(path.read_text()) == [
        {
            "targets": ["127.0.0.1:40123"],
            "labels": {"run": "quickstart", "role": "generator", "replica": "generator-0", "node": "b2"},
        },
        {
            "targets": ["127.0.0.1:9400"],
            "labels": {"run": "quickstart", "role": "learner", "replica": "learner-0", "node": "a1"},
        },
    ]


def test_rays_nodes_are_targets_while_they_live_and_serve_metrics() -> None:
    nodes = [
        {
            "NodeID": name * 56, "Alive": alive, "NodeManagerAddress": address, "MetricsExportPort": port,
            "NodeManagerHostname": f"host-{name}",
        }
        for name, alive, address, port in (
            ("b", True, "fd00::2", 8080), ("a", True, "10.0.0.1", 41587), ("c", False, "10.0.0.3", 8080),
            ("d", True, "10.0.0.4", -1),
        )
    ]  # fmt: skip
    assert ray_targets(nodes) == [
        Target(role="ray", replica="ray-aaaaaaaa", address="10.0.0.1:41587", node="host-a"),
        Target(role="ray", replica="ray-bbbbbbbb", address="[fd00::2]:8080", node="host-b"),
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
