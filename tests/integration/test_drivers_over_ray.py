"""The drivers of policy and critic over real Ray actors: rows by value and by name give the same result, no rows pass
through the driver, and a failure ends the call on all ranks.

Starting a rank takes ten seconds of a core, so tests share two policies and a critic, in one Ray. Each test continues
with the weights of the one before, and the last test of a policy or critic ends its ranks. So the tests must run in
this order. Which rows a rank gets with other kinds of batching: tests/policy/test_tq_policy.py.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import stacks
import torch
from counted_calls import Counted
from local_ray import end_actor, local_ray
from ray.util import placement_group_table
from tiny_groups import STEP, make_batch, make_config, make_model

from asyncrl.algorithms.advantages import Samples, compute_advantages
from asyncrl.algorithms.baselines import Whitening
from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.presets import PRESETS
from asyncrl.algorithms.returns import TokenAdvantages
from asyncrl.algorithms.token_estimators import OUTCOME, resolve_estimators, whitened_advantages
from asyncrl.algorithms.value_loss import ClippedValueLoss
from asyncrl.complete_directory import COMPLETE
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import CRITIC_FIELDS
from asyncrl.data_plane.interfaces import KVBatchMeta
from asyncrl.data_plane.row_store import ensure_row_store
from asyncrl.data_plane.rows import TRAIN_PARTITION, open_client
from asyncrl.errors import (
    CallRefused,
    CheckpointError,
    MissingColumns,
    PlacementError,
    RowsLost,
    RunError,
    StalenessViolation,
)
from asyncrl.policy.lm_policy import Policy
from asyncrl.policy.tq_policy import STEP_FIELDS, TQPolicy
from asyncrl.ranks.gather import gather_weights
from asyncrl.ranks.group import RankGroup
from asyncrl.ranks.shard_files import HostCopies
from asyncrl.value.estimators import GAE
from asyncrl.value.lm_value import Value
from asyncrl.value.tq_value import TQValue

pytestmark = pytest.mark.integration

LOSS = ObjectiveLoss(PRESETS["decoupled_icepop"].objective)
VALUE_LOSS = ClippedValueLoss(clip=0.2)
ESTIMATOR = GAE(gamma=1.0, lam=0.9, value_lam=1.0)
KL = {"name": "reinforce_pp_baseline", "kl": {"beta": 0.3, "kind": "k3"}, "gamma": 0.9}
IDS = [f"{group}.0_g{i}" for group in range(4) for i in range(3)]
BULK = ("input_ids", "input_lengths", "generation_logprobs", "weight_versions", "token_mask")
REWARDS = torch.tensor(np.random.default_rng(3).normal(0.5, 1, len(IDS)).astype(np.float32))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("policy") / "model"))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    # The ranks cannot import test modules, so their functions are pickled by value.
    for module in (sys.modules[__name__], stacks):
        ray.cloudpickle.register_pickle_by_value(module)
    with local_ray(cpus=3, namespace=make_config().run.name):
        yield


def config(**learner: Any) -> Config:
    """Returns a config whose collective deadline is far above the timeout of a test. A test that passes did not wait
    for it."""
    return make_config(cpus=0.5, collective_timeout_s=600.0, **learner)


def die_on_rank_1(worker: Any) -> None:
    if worker.rank == 1:
        signal.raise_signal(signal.SIGKILL)
    worker.gather(None)


def pid(worker: Any) -> int:
    return os.getpid()


def fail_on_rank_1(worker: Any) -> None:
    if worker.rank == 1:
        raise ValueError("a bug")
    worker.gather(None)


def weights(worker: Any) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in worker.gather_weights()}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


def named(ids: Sequence[str] = IDS, *, limit: int = 2) -> KVBatchMeta:
    lengths = dict(zip(IDS, make_batch()["input_lengths"].tolist(), strict=True))
    return KVBatchMeta(
        partition_id=TRAIN_PARTITION,
        task_name="train",
        sample_ids=list(ids),
        fields=list(BULK),
        sequence_lengths=[lengths[name] for name in ids],
        extra_info={"step": STEP},
        tags=[{"max_staleness_versions": limit} for _ in ids],
    )


def put_rows(client: Any) -> BatchedDataDict:
    """Puts the rows that generators put, as the first of the columns. Returns the batch."""
    batch = make_batch()
    client.put_samples(IDS, TRAIN_PARTITION, fields={name: batch[name] for name in BULK})
    return batch


class WeighedRanks(RankGroup[Any]):
    """Counts the bytes of all calls with rows."""

    passed_bytes = 0

    def call_with_rows(self, *arguments: Any, **options: Any) -> list[Any]:
        call = Counted(super().call_with_rows)
        found: list[Any] = call(*arguments, **options)
        WeighedRanks.passed_bytes += call.bytes
        return found


def started(settings: Config, model_path: str) -> TQPolicy:
    policy = TQPolicy(settings, model_path=model_path, dp_cfg=settings.data_plane, make_ranks=WeighedRanks)
    policy.start()
    policy.prepare_step(len(IDS), 3)
    return policy


@pytest.fixture(scope="module")
def of_two_ranks(model_path: str) -> Iterator[TQPolicy]:
    """A policy of two ranks. Its first test needs the first weights."""
    policy = started(config(ranks=2, micro_batch_size=3), model_path)
    yield policy
    policy.shutdown()


@pytest.fixture(scope="module")
def with_kl(model_path: str) -> Iterator[TQPolicy]:
    """A policy of two ranks with packed rows, and with a reference for the KL in the reward. Its first test needs the
    first weights."""
    whole = config(ranks=2, optimizer={"learning_rate": 1e-2}, batching="packed", micro_batch_tokens=32).model_dump()
    algorithm = {**whole["algorithm"], "advantage": KL}
    policy = started(Config.model_validate({**whole, "algorithm": algorithm}), model_path)
    yield policy
    policy.shutdown()


@pytest.fixture(scope="module")
def critic(model_path: str) -> Iterator[TQValue]:
    """A critic of two ranks. Its first test needs the first weights."""
    learner = {"batching": "dynamic", "micro_batch_tokens": 32, "optimizer": {"learning_rate": 1e-2}}
    critic = TQValue(config(ranks=2, **learner), model_path=model_path, make_ranks=WeighedRanks)
    critic.start()
    yield critic
    critic.shutdown()


def learn(
    policy: TQPolicy, batch: BatchedDataDict, meta: KVBatchMeta, *, loss: ObjectiveLoss = LOSS, **options: Any
) -> dict[str, Any]:
    """Trains a step with the same stages as the learner's loop."""
    policy.write_to_dataplane(meta, {"advantages": batch["advantages"], "sample_mask": batch["sample_mask"]})
    policy.get_logprobs_from_meta(meta)
    return policy.train_from_meta(meta, loss, **options)


def check_rows_by_name(policy: TQPolicy, folder: Path) -> None:
    """Trains twice from the same weights. The ranks first get the names of the rows, and then the rows."""
    first = folder / "weights", folder / "optimizer"
    policy.save_checkpoint(*first)
    batch = put_rows(policy.dp_client)
    with pytest.raises(AssertionError, match="not a multiple of shards"):
        policy.get_logprobs(batch.slice(0, 3))
    scored = policy.get_logprobs(batch)["logprobs"]
    meta = named()
    result = learn(policy, batch, meta, gbs=4)
    written = policy.read_from_dataplane(meta, select_fields=["prev_logprobs"])["prev_logprobs"]
    assert torch.equal(written, scored), "the log-probs must be equal and in the same order"
    trained = policy.ranks.call(weights)[0]

    policy.load_checkpoint(*first)
    assert not same(trained, policy.ranks.call(weights)[0])
    expected = policy.train(BatchedDataDict(**batch, prev_logprobs=scored), LOSS, gbs=4)
    for name in ("loss", "grad_norm"):
        assert torch.equal(result[name], expected[name]), name
    assert len(result["loss"]) == 3
    assert result["all_mb_metrics"] == expected["all_mb_metrics"]
    assert same(trained, policy.ranks.call(weights)[0])

    reference = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
    assert torch.equal(reference, scored), "the reference must be the first weights"
    policy.get_reference_policy_logprobs_from_meta(meta)
    rows = policy.read_from_dataplane(meta, select_fields=["reference_policy_logprobs"])
    assert torch.equal(rows["reference_policy_logprobs"], reference)

    evaluated = policy.train_from_meta(meta, LOSS, eval_mode=True, gbs=4)
    assert not evaluated["grad_norm"].any()
    assert same(trained, policy.ranks.call(weights)[0])
    policy.finish_step(meta)
    assert policy.rows_outstanding() == {TRAIN_PARTITION: 0}


def test_packed_rows_by_name_train_bit_for_bit_as_the_rows_themselves(with_kl: TQPolicy, tmp_path: Path) -> None:
    check_rows_by_name(with_kl, tmp_path)


def has_reference(worker: Any) -> bool:
    return worker._first_weights is not None


class Failing:
    """An estimator that fails only on the rank with the first row."""

    reads = ("input_lengths", "token_mask", "sample_mask", "index")
    whitening = Whitening(whiten="tokens")

    def __init__(self, *, shape: bool) -> None:
        self.shape = shape

    def __call__(self, data: BatchedDataDict) -> TokenAdvantages:
        first = bool((data["index"] == 0).any())
        if first and not self.shape:
            raise ValueError("mine")
        answer = data["index"].float() if first else torch.zeros(data["token_mask"].shape)
        return TokenAdvantages(advantages_BS=answer, returns_BS=torch.zeros(data["token_mask"].shape))


def test_the_kl_in_the_reward_is_whitened_over_two_ranks_as_over_one(with_kl: TQPolicy) -> None:
    """Trains a first step. After it the policy differs from the reference, so the KL is not 0."""
    policy, client = with_kl, with_kl.dp_client
    of_samples, of_tokens = resolve_estimators(KL)
    assert of_tokens is not None
    assert policy.ranks.call(has_reference) == [True, True], "the ranks must load the reference at their start"
    batch = put_rows(client)
    learn(policy, batch, named())
    meta = named()
    samples = Samples(rewards_N=torch.arange(12.0), group_ids_N=torch.arange(12) // 3)
    outcomes_B = compute_advantages(of_samples, samples)
    policy.write_to_dataplane(
        meta, {OUTCOME: outcomes_B, "sample_mask": batch["sample_mask"], "index": torch.arange(12)}
    )
    policy.get_reference_policy_logprobs_from_meta(meta)
    policy.get_logprobs_from_meta(meta)
    policy.get_advantages_from_meta(meta, of_tokens)
    names = [*of_tokens.reads, "advantages"]
    rows = policy.read_from_dataplane(meta, select_fields=names)
    assert float((rows["prev_logprobs"] - rows["reference_policy_logprobs"]).abs().max()) > 1e-3
    found = whitened_advantages(rows, of_tokens(rows), rule=of_tokens.whitening, add_up=lambda moments: moments)
    assert found is not None
    torch.testing.assert_close(rows["advantages"], found.advantages_BS)

    for shape, words in ((False, "mine"), (True, "the advantage estimator returned advantages of shape")):
        with pytest.raises(CallRefused, match=words):
            policy.get_advantages_from_meta(meta, Failing(shape=shape))
    with pytest.raises(MissingColumns, match=r"rows do not have all of .*values"):
        policy.get_advantages_from_meta(meta, GAE(gamma=1.0, lam=1.0, value_lam=1.0))
    again = policy.read_from_dataplane(meta, select_fields=["advantages"])["advantages"]
    assert torch.equal(again, rows["advantages"]), "a refused call must not write the column"
    trained = policy.train_from_meta(meta, LOSS)
    assert float(trained["grad_norm"].max()) > 0, "the ranks must still work"


def hold_disk(worker: Any, answers: str) -> None:
    """Makes the next write of the weights wait until the file `answers` exists."""
    write = HostCopies.write

    def waits(*arguments: Any, **options: Any) -> None:
        deadline_s = time.monotonic() + 300.0
        while not os.path.exists(answers) and time.monotonic() < deadline_s:
            time.sleep(0.01)  # a disk that is slow, in the rank's thread for saving
        write(*arguments, **options)

    HostCopies.write = waits  # type: ignore[method-assign]


def test_ranks_train_while_they_write_a_checkpoint_which_has_the_state_of_its_own_step(
    with_kl: TQPolicy, tmp_path: Path
) -> None:
    policy = with_kl
    put_rows(policy.dp_client)
    learn(policy, make_batch(), named())
    saved, answers = policy.ranks.call(weights)[0], tmp_path / "answers"
    policy.stage_checkpoint()
    policy.ranks.call(hold_disk, str(answers))
    paths = tmp_path / "weights", tmp_path / "optimizer"
    with ThreadPoolExecutor() as threads:
        writing = threads.submit(policy.write_checkpoint, *paths)
        learn(policy, make_batch(), named())
        assert not same(saved, policy.ranks.call(weights)[0])
        with pytest.raises(CheckpointError, match="the previous checkpoint is still being written"):
            policy.stage_checkpoint()
        assert not any((path / COMPLETE).exists() for path in paths)
        answers.touch()
        writing.result()
    exported = tmp_path / "hf"
    policy.write_hf(paths[0], exported)
    policy.load_checkpoint(*paths)
    assert same(saved, policy.ranks.call(weights)[0])
    policy.save_hf(tmp_path / "live")
    name = "model.safetensors"
    assert (exported / name).read_bytes() == (tmp_path / "live" / name).read_bytes()


def die_while_writing(worker: Any) -> None:
    if worker.rank == 1:
        HostCopies.write = lambda *_, **__: signal.raise_signal(signal.SIGKILL)  # type: ignore[method-assign]


@pytest.mark.fault("F34")
def test_a_rank_that_dies_while_it_writes_ends_the_save_at_once_and_leaves_no_checkpoint(
    with_kl: TQPolicy, tmp_path: Path
) -> None:
    policy = with_kl
    policy.stage_checkpoint()
    policy.ranks.call(die_while_writing)
    with pytest.raises(CheckpointError, match="learner rank 1 died in write_checkpoint"):
        policy.write_checkpoint(tmp_path / "weights", tmp_path / "optimizer")
    assert not list(tmp_path.rglob(COMPLETE))
    with pytest.raises(RunError, match="learner rank 1 died in trained_step"):
        policy.trained_step()
    policy.shutdown()


def test_padded_rows_by_name_train_bit_for_bit_as_the_rows_themselves(of_two_ranks: TQPolicy, tmp_path: Path) -> None:
    check_rows_by_name(of_two_ranks, tmp_path)


def test_no_bulk_passes_the_driver(of_two_ranks: TQPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the bytes of all messages of the driver to and from the ranks and the data plane over a whole step. Rows
    with a hundred times as many tokens need the same number of bytes."""
    policy, client = of_two_ranks, of_two_ranks.dp_client
    sizes = {}
    for repeats in (1, 100):
        batch = make_batch()
        wide = BatchedDataDict(
            {name: column.repeat(1, repeats) if column.ndim == 2 else column for name, column in batch.items()}
        )
        wide["input_lengths"] = torch.full((len(IDS),), wide["input_ids"].shape[1])
        client.put_samples(IDS, TRAIN_PARTITION, fields={name: wide[name] for name in BULK})
        before = WeighedRanks.passed_bytes
        puts, gets = Counted(policy.dp_client.put_samples), Counted(policy.dp_client.get_data)
        with monkeypatch.context() as patched:
            patched.setattr(policy.dp_client, "put_samples", puts)
            patched.setattr(policy.dp_client, "get_data", gets)
            meta = named()
            meta.sequence_lengths = wide["input_lengths"].tolist()
            result = learn(policy, wide, meta)
        assert result["report"].trained_tokens > 0
        policy.finish_step(meta)
        sizes[repeats] = WeighedRanks.passed_bytes - before + puts.bytes + gets.bytes
        row_bytes = sum(wide[name].nbytes for name in BULK)
    assert abs(sizes[100] - sizes[1]) < 1000, sizes
    assert sizes[100] < 0.1 * row_bytes


def test_a_start_that_fails_leaves_no_place_taken_and_a_second_one_is_refused(of_two_ranks: TQPolicy) -> None:
    others = set(placement_group_table())
    policy = Policy(make_config(ranks=1), model_path="./nowhere")
    with pytest.raises(RunError, match="failed in setup"):
        policy.start()
    ours = [group["state"] for name, group in placement_group_table().items() if name not in others]
    assert ours == ["REMOVED"]
    with pytest.raises(RunError, match="already started"):
        of_two_ranks.start()
    assert of_two_ranks.ranks.call(pid) != [os.getpid()], "the ranks must still work"


def test_a_short_last_step_of_rows_that_ranks_cannot_share_evenly_trains_them_all(of_two_ranks: TQPolicy) -> None:
    batch = put_rows(of_two_ranks.dp_client)
    result = learn(of_two_ranks, batch.slice(0, 3), named(IDS[:3]))
    assert (result["report"].trained_samples, result["report"].trained_tokens) == (3, 14)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 300.0
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)  # another process acts meanwhile


class Observed(ObjectiveLoss):
    """Notes the functions that have called it, and returns when the file `seen` exists."""

    def __init__(self, folder: Path) -> None:
        super().__init__(LOSS.objective)
        self.folder = folder

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        (self.folder / f"rank-{os.getpid()}").write_text("\n".join(stacks.functions_of_asyncrl()))
        wait_for((self.folder / "seen").exists)
        return super().__call__(*arguments, **options)


def test_few_functions_are_between_a_driver_and_its_loss(of_two_ranks: TQPolicy, tmp_path: Path) -> None:
    """A reader has to know them all: `docs/how-a-step-works.md` names their files."""
    batch, meta, learner = put_rows(of_two_ranks.dp_client), named(), threading.get_ident()
    of_driver: list[str] = []

    def observe() -> None:
        wait_for(lambda: len(list(tmp_path.glob("rank-*"))) == 2)
        of_driver[:] = stacks.functions_of_asyncrl(sys._current_frames()[learner])
        (tmp_path / "seen").touch()

    with ThreadPoolExecutor() as threads:
        observing = threads.submit(observe)
        learn(of_two_ranks, batch, meta, loss=Observed(tmp_path))
        observing.result()
    assert of_driver[0].endswith(".train_from_meta")
    assert len(of_driver) <= 6, of_driver
    for path in tmp_path.glob("rank-*"):
        on_rank = path.read_text().splitlines()
        assert on_rank[0].endswith(".call_with_rows")
        assert len(on_rank) <= 7, on_rank


@pytest.mark.fault("F34", "F37")
def test_two_ranks_name_lost_rows_go_on_and_end_together(of_two_ranks: TQPolicy, tmp_path: Path) -> None:
    policy, client, namespace = of_two_ranks, of_two_ranks.dp_client, make_config().run.name
    client.clear_samples(IDS, TRAIN_PARTITION)  # other tests have written more columns
    batch = put_rows(client)
    result = learn(policy, batch, named())
    report = result["report"]
    assert (report.updates_applied, report.trained_tokens, report.trained_samples) == (1, 44, 11)
    assert report.token_staleness
    assert {"forward_backward", "optimizer"} <= set(report.seconds)
    policy.prepare_for_training()
    policy.finish_training()

    # another layer of the program can call functions on the ranks' models
    trained = policy.ranks.call(weights)
    assert [list(names) for names in trained] == [[spec.name for spec in policy.weights_metadata()]] * 2
    policy.save_hf(tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").exists()

    # F37: the error names the rows whose row store died, and no rank trains.
    name = ensure_row_store(namespace=namespace)
    end_actor(ray.get_actor(name, namespace=namespace))
    with pytest.raises(RowsLost) as lost:
        policy.get_logprobs_from_meta(named())
    assert set(lost.value.sample_ids) == set(IDS), "the error must name the rows that any rank lacks"
    first = BatchedDataDict(**batch.slice(0, 6), prev_logprobs=batch["generation_logprobs"][:6])
    client.put_samples(IDS[:6], TRAIN_PARTITION, fields={name: first[name] for name in (*BULK, "prev_logprobs")})
    for_all = {"advantages": batch["advantages"], "sample_mask": batch["sample_mask"]}
    policy.write_to_dataplane(named(), for_all)
    meta = named().with_fields(list(for_all))
    with pytest.raises(RowsLost) as lost:
        policy.train_from_meta(meta, LOSS)
    assert set(lost.value.sample_ids) == set(IDS[6:]), "rank 0 has all its rows, but must not train without rank 1"
    assert same(trained[0], policy.ranks.call(weights)[0])

    # Rank 1 refuses its rows, and rank 0 does not wait for it in a collective.
    put_rows(client)
    client.put_samples(IDS, TRAIN_PARTITION, fields={"prev_logprobs": batch["generation_logprobs"]})
    old = named().with_fields(list(for_all))
    assert old.tags is not None
    old.tags[-1]["max_staleness_versions"] = 0
    with pytest.raises(StalenessViolation, match=r"sample 3\.0_g2"):
        policy.train_from_meta(old, LOSS)
    assert same(trained[0], policy.ranks.call(weights)[0])

    # F34: rank 1 fails while rank 0 waits for it in a collective.
    with pytest.raises(RunError, match="learner rank 1 failed in fail_on_rank_1: ValueError: a bug"):
        policy.ranks.call(fail_on_rank_1)
    with pytest.raises(RunError, match="no ranks"):
        policy.train_from_meta(named(), LOSS)
    policy.shutdown()
    assert policy.shutdown(), "a second shutdown must succeed too"


# --- the critic -------------------------------------------------------------------------------------------------------


def critic_weights(worker: Any) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in gather_weights(worker.model, dtype=torch.float32)}


def put_rows_to_value(client: Any) -> BatchedDataDict:
    """Puts the columns that generators and the learner put. Returns the batch."""
    client.register_partition(TRAIN_PARTITION, STEP_FIELDS, len(IDS), ["train"], 3)
    batch = put_rows(client)
    client.put_samples(IDS, TRAIN_PARTITION, fields={"rewards": REWARDS, "sample_mask": batch["sample_mask"]})
    return batch


def named_to_value() -> KVBatchMeta:
    return named().with_fields([*BULK, "rewards", "sample_mask"])


def learn_values(critic: TQValue, meta: KVBatchMeta) -> dict[str, Any]:
    """Runs the critic's stages of a step in the same order as the learner's loop."""
    critic.get_values_from_meta(meta)
    critic.get_advantages_from_meta(meta, ESTIMATOR)
    return critic.train_from_meta(meta, VALUE_LOSS, gbs=4)


def test_rows_by_name_train_a_critic_bit_for_bit_as_the_rows_themselves(critic: TQValue, tmp_path: Path) -> None:
    """Trains twice from the same weights, over two steps. The ranks first get the names of the rows, and then the rows.
    The values are 0 in the first step and differ from 0 in the second."""
    client = open_client(config())
    first = tmp_path / "weights", tmp_path / "optimizer"
    critic.save_checkpoint(*first)
    batch = put_rows_to_value(client)
    by_name = []
    for _ in range(2):
        meta = named_to_value()
        result = learn_values(critic, meta)
        assert meta.fields == [*BULK, "rewards", "sample_mask", "values", "advantages", "returns"]
        by_name.append((result, client.get_data(meta, [*CRITIC_FIELDS, "advantages"])))
    trained = critic.ranks.call(critic_weights)[0]

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
        expected = critic.train(rows, VALUE_LOSS, gbs=4)
        critic.finish_training()
        for name in ("loss", "grad_norm"):
            assert torch.equal(result[name], expected[name]), name
        assert len(result["loss"]) == 3
        assert result["all_mb_metrics"] == expected["all_mb_metrics"]
    assert same(trained, critic.ranks.call(critic_weights)[0])
    evaluated = critic.train_from_meta(meta, VALUE_LOSS, eval_mode=True)
    assert not evaluated["grad_norm"].any()


def test_no_bulk_passes_the_driver_of_a_critic_and_lost_rows_are_named_by_ranks_that_go_on(
    critic: TQValue,
) -> None:
    namespace = make_config().run.name
    client = open_client(config())
    client.clear_samples(IDS, TRAIN_PARTITION)  # other tests have written more columns
    put_rows_to_value(client)
    passed_bytes = WeighedRanks.passed_bytes
    report = learn_values(critic, named_to_value())["report"]
    assert (report.updates_applied, report.trained_tokens, report.trained_samples) == (3, 44, 11)
    assert WeighedRanks.passed_bytes - passed_bytes < 16_000, "three stages need only the metadata of 12 rows"

    before = critic.ranks.call(critic_weights)[0]
    store = ensure_row_store(namespace=namespace)
    end_actor(ray.get_actor(store, namespace=namespace))
    for stage in (critic.get_values_from_meta, lambda meta: critic.get_advantages_from_meta(meta, ESTIMATOR)):
        with pytest.raises(RowsLost) as lost:
            stage(named_to_value().with_fields(["values"]))
        assert set(lost.value.sample_ids) == set(IDS), "the error must name the rows that any rank lacks"
    with pytest.raises(RowsLost):
        critic.train_from_meta(named_to_value().with_fields(["values", "returns"]), VALUE_LOSS)
    assert same(before, critic.ranks.call(critic_weights)[0])


@pytest.mark.fault("F34")
def test_a_rank_that_dies_is_named(critic: TQValue) -> None:
    with pytest.raises(RunError, match="critic rank 1 died in die_on_rank_1"):
        critic.ranks.call(die_on_rank_1)


@pytest.mark.parametrize(
    ("driver", "said"), [(Policy, r"4 learner ranks \(learner.ranks\)"), (Value, r"4 critic ranks \(critic.ranks\)")]
)
def test_a_cluster_without_room_is_refused_within_the_deadline_with_numbers(driver: Any, said: str) -> None:
    settings = make_config(ranks=4, cpus=1.0).model_dump()
    settings["ray"]["placement_timeout_s"] = 0.5
    with pytest.raises(PlacementError, match=rf"{said}.*placement_timeout_s=0.5.*the cluster has 3 CPU"):
        driver(Config.model_validate(settings), model_path="nowhere").start()
