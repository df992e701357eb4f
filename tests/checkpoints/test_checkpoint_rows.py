"""Rows of groups go into a checkpoint and come back as they were."""

from pathlib import Path

import numpy as np
import pytest
import torch
from memory_client import MemoryClient

from asyncrl.checkpoints.run import load_rows, save_rows
from asyncrl.common.version import Version
from asyncrl.config.schema import Config
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import GENERATED_FIELDS, SUPPORT
from asyncrl.data_plane.codec import PAD_VALUES
from asyncrl.data_plane.rows import TRAIN_PARTITION, Rows
from asyncrl.data_plane.sample_ids import samples_of
from asyncrl.errors import CheckpointDamaged
from asyncrl.generation.episodes import episode_rows, single_turn
from asyncrl.generation.interfaces import Completion
from asyncrl.policy.tq_policy import STEP_FIELDS


def client() -> MemoryClient:
    made = MemoryClient()
    made.register_partition(TRAIN_PARTITION, STEP_FIELDS, 8, ["train"], 2)
    return made


def completion(*tokens: int, top_k: int | None = None) -> Completion:
    return Completion(
        token_ids=list(tokens),
        logprobs=[-0.1 * token for token in tokens],
        versions=[Version(1, 3)] * len(tokens),
        text="",
        truncated=False,
        wide={} if top_k is None else {SUPPORT: np.tile(np.array(tokens, dtype=np.int32)[:, None], (1, top_k))},
    )


def rows_of(prompt: list[int], *completions: Completion) -> BatchedDataDict:
    return episode_rows([single_turn(prompt, each) for each in completions])


@pytest.mark.parametrize("top_k", [None, 3])
def test_what_was_saved_comes_back_exactly_and_nothing_else(top_k: int | None, tmp_path: Path) -> None:
    columns = (*GENERATED_FIELDS, *([] if top_k is None else [SUPPORT]))
    before, after = client(), client()
    groups = {
        "7.0": rows_of([5, 6], completion(1, 2, 3, top_k=top_k), completion(4, top_k=top_k)),
        "8.1": rows_of([9], completion(top_k=top_k), completion(2, 2, top_k=top_k)),
        "9.0": rows_of([9], completion(1, top_k=top_k), completion(2, top_k=top_k)),
    }
    for key, rows in groups.items():
        before.put_samples(samples_of(key, count=2), TRAIN_PARTITION, fields=rows)
    save_rows(Rows(Config(), client=before), ["7.0", "8.1"], tmp_path / "rows", group_size=2, columns=columns)
    load_rows(Rows(Config(), client=after), tmp_path / "rows")
    assert after.rows_outstanding()[TRAIN_PARTITION] == 4
    for key in ("7.0", "8.1"):
        old, new = (
            each.get_samples(samples_of(key, count=2), TRAIN_PARTITION, columns, pad_value_dict=PAD_VALUES)
            for each in (before, after)
        )
        for name in columns:
            assert old[name].dtype == new[name].dtype
            assert torch.equal(old[name], new[name]), name
    assert set(groups["7.0"]) == set(columns), "all columns of a generator are saved"


def test_a_file_that_is_no_group_is_named(tmp_path: Path) -> None:
    (tmp_path / "7.0.safetensors").write_bytes(b"not rows")
    with pytest.raises(CheckpointDamaged, match=r"7\.0\.safetensors cannot be read"):
        load_rows(Rows(Config(), client=client()), tmp_path)
