"""Samples of live parameters are compared with what was published, wherever a worker keeps its part of them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow  # imports vllm

WIDTH, VOCABULARY = 8, 12


class Layer(torch.nn.Module):
    """A layer in the manner of vLLM, with the attributes by which it is read."""

    def __init__(self, method: Any, *, bias: int = 0, **attributes: Any) -> None:
        super().__init__()
        self.quant_method = method
        self.__dict__.update(attributes)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(bias))

    def holds(self, weight: torch.Tensor) -> "Layer":
        self.weight = torch.nn.Parameter(weight)
        return self


@pytest.fixture(scope="module")
def vllm() -> Any:
    """Returns what the tests need of vLLM, and the function under test."""
    from asyncrl.vllm_internals import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
    from asyncrl.weights.read_back import read_back

    return SimpleNamespace(
        embedding=UnquantizedEmbeddingMethod(), linear=UnquantizedLinearMethod(), read_back=read_back
    )


def published() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "q_proj.weight": (8, WIDTH),
        "k_proj.weight": (4, WIDTH),
        "v_proj.weight": (4, WIDTH),
        "q_proj.bias": (8,),
        "k_proj.bias": (4,),
        "v_proj.bias": (4,),
        "o_proj.weight": (WIDTH, WIDTH),
        "norm.weight": (WIDTH,),
        "embed.weight": (VOCABULARY, WIDTH),
        "experts.w13": (2, 4, WIDTH),
    }
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def model_of(vllm: Any, *, rank: int, workers: int) -> Any:
    """Returns the part of a model that a worker of tensor parallelism has. Heads of keys and values: one for 4 rows."""
    weights = published()
    share, kv_share = 8 // workers, max(4, 8 // workers) if workers > 1 else 4
    kv = slice(0, 4) if kv_share == 4 else slice(rank * kv_share, (rank + 1) * kv_share)
    q, columns = slice(rank * share, (rank + 1) * share), slice(rank * share, (rank + 1) * share)
    names = ("q_proj", "k_proj", "v_proj")
    fused = {
        kind: torch.cat([weights[f"{name}.{kind}"][q if name == "q_proj" else kv] for name in names])
        for kind in ("weight", "bias")
    }
    tp = {"tp_rank": rank, "tp_size": workers}
    model: Any = torch.nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    model.qkv_proj = Layer(
        vllm.linear, bias=1, output_partition_sizes=[share, 4, 4], input_size_per_partition=WIDTH, **tp
    ).holds(fused["weight"])
    model.qkv_proj.bias = torch.nn.Parameter(fused["bias"])
    model.o_proj = Layer(vllm.linear, output_partition_sizes=[WIDTH], input_size_per_partition=share, **tp).holds(
        weights["o_proj.weight"][:, columns].clone()
    )
    model.norm = Layer(None).holds(weights["norm.weight"])
    half = VOCABULARY // workers
    rows = SimpleNamespace(org_vocab_start_index=rank * half, org_vocab_end_index=(rank + 1) * half)
    padded = torch.cat([weights["embed.weight"][rank * half : (rank + 1) * half], torch.zeros(4, WIDTH)])
    model.embed = Layer(vllm.embedding, shard_indices=rows, **tp).holds(padded)
    model.experts = torch.nn.Module()
    model.experts.w13 = torch.nn.Parameter(weights["experts.w13"])
    return model


LIVE = {"qkv_proj.weight", "qkv_proj.bias", "o_proj.weight", "norm.weight", "embed.weight"}


@pytest.mark.parametrize(("rank", "workers"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_each_worker_finds_its_own_part_and_names_what_differs(vllm: Any, rank: int, workers: int) -> None:
    model = model_of(vllm, rank=rank, workers=workers)
    found = vllm.read_back(model, published().items(), seed=1)
    assert (found.alike, found.differing, found.unread) == (LIVE, frozenset(), {"experts.w13"})
    for name in LIVE:
        live = model.get_parameter(name)
        kept = live.detach().clone()
        with torch.no_grad():
            live.add_(1e-3)
        assert vllm.read_back(model, published().items(), seed=1).differing == {name}
        live.data.copy_(kept)


def test_rows_in_another_order_are_found(vllm: Any) -> None:
    model = model_of(vllm, rank=0, workers=1)
    with torch.no_grad():
        model.o_proj.weight.copy_(model.o_proj.weight.roll(1, dims=0))
    assert vllm.read_back(model, published().items(), seed=1).differing == {"o_proj.weight"}


def test_another_seed_compares_other_rows(vllm: Any) -> None:
    model = model_of(vllm, rank=0, workers=1)
    with torch.no_grad():
        model.o_proj.weight[3].add_(1.0)
    found = [bool(vllm.read_back(model, published().items(), seed=seed).differing) for seed in range(40)]
    assert 0 < sum(found) < 40


def test_a_nan_that_was_published_is_as_published(vllm: Any) -> None:
    model, weights = model_of(vllm, rank=0, workers=1), published()
    weights["norm.weight"] = torch.full((WIDTH,), torch.nan)
    assert vllm.read_back(model, weights.items(), seed=1).differing == {"norm.weight"}
    model.norm.weight.data.fill_(torch.nan)
    assert not vllm.read_back(model, weights.items(), seed=1).differing


def test_quantized_layers_and_parameters_that_were_not_published_are_not_compared(vllm: Any) -> None:
    model = model_of(vllm, rank=0, workers=1)
    model.o_proj.quant_method = object()
    model.scale = Layer(None).holds(torch.ones(3))
    assert vllm.read_back(model, published().items(), seed=1).unread == {
        "experts.w13",
        "o_proj.weight",
        "scale.weight",
    }


def test_names_are_those_after_vllms_renaming(vllm: Any) -> None:
    model = model_of(vllm, rank=0, workers=1)
    outer: Any = torch.nn.Module()
    outer.packed_modules_mapping, outer.language_model = model.packed_modules_mapping, model
    renamed = SimpleNamespace(map_name=lambda name: f"language_model.{name}")
    outer.hf_to_vllm_mapper = SimpleNamespace(get_rename_mapper=lambda: renamed)
    found = vllm.read_back(outer, published().items(), seed=1)
    assert found.alike == {f"language_model.{name}" for name in LIVE}
    assert found.unread == {"language_model.experts.w13"}
