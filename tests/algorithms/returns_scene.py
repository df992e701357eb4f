"""Rewards, values, ratios and masks for the tests of returns, and short calls of the functions under test."""

import torch

from asyncrl.algorithms.returns import TokenAdvantages, gae, vtrace

ROWS, TOKENS = 5, 9
GAMMA = 0.875
"""A discount that float32 represents exactly, because torchrl's discounts are float32 for every dtype of its
columns."""


def scene(seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns rewards, values, log-ratios (float64) and a mask of prompt, completion, environment tokens and
    padding."""
    random = torch.Generator().manual_seed(seed)
    columns = {
        name: torch.randn(ROWS, TOKENS, generator=random, dtype=torch.float64)
        for name in ("rewards", "values", "log_ratios")
    }
    mask_BS = torch.rand(ROWS, TOKENS, generator=random) < 0.6
    mask_BS[:, 0] = False
    mask_BS[0, 1:] = True
    mask_BS[1] = False
    return {**columns, "mask": mask_BS}


def gae_of(data: dict[str, torch.Tensor], **kwargs: object) -> TokenAdvantages:
    return gae(data["rewards"], data["values"], data["mask"], **kwargs)  # type: ignore[arg-type]


def vtrace_of(data: dict[str, torch.Tensor], **kwargs: object) -> TokenAdvantages:
    kwargs = {"gamma": 0.9, "log_ratios_BS": data["log_ratios"]} | kwargs
    return vtrace(data["rewards"], data["values"], data["mask"], **kwargs)  # type: ignore[arg-type]
