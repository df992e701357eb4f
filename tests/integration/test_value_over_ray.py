"""The critic's driver over real Ray actors: rows by value and by name give the same result, no rows pass through the
driver, and lost rows are reported."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from counted_calls import Counted
from local_ray import end_actor, local_ray
from tiny_groups import STEP, make_batch, make_config, make_model

from asyncrl.algorithms.token_estimators import whitened_advantages
from asyncrl.algorithms.value_loss import ClippedValueLoss
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import CRITIC_FIELDS
from asyncrl.data_plane.clients import TRAIN_PARTITION, open_client
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.data_plane.row_store import ensure_row_store
from asyncrl.errors import PlacementError, RowsLost
from asyncrl.policy.tq_policy import STEP_FIELDS
from asyncrl.ranks.gather import gather_weights
from asyncrl.value.estimators import GAE
from asyncrl.value.lm_value import Value
from asyncrl.value.tq_value import TQValue

pytestmark = pytest.mark.integration

LOSS = ClippedValueLoss(clip=0.2)
ESTIMATOR = GAE(gamma=1.0, lam=0.9, value_lam=1.0)
IDS = [f"{group}.0_g{i}" for group in range(4) for i in range(3)]
BULK = ("input_ids", "input_lengths", "generation_logprobs", "weight_versions", "token_mask")
REWARDS = torch.tensor(np.random.default_rng(3).normal(0.5, 1, len(IDS)).astype(np.float32))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("critic") / "model"))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with local_ray(cpus=3, namespace=make_config().run.name):
        yield


def config(**learner: Any) -> Config:
    optimizer = {"learning_rate": 1e-2}
    return make_config(cpus=0.5, collective_timeout_s=600.0, optimizer=optimizer, **learner)


def weights(worker: Any) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in gather_weights(worker._model, dtype=torch.float32)}


def named() -> KVBatchMeta:
    return KVBatchMeta(
        partition_id=TRAIN_PARTITION,
        task_name="train",
        sample_ids=list(IDS),
        fields=[*BULK, "rewards", "sample_mask"],
        sequence_lengths=make_batch()["input_lengths"].tolist(),
        extra_info={"step": STEP},
        tags=[{"max_staleness_versions": 2} for _ in IDS],
    )


def put_rows(client: Any) -> BatchedDataDict:
    """Puts the columns that generators and the learner put. Returns the batch."""
    batch = make_batch()
    client.register_partition(TRAIN_PARTITION, STEP_FIELDS, len(IDS), ["train"], 3)
    client.put_samples(IDS, TRAIN_PARTITION, fields={name: batch[name] for name in BULK})
    client.put_samples(IDS, TRAIN_PARTITION, fields={"rewards": REWARDS, "sample_mask": batch["sample_mask"]})
    return batch


def learn(critic: TQValue, meta: KVBatchMeta) -> dict[str, Any]:
    """Runs the critic's stages of a step in the same order as the learner's loop."""
    critic.get_values_from_meta(meta)
    critic.get_advantages_from_meta(meta, ESTIMATOR)
    return critic.train_from_meta(meta, LOSS, gbs=4)


@pytest.fixture(scope="module")
def of_two_ranks(model_path: str) -> Iterator[TQValue]:
    """A critic of two ranks for two tests, because starting a rank takes ten seconds of a core. The first test needs
    the first weights."""
    critic = TQValue(config(ranks=2, micro_batch_size=3), model_path=model_path)
    critic.start()
    yield critic
    assert critic.shutdown()


def check_rows_by_name(critic: TQValue, folder: Path) -> None:
    """Trains twice from the same weights, over two steps. The ranks first get the names of the rows, and then the rows.
    The values are 0 in the first step and differ from 0 in the second."""
    client = open_client(config())
    first = folder / "weights", folder / "optimizer"
    critic.save_checkpoint(*first)
    batch = put_rows(client)
    by_name = []
    for _ in range(2):
        meta = named()
        result = learn(critic, meta)
        assert meta.fields == [*BULK, "rewards", "sample_mask", "values", "advantages", "returns"]
        by_name.append((result, client.get_data(meta, [*CRITIC_FIELDS, "advantages"])))
    trained = critic.on_ranks(weights)[0]

    critic.load_checkpoint(*first)
    critic.prepare_for_training()
    for step, (result, written) in enumerate(by_name):
        critic.prepare_for_inference()
        values = critic.get_values(batch)["values"]
        rows = BatchedDataDict(**{**batch, "values": values, "rewards": REWARDS})
        found = whitened_advantages(rows, ESTIMATOR(rows), rule=ESTIMATOR.whitening, add_up=lambda moments: moments)
        assert found is not None
        width = written["values"].shape[1]
        assert torch.equal(written["values"], values[:, :width])
        assert bool(written["values"].any()) == (step > 0)
        torch.testing.assert_close(written["advantages"], found.advantages_BS[:, :width])
        assert torch.equal(written["returns"], found.returns_BS[:, :width])
        rows["returns"] = found.returns_BS
        expected = critic.train(rows, LOSS, gbs=4)
        critic.finish_training()
        for name in ("loss", "grad_norm"):
            assert torch.equal(result[name], expected[name]), name
        assert len(result["loss"]) == 3
        assert result["all_mb_metrics"] == expected["all_mb_metrics"]
    again = critic.on_ranks(weights)[0]
    assert all(np.array_equal(trained[name], again[name]) for name in trained)
    evaluated = critic.train_from_meta(meta, LOSS, eval_mode=True)
    assert not evaluated["grad_norm"].any()


def test_padded_rows_by_name_train_bit_for_bit_as_the_rows_themselves(of_two_ranks: TQValue, tmp_path: Path) -> None:
    check_rows_by_name(of_two_ranks, tmp_path)


@pytest.mark.parametrize("batching", ["packed", "dynamic"])
def test_other_rows_by_name_train_bit_for_bit_as_the_rows_themselves(
    batching: str, model_path: str, tmp_path: Path
) -> None:
    critic = TQValue(config(ranks=2, batching=batching, micro_batch_tokens=32), model_path=model_path)
    critic.start()
    try:
        check_rows_by_name(critic, tmp_path)
    finally:
        critic.shutdown()


def test_no_bulk_passes_the_driver_and_lost_rows_are_named_by_ranks_that_go_on(
    of_two_ranks: TQValue, monkeypatch: pytest.MonkeyPatch
) -> None:
    critic, namespace = of_two_ranks, make_config().run.name
    client = open_client(config())
    client.clear_samples(IDS, TRAIN_PARTITION)  # other tests have written more columns
    put_rows(client)
    calls = Counted(critic._ranks.call_with_rows)
    with monkeypatch.context() as patched:
        patched.setattr(critic._ranks, "call_with_rows", calls)
        report = learn(critic, named())["report"]
    assert (report.updates_applied, report.trained_tokens, report.trained_samples) == (3, 44, 11)
    assert calls.bytes < 16_000, "three stages need only the metadata of 12 rows"

    before = critic.on_ranks(weights)[0]
    store = ensure_row_store(namespace=namespace)
    end_actor(ray.get_actor(store, namespace=namespace))
    for stage in (critic.get_values_from_meta, lambda meta: critic.get_advantages_from_meta(meta, ESTIMATOR)):
        with pytest.raises(RowsLost) as lost:
            stage(named().with_fields(["values"]))
        assert set(lost.value.sample_ids) == set(IDS), "the error must name the rows that any rank lacks"
    with pytest.raises(RowsLost):
        critic.train_from_meta(named().with_fields(["values", "returns"]), LOSS)
    after = critic.on_ranks(weights)[0]
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_cluster_without_room_is_refused_with_the_critic_s_own_keys() -> None:
    settings = make_config(ranks=4, cpus=1.0).model_dump()
    settings["ray"]["placement_timeout_s"] = 0.5
    with pytest.raises(PlacementError, match=r"4 critic ranks \(critic.ranks\)"):
        Value(Config.model_validate(settings), model_path="nowhere").start()
