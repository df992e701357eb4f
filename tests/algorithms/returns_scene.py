"""Rewards, values, ratios and masks for tests of returns, and the calls over them."""

import torch

from asyncrl.algorithms.returns import TokenAdvantages, gae, vtrace

ROWS, TOKENS = 5, 9
GAMMA = 0.875
"""A discount that float32 holds exactly: torchrl's are float32, whatever the dtype of its columns."""


def scene(seed: int = 0) -> dict[str, torch.Tensor]:
    """Rewards, values, log-ratios and a mask of prompt, completion, environment tokens and padding; float64."""
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
