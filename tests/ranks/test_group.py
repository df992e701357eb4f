"""Starting ranks without a running Ray."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_ranks
import pytest
import ray
from fake_ranks import started

from asyncrl import shown_text
from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.group import RankGroup, place_ranks
from asyncrl.shown_text import describe_process

pytestmark = pytest.mark.slow


def test_ranks_join_no_cluster_that_happens_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RunError, match=r"call ray.init\(\) first"):
        RankGroup(PolicyWorker, Config(), model_path="nowhere").start()


class Rank:
    """Replaces Ray's class of an actor. Notes the bundle of each rank."""

    def __init__(self, bundles: dict[int, int]) -> None:
        self._bundles, self._bundle = bundles, -1

    def options(self, *, scheduling_strategy: Any, **_: Any) -> "Rank":
        self._bundle = scheduling_strategy.placement_group_bundle_index
        return self

    def remote(self, *, rank: int, **_: Any) -> "Rank":
        self._bundles[rank] = self._bundle
        return self


def test_ranks_log_to_the_directory_of_a_run_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An audit reads `run.dir` from a config.yaml that another person may have written. That folder may be of another
    run."""
    config = Config.model_validate({"run": {"dir": tmp_path, "name": "mine"}})
    monkeypatch.setattr(shown_text, "_facts", {})
    rank = fake_ranks.Rank("done")
    started(rank, config=config)
    describe_process(incarnation=2)
    started(rank, config=config)
    found = [(each["incarnation"], each["logs"]) for each in rank.begin.named]
    assert found == [(None, None), (2, tmp_path / "mine" / "logs")]


@pytest.mark.parametrize("shards", [2, None])
def test_ranks_of_one_node_are_consecutive_and_a_copy_that_spans_nodes_is_warned_of(
    shards: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray has put the bundles 0 and 2 on one node and 1 and 3 on another one."""
    bundles: dict[int, int] = {}
    nodes = {0: "n1", 1: "n2", 2: "n1", 3: "n2"}
    names = {"n1": "gpu-a", "n2": "gpu-b"}
    placed = SimpleNamespace(wait=lambda timeout_s: True)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util, "placement_group", lambda *_, **__: placed)
    monkeypatch.setattr(ray.util, "placement_group_table", lambda group: {"bundles_to_node_id": nodes})
    monkeypatch.setattr(ray, "remote", lambda **_: lambda _: Rank(bundles))
    known = [{"NodeID": n, "NodeManagerHostname": name, "NodeManagerAddress": "ip"} for n, name in names.items()]
    monkeypatch.setattr(ray, "nodes", lambda: known)
    config = Config.model_validate({"learner": {"ranks": 4, "shards": shards}})
    place_ranks(PolicyWorker, config)
    assert bundles == {0: 0, 1: 2, 2: 1, 3: 3}
    warned = "ranks 0 to 3 on gpu-a (ip) and gpu-b (ip)" in caplog.text
    assert warned == (shards is None)
