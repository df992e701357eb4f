"""The rows of ready groups in a checkpoint: one safetensors file for each group, named after the group's key.

The tensors of a file are the columns of the group's samples, [G], [G, S] or [G, S, K], in the order of the samples.
Only one group is in memory at a time.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data_plane.clients import TRAIN_PARTITION
from asyncrl.data_plane.codec import PAD_VALUES
from asyncrl.data_plane.interfaces import DataPlaneClient
from asyncrl.data_plane.sample_ids import samples_of
from asyncrl.errors import CheckpointDamaged
from asyncrl.run_files import names

_SUFFIX = ".safetensors"


def save_rows(
    client: DataPlaneClient, keys: Iterable[str], folder: Path, *, group_size: int, columns: Sequence[str]
) -> None:
    """Writes these columns of the rows of the groups `keys` into `folder`. Raises the errors of the client, e.g.
    RowsLost."""
    folder.mkdir()
    for key in keys:
        rows = client.get_samples(
            samples_of(key, count=group_size), TRAIN_PARTITION, columns, pad_value_dict=PAD_VALUES
        )
        save_file({name: rows[name] for name in columns}, folder / f"{key}{_SUFFIX}")


def load_rows(client: DataPlaneClient, folder: Path) -> None:
    """Puts the rows of all groups in `folder` back under their names. Raises CheckpointDamaged for a file that is not
    one of `save_rows`."""
    for name in names(folder, inside=folder.parent):
        if not name.endswith(_SUFFIX):
            continue
        path = folder / name
        try:
            rows = BatchedDataDict(load_file(path))
        except SafetensorError as error:
            raise CheckpointDamaged(f"{path} cannot be read ({error})") from error
        client.put_samples(samples_of(path.stem, count=rows.size), TRAIN_PARTITION, fields=rows)
