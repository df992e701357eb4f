"""Processes that share a GPU: refused if Ray, NCCL or the memory forbids it, a warning if memory may be too small."""

import re
from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.config.rules import check_config
from asyncrl.errors import ConfigError

REPOSITORY = Path(__file__).parents[2]
HALVES = ["learner.gpus=0.5", "generator.gpus=0.5"]


def _warnings(*overrides: str) -> list[str]:
    return check_config(load_config([], overrides))


def _violation(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        _warnings(*overrides)
    [line] = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize("pool", ["generator", "learner", "critic"])
@pytest.mark.fault("F28")
def test_gpus_above_one_are_whole(pool: str) -> None:
    assert _violation(f"{pool}.gpus=1.5").startswith(f"{pool}.gpus = 1.5: ")
    assert "set it to 2 or 3" in _violation(f"{pool}.gpus=2.5")
    assert _warnings(f"{pool}.gpus=2") == []


@pytest.mark.parametrize("pool", ["learner", "critic"])
@pytest.mark.fault("F28")
def test_two_ranks_of_a_pool_never_share_a_gpu(pool: str) -> None:
    said = _violation(f"{pool}.gpus=0.5", f"{pool}.ranks=2")
    assert said.startswith(f"{pool}.gpus = 0.5: ")
    assert f"2 of {pool}.ranks = 2 on one GPU" in said
    assert "NCCL" in said
    assert f"4 of {pool}.ranks = 8" in _violation(f"{pool}.gpus=0.25", f"{pool}.ranks=8")
    for apart in (["gpus=0.5001", "ranks=2"], ["gpus=0.5", "ranks=1"], ["gpus=1", "ranks=2"], ["gpus=0", "ranks=2"]):
        assert _warnings(*[f"{pool}.{each}" for each in apart]) == []


def test_policy_and_critic_share_a_gpu_for_they_are_two_groups_of_nccl() -> None:
    assert _warnings("learner.gpus=0.5", "critic.gpus=0.5") == []


# share of a GPU of one engine, number of engines, and the largest share of memory that one engine may take
@pytest.mark.parametrize(
    ("gpus", "replicas", "most"),
    [("0.5", 2, 0.5), ("0.5", 5, 0.5), ("0.3333", 3, 0.33), ("0.2", 5, 0.2), ("0.2", 2, 0.5)],
)
@pytest.mark.fault("F28")
def test_the_engines_of_one_gpu_fit_its_memory(gpus: str, replicas: int, most: float) -> None:
    pool = [f"generator.gpus={gpus}", f"generator.replicas={replicas}"]
    said = _violation(*pool, f"generator.gpu_memory_utilization={most + 0.01:g}")
    assert said.startswith(f"generator.gpu_memory_utilization = {most + 0.01:g}: ")
    assert f"lower it to {most:g}" in said
    assert _warnings(*pool, f"generator.gpu_memory_utilization={most}") == []


@pytest.mark.parametrize("alone", [["generator.gpus=0.51"], ["generator.gpus=1"], ["generator.gpus=0"]])
def test_engines_on_gpus_of_their_own_may_take_nearly_all_of_them(alone: list[str]) -> None:
    assert _warnings(*alone, "generator.replicas=4", "generator.gpu_memory_utilization=0.95") == []


def test_engines_that_take_more_than_their_share_beside_ranks_are_a_warning() -> None:
    [warning] = _warnings(*HALVES, "generator.gpu_memory_utilization=0.51")
    assert "a replica of generator.gpus = 0.5 and a rank of learner.gpus = 0.5 may share one GPU" in warning
    assert "lower it to 0.5" in warning
    quarters = ["learner.gpus=0.5", "generator.gpus=0.25", "generator.replicas=2"]
    [warning] = _warnings(*quarters, "generator.gpu_memory_utilization=0.5")
    assert "lower it to 0.25" in warning
    assert _warnings(*HALVES, "generator.gpu_memory_utilization=0.5") == []
    assert len(_warnings("learner.gpus=0.8", "generator.gpus=0.2")) == 1
    assert _warnings("learner.gpus=0.5", "generator.gpus=0.6") == []
    assert _warnings("learner.gpus=1", "generator.gpus=0.5") == []


def test_a_critic_counts_by_itself_and_beside_the_policy() -> None:
    [warning] = _warnings("critic.gpus=0.5", "generator.gpus=0.5")
    assert "a rank of critic.gpus = 0.5" in warning
    three = ["learner.gpus=0.25", "critic.gpus=0.25", "generator.gpus=0.5"]
    [warning] = _warnings(*three, "generator.gpu_memory_utilization=0.8")
    assert "a rank of learner.gpus = 0.25 and a rank of critic.gpus = 0.25" in warning
    assert _warnings(*three, "generator.gpu_memory_utilization=0.5") == []


def test_pools_that_labels_keep_apart_share_no_gpu() -> None:
    labels = ["learner.node_labels={pool: learner}", "generator.node_labels={pool: generator}"]
    assert _warnings(*HALVES, *labels) == []
    assert len(_warnings(*HALVES, *labels[:1])) == 1
    assert len(_warnings(*HALVES, labels[0], "generator.node_labels={pool: learner}")) == 1


def test_what_the_guide_recommends_for_one_gpu_passes() -> None:
    guide = (REPOSITORY / "deploy" / "README.md").read_text()
    [overrides] = re.findall(r"`(learner\.gpus=0\.\d+ [^`]*)`", guide)
    assert check_config(load_config([REPOSITORY / "configs" / "quickstart.yaml"], overrides.split())) == []
