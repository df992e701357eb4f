"""Writes and restores the checkpoint of a whole run: policy, critic, buffer and rows, in one directory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from asyncrl.checkpoints import directory
from asyncrl.checkpoints.directory import HF, RunManifest
from asyncrl.common.version import Lineage
from asyncrl.config.load import shared_config
from asyncrl.config.schema import Config
from asyncrl.coordinator.status import RunSnapshot
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import GENERATED_FIELDS
from asyncrl.data_plane.rows import TRAIN_PARTITION, Rows
from asyncrl.data_plane.sample_ids import samples_of
from asyncrl.errors import CheckpointDamaged
from asyncrl.policy.tq_policy import TQPolicy
from asyncrl.run_files import FILE_BYTES, UNREADABLE, names, read
from asyncrl.value.tq_value import TQValue

POLICY, CRITIC, BUFFER, ROWS = "policy", "critic", "buffer.msgpack", "rows"


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """The parts of a run that a checkpoint has. `lineage` has the incarnations of the run, with that of this learner,
    and `nonce` identifies the run."""

    config: Config
    policy: TQPolicy
    critic: TQValue | None
    rows: Rows
    lineage: Lineage
    nonce: str
    packages: dict[str, str]

    def check_folder(self, folder: Path) -> None:
        """Raises CheckpointError unless this process and all ranks can write to `folder` and share it."""
        self.policy.check_folder(folder)
        if self.critic is not None:
            self.critic.check_folder(folder)

    def stage(self) -> None:
        """Copies weights and optimizers on the ranks, which train nothing meanwhile. Raises CheckpointError if they
        cannot be copied."""
        self.policy.stage_checkpoint()
        if self.critic is not None:
            self.critic.stage_checkpoint()

    def write(self, path: Path, snapshot: RunSnapshot, *, hf: bool) -> None:
        """Writes the checkpoint at `path`: `snapshot`, and the copies of weights and optimizers that the last `stage`
        made. Both must be of the same moment. With `hf`, also the weights as vLLM and transformers load them.

        The ranks may train meanwhile. The rows of the snapshot's ready groups must stay until the call ends.
        Raises CheckpointError if a part cannot be written, and RowsLost if rows of a ready group are lost. Then there
        is no new checkpoint.
        """
        manifest = RunManifest(
            nonce=self.nonce,
            version=snapshot.version,
            lineage=self.lineage,
            settings=dict(shared_config(self.config)),
            packages=self.packages,
            most_branches=self.config.most_branches,
        )

        def fill(folder: Path) -> None:
            ready = [group.ticket.key for group in snapshot.buffer.open if group.meta is not None]
            size = self.config.learner.group_size
            columns = (*GENERATED_FIELDS, *self.config.extra_columns)
            save_rows(self.rows, ready, folder / ROWS, group_size=size, columns=columns)
            (folder / BUFFER).write_bytes(msgspec.msgpack.encode(snapshot))
            self.policy.write_checkpoint(*parts_of(folder / POLICY))
            if self.critic is not None:
                self.critic.write_checkpoint(*parts_of(folder / CRITIC))
            if hf:
                self.policy.write_hf(parts_of(folder / POLICY)[0], folder / HF)

        directory.write(path, manifest, fill=fill)

    def load(self, path: Path) -> None:
        """Loads weights, optimizers and rows of the checkpoint at `path`. The ranks must have started."""
        learner = self.config.learner
        self.policy.prepare_step(learner.groups_per_step * learner.group_size, learner.group_size)
        self.policy.load_checkpoint(*parts_of(path / POLICY))
        if self.critic is not None:
            self.critic.load_checkpoint(*parts_of(path / CRITIC))
        load_rows(self.rows, path / ROWS)

    def load_weights(self, path: Path, *, critic: bool) -> None:
        """Loads the weights of the policy from the checkpoint at `path`, which may be of another run. `critic`: the
        checkpoint has a critic, whose weights are loaded if this run has one too. The optimizers stay new."""
        self.policy.load_checkpoint(parts_of(path / POLICY)[0])
        if self.critic is not None and critic:
            self.critic.load_checkpoint(parts_of(path / CRITIC)[0])


def read_snapshot(path: Path) -> RunSnapshot:
    """Returns the snapshot in the checkpoint at `path`. Raises CheckpointDamaged if it cannot be read."""
    try:
        return msgspec.msgpack.decode(read(path / BUFFER, most=FILE_BYTES), type=RunSnapshot)
    except UNREADABLE as error:
        raise CheckpointDamaged(f"{path / BUFFER} cannot be read ({error})") from error


def parts_of(folder: Path) -> tuple[Path, Path]:
    """Returns the directories of a model's weights and of its optimizer in a checkpoint."""
    return folder / "weights", folder / "optimizer"


# The rows of ready groups in a checkpoint: one safetensors file for each group, named after the group's key.
#
# The tensors of a file are the columns of the group's samples, [G], [G, S] or [G, S, K], in the order of the samples (G
# samples, S tokens, K entries for a token). Only one group is in memory at a time.

_SUFFIX = ".safetensors"


def save_rows(rows: Rows, keys: Iterable[str], folder: Path, *, group_size: int, columns: Sequence[str]) -> None:
    """Writes these columns of the rows of the groups `keys` into `folder`. Raises the errors of the data plane's
    client, e.g. RowsLost."""
    folder.mkdir()
    for key in keys:
        _save_group(rows, folder / f"{key}{_SUFFIX}", group_size=group_size, columns=columns)


def _save_group(rows: Rows, path: Path, *, group_size: int, columns: Sequence[str]) -> None:
    ids = samples_of(path.stem, count=group_size)
    group = rows.patiently(lambda client: client.get_samples(ids, TRAIN_PARTITION, columns))
    save_file({name: group[name] for name in columns}, path)


def load_rows(rows: Rows, folder: Path) -> None:
    """Puts the rows of all groups in `folder` back on the data plane, under the ids that they had. Raises
    CheckpointDamaged for a file that cannot be read."""
    for name in names(folder, inside=folder.parent):
        if name.endswith(_SUFFIX):
            _load_group(rows, folder / name)


def _load_group(rows: Rows, path: Path) -> None:
    try:
        group = BatchedDataDict(load_file(path))
    except SafetensorError as error:
        raise CheckpointDamaged(f"{path} cannot be read ({error})") from error
    ids = samples_of(path.stem, count=group.size)
    rows.patiently(lambda client: client.put_samples(ids, TRAIN_PARTITION, fields=group))
