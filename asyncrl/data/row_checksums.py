"""Checksums of rows, by which the audit recognises the rows that a step trained."""

from typing import Any

import numpy as np
import xxhash

from asyncrl.data.batched_data_dict import BatchedDataDict

ROW_COLUMNS = ("input_ids", "input_lengths", "generation_logprobs", "weight_versions", "token_mask")
"""The columns that the checksum of a row covers."""


def row_checksums(rows: BatchedDataDict) -> list[int]:
    """Returns the xxh3-64 of each row's real tokens: their ids, log-probs, versions and masks. Padding does not
    count."""
    columns = [rows[name].contiguous().numpy() for name in ROW_COLUMNS if name != "input_lengths"]
    lengths: list[int] = rows["input_lengths"].tolist()
    return [_checksum([column[row, :length] for column in columns]) for row, length in enumerate(lengths)]


def _checksum(parts: list[np.ndarray[Any, Any]]) -> int:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(np.ascontiguousarray(part).data)
    return digest.intdigest()
