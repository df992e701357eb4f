"""Checks the compose file: it is valid, publishes ports on this machine only, and its commands are valid.

The tests have no Docker daemon, so they do not start the containers.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from asyncrl.cli.preflight import check_presence
from asyncrl.common.roles import Role
from asyncrl.config.load import config_origins, load_config
from asyncrl.config.rules import check_config, check_metrics_host


@pytest.fixture
def file(deploy: Path) -> Path:
    return deploy / "compose" / "compose.yaml"


def services_of(file: Path, given: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Returns the services with `${NAME:-default}` replaced, as Compose does from deploy/compose/.env."""
    text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: given.get(found[1], found[2]), file.read_text())
    return dict(yaml.safe_load(text)["services"])


@pytest.fixture
def services(file: Path) -> dict[str, Any]:
    return services_of(file)


@pytest.mark.slow
def test_it_is_what_the_compose_specification_allows(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_ports_are_published_at_this_machine_only(services: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert published == {"prometheus": ["127.0.0.1:9090:9090"], "grafana": ["127.0.0.1:3000:3000"]}


def test_every_part_of_ray_has_a_token_that_the_user_must_give(services: dict[str, Any]) -> None:
    parts = {name: service for name, service in services.items() if service["image"].startswith("asyncrl:")}
    assert set(parts) == {"ray-head", "learner", "generator", "learner-gpu", "generator-gpu"}
    for service in parts.values():
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
        assert service["environment"]["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?")
        assert service["cap_drop"] == ["ALL"]


def test_images_are_pinned_by_version(services: dict[str, Any]) -> None:
    tags = {name: service["image"].rpartition(":")[2] for name, service in services.items()}
    assert not [name for name, tag in tags.items() if not tag.lstrip("v")[0].isdigit()], tags


def test_what_is_mounted_from_the_repository_is_there_and_where_its_reader_looks(
    file: Path, services: dict[str, Any]
) -> None:
    mounts: dict[str, Path] = {}
    for service in services.values():
        for volume in service.get("volumes", []):
            source, target = volume.split(":")[:2]
            if source.startswith("."):
                mounts[target] = (file.parent / source).resolve(strict=True)
    assert (mounts["/etc/prometheus"] / "prometheus.yml").is_file(), "the image's command reads this file"
    assert {path.name for path in mounts["/etc/grafana/provisioning"].iterdir()} == {"dashboards", "datasources"}
    boards = mounts[services["grafana"]["environment"]["ASYNCRL_DASHBOARDS"]]
    assert len(list(boards.glob("*.json"))) == 3


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_a_profile_is_one_learner_and_one_generator(profile: str, services: dict[str, Any]) -> None:
    started = sorted(name.partition("-gpu")[0] for name, each in services.items() if each.get("profiles") == [profile])
    assert started == ["generator", "learner"]


def spoken(service: dict[str, Any], folder: Path) -> Iterator[list[str]]:
    """Yields the commands that a service's shell runs, as lists of the words that `ray` and `asyncrl` would get."""
    for name in ("ray", "asyncrl"):
        (folder / name).write_text(f'#!/bin/sh\nfor word in {name} "$@"; do printf "%s\\0" "$word"; done; echo\n')
        (folder / name).chmod(0o755)
    environment = {name: str(value) for name, value in service["environment"].items()} | {"RAY_AUTH_TOKEN": "t"}
    done = subprocess.run(
        [word.replace("$$", "$") for word in service["command"]],
        env=environment | {"PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        yield line.split("\0")[:-1]


@pytest.mark.parametrize("name", ["learner", "generator", "learner-gpu", "generator-gpu"])
def test_a_pool_is_a_node_with_its_label_and_a_driver_whose_configuration_can_run(
    name: str, services: dict[str, Any], tmp_path: Path, repository: Path
) -> None:
    pool, _, gpu = name.partition("-")
    node, driver = spoken(services[name], tmp_path)
    assert node[:4] == ["ray", "start", "--address=ray-head:6379", f"--labels=pool={pool}"]
    assert node[-1] == "--object-store-memory=1800000000"
    assert driver[:7] == [
        "asyncrl",
        pool,
        "--address",
        "ray-head:6379",
        "--allow-public",
        "-c",
        "configs/quickstart.yaml",
    ]
    config = load_config([repository / "configs" / "quickstart.yaml"], driver[7:])
    check_config(config)
    check_metrics_host(config, allow_public=True)
    section = getattr(config, pool)
    assert section.node_labels == {"pool": pool}
    assert section.gpus == (1 if gpu else 0)
    # The mounted folders are those of the run, the model and the task.
    mounted = {volume.split(":")[1] for volume in services[name]["volumes"]}
    assert {str(config.run.dir), str(Path(config.model.path).parent), "/tasks"} == mounted


def test_a_learner_that_is_started_again_resumes_or_begins_a_new_run_if_the_weights_are_lost(
    services: dict[str, Any], tmp_path: Path
) -> None:
    """The buffer of a killed learner that has no checkpoint refuses another learner without this key."""
    for name in ("learner", "learner-gpu"):
        node, driver = spoken(services[name], tmp_path)
        assert node[:2] == ["ray", "start"]
        assert "run.lost_weights=new_run" in driver
        assert "--fresh" not in driver


def test_only_the_pools_are_started_again_and_not_for_ever(services: dict[str, Any]) -> None:
    restarts = {name: service["restart"] for name, service in services.items() if "restart" in service}
    pools = ("learner", "generator", "learner-gpu", "generator-gpu")
    assert restarts == dict.fromkeys(pools, "on-failure:3") | dict.fromkeys(("prometheus", "grafana"), "unless-stopped")
    assert "runs:/runs" in services["learner"]["volumes"], "the checkpoints must outlive the container"


OWN_TASK = {
    "TASKS": "../../configs",
    "CONFIG": "/tasks/own_task.yaml",
    "RUN": "own-task",
    "OVERRIDES": "model.path=/models/tiny-larger model.tiny={}",
}


@pytest.mark.usefixtures("importable_configs")
def test_a_task_of_ones_own_is_a_folder_that_the_env_file_names(file: Path, tmp_path: Path, repository: Path) -> None:
    commented = [line.removeprefix("#").strip() for line in file.read_text().splitlines() if line.startswith("#  ")]
    assert [f"{name}={value}" for name, value in OWN_TASK.items()] == commented[-4:]
    for pool in ("learner", "generator"):
        service = services_of(file, OWN_TASK)[pool]
        _, driver = spoken(service, tmp_path)
        assert driver[5:7] == ["-c", "/tasks/own_task.yaml"]
        files = [repository / "configs" / "own_task.yaml"]
        config = load_config(files, driver[7:])
        check_config(config)
        check_presence(config, roles={Role(pool)}, origins=config_origins(files, driver[7:]))
        assert (config.run.name, config.model.path) == ("own-task", "/models/tiny-larger")
        # The image has /tasks on Python's search path.
        assert "../../configs:/tasks:ro" in service["volumes"]
        assert (file.parent / OWN_TASK["TASKS"] / "own_task.py").is_file()


def test_a_task_of_ones_own_keeps_the_model_that_its_file_names(file: Path, tmp_path: Path) -> None:
    own = {"CONFIG": "/tasks/mine.yaml", "RUN": "mine"}
    for pool in ("learner", "generator"):
        _, driver = spoken(services_of(file, own)[pool], tmp_path)
        assert not [word for word in driver if word.startswith("model.")]


def test_the_object_store_fits_into_the_containers_shared_memory(services: dict[str, Any]) -> None:
    for name in ("ray-head", "learner", "generator", "learner-gpu", "generator-gpu"):
        assert services[name]["shm_size"] == "2gb", name
    [head] = re.findall(r"--object-store-memory=(\d+)", services["ray-head"]["command"])
    store_bytes = services["learner"]["environment"]["OBJECT_STORE_BYTES"]
    assert int(head) == store_bytes
    assert store_bytes < 0.95 * 2 * 2**30, "Ray uses the disk if 5 % of /dev/shm would not be free"
