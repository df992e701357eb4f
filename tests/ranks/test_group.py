"""Starting ranks without a running Ray."""

import pytest
import ray

from asyncrl.config.schema import Config
from asyncrl.errors import RunError
from asyncrl.policy.worker import PolicyWorker
from asyncrl.ranks.group import RankGroup

pytestmark = pytest.mark.slow


def test_ranks_join_no_cluster_that_happens_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(RunError, match=r"call ray.init\(\) first"):
        RankGroup(PolicyWorker, Config(), model_path="nowhere").start()
