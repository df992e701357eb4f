"""The optimizer of a rank: AdamW, or one of the user's own (`learner.optimizer.name`).

An optimizer of the user's own is a callable `(params, lr=…, **options)` that returns a `torch.optim.Optimizer`. FSDP2
shards its parameters, and checkpoints keep its state by the names of the parameters. So an optimizer is used only if

- it steps without a closure, and takes the rate of a step from `lr` of its parameter groups,
- all of its state is in `optimizer.state[parameter]`, as tensors or numbers,
- its state for a sharded parameter is sharded too: made by operations on the parameter, such as `torch.zeros_like`.

`try_optimizer` checks the first two conditions before a run starts. Each step of a run checks the third one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from asyncrl.config.import_path import fitting_options, resolve
from asyncrl.config.schema import OptimizerSection
from asyncrl.errors import ConfigError
from asyncrl.user_code import describe_error

MOMENT_BYTES = 4
"""Bytes of a number in the state of an optimizer: the numbers are float32."""
ADAMW_BYTES = 2 * MOMENT_BYTES
"""Bytes of AdamW's state for each number of the parameters: its two moments."""
TRIED_RATE = 1e-3
"""The learning rate of the steps of `try_optimizer` after the first one, whose rate is 0."""


def make_optimizer(
    model: torch.nn.Module, section: OptimizerSection, *, key: str, device: torch.device
) -> torch.optim.Optimizer:
    """Returns the optimizer of the section for the trained parameters of the model, which is on `device`. `key` is the
    key of the section, for messages. Raises ConfigError if the optimizer is the user's own and cannot be made."""
    if section.own is None:
        return adamw(model, section, device=device)
    return own_optimizer(trained_parameters(model), section, key=key)


def trained_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Returns the parameters of the model that are trained, in the order of the model."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def weight_decay_of(optimizer: torch.optim.Optimizer) -> float:
    """Returns the weight decay of the first group of parameters; 0 if the group has none."""
    return float(optimizer.param_groups[0].get("weight_decay") or 0.0)


def adamw(model: torch.nn.Module, section: OptimizerSection, *, device: torch.device) -> torch.optim.AdamW:
    """Returns AdamW for the parameters of the model that are trained, with the settings of the section.

    `device` is where the parameters will be when the optimizer steps. On a CPU, AdamW is torch's default, a loop over
    the parameters. On a GPU it is one fused kernel, which takes 0.42 to 0.44 of the time of an AdamW that is not fused
    (docs/gpu.md).

    A checkpoint has no hyperparameters (`asyncrl.ranks.sharded_checkpoint`), so loading one does not change whether
    AdamW is fused.
    """
    return torch.optim.AdamW(
        trained_parameters(model),
        fused=True if device.type == "cuda" else None,
        lr=section.learning_rate,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
    )


def own_optimizer(
    parameters: Sequence[torch.nn.Parameter], section: OptimizerSection, *, key: str
) -> torch.optim.Optimizer:
    """Returns the user's own optimizer for these parameters. Its `step` raises ConfigError if the state of a sharded
    parameter is not sharded.

    Raises ConfigError if it cannot be imported, if the options do not fit its signature, if it raises an error, if its
    result is not a torch.optim.Optimizer, or if the optimizer lacks some of the parameters.
    """
    assert section.own is not None, "AdamW is built in"
    path, key_of_name = section.own.path, f"{key}.name"
    function = resolve(path, key=key_of_name)
    options = fitting_options(function, section.own.options, key=f"{key}.options", name=path, values=1, given=("lr",))
    found = _called(
        lambda: function(parameters, lr=section.learning_rate, **options), "was called to make an optimizer", path, key
    )
    if not isinstance(found, torch.optim.Optimizer):
        raise ConfigError(
            f"{key_of_name} = {path}: gives a {type(found).__name__}, which is not a torch.optim.Optimizer; name a "
            "class or a function that returns an optimizer for (params, lr=…)"
        )
    _called(
        lambda: found.register_step_post_hook(lambda *_: _check_sharded(found, name=path, key=key)),
        "was asked to call a check after each step, which needs super().__init__(params, defaults)",
        path,
        key,
    )
    has = {id(parameter) for group in found.param_groups for parameter in group["params"]}
    if missing := sum(id(parameter) not in has for parameter in parameters):
        raise ConfigError(
            f"{key_of_name} = {path}: the optimizer has {len(parameters) - missing} of the {len(parameters)} "
            "parameters that it was given, and the others would never change; put all of them into its groups"
        )
    return found


def _called(call: Callable[[], Any], what: str, path: str, key: str) -> Any:
    """Returns the result of `call`, which runs the user's code. Raises ConfigError if that raises an error."""
    try:
        return call()
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f"{key}.name = {path}: {what}, and it raised {describe_error(error)}; fix it, or name another"
        ) from error


def try_optimizer(section: OptimizerSection, *, key: str) -> float:
    """Steps an optimizer of the user's own with a small matrix and a vector. Returns the bytes of the arrays in its
    state for each number of the parameters. Raises ConfigError with the reason if a run cannot use it.

    A second optimizer takes over the state as a resumed run does, and must then make the same step, bit by bit.
    """
    path = section.name
    first, second = (_small_parameters() for _ in range(2))
    optimizer, resumed = (own_optimizer(each, section, key=key) for each in (first, second))
    start = [parameter.detach().clone() for parameter in first]
    outside = _numbers_outside_of_state(optimizer)
    _tried_step(optimizer, first, rate=0.0, number=0, path=path, key=key)
    if not _equal(first, start):
        raise ConfigError(
            f"{key}.name = {path}: a step with the learning rate 0 changed the weights; take the rate of a step from "
            'group["lr"] of self.param_groups, which the schedule sets'
        )
    layout = _layout(optimizer, first, path=path, key=key)
    _tried_step(optimizer, first, rate=TRIED_RATE, number=1, path=path, key=key)
    if _layout(optimizer, first, path=path, key=key) != layout:
        raise ConfigError(
            f"{key}.name = {path}: its second step made another state than its first one, so a checkpoint could not be "
            "loaded; make all entries of self.state[parameter] in the first step"
        )
    if changed := sorted(_numbers_outside_of_state(optimizer) ^ outside):
        raise ConfigError(
            f"{key}.name = {path}: its steps changed {changed[0][0]}, which a checkpoint does not keep, so a resumed "
            "run would not go on as before; keep all state in self.state[parameter], and none in the optimizer itself "
            "or in its parameter groups"
        )
    if _equal(first, start):
        raise ConfigError(f"{key}.name = {path}: a step did not change the weights; fix it")
    for own, other in zip(first, second, strict=True):
        other.data.copy_(own.data)
        resumed.state[other] = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in optimizer.state.get(own, {}).items()
        }
    for each, parameters in ((optimizer, first), (resumed, second)):
        _tried_step(each, parameters, rate=TRIED_RATE, number=2, path=path, key=key)
    if not _equal(first, second):
        raise ConfigError(
            f"{key}.name = {path}: a new optimizer with the state of another one makes another step, so a resumed run "
            "would not go on as before; keep all state in self.state[parameter], and none in the optimizer itself or "
            "in its parameter groups"
        )
    values = (value for state in optimizer.state.values() for value in state.values() if _is_array(value))
    nbytes: int = sum(value.nbytes for value in values)
    return nbytes / sum(parameter.numel() for parameter in first)


def state_bytes(section: OptimizerSection, *, key: str) -> float:
    """Returns the bytes of the optimizer's state for each number of the parameters: of AdamW's two moments, or what
    `try_optimizer` measures. Raises the errors of `try_optimizer`."""
    return ADAMW_BYTES if section.own is None else try_optimizer(section, key=key)


def _small_parameters() -> list[torch.nn.Parameter]:
    """Returns a matrix and a vector, as a model has them."""
    draw = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((64, 64), (64,))]


def _tried_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    *,
    rate: float,
    number: int,
    path: str,
    key: str,
) -> None:
    """Makes a step as a rank does, but with random gradients that depend on `number` only."""
    draw = torch.Generator().manual_seed(number + 1)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=draw)
    for group in optimizer.param_groups:
        group["lr"] = rate
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        _called(lambda: optimizer.step(None), "made a step with a matrix and a vector, without a closure", path, key)
    optimizer.zero_grad()


def _equal(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def _is_array(value: object) -> bool:
    """Returns whether a value of a state is a tensor of one or more dimensions, and not a number or a counter."""
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _numbers_outside_of_state(optimizer: torch.optim.Optimizer) -> set[tuple[str, str]]:
    """Returns the numbers of the optimizer itself and of its groups that its steps must not change, each as its name
    and its value. Truth values of the optimizer itself are left out, because torch's own optimizers change some:
    AdamW with `fused` remembers that it has checked the devices."""
    found = {(f"self.{name}", repr(value)) for name, value in vars(optimizer).items() if type(value) in (int, float)}
    for group in optimizer.param_groups:
        numbers = {name: value for name, value in group.items() if type(value) in (bool, int, float) and name != "lr"}
        found |= {(f"{name!r} of a parameter group", repr(value)) for name, value in numbers.items()}
    return found


def _layout(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter], *, path: str, key: str
) -> list[dict[str, Any]]:
    """Returns the shape or the type of each entry of the state, for each parameter. Raises ConfigError for a key of the
    state that is not a parameter, and for an entry that a checkpoint cannot keep, because it is neither a tensor nor a
    number, or is a tensor that is not float32. torch would load such a tensor in the precision of the parameter, except
    for the entry `step`, which may have any precision."""
    known = {id(parameter) for parameter in parameters}
    for entry in optimizer.state:
        if id(entry) not in known:
            shown = repr(entry) if isinstance(entry, str) else f"of the type {type(entry).__name__}"
            raise ConfigError(
                f"{key}.name = {path}: its state has a key that is not a parameter ({shown}). A checkpoint keeps the "
                "state of parameters only; keep all state in self.state[parameter]"
            )
    found: list[dict[str, Any]] = []
    for parameter in parameters:
        found.append({})
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                kept, kind = value.dtype == torch.float32 or name == "step", f"a tensor of {value.dtype}"
            else:
                kept, kind = type(value) in (bool, int, float), f"a {type(value).__name__}"
            if not kept:
                raise ConfigError(
                    f"{key}.name = {path}: its state has {name!r}, which is {kind}; a checkpoint keeps tensors of "
                    "float32 and numbers"
                )
            found[-1][name] = value.shape if isinstance(value, torch.Tensor) else type(value)
    return found


def _check_sharded(optimizer: torch.optim.Optimizer, *, name: str, key: str) -> None:
    """Raises ConfigError if the state of a sharded parameter has an array that is a plain tensor, or a sum that is not
    added up over the ranks: a checkpoint would keep only that of one rank."""
    for parameter, state in optimizer.state.items():
        for entry, value in state.items() if isinstance(parameter, DTensor) else ():
            if isinstance(value, DTensor):
                problem = "a sum over the ranks that is not added up" if _is_partial(value) else ""
            else:
                problem = "a plain tensor" if _is_array(value) else ""
            if problem:
                raise ConfigError(
                    f"{key}.name = {name}: its state has {entry!r}, which is {problem} beside a sharded parameter, and "
                    "a checkpoint cannot keep the parts of all ranks; make it with torch.zeros_like(parameter)"
                )


def _is_partial(value: DTensor) -> bool:
    return any(placement.is_partial() for placement in value.placements)
