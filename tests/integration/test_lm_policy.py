"""The driver's policy over real Ray actors: rows fetched by their rank, and one fate for all ranks."""

import asyncio
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from rank_scenarios import PROBE
from tiny_groups import STEP, make_config, make_groups, make_model

from asyncrl.config.schema import Config
from asyncrl.errors import PlacementError, RunError, StalenessViolation
from asyncrl.policy.interfaces import TrainGroup
from asyncrl.policy.lm_policy import LMPolicy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("policy") / "model")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    # the ranks cannot import a test module
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.init(
        address="local",  # never whatever cluster another test left word of
        num_cpus=2,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 * 2**20,
    )
    yield
    ray.shutdown()


def in_store(groups: list[TrainGroup]) -> list[TrainGroup]:
    return [dataclasses.replace(group, rows=ray.put(group.rows)) for group in groups]


def too_old(group: TrainGroup) -> TrainGroup:
    rows = {**group.rows, "weight_versions": np.zeros_like(group.rows["weight_versions"])}
    return dataclasses.replace(group, rows=rows)


@ray.remote(num_cpus=0)
class RowOwner:
    """Owns rows, and takes them with it when it is killed."""

    def put(self, rows: Any) -> list[Any]:
        return [ray.put(rows)]


def wait_until_lost(ref: Any) -> None:
    """The death of an owner gets about within a second or so; until then its objects can be read."""
    while True:
        try:
            ray.get(ref)
        except ray.exceptions.ObjectLostError:
            return


def gathered_names(worker: Any) -> list[str]:
    return [name for name, _ in worker.gather_weights()]


def die(worker: Any) -> None:
    os._exit(1)


def config(**learner: Any) -> Config:
    """The collective's deadline is far beyond the test's: a test that passes did not wait for it."""
    return make_config(cpus=0.5, collective_timeout_s=600.0, **learner)


async def _two_ranks(model_path: Path, tmp_path: Path) -> None:
    policy = LMPolicy(config(ranks=2, micro_batch_size=3), model_path=str(model_path))
    await policy.start()
    groups = in_store(make_groups())

    before = await policy.probe(PROBE)
    report = await policy.train_step(groups, step=STEP)
    assert (report.updates_applied, report.trained_tokens, report.trained_samples) == (1, 44, 11)
    assert {"forward_backward", "optimizer"} <= set(report.seconds)
    assert any(not np.array_equal(a, b) for a, b in zip(before, await policy.probe(PROBE), strict=True))

    # another layer reaches the ranks' models
    names = [spec.name for spec in policy.weights_metadata()]
    assert await policy.on_ranks(gathered_names) == [names, names]
    await policy.save_hf(tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").exists()

    # F37: rows whose owner died are named, and nobody trains
    owner = RowOwner.remote()
    # ballast: Ray keeps copies of small objects elsewhere, and they outlive their owner
    [lost] = await owner.put.remote({**make_groups()[1].rows, "ballast": np.zeros(2**20, np.uint8)})
    ray.kill(owner)
    wait_until_lost(lost)
    trained = await policy.probe(PROBE)
    report = await policy.train_step([groups[0], dataclasses.replace(groups[1], rows=lost)], step=STEP)
    assert (report.rows_lost, report.lost_keys, report.updates_applied) == (True, ("1.0",), 0)
    assert all(np.array_equal(a, b) for a, b in zip(trained, await policy.probe(PROBE), strict=True))

    # F34: rank 1 refuses its group, rank 0 waits for it in a collective
    old = in_store([too_old(group) for group in make_groups()[1:2]])
    with pytest.raises(StalenessViolation, match=r"group 1\.0") as caught:
        await policy.train_step([groups[0], *old], step=STEP)
    assert "learner rank 1" in caught.value.__notes__[-1]
    with pytest.raises(RunError, match="no ranks"):
        await policy.train_step(groups, step=STEP)
    await policy.shutdown()
    assert await policy.shutdown(), "a second shutdown finds nothing to do"


def test_f34_f37_two_ranks_train_name_lost_rows_and_end_together(model_path: Path, tmp_path: Path) -> None:
    asyncio.run(_two_ranks(model_path, tmp_path))


def test_f34_a_rank_that_dies_is_named(model_path: Path) -> None:
    async def scenario() -> None:
        policy = LMPolicy(config(ranks=1), model_path=str(model_path))
        await policy.start()
        with pytest.raises(RunError, match="learner rank 0 died in die"):
            await policy.on_ranks(die)
        await policy.shutdown()

    asyncio.run(scenario())


def test_a_cluster_without_room_is_refused_within_the_deadline_with_numbers() -> None:
    async def scenario() -> None:
        settings = make_config(ranks=3, cpus=1.0).model_dump()
        settings["ray"]["placement_timeout_s"] = 0.5
        policy = LMPolicy(Config.model_validate(settings), model_path="nowhere")
        with pytest.raises(PlacementError, match=r"3 learner ranks.*placement_timeout_s=0.5.*the cluster has 2 CPU"):
            await policy.start()

    asyncio.run(scenario())
