"""Lengths of rows with a long tail."""

import torch


def long_tailed(rows: int, *, longest: int) -> torch.Tensor:
    """Returns lognormal lengths: the median is 1/16 of `longest`, and about one row in fifty has the length
    `longest`."""
    draw = torch.randn(rows, generator=torch.Generator().manual_seed(0))
    return (longest / 16 * (1.35 * draw).exp()).long().clamp(8, longest)
