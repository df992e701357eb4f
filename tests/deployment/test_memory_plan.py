"""The plan of a configuration: its bytes are those that real snapshots and engines take, and what cannot fit is
named."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig
from typer.testing import CliRunner

from asyncrl.cli.main import app
from asyncrl.cli.plan import specs_of
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.deployment.memory_plan import (
    FREED_VERSIONS,
    GIB,
    PAUSE_S,
    RAY_BYTES,
    Hardware,
    Line,
    Memory,
    Plan,
    gathered,
    largest_shard,
    plan,
    stored_versions,
)
from asyncrl.errors import ConfigError
from asyncrl.ranks.gather import own_shards, parameter_specs
from asyncrl.weights.delta import DeltaSender
from asyncrl.weights.manifest import Manifest, ParameterSpec, Piece, Probe, layout
from asyncrl.weights.publisher import Snapshot, deliver, snapshot_of
from asyncrl.weights.store import KEPT_VERSIONS
from asyncrl.weights.transports.interfaces import Shipment

pytestmark = pytest.mark.slow  # imports transformers

NODE = Hardware(
    node_bytes=1000 * GIB, gpu_bytes=80 * GIB, gpus_per_node=8, copy_speed=10 * GIB, gpu_copy_speed=10 * GIB
)
LARGE = {
    "7B": (
        Qwen2Config(
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
        ),
        7_615_616_512,
    ),
    "70B": (
        LlamaConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
        ),
        70_553_706_496,
    ),
    "235B": (
        Qwen3MoeConfig(
            vocab_size=151936,
            hidden_size=4096,
            moe_intermediate_size=1536,
            num_hidden_layers=94,
            num_attention_heads=64,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
        ),
        235_093_634_560,
    ),
}
"""Configurations of published models, and the number of parameters that their authors state or their files have."""


def planned(
    described: PretrainedConfig,
    folder: Path,
    *,
    hardware: Hardware = NODE,
    reference: bool = False,
    lora: dict[str, Any] | None = None,
    **sections: Any,
) -> Plan:
    described.save_pretrained(folder)
    model = {"path": str(folder), "dtype": "bfloat16", "lora": lora} | sections.pop("model", {})
    config = Config.model_validate({"model": model, **sections})
    adapter = specs_of(config, adapter=True) if config.model.lora is not None else ()
    return plan(config, specs_of(config), hardware, reference=reference, adapter=adapter)


def lines_of(found: Plan, what: str) -> list[Line]:
    return [line for line in found.lines if line.what == what]


def spec(name: str, *shape: int, tied_to: str = "") -> ParameterSpec:
    return ParameterSpec(name=name, shape=shape, dtype="bfloat16", nbytes=2 * math.prod(shape), tied_to=tied_to)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 8))
def test_the_first_rank_holds_the_first_chunk_of_rows(shape: list[int], shards: int) -> None:
    """FSDP2 divides a parameter with `torch.chunk`."""
    first, *_ = torch.empty(shape).chunk(shards)
    assert largest_shard([spec("a", *shape), spec("b", *shape, tied_to="a")], shards) == first.numel()


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_are_those_of_a_real_snapshot_and_its_flat_buffer(tied: bool, tmp_path: Path) -> None:
    described = Qwen3Config(
        vocab_size=98,
        hidden_size=24,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    model = Qwen3ForCausalLM(described)  # type: ignore[no-untyped-call]
    entries, probe = layout(parameter_specs(model, dtype=torch.bfloat16)), Probe(tokens=(), logprobs=())
    snapshot = snapshot_of(own_shards(model, rank=0), entries, bucket_bytes=2**16)
    manifest = Manifest(version=Version(1, 0), tensors=entries, buckets=snapshot.described(), probe=probe)
    found = planned(described, tmp_path)
    assert (found.published_bytes, found.sent_bytes) == (manifest.sent_bytes, snapshot.memory.nbytes)
    [staged] = [line.nbytes for line in found.lines if line.what == "staged weights"]
    assert 0 <= staged - manifest.flat_bytes < 64
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert lines_of(found, "whole layers in a pass")[0].nbytes == 2 * whole, "the model has two layers"
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 9))
def test_a_rank_gathers_what_is_outside_of_layers_and_two_layers(layers: int, outside: int, inside: int) -> None:
    own = [spec("model.embed_tokens.weight", outside), spec("lm_head.weight", outside, tied_to="model.embed_tokens")]
    own += [spec(f"model.layers.{i}.experts.{j}.weight", inside) for i in range(layers) for j in range(3)]
    assert gathered(own) == outside + min(layers, 2) * 3 * inside


def test_with_hsdp_only_the_first_copy_sends_and_all_ranks_share_the_checkpoint(tmp_path: Path) -> None:
    described, parameters = LARGE["7B"]
    learner = {"ranks": 4, "groups_per_step": 16}
    two_copies = planned(described, tmp_path, learner={**learner, "shards": 2})
    one_copy = planned(described, tmp_path, learner=learner)
    [snapshots], [of_one] = (lines_of(found, "two snapshots to publish") for found in (two_copies, one_copy))
    assert (snapshots.processes, of_one.processes) == (2, None)
    assert snapshots.nbytes == pytest.approx(2 * of_one.nbytes, rel=0.01)
    saved = [lines_of(found, "copy for a checkpoint")[0].nbytes for found in (two_copies, one_copy)]
    assert saved == pytest.approx([12 * parameters / 4] * 2, rel=0.01)
    sending = [line for line in two_copies.lines if line.place != "replica" and line.processes is not None]
    everything = sum(line.nbytes for line in two_copies.lines if line.place == "rank of the learner")
    replica = sum(line.nbytes for line in two_copies.lines if line.place == "replica")
    [node] = two_copies.sums
    assert node.nbytes == pytest.approx(4 * everything + replica + RAY_BYTES - 2 * sum(line.nbytes for line in sending))


class Kept:
    """A transport that notes the size of each handle."""

    def __init__(self) -> None:
        self.nbytes: dict[int, int] = {}

    def send(self, sent: Shipment) -> list[int]:
        handles = [len(self.nbytes) + number for number in range(len(sent.parts))]
        self.nbytes |= {handle: part.nbytes for handle, part in zip(handles, sent.parts, strict=True)}
        return handles


@pytest.mark.parametrize("delta", [True, False])
def test_the_object_store_holds_the_newest_two_versions_and_the_next_one_in_the_planned_bytes(delta: bool) -> None:
    """The worst case: a chain that is nearly as large as two buckets, and two buckets that are sent whole after it."""
    config = Config.model_validate({"model": {"dtype": "bfloat16"}, "weights": {"delta": delta}})
    transport, elements = Kept(), 1000
    sender = DeltaSender(anchor_every=20) if delta else None
    memory, kept, most = np.zeros(2 * elements, dtype=np.uint8), [], 0
    for step, changed in enumerate((elements, 650, 650, elements, 650, 10)):
        memory = memory.copy()
        memory.view(np.uint16)[:changed] += 1
        pieces = ((Piece(0, memory.nbytes),),)
        snapshot = Snapshot(entries=(), pieces=pieces, memory=memory)
        version, previous = Version(1, step), Version(1, step - 1) if step else None
        if sender is None:
            [sent] = deliver(snapshot, transport, version)
        else:
            [sent] = sender.deliver(snapshot, transport, version, previous=previous)
        kept = [*kept, {sent.handle} if sender is None else {*sent.handle}][-KEPT_VERSIONS - 1 :]
        most = max(most, sum(transport.nbytes[handle] for handle in set().union(*kept)))
    planned_bytes = (stored_versions(config) - FREED_VERSIONS) * memory.nbytes
    assert 0.95 * planned_bytes < most <= planned_bytes


def test_the_replicas_of_a_node_share_the_staged_weights_and_the_buckets_on_their_way(tmp_path: Path) -> None:
    described, parameters = LARGE["7B"]
    found = planned(described, tmp_path, learner={"gpus": 1.0}, generator={"gpus": 1.0, "replicas": 12})
    [node] = [line for line in found.sums if line.place == "node with generators"]
    lines = [line for line in found.lines if line.place == "replica"]
    once = {line.what: line.nbytes for line in lines if line.processes == 1}
    assert once.keys() == {"staged weights", "buckets on their way"}
    assert once["staged weights"] == pytest.approx(2 * parameters, rel=1e-3)
    each = sum(line.nbytes for line in lines) - sum(once.values())
    assert node.nbytes == pytest.approx(RAY_BYTES + sum(once.values()) + 8 * each), "eight GPUs in a node"


@pytest.mark.parametrize("size", LARGE)
def test_large_models_are_planned_without_their_weights(size: str, tmp_path: Path) -> None:
    described, parameters = LARGE[size]
    gpus = {
        "learner": {"ranks": 64, "gpus": 1.0, "gradient_sync": "micro_batch", "groups_per_step": 64},
        "generator": {"replicas": 8, "gpus": 8.0, "tensor_parallel_size": 8},
    }
    found = planned(described, tmp_path, **gpus)
    assert found.parameters == parameters
    assert found.published_bytes == 2 * parameters
    [of_rank] = [line for line in found.sums if line.place == "GPU of a rank of the learner"]
    whole = lines_of(found, "whole layers in a pass")[0].nbytes
    kept = lines_of(found, "activations (estimated)")[0].nbytes
    assert of_rank.nbytes - whole - kept == pytest.approx(16 * parameters / 64, rel=0.01), (
        "weights, gradients, two moments"
    )
    assert 0 < whole < 0.3 * found.published_bytes
    copied_s = 2 * parameters / 8 / NODE.gpu_copy_speed
    assert dict(found.times)["an engine pauses"] == pytest.approx(PAUSE_S + copied_s)


@pytest.mark.parametrize(
    ("size", "measured_gib"),
    [((24, 896, 4864, 14), 17.0 - 0.494 * 16e9 / GIB), ((28, 1536, 8960, 12), 42.6 - 1.544 * 16e9 / GIB)],
)
def test_activations_are_about_those_of_a_gpu(
    size: tuple[int, int, int, int], measured_gib: float, tmp_path: Path
) -> None:
    """The peaks of docs/gpu.md, without weights, gradients and moments: 8 rows of 1,024 tokens in bfloat16."""
    layers, width, feed_forward, heads = size
    described = Qwen2Config(
        vocab_size=151936, hidden_size=width, intermediate_size=feed_forward, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    batch = {"gpus": 1.0, "batching": "packed", "micro_batch_tokens": 8192, "groups_per_step": 32}
    found = planned(described, tmp_path, learner=batch, model={"max_length": 1024, "dtype": "bfloat16"})
    [line] = lines_of(found, "activations (estimated)")
    assert line.nbytes / GIB == pytest.approx(measured_gib, rel=0.15)
    again = planned(
        described,
        tmp_path,
        learner=batch | {"activation_checkpointing": True},
        model={"max_length": 1024, "dtype": "bfloat16"},
    )
    [recomputed] = lines_of(again, "activations (estimated)")
    assert recomputed.nbytes < 0.2 * line.nbytes


def test_the_estimate_follows_the_batching_and_never_exceeds_the_rows_of_a_step(tmp_path: Path) -> None:
    described, _ = LARGE["7B"]

    def kept(**learner: object) -> float:
        [line] = lines_of(
            planned(described, tmp_path, learner={"gpus": 1.0, **learner}, model={"max_length": 100}),
            "activations (estimated)",
        )
        return line.nbytes

    of_a_token = kept(batching="packed", micro_batch_tokens=1000) / 1000
    assert kept(batching="padded", micro_batch_size=4) == pytest.approx(400 * of_a_token)
    few = {"groups_per_step": 2, "group_size": 2}
    assert kept(batching="packed", micro_batch_tokens=10**6, **few) == pytest.approx(400 * of_a_token)


def test_a_rank_beside_an_engine_has_what_the_engine_leaves(tmp_path: Path) -> None:
    shared = {"learner": {"gpus": 0.5}, "generator": {"gpus": 0.5, "gpu_memory_utilization": 0.4}}
    problems = planned(LARGE["7B"][0], tmp_path, **shared, ray={"object_store_mb": 2**20}).problems
    assert "GiB and has 48.0;" in problems[0]
    shared["generator"]["gpus"] = 1.0
    assert "GiB and has 80.0;" in planned(LARGE["7B"][0], tmp_path, **shared).problems[0]


def test_each_rank_loads_the_whole_model_on_the_host(tmp_path: Path) -> None:
    described, parameters = LARGE["7B"]
    [line] = lines_of(planned(described, tmp_path, learner={"gpus": 1.0}), "whole model, while it loads")
    assert (line.nbytes, line.memory) == (4 * parameters, Memory.NODE)
    assert lines_of(planned(described, tmp_path), "whole model, while it loads") == []


def test_what_does_not_fit_is_named_with_both_numbers(tmp_path: Path) -> None:
    described, _ = LARGE["7B"]
    gpus = {"learner": {"gpus": 1.0}, "generator": {"gpus": 1.0}, "ray": {"object_store_mb": 2**20}}
    problems = planned(described, tmp_path, **gpus).problems
    assert problems == (
        "a GPU of a rank of the learner needs 154.9 GiB and has 80.0; set learner.activation_checkpointing: true, or "
        "lower learner.micro_batch_tokens, or raise `ranks`, if there are more GPUs, or train an adapter (model.lora)",
    )
    gpus["generator"]["gpu_memory_utilization"] = 0.1
    gpus["ray"]["object_store_mb"] = 20000
    problems = planned(described, tmp_path, **gpus).problems
    assert [problem.partition(";")[0] for problem in problems[1:]] == [
        "a GPU of a process of an engine needs 14.2 GiB and has 8.0",
        "ray.object_store_mb = 20000 does not hold 4 versions of the weights",
        "a GPU of a process of an engine has about 0.0 GiB for its KV cache, which is less than a sequence of "
        "model.max_length = 64 tokens",
    ]


def test_advice_names_only_what_is_not_set_yet(tmp_path: Path) -> None:
    described, _ = LARGE["70B"]

    def advice(*, sync: str, shared: bool = False) -> str:
        learner = {"gpus": 0.5 if shared else 1.0, "ranks": 2, "activation_checkpointing": True, "gradient_sync": sync}
        problems = planned(described, tmp_path, learner=learner, generator={"gpus": 0.5 if shared else 1.0}).problems
        return next(problem for problem in problems if problem.startswith("a GPU of a rank of the learner"))

    assert "checkpointing" not in advice(sync="update")
    assert "gradient_sync: micro_batch" in advice(sync="update")
    assert "gradient_sync" not in advice(sync="micro_batch")
    assert "gpu_memory_utilization" not in advice(sync="micro_batch")
    assert "lower generator.gpu_memory_utilization" in advice(sync="micro_batch", shared=True)


def test_the_kv_cache_is_what_weights_and_workspace_leave_of_the_share(tmp_path: Path) -> None:
    described, parameters = LARGE["7B"]
    engine = {"gpus": 2.0, "tensor_parallel_size": 2, "gpu_memory_utilization": 0.9, "max_concurrent_groups": 32}
    found = planned(described, tmp_path, generator=engine, model={"max_length": 4096, "dtype": "bfloat16"}).cache
    assert found is not None
    assert found.nbytes == pytest.approx(0.9 * 80 * GIB - parameters - 2 * GIB)
    of_a_token = 28 * 2 * 4 * 128 * 2  # layers, keys and values, heads, width of a head, bytes
    assert found.sequences == pytest.approx(2 * found.nbytes / of_a_token / 4096)
    assert found.asked == 32 * Config().learner.group_size
    engine["kv_cache_gib"] = 5.0
    found = planned(described, tmp_path, generator=engine, model={"dtype": "bfloat16"}).cache
    assert found is not None
    assert found.nbytes == 5 * GIB
    assert planned(described, tmp_path).cache is None, "an engine on CPUs"


@pytest.mark.parametrize(
    ("ranks", "replicas", "address", "refused"), [(4, 6, None, True), (2, 6, None, False), (4, 6, "auto", False)]
)
def test_a_run_on_one_machine_needs_all_gpus_there(
    ranks: int, replicas: int, address: str | None, refused: bool, tmp_path: Path
) -> None:
    problems = planned(
        LARGE["7B"][0],
        tmp_path,
        learner={"gpus": 1.0, "ranks": ranks, "groups_per_step": 64},
        generator={"gpus": 1.0, "replicas": replicas},
        ray={"address": address, "object_store_mb": 2**20},
    ).problems
    found = [problem for problem in problems if "in one node" in problem]
    assert bool(found) is refused
    assert not refused or found[0].startswith("learner 4 × 1, generators 6 × 1: `asyncrl up` needs 10 GPUs in one node")


def test_all_replicas_receive_a_broadcast_which_may_need_the_object_store(tmp_path: Path) -> None:
    described, _ = LARGE["7B"]

    def lines(transport: str) -> dict[str, Line]:
        found = planned(described, tmp_path, weights={"transport": transport})
        return {line.what: line for line in found.lines}

    stored, broadcast = lines("object_store"), lines("collective")
    assert broadcast.keys() == stored.keys()
    assert broadcast["versions in the object store"] == stored["versions in the object store"]
    different = [what for what, line in broadcast.items() if line != stored[what]]
    assert different == ["buckets on their way"]
    assert broadcast["buckets on their way"].processes is None


def test_pools_without_gpus_share_a_node_and_others_only_if_it_has_enough_gpus(tmp_path: Path) -> None:
    described, _ = LARGE["7B"]

    def nodes(**sections: Any) -> list[str]:
        return [line.place for line in planned(described, tmp_path, **sections).sums if line.memory is Memory.NODE]

    assert nodes() == ["node with learner and generators"]
    on_gpus = {"learner": {"ranks": 4, "gpus": 1.0}, "generator": {"replicas": 4, "gpus": 1.0}}
    assert nodes(**on_gpus) == ["node with learner and generators"]
    on_gpus["generator"]["replicas"] = 5
    assert nodes(**on_gpus) == ["node with learner", "node with generators"]


def test_the_command_prints_the_plan_and_fails_if_something_does_not_fit(tmp_path: Path) -> None:
    described, _ = LARGE["7B"]
    described.save_pretrained(tmp_path)
    command = ["doctor", "--plan", f"model.path={tmp_path}", "model.dtype=bfloat16"]
    refused = CliRunner().invoke(app, [*command, "--node-gib", "100"])
    assert refused.exit_code == 2
    assert "7.616 billion parameters" in refused.output
    assert "ray.object_store_mb = 512 does not hold 4 versions" in refused.output
    fits = CliRunner().invoke(app, [*command, "ray.object_store_mb=60000", "--node-gib", "1000"])
    assert fits.exit_code == 0, fits.output
    assert "everything fits" in fits.output
    on_gpus = ["generator.gpus=1", "learner.gpus=1", "learner.ranks=4", "learner.activation_checkpointing=true"]
    shown = CliRunner().invoke(app, [*command, *on_gpus, "ray.object_store_mb=60000"]).output
    assert "GPUs: learner 4 × 1, generators 1 × 1; together 5, at least 1 node\n" in shown
    assert "KV cache of an engine: about " in shown
    (tmp_path / "config.json").unlink()
    for folder, reason in ((tmp_path, "has no config.json"), (tmp_path / "none", "there is no such folder")):
        refused = CliRunner().invoke(app, [*command[:2], f"model.path={folder}"])
        assert refused.exit_code == 2
        assert f"{reason}; for a plan, a folder with the model's config.json alone is enough" in refused.output


def test_the_state_of_an_own_optimizer_is_measured_and_saved(tmp_path: Path) -> None:
    described, parameters = LARGE["7B"]
    found = {}
    for options in ({}, {"momentum": 0.9}):
        optimizer = {"name": "torch.optim:SGD", "options": options}
        learner = {"ranks": 2, "gpus": 1, "groups_per_step": 16, "optimizer": optimizer}
        lines = planned(described, tmp_path, reference=False, learner=learner, generator={"gpus": 1}).lines
        rank = {line.what: line.nbytes for line in lines if line.place == "rank of the learner"}
        found[len(options)] = (
            rank["state of torch.optim:SGD (measured with a small matrix)"],
            rank["copy for a checkpoint"],
            rank["weights, float32"],
        )
    weights = found[0][2]
    assert weights == pytest.approx(4 * parameters / 2, rel=1e-3)
    assert found == {0: (0, weights, weights), 1: (weights, 2 * weights, weights)}


def test_with_an_adapter_only_its_bytes_are_sent_and_only_it_has_an_optimizer(tmp_path: Path) -> None:
    described, parameters = LARGE["7B"]
    learner = {"ranks": 2, "gpus": 1, "groups_per_step": 16}
    found = planned(described, tmp_path, reference=True, lora={"rank": 16}, learner=learner, generator={"gpus": 1})
    wide, inner, keys = 3584, 18944, 4 * 128
    layers = 2 * (wide + wide) + 2 * (wide + keys) + 3 * (wide + inner)  # q and o, k and v, the three of the MLP
    adapter = 16 * 28 * layers
    assert (found.parameters, found.trained, found.published_bytes) == (parameters, adapter, 2 * adapter)
    rank = {line.what: line.nbytes for line in found.lines if line.place == "rank of the learner"}
    assert rank["frozen weights"] == pytest.approx(2 * parameters / 2, rel=1e-3), "bfloat16, on two ranks"
    assert rank["adapter, float32"] == 4 * adapter / 2
    assert rank["AdamW's moments"] == 8 * adapter / 2
    assert rank["two snapshots to publish"] == 2 * found.sent_bytes == 2 * adapter * 2 / 2
    assert rank["copy for a checkpoint"] == 12 * adapter / 2
    assert "reference weights" not in rank
    engine = {line.what: line.nbytes for line in found.lines if line.place == "process of an engine"}
    assert engine == {"weights": 2 * parameters, "adapters": 4 * 2 * adapter}
    assert [what for what, _ in found.times] == ["training waits for a snapshot"]


def test_the_plan_names_the_layers_of_the_model_if_the_adapter_s_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no linear layer c_attn; choose from q_proj, k_proj"):
        planned(LARGE["7B"][0], tmp_path, lora={"target_modules": ["c_attn"]})
