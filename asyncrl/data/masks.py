"""Tells which tokens of a batch are trained."""

import torch

from asyncrl.data.batched_data_dict import BatchedDataDict


def trained_mask(batch: BatchedDataDict) -> torch.Tensor:
    """Returns the tokens that are trained, bool [B, S] (B rows, S tokens): those with a positive `token_mask` [B, S] in
    rows with a positive `sample_mask` [B]. The first token of a row has no prefix and is never trained."""
    mask_BS: torch.Tensor = (batch["token_mask"] * batch["sample_mask"].unsqueeze(1)) > 0
    mask_BS[:, 0] = False
    return mask_BS
