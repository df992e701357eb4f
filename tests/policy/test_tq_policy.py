"""`TQPolicy`'s side of the contract: what ranks are told to fetch and to write, and which rows are there when."""

from typing import Any

import pytest
import torch
from noted_ranks import DYNAMIC, LOSS, PACKED, named, settings, tq_on
from tiny_groups import make_batch

from asyncrl.data_plane import PAD_SEQLEN
from asyncrl.errors import RowsLost, RunError
from asyncrl.policy.lm_policy import Policy
from asyncrl.policy.tq_policy import TQPolicy


def test_each_stage_s_packing_arguments_are_copies_of_its_own() -> None:
    for learner, place in ((PACKED, 0), (DYNAMIC, 1)):
        policy = Policy(settings(**learner), model_path="nowhere")
        for stage in ("logprob_mb_tokens", "train_mb_tokens"):
            args = policy._packing_args(stage)
            assert args[1 - place] is None
            found: Any = args[place]
            assert found["max_tokens_per_microbatch"] == 32
            found["max_tokens_per_microbatch"] = 1
            again: Any = policy._packing_args(stage)[place]
            assert again["max_tokens_per_microbatch"] == 32
    padded = Policy(settings(), model_path="nowhere")
    assert padded._packing_args("train_mb_tokens") == (None, None)
    with pytest.raises(ValueError, match="'mb_tokens' is no stage: logprob_mb_tokens or train_mb_tokens"):
        padded._packing_args("mb_tokens")


@pytest.mark.parametrize("learner", [{}, DYNAMIC, PACKED], ids=["padded", "dynamic", "packed"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_names_are_cut_as_their_rows_are(ranks: int, learner: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    policy, noted, _ = tq_on(ranks, monkeypatch, **learner)
    batch = make_batch()
    batch["ids"] = named(batch).sample_ids
    policy.train_from_meta(named(batch), LOSS, gbs=4)
    policy.train(batch, LOSS, gbs=4)
    by_name, by_row = (call for call in noted.calls if call[0] == "train")
    for (meta, _), (shard, _) in zip(by_name[1], by_row[1], strict=True):
        assert meta.sample_ids == shard["ids"]
        assert meta.extra_info.get("micro_batch_indices") == shard.micro_batch_indices
        assert meta.extra_info.get("micro_batch_lengths") == shard.micro_batch_lengths
    assert by_name[2] == {**by_row[2], "with_meta": True}


def test_the_width_is_stamped_once_and_reaches_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, noted, _ = tq_on(2, monkeypatch)
    meta = named(make_batch())
    policy._stamp_pad_seqlen(meta)
    assert meta.extra_info[PAD_SEQLEN] == max(meta.sequence_lengths or [])
    meta.extra_info[PAD_SEQLEN] = 32
    policy._stamp_pad_seqlen(meta)
    assert meta.extra_info[PAD_SEQLEN] == 32
    policy.get_logprobs_from_meta(meta)
    _, shards, options = noted.calls[-1]
    assert [shard.extra_info[PAD_SEQLEN] for (shard,) in shards] == [32, 32]
    assert [shard.fields for (shard,) in shards] == [["input_ids", "input_lengths", "token_mask", "sample_mask"]] * 2
    assert options == {"with_meta": True, "micro_batch_size": None}


def test_what_a_stage_wrote_is_named_by_the_meta_and_lost_rows_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, noted, _ = tq_on(2, monkeypatch)
    meta = named(make_batch())
    assert policy.get_logprobs_from_meta(meta, 4) is None
    assert policy.get_reference_policy_logprobs_from_meta(meta, micro_batch_size=4) is None
    assert meta.fields == ["input_ids", "prev_logprobs", "reference_policy_logprobs"]
    noted.lost = RowsLost("gone", sample_ids=["0.0_g0"])
    fresh = named(make_batch())
    for call in (policy.get_logprobs_from_meta, policy.get_reference_policy_logprobs_from_meta):
        with pytest.raises(RowsLost, match="gone"):
            call(fresh)
    with pytest.raises(RowsLost, match="gone"):
        policy.train_from_meta(fresh, LOSS)
    assert fresh.fields == ["input_ids"]


def test_a_step_s_rows_are_registered_twice_read_written_discarded_and_dropped_by_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, _, client = tq_on(2, monkeypatch)
    batch, meta = make_batch(), named(make_batch())
    client.put_samples(meta.sample_ids, "train", fields={name: batch[name] for name in ("input_ids", "input_lengths")})
    policy.prepare_step(12)
    assert policy.rows_outstanding() == {"train": 12}, "registering again has cleared rows"
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


def test_shutdown_closes_the_data_plane_before_the_ranks_and_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, noted, client = tq_on(2, monkeypatch)
    order = noted.calls
    closing = client.close
    monkeypatch.setattr(client, "close", lambda: (order.append(("close", [], {})), closing()))
    order.clear()
    assert policy.shutdown()
    assert [name for name, *_ in order] == ["close", "shutdown"]
    assert policy.shutdown()
    with pytest.raises(RunError, match="closed"):
        policy.rows_outstanding()


def test_a_metadata_policy_that_was_not_started_says_so() -> None:
    config = settings()
    policy = TQPolicy(config, model_path="nowhere", dp_cfg=config.data_plane)
    with pytest.raises(RunError, match="was not started"):
        policy.prepare_step(1)
