"""Checksums of rows and prompts, by which learner and audit recognise the rows that a step trained."""

from typing import Any

import msgspec
import numpy as np
import xxhash

from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import GENERATED_FIELDS, extra_fields
from asyncrl.data.tokenizer import Input


def row_checksums(rows: BatchedDataDict) -> list[int]:
    """Returns the xxh3-64 of each row's real tokens: their ids, log-probs, versions and masks, and the columns
    in `EXTRA_FIELDS` that the rows have. Padding does not count."""
    names = [name for name in (*GENERATED_FIELDS, *extra_fields(rows)) if name != "input_lengths"]
    columns = [rows[name].contiguous().numpy() for name in names]
    lengths: list[int] = rows["input_lengths"].tolist()
    return [_checksum([column[row, :length] for column in columns]) for row, length in enumerate(lengths)]


def prompt_checksum(prompt: Input) -> int:
    """Returns the xxh3-64 of a prompt: of its text, or of its messages."""
    return xxhash.xxh3_64_intdigest(msgspec.json.encode(prompt, order="deterministic"))


def _checksum(parts: list[np.ndarray[Any, Any]]) -> int:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(np.ascontiguousarray(part).data)
    return digest.intdigest()
