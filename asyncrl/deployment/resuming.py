"""Continues a run in its directory, from its newest complete checkpoint or from an earlier one.

The steps after the checkpoint are lost: they will be trained again. Their files are set aside, so that no reader takes
them for those of the run. `<n>` is the incarnation that begins:

    lost-steps.jsonl  lost-evals.jsonl    their records
    samples/lost-<n>/step-N.jsonl         their samples
    checkpoints/lost-<n>/step-N/          their checkpoints, also damaged ones
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from asyncrl.atomic_write import write_atomically
from asyncrl.checkpoints.directory import (
    CHECKPOINTS,
    RunManifest,
    complete_steps,
    folder_of,
    newest,
    put_back,
    verified,
)
from asyncrl.common.version import Lineage
from asyncrl.complete_directory import COMPLETE, discard
from asyncrl.config.import_path import ADAMW
from asyncrl.config.load import flat_config, shared_config
from asyncrl.config.schema import Config, OptimizerSection
from asyncrl.errors import CheckpointDamaged, CheckpointError, CheckpointOfOtherFormat, ConfigError, RunError
from asyncrl.learner.records import EvalRecord, RunInfo, StepRecord, known_info, read_info, read_lines
from asyncrl.ranks.schedule import learning_rate
from asyncrl.run_files import FILE_BYTES, UNREADABLE, read

SAMPLES = "samples"
"""Folder of the samples in a run's directory."""
LINEAGE = "lineage.json"
"""File with the run's incarnations, in the run's directory."""
FIXED = (
    "learner.groups_per_step",
    "learner.group_size",
    "generator.top_k",
    "generator.logprobs",
    "run.seed",
    "data.shuffle",
    "model.lora.rank",
    "model.lora.alpha",
    "model.lora.target_modules",
)
"""Settings that a resumed run keeps. The prompts and the shapes of the model must be equal too. This is checked later,
when they are read."""
_SCHEDULE = ("learning_rate", "schedule", "warmup_steps", "final_fraction")
"""Settings of an optimizer that decide the learning rate of a step, besides `learner.total_steps`."""
_STEP = re.compile(r"step-(\d+)")
_FILES_OF_STEP = re.compile(r"step-(\d+)(\.replaced|\.jsonl)?")
Record = TypeVar("Record", StepRecord, EvalRecord)


class Resumed(NamedTuple):
    """The checkpoint from which a run continues, and the content of run.json before the run is resumed."""

    path: Path
    manifest: RunManifest
    info: RunInfo

    @property
    def saved_at(self) -> float:
        """When the checkpoint was complete, Unix time."""
        return (self.path / COMPLETE).stat().st_mtime

    @property
    def step(self) -> int:
        """The number of steps that the run had trained when the checkpoint was saved."""
        return self.manifest.version.step


Choice = Callable[[Path, Config], Resumed | None]
"""Chooses the checkpoint from which the ended run in a directory continues. If it returns None, the directory is moved
aside, and a new run begins."""


def unfinished_run(directory: Path, config: Config) -> Resumed | None:
    """Chooses the newest checkpoint of a run that has not finished. For `asyncrl up`.

    Returns None if the run has finished, or has no complete checkpoint. Raises CheckpointDamaged if it has complete
    checkpoints, but none of them can be used, CheckpointOfOtherFormat if another version wrote them, CheckpointError if
    the newest one is of another run, RunError if it is a fork without a checkpoint, and ConfigError, which names the
    key and both values, if `config` changes a setting that must stay.
    """
    checkpoints = directory / CHECKPOINTS
    put_back(checkpoints)
    info = known_info(directory)
    if info is None or info.state == "finished":
        return None
    if (found := _newest(directory)) is None:
        if steps := complete_steps(checkpoints):
            raise CheckpointDamaged(
                f"the run in {directory} has not finished, and none of its checkpoints can be used "
                f"({', '.join(folder_of(checkpoints, step).name for step in steps)}; the log has the reasons). Begin a "
                "new run with --fresh, which moves this directory aside, or set another run.name"
            )
        if (fork := info.forked_from) is not None:
            raise RunError(
                f"the run in {directory} began with the weights of {fork}, and ended before its first checkpoint, so "
                f"it cannot be resumed, and a new run would begin with other weights: give asyncrl fork again, with "
                f"--at step-{fork.version.step}, or begin a run with the model at model.path by --fresh"
            )
        return None
    return _checked(Resumed(*found, info), directory, config)


def no_checkpoint(directory: Path, config: Config) -> None:
    """Chooses no checkpoint, so that a new run begins. For `--fresh`."""


def chosen_checkpoint(directory: Path, config: Config, *, step: int | None) -> Resumed:
    """Chooses the checkpoint after `step` steps, or the newest one if `step` is None. The run may have finished. For
    `asyncrl resume`.

    Raises ConfigError if there is no such checkpoint, if it is of the last step or later, or if `config` changes a
    setting that must stay. Raises the other errors of `found_checkpoint`, CheckpointError if the checkpoint is of
    another run, and RunError if `run.json` cannot be read.
    """
    put_back(directory / CHECKPOINTS)
    info = read_info(directory)
    resumed = _checked(Resumed(*found_checkpoint(directory, step), info), directory, config)
    if resumed.step >= config.learner.total_steps:
        raise ConfigError(
            f"the checkpoint {resumed.path} is of step {resumed.step}, and learner.total_steps = "
            f"{config.learner.total_steps}, so there is nothing to train: raise learner.total_steps, or name an "
            f"earlier checkpoint with --at ({_choices(directory)})"
        )
    return resumed


def rate_changes(resumed: Resumed, config: Config) -> list[str]:
    """Returns a line for each pool whose learning rate jumps at the resumed step, because settings have changed.

    The rate is a function of the step, so e.g. a larger `learner.total_steps` changes the rate of every step. The line
    says with which setting the run continues at the old rate.
    """
    before = resumed.manifest.settings
    now = flat_config(config)
    lines = []
    for pool, section in config.rank_pools().items():
        prefix = f"{pool}.optimizer."
        had = {name: before[f"{prefix}{name}"] for name in _SCHEDULE if f"{prefix}{name}" in before}
        if len(had) < len(_SCHEDULE):  # the run had no critic before
            continue
        keys = ["learner.total_steps", *(f"{prefix}{name}" for name in _SCHEDULE)]
        keys += ["critic.warmup_steps"] * (pool == "learner" and config.critic is not None)
        old_section = section.optimizer.model_copy(update=had)
        old = _next_rate(pool, old_section, before, step=resumed.step)
        new = _next_rate(pool, section.optimizer, now, step=resumed.step)
        if math.isclose(old, new, rel_tol=1e-6):
            continue
        why = ", ".join(f"{key} was {before.get(key)} and is {now[key]}" for key in keys if before.get(key) != now[key])
        keep = section.optimizer.learning_rate * old / new if new else 0.0
        advice = f"; {prefix}learning_rate={keep:.4g} continues from {old:.4g}" if keep else ""
        lines.append(
            f"the learning rate of the {pool} goes from {old:.4g} to {new:.4g} at step {resumed.step + 1}, because "
            f"{why}{advice}"
        )
    return lines


def _next_rate(pool: str, section: OptimizerSection, settings: Mapping[str, object], *, step: int) -> float:
    """Returns the learning rate of a pool at `step`. The policy does not train in the critic's warm-up steps."""
    waited = settings.get("critic.warmup_steps") if pool == "learner" else 0
    trained = max(0, step - (waited if isinstance(waited, int) else 0))
    total_steps = settings["learner.total_steps"]
    assert isinstance(total_steps, int)
    return learning_rate(section, step=trained, total_steps=total_steps)


def step_of(name: str) -> int:
    """Returns the number of steps of the checkpoint called `name`. Raises ConfigError for a name that is
    not `step-` and a number.

    >>> step_of("step-140")
    140
    """
    if (match := _STEP.fullmatch(name)) is None:
        raise ConfigError(f"--at {name}: this is not the name of a checkpoint; write step- and a number, e.g. step-140")
    return int(match[1])


def begin_incarnation(directory: Path, resumed: Resumed) -> Lineage:
    """Begins the next incarnation of the run in `directory`. Returns its lineage, which it writes to `lineage.json`."""
    lineage = (known_lineage(directory) or resumed.manifest.lineage).child(resumed.manifest.version)
    # This is written first. If the process is killed afterwards, the next start uses another number for its
    # incarnation, and ignores the checkpoints of later steps.
    write_atomically(directory / LINEAGE, msgspec.json.encode(lineage))
    checkpoints = directory / CHECKPOINTS
    for folder in checkpoints.glob("step-*"):
        # such a folder is of a save that was killed, or has only the weights that a failed run saved at its end
        if folder.is_dir() and (folder.suffix == ".tmp" or not (folder / COMPLETE).exists()):
            discard(folder)
    # The checkpoints are moved before the records, and the newer ones before the older ones. If this process is killed
    # in between, each checkpoint that is still in its place has its records, and the next start continues from one of
    # them. Checkpoint N is the state after N steps, so the record and the samples of step N are lost, and checkpoint N
    # is not.
    _set_aside(checkpoints, lost_folder(checkpoints, lineage), lost=lambda step: step > resumed.step)
    _set_aside(directory / SAMPLES, lost_folder(directory / SAMPLES, lineage), lost=lambda step: step >= resumed.step)
    _take_out(directory, "steps", StepRecord, lost=lambda record: record.step >= resumed.step)
    _take_out(directory, "evals", EvalRecord, lost=lambda record: record.step > resumed.step)
    return lineage


def lost_folder(folder: Path, lineage: Lineage) -> Path:
    """Returns the folder for entries of `folder` that belong to lost steps. They are moved there when the live
    incarnation of `lineage` begins."""
    return folder / f"lost-{lineage.incarnation}"


def last_set_aside(folder: Path) -> int:
    """Returns the newest incarnation at whose start entries of `folder` were set aside (`lost_folder`); 0 if there is
    none."""
    found = (path.name.removeprefix("lost-") for path in folder.glob("lost-*"))
    return max((int(number) for number in found if number.isdecimal()), default=0)


def known_lineage(directory: Path) -> Lineage | None:
    """Returns the incarnations of the run; None if it was never resumed. Raises RunError if their file cannot be
    read."""
    path = directory / LINEAGE
    try:
        return msgspec.json.decode(read(path), type=Lineage)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise RunError(f"{path} cannot be read ({error}): it has the incarnations of the run; put it back") from error


def _newest(directory: Path) -> tuple[Path, RunManifest] | None:
    """Returns the newest undamaged checkpoint of the run, with its manifest; None if there is none.

    A start that went back to an earlier checkpoint may have been killed before it had set the later ones aside. These
    later checkpoints do not count.
    """
    return newest(directory / CHECKPOINTS, lineage=known_lineage(directory))


def found_checkpoint(directory: Path, step: int | None) -> tuple[Path, RunManifest]:
    """Returns the checkpoint after `step` steps, or the newest undamaged one if `step` is None, with its manifest.

    Raises ConfigError if there is none, CheckpointDamaged if the files of the one after `step` steps differ from its
    manifest, and CheckpointOfOtherFormat if another version of asyncrl wrote it.
    """
    checkpoints = directory / CHECKPOINTS
    if step is None:
        if (found := _newest(directory)) is None:
            raise ConfigError(
                f"{checkpoints} has no complete and undamaged checkpoint: wait for the first one if the run trains now "
                "(checkpoint.every_steps), else start it again with asyncrl up"
            )
        return found
    path = folder_of(checkpoints, step)
    if step not in complete_steps(checkpoints):
        raise ConfigError(
            f"--at {path.name}: {checkpoints} has no complete checkpoint of this step; {_choices(directory)}"
        )
    try:
        return path, verified(path)
    except CheckpointOfOtherFormat:
        raise
    except CheckpointError as error:
        raise CheckpointDamaged(
            f"--at {path.name}: the checkpoint cannot be used: {error}; name another one with --at; "
            f"{_choices(directory)}"
        ) from error


def _choices(directory: Path) -> str:
    """Returns a sentence with the run's complete checkpoints."""
    steps = complete_steps(directory / CHECKPOINTS)
    return f"there are {', '.join(f'step-{step}' for step in steps)}" if steps else "there are none"


def _checked(resumed: Resumed, directory: Path, config: Config) -> Resumed:
    """Returns `resumed`. Raises CheckpointError if the checkpoint is of another run, and ConfigError if `config`
    changes a setting that must stay."""
    if resumed.manifest.nonce != resumed.info.nonce:
        raise CheckpointError(
            f"the checkpoint {resumed.path} is of a run with the nonce {resumed.manifest.nonce!r}, but the run in "
            f"{directory} has the nonce {resumed.info.nonce!r} (run.json): move the checkpoint back into the directory "
            "of its run. To begin another run with its weights, set model.path to its folder hf/"
        )
    now = shared_config(config)
    for key in FIXED:
        if resumed.manifest.settings.get(key) != now.get(key):
            raise ConfigError(
                f"{key} = {now.get(key)!r}, but the run in {directory} was started with "
                f"{resumed.manifest.settings.get(key)!r}, and a run keeps this value when it is resumed: use the old "
                "value, or begin a new run with --fresh or another run.name"
            )
    for pool in config.rank_pools():
        key = f"{pool}.optimizer.name"
        settings = resumed.manifest.settings
        # a checkpoint without the key is of a release that had AdamW only, or of a run that had no critic
        had = settings.get(key, ADAMW if f"{pool}.optimizer.learning_rate" in settings else None)
        if had not in (None, now[key]):
            raise ConfigError(
                f"{key} = {now[key]}, but the checkpoint {resumed.path} has the state of {had}, and another optimizer "
                "cannot go on from it: use the old one, or begin a run with these weights by asyncrl fork"
            )
    before, branches = resumed.manifest.most_branches, config.most_branches
    if before != branches:
        raise ConfigError(
            f"environment.max_branches = {branches}, but the rows of the checkpoint {resumed.path} have up to {before} "
            "branches: set it to the old value, or begin a new run with --fresh or another run.name"
        )
    return resumed


def _set_aside(folder: Path, aside: Path, *, lost: Callable[[int], bool]) -> None:
    """Moves the entries of lost steps from `folder` to `aside`, that of the last step first."""
    for _, path in sorted(_of_steps(folder, lost), reverse=True):
        aside.mkdir(exist_ok=True)
        path.rename(aside / path.name)


def _of_steps(folder: Path, wanted: Callable[[int], bool]) -> Iterator[tuple[int, Path]]:
    """Yields the entries of wanted steps in `folder`, each with its step."""
    for path in folder.glob("step-*"):
        if (match := _FILES_OF_STEP.fullmatch(path.name)) is not None and wanted(int(match[1])):
            yield int(match[1]), path


def _take_out(directory: Path, name: str, kind: type[Record], *, lost: Callable[[Record], bool]) -> None:
    """Moves the lost records of `<name>.jsonl` to `lost-<name>.jsonl`. Removes an incomplete record at the end of the
    file, which a crash of the machine may leave: the next record would be appended to it."""
    path, aside = directory / f"{name}.jsonl", directory / f"lost-{name}.jsonl"
    kept: list[bytes] = []
    gone: list[bytes] = []
    # The lines stay as they were written, because the audit compares them with checksums.
    for line, record in zip(_lines(path)[0], read_lines(path, kind), strict=True):
        (gone if lost(record) else kept).append(line)
    # A start that was killed between the two writes has left records in both files. Two records of a run are never
    # equal, because each has its time.
    here = {*kept, *gone}
    already = _lines(aside)[0]
    earlier: list[bytes] = [line for line in already if line not in here]
    if gone or len(earlier) < len(already):
        write_atomically(aside, _joined([*earlier, *gone]))
    if gone or _lines(path)[1]:
        write_atomically(path, _joined(kept))


def _lines(path: Path) -> tuple[list[bytes], bytes]:
    """Returns the complete lines of a file, and the text after its last newline; both empty if there is no file."""
    try:
        whole, newline, torn = read(path, most=FILE_BYTES).rpartition(b"\n")
    except FileNotFoundError:
        return [], b""
    return (whole.split(newline) if newline else []), torn


def _joined(lines: Iterable[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)
