"""A whole model of transformers with the weights that a run kept, and the optimizer over whole tensors: AdamW by its
formula, or the user's own.

The sixth check of the audit computes with it. It has no shards, no packing and no wrapper. Of the code of the ranks it
uses only the reader of the files that they saved (`SavedTensors`), and the function that imports the user's optimizer
(`own_optimizer`). An adapter (`model.lora`) is two products beside each linear layer, W x + (alpha / rank) · B A x.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.audit.history import NotPossible
from asyncrl.config.schema import LoraSection, OptimizerSection
from asyncrl.errors import ConfigError
from asyncrl.ranks.optimizer import own_optimizer
from asyncrl.ranks.shard_files import SavedTensors
from asyncrl.user_code import describe_error

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]
LEAST_GRADIENT = 1e-4
"""Share of the typical gradient (the root mean square of all elements) by which rounding may change the gradient of an
element. With AdamW, an element with a smaller gradient is not compared. Two attention implementations gave gradients
that differ by at most 1.5e-5 of the typical one (random Qwen2 models of 0.1 and 1 M parameters)."""
LARGEST_ROUNDING = 0.1
"""With an optimizer of the user's own, an element is not compared if gradients that differ by LEAST_GRADIENT change its
step by more than this share of the tensor's typical step. The measured differences of gradients are 0.15 of
LEAST_GRADIENT, so they change a tensor's step by less than 1.5 %, unless the optimizer's step jumps, as that of a sign
function does. Such a jump is larger than this share."""


class PlainModel:
    """The model whose `config.json` is in the folder `described`. Its weights are those of the last call of `load`.
    With `lora`, the folder also has the frozen weights, and a kept version has only those of the adapter."""

    def __init__(self, described: Path, *, lora: LoraSection | None) -> None:
        self._lora = lora
        try:
            self.network = _network(described, with_weights=lora is not None)
        except (OSError, ValueError, ImportError) as error:
            raise NotPossible(f"transformers cannot load the model in {described}: {error}") from error
        self.trained: dict[str, torch.nn.Parameter] = {}
        """The trained tensors by the names under which they are kept."""
        self._adapted = True

    def load(self, weights: Path) -> None:
        """Loads the weights of a kept version from the folder `weights`. Raises NotPossible if they are not those of
        this model."""
        saved = SavedTensors(weights)
        found = self._adapters(saved) if self._lora is not None else self._own_names(saved)
        for name, parameter in found.items():
            kept = saved.read(name, dtype=torch.float32)
            if kept.shape != parameter.shape:
                raise NotPossible(
                    f"{weights} has {name} with the shape {list(kept.shape)}, but the config.json of the run's model "
                    f"gives it the shape {list(parameter.shape)}"
                )
            parameter.data = kept
            parameter.grad = None
        for name, buffer in self.network.named_buffers():
            if name in saved:
                buffer.copy_(saved.read(name, dtype=buffer.dtype))
        self.trained = found

    def _own_names(self, saved: SavedTensors) -> dict[str, torch.nn.Parameter]:
        names: dict[int, list[str]] = {}
        parameters: dict[int, torch.nn.Parameter] = {}
        for name, parameter in self.network.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            parameters[id(parameter)] = parameter
        kept = {key: next((name for name in own if name in saved), None) for key, own in names.items()}
        missing = [names[key][0] for key, name in kept.items() if name is None]
        if missing:
            raise NotPossible(f"the kept weights have no tensor {missing[0]}, which transformers' model has")
        return {name: parameters[key] for key, name in kept.items() if name is not None}

    def _adapters(self, saved: SavedTensors) -> dict[str, torch.nn.Parameter]:
        if self.trained:
            return self.trained
        found = {}
        for name in saved:
            layer, _, rest = name.partition(".lora_A.")
            if not rest:
                continue
            pair = []
            for own in (name, f"{layer}.lora_B.{rest}"):
                found[own] = torch.nn.Parameter(saved.read(own, dtype=torch.float32))
                pair.append(found[own])
            self.network.get_submodule(layer).register_forward_hook(self._hook(*pair))
        if len(found) != len([*saved]):
            raise NotPossible("the kept weights have tensors other than the matrices A and B of an adapter")
        return found

    def _hook(self, a: torch.nn.Parameter, b: torch.nn.Parameter) -> Any:
        assert self._lora is not None, "only adapters have hooks"
        scale = self._lora.alpha / self._lora.rank

        def added(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            return output + scale * (inputs[0] @ a.T) @ b.T if self._adapted else output

        return added

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Lets the model compute without its adapter within the block. If the run has no adapter, it changes
        nothing."""
        self._adapted = False
        try:
            yield
        finally:
            self._adapted = True

    def gradient(self) -> Tensors:
        """Returns the gradients that the passes have added up, in float64, and removes them. A tensor that no pass has
        reached, such as that of an expert without tokens, has none."""
        found = {name: each.grad.double() for name, each in self.trained.items() if each.grad is not None}
        for parameter in self.trained.values():
            parameter.grad = None
        return found

    def values(self) -> Tensors:
        """Returns the trained tensors in float64."""
        return {name: parameter.detach().double() for name, parameter in self.trained.items()}


def _network(described: Path, *, with_weights: bool) -> Any:
    """Returns a model in float32. With `with_weights`, it has the weights in the folder, and they are frozen; otherwise
    random ones, which `load` replaces."""
    if with_weights:
        network: Any = AutoModelForCausalLM.from_pretrained(
            str(described), dtype=torch.float32, trust_remote_code=False
        )
        return network.requires_grad_(False).train(False)
    settings = AutoConfig.from_pretrained(str(described), trust_remote_code=False)
    bare: Any = AutoModelForCausalLM
    return bare.from_config(settings, dtype=torch.float32, trust_remote_code=False).train(False)


def norm_of(gradient: Mapping[str, torch.Tensor]) -> float:
    """Returns the norm of all tensors together."""
    return math.sqrt(math.fsum(float(tensor.square().sum()) for tensor in gradient.values()))


class Moments:
    """The moments of AdamW (1711.05101) for all trained tensors, in float64. They begin with zero."""

    def __init__(self, settings: OptimizerSection) -> None:
        self._settings = settings
        self._first: Tensors = {}
        self._second: Tensors = {}
        self._steps: dict[str, int] = {}

    def step(self, values: Tensors, gradient: Tensors, *, rate: float) -> Tensors:
        """Returns the values of all tensors after an AdamW step with the learning rate `rate`. `gradient` is scaled to
        the norm `learner.optimizer.max_grad_norm` if its norm is larger. A tensor without a gradient stays."""
        settings, (first_decay, second_decay) = self._settings, self._settings.betas
        share = min(1.0, settings.max_grad_norm / (norm_of(gradient) + 1e-6))
        found = dict(values)
        for name, raw in gradient.items():
            own, zeros = share * raw, torch.zeros_like(raw)
            first = self._first[name] = first_decay * self._first.get(name, zeros) + (1 - first_decay) * own
            second = self._second[name] = second_decay * self._second.get(name, zeros) + (1 - second_decay) * own**2
            steps = self._steps[name] = self._steps.get(name, 0) + 1
            divisor = (second / (1 - second_decay**steps)).sqrt() + settings.eps
            direction = first / (1 - first_decay**steps) / divisor
            found[name] = values[name] - rate * settings.weight_decay * values[name] - rate * direction
        return found

    def decided_by_rounding(self, name: str) -> torch.Tensor:
        """Returns True for the elements of a tensor whose gradients were nearly 0, but not 0, in the steps so far; a
        single False for a tensor without gradients. AdamW divides a gradient by its own size, so rounding decides in
        which direction such an element moves. An example are the biases of keys, which do not change the result of
        attention without position embeddings."""
        sizes = {name: (second / (1 - self._settings.betas[1] ** self._steps[name])).sqrt()
                 for name, second in self._second.items()}  # fmt: skip
        if name not in sizes:
            return torch.zeros((), dtype=torch.bool)
        return (sizes[name] > 0) & (sizes[name] < LEAST_GRADIENT * _typical(sizes))


class OwnOptimizer:
    """An optimizer of the user's own (`learner.optimizer.name`) in this process, for whole tensors in float64.
    It begins without state. Raises NotPossible if the user's code fails here.

    The user's optimizer is created three times. The second and the third one get gradients that are larger and smaller
    by the share LEAST_GRADIENT of the typical one, so their steps show which elements rounding decides. The size of a
    gradient would not show it for every optimizer: Lion moves an element by the sign of 0.9 m + 0.1 g, which may be
    nearly 0 although the momentum m and the gradient g are not.
    """

    def __init__(self, settings: OptimizerSection) -> None:
        self._settings = settings
        self._made: list[_Made] = []
        self._undecided: dict[str, torch.Tensor] = {}

    def step(self, values: Tensors, gradient: Tensors, *, rate: float) -> Tensors:
        """Returns the values of all tensors after a step of the user's optimizer. The arguments are those of
        `Moments.step`."""
        if not self._made:
            self._made = [_Made.of(values, self._settings) for _ in range(3)]
        share = min(1.0, self._settings.max_grad_norm / (norm_of(gradient) + 1e-6))
        own = {name: share * raw for name, raw in gradient.items()}
        apart = LEAST_GRADIENT * _typical(own)
        found, *others = (
            made.step(values, {name: each + sign * apart * (each != 0) for name, each in own.items()}, rate=rate)
            for sign, made in zip((0, 1, -1), self._made, strict=True)
        )
        for name, value in found.items():
            typical = (value - values[name]).norm() / math.sqrt(max(value.numel(), 1))
            undecided = self._undecided.setdefault(name, torch.zeros_like(value, dtype=torch.bool))
            for other in others:
                undecided |= (other[name] - value).abs() > LARGEST_ROUNDING * typical
        return found

    def decided_by_rounding(self, name: str) -> torch.Tensor:
        """Returns True for the elements of a tensor that, in one of the steps so far, move by a clearly different
        amount if the gradients differ by as much as rounding may change them."""
        return self._undecided[name]


class _Made(NamedTuple):
    """An optimizer of the user's own with the parameters that it steps."""

    optimizer: torch.optim.Optimizer
    parameters: dict[str, torch.nn.Parameter]
    name: str

    @classmethod
    def of(cls, values: Tensors, settings: OptimizerSection) -> "_Made":
        parameters = {name: torch.nn.Parameter(value.clone()) for name, value in values.items()}
        try:
            made = own_optimizer([*parameters.values()], settings, key="learner.optimizer")
        except ConfigError as error:
            raise NotPossible(str(error)) from error
        return cls(made, parameters, settings.name)

    def step(self, values: Tensors, gradient: Tensors, *, rate: float) -> Tensors:
        """Returns the values after a step with this gradient."""
        for name, parameter in self.parameters.items():
            parameter.data.copy_(values[name])
            parameter.grad = gradient.get(name)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        try:
            self.optimizer.step(None)
        except Exception as error:  # the user's code may raise anything
            described = describe_error(error)
            raise NotPossible(
                f"a step of the optimizer {self.name} with whole tensors in float64 raised {described}"
            ) from error
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}


def _typical(tensors: Tensors) -> float:
    """Returns the root of the mean square of all elements."""
    return norm_of(tensors) / math.sqrt(max(sum(each.numel() for each in tensors.values()), 1))


def sequences_of(row: Mapping[str, torch.Tensor], *, branches: str) -> list[tuple[int, int]]:
    """Returns where each sequence of a row begins and ends. The row is one sequence, or has one for each branch of an
    agent's episode. The column `branches` then has the number of each token's branch."""
    length = int(row["input_lengths"])
    numbers: Sequence[int] = row[branches][:length].tolist() if branches in row else [0] * length
    starts = [at for at in range(length) if at == 0 or numbers[at] != numbers[at - 1]]
    return list(zip(starts, [*starts[1:], length], strict=True))
