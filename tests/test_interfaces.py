"""The names of the interfaces are at the documented import paths, and accept every call of their documents."""

import inspect
from importlib import import_module
from typing import Any

import pytest

from asyncrl.colocated.generation import VLLMGeneration
from asyncrl.data_plane import KVBatchMeta
from asyncrl.generation.interfaces import GenerationInterface
from asyncrl.policy.interfaces import ColocatablePolicyInterface, PolicyInterface
from asyncrl.policy.lm_policy import Policy
from asyncrl.policy.tq_policy import TQPolicy
from asyncrl.value.interfaces import ValueInterface
from asyncrl.value.lm_value import Value

MODULES = {
    "asyncrl.algorithms.interfaces": (
        "LossFunction", "LossInputType", "LossType", "MetricNormalization", "masked_mean",
    ),
    "asyncrl.data": (
        "BatchedDataDict", "DP_TRAIN_FIELDS", "DynamicBatchingArgs", "GenerationDatumSpec", "GenerationOutputSpec",
        "LP_SEED_FIELDS", "SequencePackingArgs", "SlicedDataDict", "get_packer", "verify_right_padding",
    ),
    "asyncrl.data_plane": ("DataPlaneClient", "KVBatchMeta", "shard_meta_for_dp"),
    "asyncrl.generation.interfaces": (
        "GenerationDatumSpec", "GenerationInterface", "GenerationOutputSpec", "verify_right_padding",
    ),
    "asyncrl.policy.interfaces": (
        "ColocatablePolicyInterface", "LogprobOutputSpec", "PolicyInterface", "ReferenceLogprobOutputSpec",
    ),
    "asyncrl.policy.tq_policy": ("TQPolicy",),
    "asyncrl.value.interfaces": ("ValueInterface", "ValueOutputSpec"),
}  # fmt: skip

DATA, LOSS, TIMER = object(), object(), object()
LIFE: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "prepare_for_training": [((), {})],
    "finish_training": [((), {})],
    "save_checkpoint": [
        (("w",), {}),
        (("w", "o", "t"), {}),
        ((), {"weights_path": "w", "optimizer_path": "o", "tokenizer_path": "t"}),
    ],
    "shutdown": [((), {})],
}
TRAIN = [
    ((DATA, LOSS), {}),
    ((DATA, LOSS, True), {"gbs": 8, "mbs": 2, "timer": TIMER}),
    ((), {"data": DATA, "loss_fn": LOSS, "eval_mode": True}),
]
POLICY_CALLS = {
    **LIFE,
    "get_logprobs": [((DATA,), {}), ((DATA, TIMER), {}), ((), {"data": DATA, "timer": TIMER})],
    "get_reference_policy_logprobs": [
        ((DATA,), {}),
        ((DATA, 2), {}),
        ((DATA,), {"micro_batch_size": 2, "timer": TIMER}),
    ],
    "train": TRAIN,
}
REFIT_CALLS = {
    "init_collective": [(("h", 1, 3), {}), ((), {"ip": "h", "port": 1, "world_size": 3, "train_world_size": 2})],
    "prepare_refit_info": [((), {})],
    "prepare_info_for_collective": [((), {})],
    "broadcast_weights_for_collective": [((), {})],
    "prepare_weights_for_ipc": [((), {}), ((0.5,), {}), ((), {"refit_buffer_size_gb": 0.5})],
    "get_weights_ipc_handles": [((["a"],), {}), ((), {"keys": ["a"]})],
    "offload_before_refit": [((), {})],
    "offload_after_refit": [((), {})],
}
GENERATION_CALLS = {
    "init_collective": REFIT_CALLS["init_collective"],
    "generate": [((DATA, True), {}), ((), {"data": DATA, "greedy": True})],
    "generate_async": [((DATA,), {}), ((), {"data": DATA, "greedy": True})],
    "prepare_for_generation": [((), {}), ((), {"tags": ["weights"]})],
    "finish_generation": [((), {})],
    "prepare_refit_info": [((DATA,), {}), ((), {"state_dict_info": DATA})],
    "update_weights_from_collective": [((), {})],
    "update_weights_from_ipc_handles": [((DATA,), {}), ((), {"ipc_handles": DATA})],
    "invalidate_kv_cache": [((), {})],
    "shutdown": [((), {})],
}
VALUE_CALLS = {
    **LIFE,
    "get_values": [((DATA,), {}), ((DATA, TIMER), {}), ((), {"data": DATA, "timer": TIMER})],
    "train": TRAIN,
    "prepare_for_inference": [((), {})],
}
META_CALLS = {
    "prepare_step": [((8,), {}), ((8, 2), {}), ((), {"num_samples": 8, "group_size": 2})],
    "prepare_val_partition": [((8,), {}), ((8,), {"partition_id": "val"})],
    "discard_samples": [((["a"], "train"), {}), ((), {"sample_ids": ["a"], "partition_id": "train"})],
    "finish_step": [((DATA,), {}), ((), {"meta": DATA})],
    "read_from_dataplane": [((DATA,), {"select_fields": []}), ((DATA,), {"select_fields": [], "pad_value_dict": {}})],
    "write_to_dataplane": [((DATA, {}), {}), ((), {"meta": DATA, "fields": {}})],
    "get_logprobs_from_meta": [((DATA,), {}), ((DATA, 2, TIMER), {}), ((DATA,), {"micro_batch_size": 2})],
    "get_reference_policy_logprobs_from_meta": [((DATA, 2, TIMER), {}), ((), {"meta": DATA, "timer": TIMER})],
    "train_from_meta": [
        ((DATA, LOSS), {}),
        ((DATA, LOSS, False, 8, 2, TIMER), {}),
        ((DATA, LOSS), {"eval_mode": True, "gbs": 8, "mbs": 2, "timer": TIMER}),
    ],
    "shutdown": [((), {})],
}  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_a_user_finds_every_name_where_its_document_says(module: str) -> None:
    for name in MODULES[module]:
        assert getattr(import_module(module), name) is not None


@pytest.mark.parametrize(
    ("kinds", "calls"),
    [
        ((PolicyInterface, Policy, TQPolicy), POLICY_CALLS),
        ((ColocatablePolicyInterface, Policy, TQPolicy), REFIT_CALLS),
        ((GenerationInterface, VLLMGeneration), GENERATION_CALLS),
        ((ValueInterface, Value), VALUE_CALLS),
        ((TQPolicy,), META_CALLS),
    ],
    ids=["policy", "refit", "generation", "value", "by name"],
)
def test_every_call_of_the_documents_is_taken(kinds: tuple[type, ...], calls: dict[str, Any]) -> None:
    for kind in kinds:
        for name, ways in calls.items():
            for positional, named in ways:
                inspect.signature(getattr(kind, name)).bind(object(), *positional, **named)


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        (PolicyInterface, POLICY_CALLS),
        (ColocatablePolicyInterface, POLICY_CALLS | REFIT_CALLS),
        (GenerationInterface, GENERATION_CALLS),
        (ValueInterface, VALUE_CALLS),
    ],
    ids=["policy", "refit", "generation", "value"],
)
def test_whoever_implements_the_documents_methods_has_implemented_the_interface(kind: Any, calls: Any) -> None:
    assert kind.__abstractmethods__ == {*calls} - {"prepare_info_for_collective"}, (
        "this method is an alias, so it is not abstract"
    )


def test_rows_are_named_by_position_or_by_name() -> None:
    by_position = KVBatchMeta("train", "task", ["a"], ["x"], [1], {"k": 1}, [{"t": 1}])
    assert by_position == KVBatchMeta(
        partition_id="train", task_name="task", sample_ids=["a"], fields=["x"], sequence_lengths=[1],
        extra_info={"k": 1}, tags=[{"t": 1}],
    )  # fmt: skip
