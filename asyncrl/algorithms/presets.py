"""Published objectives as rows of data, and the one function that applies a user's overrides to them. Torch-free."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from asyncrl.algorithms.objective import Clipped, Objective, Reinforce, Weight
from asyncrl.config.import_path import suggest
from asyncrl.errors import ConfigError

PRESETS: Mapping[str, Objective] = MappingProxyType(
    {
        # The default of asynchronous runs: DAPO's clip (2503.14476), dual clip (1912.09729), IcePop's band (2510.18855)
        "decoupled_icepop": Objective(
            surrogate=Clipped(lo=0.8, hi=1.28, dual=3.0), weight=Weight(lo=0.5, hi=5.0, outside="zero")
        ),
        # 2110.00641, 2505.24298: tokens beyond prox/beh = 5 are left out
        "decoupled_ppo": Objective(surrogate=Clipped(lo=0.8, hi=1.2), weight=Weight(hi=5.0, outside="zero")),
        # truncated importance sampling: ρ ≤ 2
        "tis": Objective(surrogate=Clipped(lo=0.8, hi=1.2), weight=Weight(hi=2.0)),
        # 2510.18855
        "icepop": Objective(surrogate=Clipped(lo=0.8, hi=1.2), weight=Weight(lo=0.5, hi=5.0, outside="zero")),
        # 2503.14476; no off-policy correction: for η = 0
        "dapo": Objective(surrogate=Clipped(lo=0.8, hi=1.28)),
        # Williams 1992, 2402.14740; no off-policy correction: for η = 0
        "reinforce": Objective(surrogate=Reinforce()),
    }
)


def resolve_objective(name: str, overrides: Mapping[str, Any]) -> Objective:
    """The preset `name` with the axes of `overrides` replaced.

    A mapping replaces the fields that it names and keeps the others; another `kind` of surrogate starts from that
    kind's defaults; `weight: null` removes the correction. ConfigError names the key, the value and the choices.

    >>> resolve_objective("tis", {"weight": {"hi": 4.0}}).weight
    Weight(lo=0.0, hi=4.0, outside='clamp')
    """
    if name not in PRESETS:
        raise ConfigError(
            f"algorithm.loss: {name!r} is neither one of {', '.join(PRESETS)} nor an import path "
            f"'package.module:callable'{suggest(name, list(PRESETS))}",
            key="algorithm.loss",
        )
    axes: dict[str, Any] = msgspec.to_builtins(PRESETS[name])
    for axis, value in overrides.items():
        if axis not in axes:
            raise ConfigError(
                f"algorithm.overrides.{axis}: no such axis, there are {', '.join(axes)}{suggest(axis, list(axes))}",
                key=f"algorithm.overrides.{axis}",
            )
        axes[axis] = _replaced(axes[axis], value)
    try:
        return msgspec.convert(axes, Objective)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"algorithm.overrides: {error} (the preset {name!r} with {dict(overrides)!r})", key="algorithm.overrides"
        ) from error


def _replaced(current: object, value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    if not isinstance(current, Mapping) or value.get("kind", current.get("kind")) != current.get("kind"):
        return dict(value)
    return {**current, **value}
