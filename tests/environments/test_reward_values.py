"""A reward counts if it has one finite number or truth value, of whatever library."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.environments.reward_values import Unusable, components, number

SINGLE_VALUES = [
    (np.bool_(True), 1.0),
    (np.bool_(False), 0.0),
    (np.array(True), 1.0),
    (np.array(0.25), 0.25),
    (np.array(3, dtype=np.uint8), 3.0),
    (np.float16(0.5), 0.5),
    (np.int32(-2), -2.0),
    (torch.tensor(0.75), 0.75),
    (torch.tensor(True), 1.0),
    (torch.tensor(2), 2.0),
    (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    (torch.tensor(0.5, requires_grad=True), 0.5),
    (Fraction(1, 4), 0.25),
]


@pytest.mark.parametrize(("value", "reward"), SINGLE_VALUES)
def test_a_single_value_counts_alone_and_as_a_component(value: Any, reward: float) -> None:
    assert number(value, at="") == reward
    found = components({"right": value, "style": value}, weights={"style": 2.0}, at="")
    assert (found.parts, found.total) == ({"right": reward, "style": reward}, 3 * reward)


@pytest.mark.parametrize(
    "value",
    [
        *(np.array([1.0]), np.array("1"), np.array(1j), np.array(None), np.str_("1"), np.datetime64("2026-01-01")),
        *(torch.tensor([1.0]), torch.zeros(2, 2), torch.tensor(1j), "1", None, Decimal(1), [1.0]),
    ],
)
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(Unusable, match=r"returned (an?|None)"):
        number(value, at="")


@pytest.mark.parametrize("value", [np.array(np.nan), np.float32("inf"), torch.tensor(float("-inf"))])
def test_a_value_that_is_not_finite_is_refused(value: Any) -> None:
    with pytest.raises(Unusable, match="a reward is a finite number"):
        number(value, at="")
