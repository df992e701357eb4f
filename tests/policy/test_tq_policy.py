"""`TQPolicy`'s part of the contract: what ranks must fetch and write, and which rows exist at which time."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from memory_client import MemoryClient
from noted_ranks import DYNAMIC, LOSS, PACKED, named, noted, settings, stored, tq_noted
from tiny_groups import make_batch

from asyncrl.algorithms.baselines import RewardKL
from asyncrl.algorithms.loss import ObjectiveLoss
from asyncrl.algorithms.presets import PRESETS
from asyncrl.algorithms.token_estimators import DiscountedReturns
from asyncrl.algorithms.value_loss import ClippedValueLoss
from asyncrl.data.specs import SUPPORT
from asyncrl.data_plane import PAD_SEQLEN, KVBatchMeta
from asyncrl.errors import CallRefused, CallTimeout, MissingColumns, RowsLost, RunError
from asyncrl.policy.tq_policy import TQPolicy, data_plane_section
from asyncrl.value.tq_value import TQValue


def packing_args(policy: TQPolicy, stage: str) -> tuple[Any, Any]:
    """Calls a method under the private name that other trainers on TransferQueue use."""
    return policy._packing_args(stage)


def test_each_stage_s_packing_arguments_are_copies_of_its_own() -> None:
    for learner, place in ((PACKED, 0), (DYNAMIC, 1)):
        config = settings(**learner)
        policy = TQPolicy(config, dp_cfg=config.data_plane)
        for stage in ("logprob_mb_tokens", "train_mb_tokens"):
            for _ in range(2):
                args = packing_args(policy, stage)
                assert args[1 - place] is None
                found: Any = args[place]
                assert found["max_tokens_per_microbatch"] == 32
                found["max_tokens_per_microbatch"] = 1
    padded = TQPolicy(settings(batching="padded"), dp_cfg=settings().data_plane)
    assert packing_args(padded, "train_mb_tokens") == (None, None)
    with pytest.raises(ValueError, match="is 'mb_tokens'; it must be one of logprob_mb_tokens, train_mb_tokens"):
        packing_args(padded, "mb_tokens")


@pytest.mark.parametrize("learner", [{}, DYNAMIC, PACKED], ids=["padded", "dynamic", "packed"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_names_are_cut_as_their_rows_are(count: int, learner: dict[str, Any]) -> None:
    policy, ranks, client = tq_noted(settings(count, **learner))
    batch = make_batch()
    batch["prev_logprobs"] = batch["generation_logprobs"]
    meta = stored(client, batch)
    policy.write_to_dataplane(meta, {"prev_logprobs": batch["prev_logprobs"]})
    batch["ids"] = meta.sample_ids
    policy.train_from_meta(meta, LOSS, gbs=4)
    policy.train(batch, LOSS, gbs=4)
    by_name, by_row = (call for call in ranks.calls if call[0] == "train")
    for (meta, _), (shard, _) in zip(by_name[1], by_row[1], strict=True):
        assert meta.sample_ids == shard["ids"]
        assert meta.extra_info.get("micro_batch_indices") == shard.micro_batch_indices
        assert meta.extra_info.get("micro_batch_lengths") == shard.micro_batch_lengths
    assert by_name[2] == by_row[2]


@pytest.mark.parametrize("learner", [{}, DYNAMIC, PACKED], ids=["padded", "dynamic", "packed"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_names_of_a_critics_rows_are_cut_as_the_rows_are(count: int, learner: dict[str, Any]) -> None:
    client = MemoryClient()
    critic, ranks = noted(TQValue, settings(count, **learner), model_path="nowhere", dp_client=client)
    critic.start()
    batch = make_batch()
    batch |= dict.fromkeys(("values", "returns"), batch["generation_logprobs"])
    client.register_partition("train", [], batch.size, ["train"], 3)
    meta = named(batch)
    client.put_samples(meta.sample_ids, "train", fields=batch)
    batch["ids"] = meta.sample_ids
    loss = ClippedValueLoss(clip=0.2)
    for by_name, by_row in (
        (critic.get_values_from_meta, critic.get_values),
        (lambda names: critic.train_from_meta(names, loss, gbs=4), lambda rows: critic.train(rows, loss, gbs=4)),
    ):
        ranks.calls.clear()
        by_name(meta)
        by_row(batch)
        (_, of_names, _), (_, of_rows, _) = ranks.calls
        for (names, *_), (rows, *_) in zip(of_names, of_rows, strict=True):
            assert names.sample_ids == rows["ids"]
            assert names.extra_info.get("micro_batch_indices") == rows.micro_batch_indices
            assert names.extra_info.get("micro_batch_lengths") == rows.micro_batch_lengths


def test_the_width_is_stamped_once_and_reaches_every_rank() -> None:
    policy, ranks, _ = tq_noted(settings(2))
    stamp = policy._stamp_pad_seqlen  # other trainers on TransferQueue call it by this name
    meta = named(make_batch())
    stamp(meta)
    assert meta.extra_info[PAD_SEQLEN] == max(meta.sequence_lengths or [])
    meta.extra_info[PAD_SEQLEN] = 32
    stamp(meta)
    assert meta.extra_info[PAD_SEQLEN] == 32
    policy.get_logprobs_from_meta(meta)
    _, shards, options = ranks.calls[-1]
    assert [shard.extra_info[PAD_SEQLEN] for (shard,) in shards] == [32, 32]
    assert [shard.fields for (shard,) in shards] == [["input_ids", "input_lengths", "token_mask", "sample_mask"]] * 2
    assert (options, ranks.writes) == ({"micro_batch_size": None}, {"logprobs": "prev_logprobs"})


def test_with_top_k_the_ranks_fetch_the_supports_too() -> None:
    config = settings()
    generator = config.generator.model_copy(update={"top_k": 3})
    policy, ranks, client = tq_noted(config.model_copy(update={"generator": generator}))
    batch = make_batch()
    batch[SUPPORT] = batch["input_ids"].int().unsqueeze(-1)
    meta = stored(client, batch)
    policy.write_to_dataplane(meta, {SUPPORT: batch[SUPPORT]})
    meta.fields = [name for name in meta.fields or [] if name != SUPPORT]
    policy.train_from_meta(meta, LOSS)
    policy.get_logprobs_from_meta(meta)
    policy.get_reference_policy_logprobs_from_meta(meta)
    for name, shards, _ in ranks.calls:
        assert all(SUPPORT in (meta.fields or []) for meta, *_ in shards), name
    assert len(ranks.calls) == 3


def test_what_a_stage_wrote_is_named_by_the_meta_and_lost_rows_are_not() -> None:
    policy, ranks, client = tq_noted(settings(2))
    meta = named(make_batch())
    assert policy.get_logprobs_from_meta(meta, 4) is None
    assert policy.get_reference_policy_logprobs_from_meta(meta, micro_batch_size=4) is None
    assert meta.fields == ["input_ids", "prev_logprobs", "reference_policy_logprobs"]
    ranks.lost = RowsLost("gone", sample_ids=["0.0_g0"])
    fresh = stored(client, make_batch())
    fresh.fields = ["input_ids"]
    for call in (policy.get_logprobs_from_meta, policy.get_reference_policy_logprobs_from_meta):
        with pytest.raises(RowsLost, match="gone"):
            call(fresh)
    with pytest.raises(RowsLost, match="gone"):
        policy.train_from_meta(fresh, LOSS)
    assert fresh.fields == ["input_ids"]


def test_token_advantages_are_made_by_ranks_that_fetch_what_the_estimator_reads() -> None:
    policy, ranks, client = tq_noted(settings(2))
    meta = stored(client, make_batch())
    estimator = DiscountedReturns(kl=RewardKL(beta=0.1))
    policy.get_advantages_from_meta(meta, estimator)
    method, shards, options = ranks.calls[-1]
    assert (method, options, ranks.writes) == ("get_advantages", {}, {"advantages": "advantages"})
    assert sorted(name for shard, _ in shards for name in shard.sample_ids) == sorted(meta.sample_ids)
    for shard, passed in shards:
        assert shard.fields == list(estimator.reads)
        assert passed is estimator
    assert meta.fields == ["input_ids", "advantages"]
    ranks.lost = RowsLost("gone", sample_ids=["0.0_g0"])
    fresh = stored(client, make_batch())
    with pytest.raises(RowsLost, match="gone"):
        policy.get_advantages_from_meta(fresh, estimator)
    assert fresh.fields == ["input_ids"]


def test_a_step_s_rows_are_registered_twice_read_written_discarded_and_dropped_by_id() -> None:
    policy, _, client = tq_noted(settings(2))
    batch, meta = make_batch(), named(make_batch())
    client.put_samples(meta.sample_ids, "train", fields={name: batch[name] for name in ("input_ids", "input_lengths")})
    policy.prepare_step(12)
    assert policy.rows_outstanding() == {"train": 12}, "registering again must not clear rows"
    policy.write_to_dataplane(meta, {"advantages": batch["advantages"], "values": torch.ones(12, 16)})
    meta.extra_info[PAD_SEQLEN] = 20
    read = policy.read_from_dataplane(
        meta, select_fields=["input_ids", "values", "advantages"], pad_value_dict={"values": -1.0}
    )
    assert read["input_ids"].shape == read["values"].shape == (12, 20)
    for row, length in zip(read["values"], meta.sequence_lengths or [], strict=True):
        assert row.tolist() == [1.0] * length + [-1.0] * (20 - length)
    assert torch.equal(read["advantages"], batch["advantages"])
    policy.discard_samples([*meta.sample_ids[:2], "never.0_g0"], "train")
    assert policy.rows_outstanding() == {"train": 10}
    policy.prepare_val_partition(4)
    client.put_samples(["v.0_g0"], "val", fields={"advantages": [0.0]})
    policy.finish_step(meta)
    assert policy.rows_outstanding() == {"train": 0, "val": 1}


def test_shutdown_closes_the_data_plane_before_the_ranks_and_may_be_repeated() -> None:
    class NotedClient(MemoryClient):
        def close(self) -> None:
            ranks.calls.append(("close", [], {}))
            super().close()

    policy, ranks, _ = tq_noted(settings(2), client=NotedClient())
    assert policy.shutdown()
    assert [name for name, *_ in ranks.calls] == ["close", "shutdown"]
    assert policy.shutdown()
    with pytest.raises(RunError, match="closed"):
        policy.rows_outstanding()


def test_the_data_plane_of_a_metadata_policy_needs_a_ray() -> None:
    config = settings()
    policy = TQPolicy(config, dp_cfg=config.data_plane)
    with pytest.raises(RunError, match="cannot open the data plane because Ray is not initialized"):
        policy.prepare_step(1)


def test_it_is_constructed_as_its_document_says() -> None:
    config = settings()
    client, section = MemoryClient(), {"backend": "object_store"}
    policy = TQPolicy(config, dp_cfg=section, tq_partition_id="mine", model_path="nowhere", dp_client=client)
    assert (policy.tq_partition_id, policy.dp_cfg) == ("mine", section)
    policy.prepare_step(2)
    assert policy.dp_client is client
    policy.prepare_val_partition(2)
    client.put_samples(["a"], "mine", fields={"input_lengths": [1]})
    client.put_samples(["a"], "val", fields={"input_lengths": [1]})
    for partition, task in (("mine", "prev_lp"), ("mine", "ref_lp"), ("mine", "train"), ("val", "val")):
        assert client.claim_meta(partition, task, ["input_lengths"], 1, blocking=False).sample_ids == ["a"]


@pytest.mark.parametrize(
    "ignored",
    [
        {"global_segment_size": 2**30, "local_buffer_size": 2**20},
        {"local_buffer_size": None},
        {"global_segment_size": "4GB", "observability": {}, "num_storage_units": 2},
    ],
)
def test_sizes_of_another_storage_are_ignored_with_a_warning(ignored: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=r"dp_cfg.* ignores .*(segment|buffer)_size"):
        found = data_plane_section({"impl": "transfer_queue", "backend": "simple"} | ignored)
    assert found.backend == "transfer_queue"


@pytest.mark.parametrize("path", ["nowhere", "org/model", None])
def test_the_path_of_the_model_may_be_the_second_argument(path: str | None) -> None:
    config = settings()
    _, ranks = noted(TQPolicy, config, path, dp_cfg=config.data_plane)
    assert ranks.model_path == (path or config.model.path)


def test_the_dict_of_a_transfer_queue_user_is_understood_or_refused_with_the_reason() -> None:
    found = data_plane_section({"enabled": True, "impl": "transfer_queue", "backend": "simple", "num_storage_units": 4})
    assert (found.backend, found.transfer_queue_storage_units) == ("transfer_queue", 4)
    with pytest.warns(UserWarning, match="dp_cfg.* ignores storage_capacity, observability"):
        found = data_plane_section({"impl": "transfer_queue", "storage_capacity": 9, "observability": {}})
    assert found.backend == "transfer_queue"
    assert data_plane_section({"backend": "transfer_queue"}) == data_plane_section(found)
    for wrong, reason in (
        ({"enabled": False}, "enabled is False"),
        ({"impl": "transfer_queue", "backend": "mooncake"}, "backend is 'mooncake'"),
        ({"impl": "nixl"}, "backend"),
        ({"storage": 1}, "storage"),
    ):
        with pytest.raises(ValueError, match=reason):
            data_plane_section(wrong)


ALL_TRAINED = ["input_ids", "advantages", "generation_logprobs", "input_lengths", "sample_mask", "token_mask"]


@pytest.mark.parametrize("fields", [None, [], ["input_ids"]])
def test_training_reads_its_columns_whatever_the_meta_names(fields: list[str] | None) -> None:
    policy, ranks, client = tq_noted(settings(2))
    meta = stored(client, make_batch())
    meta.fields = fields
    policy.train_from_meta(meta, LOSS)
    assert sorted(ranks.calls[-1][1][0][0].fields) == sorted(ALL_TRAINED)
    # columns that another stage has written in the meantime, and that this meta does not name
    other = named(make_batch())
    policy.write_to_dataplane(other, {"prev_logprobs": make_batch()["generation_logprobs"], "mine": torch.zeros(12)})
    policy.train_from_meta(meta, LOSS, gbs=4)
    assert sorted(ranks.calls[-1][1][0][0].fields) == sorted([*ALL_TRAINED, "prev_logprobs"])
    assert meta.fields == fields
    meta.fields = ["mine"]
    policy.train_from_meta(meta, LOSS)
    assert "mine" in ranks.calls[-1][1][0][0].fields


def test_columns_that_are_nowhere_are_refused_before_a_rank_is_called() -> None:
    policy, ranks, client = tq_noted(settings(2))
    batch = make_batch()
    meta = stored(client, batch)
    ranks.calls.clear()
    with pytest.raises(MissingColumns, match=r"prev_logprobs, but.*gbs < rows"):
        policy.train_from_meta(meta, LOSS, gbs=4)
    with pytest.raises(MissingColumns, match="reads reference_policy_logprobs, but"):
        policy.train_from_meta(meta, ObjectiveLoss(PRESETS["grpo"].objective))
    with pytest.raises(MissingColumns, match="reads mine, but"):
        policy.train_from_meta(meta.with_fields(["mine"]), LOSS)
    stepped = meta.with_fields([])
    stepped.extra_info["step"] = 3
    with pytest.raises(CallRefused, match="no 'max_staleness_versions' in their tags"):
        policy.train_from_meta(stepped, LOSS)
    stepped.stamp_tags({"max_staleness_versions": [1] * 12})
    with pytest.raises(MissingColumns, match="reads weight_versions, but"):
        policy.train_from_meta(stepped, LOSS)
    with pytest.raises(KeyError, match="never put, or cleared"):
        policy.train_from_meta(KVBatchMeta("train", None, ["nowhere"]), LOSS)
    assert not ranks.calls, "no rank may be called"


def test_a_meta_without_lengths_learns_them_and_a_narrow_stamp_grows() -> None:
    policy, _, client = tq_noted(settings(2))
    batch = make_batch()
    lengths = batch["input_lengths"].tolist()
    meta = stored(client, batch)
    bare = KVBatchMeta("train", None, meta.sample_ids)
    assert policy.read_from_dataplane(bare, select_fields=["input_ids"])["input_ids"].shape[1] == max(lengths)
    assert (bare.sequence_lengths, bare.extra_info) == (lengths, {PAD_SEQLEN: max(lengths)})
    narrow = KVBatchMeta("train", None, meta.sample_ids, None, lengths, {PAD_SEQLEN: 2})
    policy.get_logprobs_from_meta(narrow)
    assert narrow.extra_info[PAD_SEQLEN] == max(lengths)
    # rows whose lengths were never written can be read, but they cannot be cut for ranks
    loose = client.put_samples(["a", "b"], "train", fields={"values": torch.ones(2, 5)})
    assert policy.read_from_dataplane(loose, select_fields=["values"])["values"].shape == (2, 5)
    assert PAD_SEQLEN not in loose.extra_info
    with pytest.raises(ValueError, match="no sequence_lengths"):
        policy.get_logprobs_from_meta(loose)


def test_rows_that_are_named_twice_are_refused_before_a_rank_is_called() -> None:
    policy, ranks, client = tq_noted(settings(2))
    meta = stored(client, make_batch())
    ranks.calls.clear()
    twice = meta.subset([*range(11), 0])
    for call in (
        policy.get_logprobs_from_meta,
        policy.get_reference_policy_logprobs_from_meta,
        lambda meta: policy.train_from_meta(meta, LOSS),
    ):
        with pytest.raises(ValueError, match=r"names the samples \['0.0_g0'\] more than once"):
            call(twice)
    stepped = meta.with_fields([])
    stepped.extra_info["step"] = 5.0
    with pytest.raises(CallRefused, match=r"extra_info\['step'\] is 5.0; it must be an int"):
        policy.train_from_meta(stepped, LOSS)
    assert not ranks.calls, "no rank may be called"


def test_a_client_that_cannot_tell_fields_gives_training_the_same_columns() -> None:
    class Untold(MemoryClient):
        knows = True

        def fields_of(self, sample_ids: Sequence[str], partition_id: str) -> set[str] | None:
            return super().fields_of(sample_ids, partition_id) if self.knows else None

    client = Untold()
    policy, ranks, _ = tq_noted(settings(2), client=client)
    batch = make_batch()
    meta = stored(client, batch)
    policy.write_to_dataplane(named(batch), {"prev_logprobs": batch["generation_logprobs"]})
    meta.fields = None
    policy.train_from_meta(meta, LOSS)
    told = ranks.calls[-1][1][0][0].fields
    client.knows = False
    policy.train_from_meta(meta, LOSS)
    assert sorted(ranks.calls[-1][1][0][0].fields) == sorted(told)
    with pytest.raises(MissingColumns, match="reads reference_policy_logprobs, but"):
        policy.train_from_meta(meta, ObjectiveLoss(PRESETS["grpo"].objective))


def test_a_late_call_of_the_data_plane_is_repeated() -> None:
    late = [CallTimeout("the index took longer than 30 s")]

    class LateOnce(MemoryClient):
        def rows_outstanding(self) -> dict[str, int]:
            if late:
                raise late.pop()
            return super().rows_outstanding()

    policy, _, _ = tq_noted(settings(), client=LateOnce())
    assert policy.rows_outstanding() == {"train": 0}
    assert not late
