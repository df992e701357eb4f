"""A small model in the manner of vLLM's models, for the tests of `WeightSwap`. It imports vLLM, which takes seconds, so
tests import it when they run."""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

from asyncrl.weights.vllm_swap import WeightSwap

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


class Changing(Model):
    """Stores a norm as the difference to 1."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        return super().load_weights((name, tensor - 1 if name == "norm" else tensor) for name, tensor in weights)


class Quantized(UnquantizedLinearMethod):
    """Changes the weights in another way after loading."""


def learned() -> tuple[Model, WeightSwap]:
    """Returns a model with the weights of `version(0)`, and its swap."""
    model = Model()
    swap = WeightSwap(model)
    assert swap.learn(version(0))
    assert gives(model, version(0))
    return model, swap
