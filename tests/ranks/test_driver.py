"""The driver's side of `PolicyInterface` and `ValueInterface`: cuts, refusals and calls, on ranks that record them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from noted_ranks import DYNAMIC, LOSS, PACKED, NotedRanks, noted, settings, stored, tq_noted
from tiny_groups import make_batch

from asyncrl.algorithms.value_loss import ClippedValueLoss
from asyncrl.common.version import Version
from asyncrl.data import BatchedDataDict
from asyncrl.data_plane import KVBatchMeta
from asyncrl.errors import CheckpointError, MissingColumns, RunError
from asyncrl.policy.lm_policy import Policy
from asyncrl.ranks.timer import Timer
from asyncrl.value.lm_value import Value

SCORED = ("prev_logprobs", "reference_policy_logprobs")


class StrictTimer:
    """Refuses a label that is already running, like timers whose labels nest."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.seen: list[str] = []

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        assert label not in self.running, f"{label} is running"
        self.running.append(label)
        self.seen.append(label)
        yield
        self.running.remove(label)


def complete(batch: BatchedDataDict) -> BatchedDataDict:
    """Returns the batch with the columns that several updates need in addition."""
    return BatchedDataDict(**batch, prev_logprobs=batch["generation_logprobs"])


@pytest.mark.parametrize("learner", [{}, DYNAMIC, PACKED], ids=["padded", "dynamic", "packed"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_scores_come_back_in_the_caller_s_order_however_rows_were_cut(count: int, learner: dict[str, Any]) -> None:
    batch = make_batch()
    config = settings(count, **learner)
    (policy, _), (critic, _) = noted(Policy, config), noted(Value, config)
    for scored, column in (
        (policy.get_logprobs(batch), "logprobs"),
        (policy.get_reference_policy_logprobs(batch), "reference_logprobs"),
        (critic.get_values(batch), "values"),
    ):
        assert torch.equal(scored[column], batch["input_ids"].float())


def test_rows_that_the_ranks_cannot_share_are_refused_to_score_and_to_cut_into_updates() -> None:
    policy, ranks = noted(Policy, settings())
    batch = complete(make_batch())
    for call in (policy.get_logprobs, policy.get_reference_policy_logprobs):
        with pytest.raises(AssertionError, match=r"\(3\) is not a multiple of shards \(2\)"):
            call(batch.slice(0, 3))
    with pytest.raises(AssertionError, match=r"\(12\) is not a multiple of batch_size \(5\)"):
        policy.train(batch, LOSS, gbs=5)
    with pytest.raises(AssertionError, match=r"\(3\) is not a multiple of shards \(2\)"):
        policy.train(batch, LOSS, gbs=3)
    assert not ranks.calls, "no rank may be called"
    policy.train(batch.slice(0, 3), LOSS)
    [(_, shards, options)] = ranks.calls
    assert [shard.size for shard, _ in shards] == [2, 1], "all rows at once may be uneven"
    assert options["rows_per_update"] == 2


@pytest.mark.parametrize("column", [torch.zeros(12, 3), torch.zeros(12, 3, 2)])
def test_tensors_that_differ_in_dimension_1_are_refused_by_every_call_with_their_widths(column: torch.Tensor) -> None:
    (policy, of_policy), (critic, of_critic) = noted(Policy, settings()), noted(Value, settings())
    batch = BatchedDataDict(**make_batch(), odd=column)
    for call in (
        lambda: policy.get_logprobs(batch),
        lambda: policy.get_reference_policy_logprobs(batch),
        lambda: policy.train(batch, LOSS),
        lambda: critic.get_values(batch),
        lambda: critic.train(batch, LOSS),
    ):
        with pytest.raises(AssertionError, match=r"differ in dimension 1.*'odd': 3"):
            call()
    assert not of_policy.calls + of_critic.calls


def test_gbs_mbs_and_eval_mode_reach_the_ranks_and_mbs_means_padded() -> None:
    policy, ranks = noted(Policy, settings(**PACKED))
    policy.train(complete(make_batch()), LOSS, True, gbs=4, mbs=2)
    [(_, shards, options)] = ranks.calls
    expected = {"rows_per_update": 2, "micro_batch_size": 2, "eval_mode": True, "step": None, "witness": None}
    assert options == expected
    assert all(shard.micro_batch_indices is None for shard, _ in shards)
    policy.train(complete(make_batch()), LOSS, gbs=4)
    _, shards, options = ranks.calls[-1]
    assert options == expected | {"micro_batch_size": None, "eval_mode": False}
    assert all(len(shard.micro_batch_indices) == 3 for shard, _ in shards), "one entry for each update"
    policy.get_reference_policy_logprobs(make_batch(), 3)
    assert ranks.calls[-1][2] == {"micro_batch_size": 3}


@pytest.mark.parametrize("mbs", [0, -1])
def test_a_micro_batch_without_rows_is_refused_before_a_rank_hears_of_it(mbs: int) -> None:
    policy, ranks, client = tq_noted(settings())
    batch = make_batch()
    meta = stored(client, batch)
    for call in (
        lambda: policy.train(batch, LOSS, mbs=mbs),
        lambda: policy.train(batch.slice(0, 3), LOSS, mbs=mbs),
        lambda: policy.get_reference_policy_logprobs(batch, mbs),
        lambda: policy.train_from_meta(meta, LOSS, mbs=mbs),
        lambda: policy.get_logprobs_from_meta(meta, micro_batch_size=mbs),
    ):
        with pytest.raises(AssertionError, match=f"is {mbs}; it must be at least 1"):
            call()
    assert not ranks.calls, "no rank may be called"


def test_only_a_driver_with_a_data_plane_takes_rows_by_name() -> None:
    meta = KVBatchMeta("train", None, ["a"])
    for kind in (Policy, Value):
        driver, ranks = noted(kind, settings())
        with pytest.raises(TypeError, match=rf"this {kind.__name__} has no data plane, .* TQPolicy or TQValue"):
            driver.train_from_meta(meta, LOSS)
        assert not ranks.calls
        assert not ranks.named_rows, "the ranks open no client"
    _, ranks, _ = tq_noted(settings())
    assert ranks.named_rows


def test_weights_without_a_version_of_their_own_are_newer_than_all_that_were_sent() -> None:
    policy, ranks = noted(Policy, settings())
    for version in (None, Version(2, 7), Version(1, 3), None):
        policy.prepare_weights_for_ipc(version=version)
    sent = [args[1] for _, [args], _ in ranks.calls]
    assert sent == [Version(1, 0), Version(2, 7), Version(1, 3), Version(2, 8)]


def test_a_version_or_a_key_of_another_type_is_refused_and_changes_nothing() -> None:
    policy, ranks = noted(Policy, settings())
    with pytest.raises(TypeError, match="version is 3; it must be a Version"):
        policy.prepare_weights_for_ipc(version=3)  # type: ignore[arg-type]
    policy.prepare_weights_for_ipc()
    with pytest.raises(TypeError, match=r"keys are \[0\]; they must be names of weights"):
        policy.get_weights_ipc_handles([0])  # type: ignore[list-item]
    assert [(name, args[0][1]) for name, args, _ in ranks.calls] == [("prepare_weights_for_ipc", Version(1, 0))]


def test_lifecycle_calls_reach_every_rank_and_paths_are_the_callers() -> None:
    here = Path.cwd()
    for kind in (Policy, Value):
        driver, ranks = noted(kind, settings())
        driver.prepare_for_training()
        driver.finish_training()
        driver.save_checkpoint("a/weights", optimizer_path="a/optimizer", tokenizer_path=Path("a/tokenizer"))
        driver.save_checkpoint(Path("weights"))
        driver.stage_checkpoint()
        driver.write_checkpoint("a/weights", Path("a/optimizer"))
        beside = {"lane": "saving"}  # a slow disk ends no rank
        assert ranks.calls == [
            ("prepare_for_training", [()], {}),
            ("finish_training", [()], {}),
            ("stage_checkpoint", [(True,)], {}),
            ("write_checkpoint", [(here / "a/weights", here / "a/optimizer", here / "a/tokenizer")], beside),
            ("stage_checkpoint", [(False,)], {}),
            ("write_checkpoint", [(here / "weights", None, None)], beside),
            ("stage_checkpoint", [()], {}),
            ("write_checkpoint", [(here / "a/weights", here / "a/optimizer")], beside),
        ]
        assert driver.shutdown()
    policy, ranks = noted(Policy, settings())
    policy.save_hf(Path("a/hf"))
    assert ranks.calls == [
        ("stage_checkpoint", [(False,)], {}),
        ("write_hf", [(None, here / "a/hf")], {"lane": "saving"}),
    ], "the path is absolute: a rank has another working directory"
    critic, ranks = noted(Value, settings())
    critic.prepare_for_inference()
    assert [name for name, *_ in ranks.calls] == ["prepare_for_training"]


class ProbedRanks(NotedRanks):
    """Ranks of which only `writers` write their file into a folder that is checked."""

    writers: Sequence[int] = (0, 1)

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        for rank in self.writers:
            (args[0] / str(rank)).touch()
        return super().call(method, *args)


def test_a_folder_that_all_ranks_share_may_have_checkpoints_and_keeps_no_probe(tmp_path: Path) -> None:
    policy, ranks = noted(Policy, settings(), ranks=ProbedRanks)
    policy.check_folder(tmp_path / "checkpoints")
    assert [name for name, *_ in ranks.calls] == ["write_probe"]
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_folder_that_a_rank_does_not_share_is_refused_with_the_rank(tmp_path: Path) -> None:
    policy, ranks = noted(Policy, settings(3), ranks=ProbedRanks)
    ranks.writers = (0, 2)
    with pytest.raises(CheckpointError, match=r"(?s)cannot be written to .*the files that ranks 1 wrote.*Set run.dir"):
        policy.check_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused_before_a_rank_is_called(tmp_path: Path) -> None:
    policy, ranks = noted(Policy, settings())
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot be written to .*NotADirectory|Not a directory"):
        policy.check_folder(tmp_path / "checkpoints")
    assert ranks.calls == []


def test_the_first_call_starts_the_ranks_and_no_call_starts_them_again() -> None:
    unplaced = Policy(settings(), model_path="nowhere")
    with pytest.raises(RunError, match=r"cannot place ranks because Ray is not initialized; call ray.init\(\) first"):
        unplaced.get_logprobs(make_batch())
    policy, ranks = noted(Policy, settings())
    policy.get_logprobs(make_batch())
    policy.prepare_for_training()
    assert ranks.starts == 1


def test_after_a_shutdown_the_ranks_are_gone_for_good() -> None:
    policy = Policy(settings(), model_path="nowhere")
    assert policy.shutdown()
    with pytest.raises(RunError, match="the learner has no ranks: they have ended"):
        policy.get_logprobs(make_batch())
    assert policy.shutdown()


def test_a_checkpoint_of_the_constructor_is_loaded_by_the_start() -> None:
    here = Path.cwd()
    policy, ranks = noted(Policy, settings(), weights_path="a/weights", optimizer_path="a/optimizer")
    policy.start()
    assert ranks.calls == [("load_checkpoint", [(here / "a/weights", here / "a/optimizer")], {})]
    with pytest.raises(ValueError, match="optimizer_path='a/optimizer' was given without weights_path"):
        Policy(settings(), optimizer_path="a/optimizer")


def test_the_model_is_the_config_s_unless_another_is_named() -> None:
    config = settings()
    for options, path in (({}, config.model.path), ({"model_path": "mine"}, "mine")):
        _, ranks = noted(Policy, config, **options)
        assert ranks.model_path == path


def test_columns_that_a_call_reads_are_asked_for_before_a_rank_is_called() -> None:
    (policy, of_policy), (critic, of_critic) = noted(Policy, settings()), noted(Value, settings())
    batch = make_batch()
    bare = BatchedDataDict(input_ids=batch["input_ids"])
    for scoring in (policy.get_logprobs, policy.get_reference_policy_logprobs, critic.get_values):
        with pytest.raises(
            MissingColumns, match="reads input_lengths, but the rows do not have them; they have input_ids"
        ):
            scoring(bare)
    with pytest.raises(MissingColumns, match=r"reads prev_logprobs, but.*several updates \(gbs < rows\)"):
        policy.train(batch, LOSS, gbs=4)
    with pytest.raises(MissingColumns, match="reads returns, but"):
        critic.train(batch, ClippedValueLoss(clip=None))
    with pytest.raises(TypeError, match="loss_fn is a str, which cannot be called"):
        policy.train(batch, "grpo")  # type: ignore[arg-type]
    assert not of_policy.calls + of_critic.calls, "no rank may be called"
    policy.train(batch, LOSS)
    policy.train(batch, LOSS, True, gbs=4)
    policy.train(complete(batch), LOSS, gbs=4)
    assert len(of_policy.calls) == 3


UNKNOWN: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "prepare_for_training": ((7,), {"train_fields": ["a"]}),
    "finish_training": ((), {"anything": 1}),
    "prepare_for_lp_inference": ((), {"anything": 1}),
    "finish_inference": ((), {"anything": 1}),
    "save_checkpoint": (("w", "o", "t"), {"checkpointing_cfg": {}}),
    "prepare_weights_for_ipc": ((), {"_refit_buffer_size_gb": 1}),
    "broadcast_weights_for_collective": ((), {"kv_scales": {}}),
    "init_collective": (("127.0.0.1", 1, 3), {"nccl_peer": "x"}),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_arguments_that_trainers_elsewhere_pass_are_ignored_with_one_warning_that_names_them(
    name: str, recwarn: pytest.WarningsRecorder
) -> None:
    policy, ranks = noted(Policy, settings())
    args, kwargs = UNKNOWN[name]
    getattr(policy, name)(*args, **kwargs)
    assert len(ranks.calls) == (2 if name == "save_checkpoint" else 1), "it copies first, and then writes"
    [warning] = [each for each in recwarn if each.category is UserWarning]
    assert f"{name}() ignores" in str(warning.message)
    assert all(key in str(warning.message) for key in kwargs)
    assert warning.filename == __file__, "the warning must name the caller's line"
    getattr(policy, name)(*(args if name in ("save_checkpoint", "init_collective") else ()))
    assert [each for each in recwarn if each.category is UserWarning] == [warning], "known arguments give no warning"


def test_a_timer_adds_up_the_seconds_of_each_stage_also_of_a_call_that_fails() -> None:
    (policy, _), timer = noted(Policy, settings()), Timer()
    stages = ["policy_training/ranks", "policy_training/shard_data"]
    policy.train(make_batch(), LOSS, timer=timer)
    assert sorted(timer.seconds) == stages
    once = timer.seconds["policy_training/shard_data"]
    with pytest.raises(AssertionError, match="not a multiple"):
        policy.train(complete(make_batch()), LOSS, gbs=5, timer=timer)
    assert sorted(timer.seconds) == stages
    assert timer.seconds["policy_training/shard_data"] > once > 0


def test_a_timer_that_runs_for_a_call_is_given_the_stages_within_it() -> None:
    (policy, _), (critic, _) = noted(Policy, settings()), noted(Value, settings())
    by_name, _, client = tq_noted(settings())
    batch, timer = make_batch(), StrictTimer()
    meta = stored(client, batch)
    by_name.write_to_dataplane(meta, dict.fromkeys(SCORED, batch["generation_logprobs"]))  # real ranks would write them
    calls: dict[str, list[Any]] = {
        "get_logprobs": [
            lambda: policy.get_logprobs(batch, timer),
            lambda: by_name.get_logprobs_from_meta(meta, timer=timer),
        ],
        "get_reference_policy_logprobs": [
            lambda: policy.get_reference_policy_logprobs(batch, timer=timer),
            lambda: by_name.get_reference_policy_logprobs_from_meta(meta, timer=timer),
        ],
        "policy_training": [
            lambda: policy.train(batch, LOSS, timer=timer),
            lambda: by_name.train_from_meta(meta, LOSS, timer=timer),
        ],
        "get_values": [lambda: critic.get_values(batch, timer)],
        "value_training": [lambda: critic.train(batch, LOSS, timer=timer)],
    }
    for label, same in calls.items():
        for call in same:
            with timer.time(label):
                call()
            assert timer.seen == [label, f"{label}/shard_data", f"{label}/ranks"]
            timer.seen.clear()
