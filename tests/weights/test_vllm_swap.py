"""New weights of a vLLM model are prepared beside the live ones: a forward pass computes with the old ones until they
are applied, and then with the new ones alone."""

import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from asyncrl.weights.vllm_swap import WeightSwap

pytestmark = pytest.mark.slow  # imports vllm

WIDTH, VOCABULARY = 32, 40


class Fused(torch.nn.Module):
    """Two linear layers in one, as vLLM fuses them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(2 * WIDTH, WIDTH), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.empty(2 * WIDTH), requires_grad=False)
        self.quant_method = UnquantizedLinearMethod()


class Embedding(torch.nn.Module):
    """An embedding that is the head too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(VOCABULARY, WIDTH), requires_grad=False)
        self.quant_method = UnquantizedEmbeddingMethod()


class Model(torch.nn.Module):
    """A model in vLLM's manner: its parameters have other names than the tensors that it loads."""

    says_what_it_loaded = True

    def __init__(self) -> None:
        super().__init__()
        self.embedding: Any = Embedding()
        self.norm = torch.nn.Parameter(torch.empty(WIDTH), requires_grad=False)
        self.fused: Any = Fused()
        record_metadata_for_reloading(self)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()
        for layer in (self.embedding, self.fused):
            layer.quant_method.process_weights_after_loading(layer)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        loaded = set()
        for name, tensor in weights:
            target = {"first": "fused", "second": "fused"}.get(name.partition(".")[0], "")
            target = f"{target}.{name.partition('.')[2]}" if target else name
            parameter = self.get_parameter(target)
            half = {"first": slice(0, WIDTH), "second": slice(WIDTH, None)}.get(name.partition(".")[0], slice(None))
            parameter.data[half].copy_(tensor)
            loaded.add(target)
        return loaded if self.says_what_it_loaded else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.embedding(tokens, self.embedding.weight) * self.norm
        both = self.fused.cpu_linear(hidden, self.fused.weight, self.fused.bias)
        result: torch.Tensor = self.embedding.cpu_linear(both[:, :WIDTH] + both[:, WIDTH:], self.embedding.weight, None)
        return result


def version(seed: int) -> list[tuple[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "embedding.weight": (VOCABULARY, WIDTH),
        "norm": (WIDTH,),
        "first.weight": (WIDTH, WIDTH),
        "first.bias": (WIDTH,),
        "second.weight": (WIDTH, WIDTH),
        "second.bias": (WIDTH,),
    }
    return [(name, torch.randn(shape, generator=draw)) for name, shape in shapes.items()]


TOKENS = torch.arange(VOCABULARY)


def expected(weights: list[tuple[str, torch.Tensor]]) -> torch.Tensor:
    named = dict(weights)
    hidden = named["embedding.weight"] * named["norm"]
    first = hidden @ named["first.weight"].T + named["first.bias"]
    second = hidden @ named["second.weight"].T + named["second.bias"]
    return (first + second) @ named["embedding.weight"].T


def gives(model: Model, weights: list[tuple[str, torch.Tensor]]) -> bool:
    return torch.allclose(model(TOKENS), expected(weights), rtol=1e-4, atol=1e-3)


@pytest.fixture
def learned() -> tuple[Model, WeightSwap]:
    model = Model()
    swap = WeightSwap(model)
    assert swap.learn(version(0))
    assert gives(model, version(0))
    return model, swap


def test_a_version_is_computed_with_only_after_it_is_applied(learned: tuple[Model, WeightSwap]) -> None:
    model, swap = learned
    for seed in (1, 2, 3):
        before = model(TOKENS)
        swap.prepare(version(seed))
        assert torch.equal(model(TOKENS), before), "a forward pass must not see a version that is not applied"
        swap.apply()
        assert gives(model, version(seed))


def test_forward_passes_beside_a_preparation_compute_with_the_old_weights(learned: tuple[Model, WeightSwap]) -> None:
    model, swap = learned
    before = model(TOKENS)
    thread = threading.Thread(target=lambda: [swap.prepare(version(seed)) for seed in range(50)])
    thread.start()
    passes = 0
    while thread.is_alive():
        assert torch.equal(model(TOKENS), before)
        passes += 1
    thread.join()
    assert passes > 0
    swap.apply()
    assert gives(model, version(49)), "the last one that was prepared"


def test_a_preparation_that_fails_changes_nothing_and_the_next_one_is_whole(learned: tuple[Model, WeightSwap]) -> None:
    model, swap = learned
    damaged = [(name, tensor[:-1] if name == "second.weight" else tensor) for name, tensor in version(1)]
    with pytest.raises(RuntimeError):
        swap.prepare(damaged)
    swap.apply()
    assert gives(model, version(0))
    swap.prepare(version(2))
    swap.apply()
    assert gives(model, version(2))


def test_the_second_name_of_a_tied_parameter_is_left_out() -> None:
    model = Model()
    swap = WeightSwap(model)
    weights = version(0)
    assert swap.learn([*weights, ("head.weight", dict(weights)["embedding.weight"])])
    later = version(1)
    swap.prepare([*later, ("head.weight", dict(later)["embedding.weight"])])
    swap.apply()
    assert gives(model, later)


def test_a_model_that_does_not_say_what_it_loaded_or_lacks_a_tensor_is_not_learned() -> None:
    silent = Model()
    silent.says_what_it_loaded = False
    assert not WeightSwap(silent).learn(version(0))
    assert gives(silent, version(0)), "its layers are packed again"
    assert not WeightSwap(Model()).learn([each for each in version(0) if each[0] != "norm"])


def test_only_unquantized_models_on_cpus_are_suited() -> None:
    model = Model()
    assert WeightSwap.suits(model, torch.device("cpu"))
    assert not WeightSwap.suits(model, torch.device("cuda"))

    class Quantized(UnquantizedLinearMethod):
        """Changes the weights in another way after loading."""

    model.fused.quant_method = Quantized()
    assert not WeightSwap.suits(model, torch.device("cpu"))
    model.fused.quant_method = UnquantizedLinearMethod()
    assert WeightSwap.suits(model, torch.device("cpu"))
    model.fused.weight = torch.nn.Parameter(torch.empty(WIDTH, 1, 4), requires_grad=False)
    assert not WeightSwap.suits(model, torch.device("cpu")), "a convolution"


def test_a_model_that_changes_a_tensor_before_it_loads_it_is_not_learned() -> None:
    class Changing(Model):
        """Stores a norm as the difference to 1."""

        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
            return super().load_weights((name, tensor - 1 if name == "norm" else tensor) for name, tensor in weights)

    assert not WeightSwap(Changing()).learn(version(0))


def test_after_a_first_version_that_failed_a_whole_one_is_learned() -> None:
    model = Model()
    damaged = [(name, tensor[:-1] if name == "second.weight" else tensor) for name, tensor in version(0)]
    with pytest.raises(RuntimeError):
        WeightSwap(model).learn(damaged)
    swap = WeightSwap(model)
    assert swap.learn(version(0))
    swap.prepare(version(1))
    swap.apply()
    assert gives(model, version(1))
