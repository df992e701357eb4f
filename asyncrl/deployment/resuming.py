"""Continues a run in its directory, from its newest complete checkpoint.

The records of steps after the checkpoint are taken out, because their weights are lost and the steps will be trained
again. They stay in `lost-steps.jsonl` and `lost-evals.jsonl`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from asyncrl.atomic_write import write_atomically
from asyncrl.checkpoints.directory import CHECKPOINTS, RunManifest, newest
from asyncrl.common.lineage import Lineage
from asyncrl.complete_directory import COMPLETE, discard
from asyncrl.config.load import shared_config
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.learner.records import EvalRecord, RunInfo, StepRecord, read_lines

LINEAGE = "lineage.json"
"""File of the run's incarnations in its directory."""
FIXED = ("learner.groups_per_step", "learner.group_size", "run.seed", "data.shuffle")
"""Settings that a resumed run keeps. The prompts and the shapes of the model must be equal too, which is checked where
they are read."""
Record = TypeVar("Record", StepRecord, EvalRecord)


class Resumed(NamedTuple):
    """The checkpoint from which a run continues, and the run's description before."""

    path: Path
    manifest: RunManifest
    info: RunInfo

    @property
    def saved_at(self) -> float:
        """When the checkpoint was complete, Unix time."""
        return (self.path / COMPLETE).stat().st_mtime

    @property
    def step(self) -> int:
        """The number of steps that are trained."""
        return self.manifest.version.step


def resumable(directory: Path, config: Config) -> Resumed | None:
    """Returns the checkpoint from which the run in `directory` can be continued.

    Returns None if the run has finished, or has no complete and undamaged checkpoint. Raises ConfigError, which names
    the key and both values, if `config` changes a setting that must stay.
    """
    try:
        info = msgspec.json.decode((directory / "run.json").read_bytes(), type=RunInfo)
    except (OSError, msgspec.MsgspecError):
        return None
    if info.state == "finished" or (found := newest(directory / CHECKPOINTS)) is None:
        return None
    path, manifest = found
    now = shared_config(config)
    for key in FIXED:
        if manifest.settings.get(key) != now.get(key):
            raise ConfigError(
                f"{key} = {now.get(key)!r}, but the run in {directory} was started with "
                f"{manifest.settings.get(key)!r}, and a run keeps this value when it is resumed: use the old value, or "
                "begin a new run with --fresh or another run.name",
                key=key,
            )
    return Resumed(path, manifest, info)


def begin_incarnation(directory: Path, resumed: Resumed) -> Lineage:
    """Begins the next incarnation of the run in `directory`. Returns its lineage, which it writes to `lineage.json`."""
    path = directory / LINEAGE
    known = msgspec.json.decode(path.read_bytes(), type=Lineage) if path.exists() else resumed.manifest.lineage
    lineage = known.child(resumed.manifest.version)
    # First of all: whatever ends this process, the number of the incarnation is never used again.
    write_atomically(path, msgspec.json.encode(lineage))
    _take_out(directory, "steps", StepRecord, lost=lambda record: record.step >= resumed.step)
    _take_out(directory, "evals", EvalRecord, lost=lambda record: record.version > resumed.step)
    for samples in (directory / "samples").glob("step-*.jsonl"):
        if int(samples.stem.removeprefix("step-")) >= resumed.step:
            samples.unlink()
    for folder in (directory / CHECKPOINTS).glob("step-*"):
        # a save that was killed, or the weights that a failed run saved at its end
        if folder.is_dir() and (folder.suffix == ".tmp" or not (folder / COMPLETE).exists()):
            discard(folder)
    return lineage


def _take_out(directory: Path, name: str, kind: type[Record], *, lost: Callable[[Record], bool]) -> None:
    """Moves the lost records of `<name>.jsonl` to `lost-<name>.jsonl`."""
    records = read_lines(directory / f"{name}.jsonl", kind)
    gone = [record for record in records if lost(record)]
    if not gone:
        return
    with (directory / f"lost-{name}.jsonl").open("ab") as file:
        file.writelines(msgspec.json.encode(record) + b"\n" for record in gone)
    kept = b"".join(msgspec.json.encode(record) + b"\n" for record in records if not lost(record))
    write_atomically(directory / f"{name}.jsonl", kept)
