"""New weights of a vLLM model are prepared beside the live ones: a forward pass computes with the old ones until they
are applied, and then with the new ones alone."""

import importlib
import threading
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow  # imports vllm


@pytest.fixture(scope="module")
def like() -> Any:
    """Returns the module with the model."""
    return importlib.import_module("vllm_like_model")


def test_a_version_is_computed_with_only_after_it_is_applied(like: Any) -> None:
    model, swap = like.learned()
    for seed in (1, 2, 3):
        before = model(like.TOKENS)
        swap.prepare(like.version(seed))
        assert torch.equal(model(like.TOKENS), before), "a forward pass must not see a version that is not applied"
        swap.apply()
        assert like.gives(model, like.version(seed))


def test_forward_passes_beside_a_preparation_compute_with_the_old_weights(like: Any) -> None:
    model, swap = like.learned()
    before = model(like.TOKENS)
    thread = threading.Thread(target=lambda: [swap.prepare(like.version(seed)) for seed in range(50)])
    thread.start()
    passes = 0
    while thread.is_alive():
        assert torch.equal(model(like.TOKENS), before)
        passes += 1
    thread.join()
    assert passes > 0
    swap.apply()
    assert like.gives(model, like.version(49)), "the last one that was prepared"


def test_a_preparation_that_fails_changes_nothing_and_the_next_one_is_whole(like: Any) -> None:
    model, swap = like.learned()
    damaged = [(name, tensor[:-1] if name == "second.weight" else tensor) for name, tensor in like.version(1)]
    with pytest.raises(RuntimeError):
        swap.prepare(damaged)
    swap.apply()
    assert like.gives(model, like.version(0))
    swap.prepare(like.version(2))
    swap.apply()
    assert like.gives(model, like.version(2))


def test_the_second_name_of_a_tied_parameter_is_left_out(like: Any) -> None:
    model = like.Model()
    swap = like.WeightSwap(model)
    weights = like.version(0)
    assert swap.learn([*weights, ("head.weight", dict(weights)["embedding.weight"])])
    later = like.version(1)
    swap.prepare([*later, ("head.weight", dict(later)["embedding.weight"])])
    swap.apply()
    assert like.gives(model, later)


def test_a_model_that_does_not_say_what_it_loaded_or_lacks_a_tensor_is_not_learned(like: Any) -> None:
    silent = like.Model()
    silent.says_what_it_loaded = False
    assert not like.WeightSwap(silent).learn(like.version(0))
    assert like.gives(silent, like.version(0)), "its layers are packed again"
    assert not like.WeightSwap(like.Model()).learn([each for each in like.version(0) if each[0] != "norm"])


def test_only_unquantized_models_on_cpus_are_suited(like: Any) -> None:
    model = like.Model()
    assert like.WeightSwap.suits(model, torch.device("cpu"))
    assert not like.WeightSwap.suits(model, torch.device("cuda"))
    model.fused.quant_method = like.Quantized()
    assert not like.WeightSwap.suits(model, torch.device("cpu"))
    model.fused.quant_method = like.UnquantizedLinearMethod()
    assert like.WeightSwap.suits(model, torch.device("cpu"))


@pytest.mark.parametrize("shape", [(32, 1, 4), (32, 2, 3), (16, 4, 2, 2), (8, 2, 2, 2, 2)])
def test_a_convolution_is_known_by_its_weight_before_it_was_packed(like: Any, shape: tuple[int, ...]) -> None:
    model = like.Model()
    model.fused.weight = torch.nn.Parameter(torch.empty(shape), requires_grad=False)
    like.record_metadata_for_reloading(model)
    model.fused.weight = torch.nn.Parameter(torch.empty(shape).flatten(1), requires_grad=False)
    assert not like.WeightSwap.suits(model, torch.device("cpu"))


def test_a_model_that_changes_a_tensor_before_it_loads_it_is_not_learned(like: Any) -> None:
    assert not like.WeightSwap(like.Changing()).learn(like.version(0))


def test_after_a_first_version_that_failed_a_whole_one_is_learned(like: Any) -> None:
    model = like.Model()
    damaged = [(name, tensor[:-1] if name == "second.weight" else tensor) for name, tensor in like.version(0)]
    with pytest.raises(RuntimeError):
        like.WeightSwap(model).learn(damaged)
    swap = like.WeightSwap(model)
    assert swap.learn(like.version(0))
    swap.prepare(like.version(1))
    swap.apply()
    assert like.gives(model, like.version(1))
