"""Ranks that train an adapter: the base stays frozen, only the adapter is optimized, sent and saved, and the results
are equal for every number of ranks and way of cutting (spawned processes, gloo)."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lora_rank_scenarios import LORA, STEPS, WAYS, WORLDS, run_rank
from peft import PeftModel
from rank_scenarios import PROBE
from rounding import GRADIENT, LOGPROB_NATS, LOSS, assert_within, weight_spread
from safetensors import safe_open
from tiny_groups import make_model
from transformers import AutoModelForCausalLM

from asyncrl.policy.adapter_export import merge_adapter

pytestmark = pytest.mark.integration

EXACT = [way for way in WAYS if way not in ("bf16", "clipped")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora-ranks")
    make_model(folder / "model")
    contexts = [
        torch.multiprocessing.start_processes(
            run_rank, args=(world, folder), nprocs=world, join=False, start_method="forkserver"
        )
        for world in WORLDS
    ]
    for context in contexts:
        while not context.join():
            pass
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[int, list[dict[str, Any]]]:
    return {
        world: [pickle.loads((folder / f"lora-{world}-{rank}.pkl").read_bytes()) for rank in range(world)]
        for world in WORLDS
    }


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", EXACT)
def test_every_way_and_number_of_ranks_trains_the_same_adapter(results: Any, world: int, way: str) -> None:
    for rank in results[world]:
        found, plain = rank[way], results[1][0]["padded"]
        for report, wanted in zip(found["reports"], plain["reports"], strict=True):
            assert report.loss == pytest.approx(wanted.loss, abs=LOSS)
            assert report.grad_norm == pytest.approx(wanted.grad_norm, rel=10 * GRADIENT)
            assert report.updates_applied == 1
        for name, weight in plain["weights"].items():
            assert_within(found["weights"][name], weight, bound=weight_spread(STEPS), name=name)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", WAYS)
def test_only_the_adapter_changes_and_has_moments(results: Any, world: int, way: str) -> None:
    for rank in results[world]:
        found = rank[way]
        assert not found["frozen_changed"]
        assert all(".lora_" in name for name in found["weights"])
        assert len(found["weights"]) == 2 * 7 * 2, "two matrices for each of seven layers in two blocks"
        assert len(found["moments"]) == 2 * len(found["weights"])
        assert found["adapters"] == ["torch.float32"]
        assert found["bases"] == ["torch.bfloat16" if way == "bf16" else "torch.float32"]
        apart = max(abs(a - b).max() for a, b in zip(found["first"], found["after"], strict=True))
        assert apart > (1e-4 if way == "clipped" else 1e-2), "training has not changed the policy"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("way", WAYS)
def test_the_reference_is_the_base_before_and_after_training(results: Any, world: int, way: str) -> None:
    for rank in results[world]:
        reference, before = rank[way]["reference"]
        np.testing.assert_array_equal(reference, before)
        np.testing.assert_array_equal(rank[way]["reference_after"], reference)
        assert abs(rank[way]["trained_after"] - reference).max() > 1e-5


@pytest.mark.parametrize("way", WAYS)
def test_the_digest_does_not_depend_on_the_number_of_ranks(results: Any, way: str) -> None:
    for world in WORLDS:
        assert len({rank[way]["digest"] for rank in results[world]}) == 1
    assert results[1][0]["padded"]["digest"] != results[1][0]["clipped"]["digest"]


@pytest.mark.parametrize("world", WORLDS)
def test_the_bytes_that_ranks_send_are_those_of_the_adapter(results: Any, world: int) -> None:
    rank = LORA["rank"]
    shapes = [(64, 64)] * 4 + [(64, 96)] * 2 + [(96, 64)]
    values = 2 * sum(rank * (inner + outer) for inner, outer in shapes)
    assert results[world][0]["padded"]["sent_bytes"] == 4 * values
    assert results[world][0]["bf16"]["sent_bytes"] == 2 * values


@pytest.mark.parametrize("world", WORLDS)
def test_a_checkpoint_has_the_adapter_only_and_training_goes_on_from_it(folder: Path, results: Any, world: int) -> None:
    for part in ("weights", "optimizer"):
        for path in (folder / f"saved-{world}" / part / "state").glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                assert all(".lora_" in name for name in file.keys())  # noqa: SIM118 - it is not a dict
    more, weights = results[1][0]["padded"]["more"]
    for rank in results[world]:
        for report, wanted in zip(rank["resumed"]["reports"], more, strict=True):
            assert report.loss == pytest.approx(wanted.loss, abs=LOSS)
            assert report.learning_rate == wanted.learning_rate
        for name, weight in weights.items():
            assert_within(rank["resumed"]["weights"][name], weight, bound=weight_spread(STEPS + 2), name=name)


@pytest.mark.parametrize("world", WORLDS)
def test_peft_loads_the_exported_adapter_and_its_merged_weights_compute_the_same(
    folder: Path, results: Any, world: int
) -> None:
    base, saved = str(folder / "model"), folder / f"saved-{world}"
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merge_adapter(saved / "converted", saved / "merged", base=base, dtype=torch.float32)
    loaded = {
        "peft": PeftModel.from_pretrained(model, str(saved / "gathered")).eval(),
        "merged": AutoModelForCausalLM.from_pretrained(saved / "merged", dtype=torch.float32).eval(),
    }
    for name, each in loaded.items():
        for tokens, wanted in zip(PROBE, results[world][0]["padded"]["after"], strict=True):
            with torch.no_grad():
                logits = each(input_ids=torch.tensor([tokens])).logits[0, :-1]
            found = logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]].numpy()
            assert abs(found - wanted).max() < LOGPROB_NATS, name
    names = [path.name for path in (saved / "converted").iterdir()]
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "COMPLETE"} <= {*names}
    assert "model.safetensors" not in names
