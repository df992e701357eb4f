"""Checks the file for Ray's cluster launcher with the launcher's own schema and rules."""

import copy
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.cli.preflight import check_presence
from asyncrl.common.roles import Role
from asyncrl.config.load import config_origins, load_config
from asyncrl.config.rules import check_config

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(deploy: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((deploy / "ray" / "cluster.yaml").read_text()))


def test_it_is_what_rays_launcher_takes(cluster: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(copy.deepcopy(cluster)))


@pytest.mark.usefixtures("importable_configs")
def test_the_commands_that_it_shows_can_run(deploy: Path, repository: Path) -> None:
    text = (deploy / "ray" / "cluster.yaml").read_text().replace("\\\n#", "")
    commands = [shlex.split(command)[3:] for command in re.findall(r"cluster\.yaml '(asyncrl up [^']*)'", text)]
    assert [Path(file).name for _, file, *_ in commands] == ["quickstart.yaml", "own_task.yaml"]
    for _, file, *overrides in commands:
        files = [repository / "configs" / Path(file).name]
        config = load_config(files, overrides)
        check_config(config)
        check_presence(config, roles=tuple(Role), origins=config_origins(files, overrides))


def test_every_node_has_the_token_and_asks_for_it(cluster: dict[str, Any]) -> None:
    assert set(cluster["file_mounts"].values()) == {"~/.ray/auth_token"}
    for role in ("head", "worker"):
        [start] = [line for line in cluster[f"{role}_start_ray_commands"] if "ray start" in line]
        assert "RAY_AUTH_MODE=token" in start.partition(" ray start ")[0].split()
        assert "0.0.0.0" not in start


def test_the_object_store_fits_into_the_containers_shared_memory(cluster: dict[str, Any]) -> None:
    [shm_gib] = [int(option[len("--shm-size=") : -1]) for option in cluster["docker"]["run_options"] if "shm" in option]
    for role in ("head", "worker"):
        [start] = [line for line in cluster[f"{role}_start_ray_commands"] if "ray start" in line]
        [store_bytes] = [int(word.partition("=")[2]) for word in start.split() if "object-store-memory" in word]
        assert store_bytes < 0.95 * shm_gib * 2**30, "Ray uses the disk if 5 % of /dev/shm would not be free"
