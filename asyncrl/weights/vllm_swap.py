"""New weights of a vLLM model on the CPU: prepared beside the live ones while the engine decodes, then swapped in.

On CPUs vLLM packs the weight of each linear layer for its matrix products and frees the original. Packing takes three
to four times as long as a copy. vLLM's own reload does it while generation is paused.

    swap.learn(weights)     # the first version, while nothing is decoded: loads it, and learns where each tensor goes
    swap.prepare(weights)   # a later version, in any thread: does not touch what a forward pass reads
    swap.apply()            # between two decoding steps: exchanges pointers

Invariant: until `apply`, a forward pass reads nothing that `prepare` writes.
"""

import copy
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from asyncrl.vllm_internals import (
    MLAAttention,
    QuantizeMethodBase,
    UnquantizedEmbeddingMethod,
    UnquantizedLinearMethod,
    default_weight_loader,
    get_layerwise_info,
    materialize_meta_tensor,
    restore_layer_refs,
)

Weights = Sequence[tuple[str, torch.Tensor]]
"""Tensors under their Hugging Face names."""


class WeightSwap:
    """Swaps new weights into one model of vLLM on the CPU. Call `learn` first."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model: Any = model
        self._parameters = dict(model.named_parameters())
        self._layers: list[Any] = [layer for layer in model.modules() if _method_of(layer) is not None]
        names = {layer: name for name, layer in model.named_modules()}
        self._packed = {f"{names[layer]}.weight": layer for layer in self._layers if not layer.weight.numel()}
        self._targets: dict[str, str] = {}
        """The name of vLLM's parameter into which each tensor goes."""
        self._prepared: list[Callable[[], None]] = []

    @staticmethod
    def suits(model: torch.nn.Module, device: torch.device) -> bool:
        """Returns True if the device is a CPU, and packing matrices is all that vLLM does with the weights after
        loading."""
        unquantized = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        if device.type != "cpu" or hasattr(model, "process_weights_after_loading"):
            return False
        layers: list[Any] = list(model.modules())
        if any(isinstance(layer, MLAAttention) for layer in layers):
            return False  # this layer derives further weights from the loaded ones
        methods = [(layer, method) for layer in layers if (method := _method_of(layer)) is not None]
        return all(type(method) in unquantized and not _is_convolution(layer) for layer, method in methods)

    @torch.no_grad()
    def learn(self, weights: Weights) -> bool:
        """Loads a whole version into the live model, and learns into which parameter each tensor goes. Returns False if
        this cannot be learned; the version must then be loaded again in another way."""
        for layer in self._packed.values():
            layer.weight = _unpacked(layer)
        known, seen = True, set[int]()
        try:
            for name, tensor in weights:
                if tensor.data_ptr() in seen:
                    continue  # another name of a tied parameter, which vLLM refuses to load without the first name
                seen.add(tensor.data_ptr())
                loaded = self._model.load_weights([(name, tensor)])
                known = known and isinstance(loaded, set) and len(loaded) == 1 and loaded <= self._parameters.keys()
                if known:
                    [self._targets[name]] = loaded
        finally:
            for layer in self._layers:
                _pack(layer)
        return known and set(self._targets.values()) == self._parameters.keys() and self._loads_alone(weights)

    def _loads_alone(self, weights: Weights) -> bool:
        """Returns True if the loaders of single parameters give what the model's loader gave: some models change a
        tensor before they load it."""
        counts = Counter(self._targets.values())
        for name, tensor in weights:
            target = self._targets.get(name)
            if target is None or target in self._packed or counts[target] > 1:
                continue
            fresh, _ = _replacement(self._parameters[target], tensor)
            if not torch.equal(fresh, self._parameters[target]):
                return False
        return True

    @torch.no_grad()
    def prepare(self, weights: Weights) -> None:
        """Builds the packed and other tensors that `apply` exchanges for the live ones, from a whole version. Drops the
        tensors of an earlier call."""
        self._prepared = []
        by_target: dict[str, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in weights:
            if name in self._targets:
                by_target.setdefault(self._targets[name], []).append((name, tensor))
        prepared: list[Callable[[], None]] = []
        users = self._users()
        for target, tensors in by_target.items():
            if target in self._packed:
                prepared.append(self._repacked_from(self._packed[target], tensors))
            elif len(tensors) == 1:
                [(_, tensor)] = tensors
                fresh, exchange = _replacement(self._parameters[target], tensor)
                prepared += [exchange, *(_repacked(layer, fresh) for layer in users.get(target, []))]
            else:  # a few numbers, such as the bias of a fused layer: only the model's loader knows their places
                prepared.append(functools.partial(self._model.load_weights, tensors))
        self._prepared = prepared

    @torch.no_grad()
    def apply(self) -> None:
        """Makes the prepared version the live one."""
        for exchange in self._prepared:
            exchange()
        self._prepared = []

    def _repacked_from(self, layer: Any, tensors: Weights) -> Callable[[], None]:
        freed = layer.weight
        # A forward pass reads only the packed copy of the weight, so this attribute may be replaced meanwhile.
        layer.weight = _unpacked(layer)
        try:
            self._model.load_weights(tensors)
            return _repacked(layer, layer.weight)
        finally:
            layer.weight = freed

    def _users(self) -> dict[str, list[torch.nn.Module]]:
        """Returns the layers that keep both the parameter and a packed form of it, by the parameter's name: embeddings,
        which may be heads too."""
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        users: dict[str, list[torch.nn.Module]] = {}
        for layer in self._layers:
            if id(layer.weight) in names and layer.weight.numel():
                users.setdefault(names[id(layer.weight)], []).append(layer)
        return users


def _method_of(layer: torch.nn.Module) -> QuantizeMethodBase | None:
    method = getattr(layer, "quant_method", None)
    return method if isinstance(method, QuantizeMethodBase) else None


def _is_convolution(layer: Any) -> bool:
    """Returns True if the weight has more than two dimensions. The weight as it is loaded decides, because vLLM makes
    the live weight of a convolution two-dimensional."""
    parameters, _ = get_layerwise_info(layer).restore_metadata
    weight: torch.Tensor = parameters.get("weight", layer.weight)
    return weight.ndim > 2


def _unpacked(layer: torch.nn.Module) -> torch.Tensor:
    """Returns new memory for a weight that vLLM has freed after packing it, with the shape and the loader that the
    weight had before."""
    parameters, _ = get_layerwise_info(layer).restore_metadata
    memory: torch.Tensor = materialize_meta_tensor(restore_layer_refs(parameters["weight"], layer))
    return memory


def _replacement(live: torch.nn.Parameter, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    """Loads a tensor into new memory for a parameter. Returns it, and the call that makes the parameter use it."""
    fresh = materialize_meta_tensor(live)
    getattr(live, "weight_loader", default_weight_loader)(fresh, tensor)

    def exchange() -> None:
        live.data = fresh.data

    return fresh, exchange


def _pack(layer: torch.nn.Module) -> None:
    method = _method_of(layer)
    assert method is not None, "only layers with a method are packed"
    method.process_weights_after_loading(layer)


def _repacked(layer: torch.nn.Module, weight: torch.Tensor) -> Callable[[], None]:
    """Packs a new weight for a layer. Returns the call that makes the layer use it."""
    stand_in = copy.copy(layer)
    stand_in._parameters = {**layer._parameters, "weight": weight}  # type: ignore[dict-item]
    _pack(stand_in)
    packed = stand_in.cpu_linear

    def exchange() -> None:
        layer.cpu_linear = packed

    return exchange
