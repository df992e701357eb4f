"""Keeps the weights of every version and the batch of every step, for the fifth check of `asyncrl audit`.

    audit/weights/<version>/             the float32 weights, as the ranks save them in a checkpoint
    audit/batches/<version>.msgpack      the lease of the step that trained this version
    audit/batches/<version>.safetensors  its rows in the order of the lease, with the columns that the learner added

It takes the size of the model for every step. So it is for small models, and off by default (`audit.keep_weights`).
"""

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from pathlib import Path

import msgspec
from safetensors.torch import load, save

from asyncrl.atomic_write import write_atomically
from asyncrl.buffer.records import Lease
from asyncrl.common.version import Version
from asyncrl.complete_directory import COMPLETE
from asyncrl.data.batched_data_dict import BatchedDataDict
from asyncrl.data.specs import GENERATED_FIELDS
from asyncrl.learner.audit_records import AUDIT
from asyncrl.run_files import FILE_BYTES, names, read

logger = logging.getLogger(__name__)

ADDED_COLUMNS = ("advantages", "sample_mask")
"""Columns that the learner adds to the rows of every step."""
PREV_LOGPROBS = "prev_logprobs"
"""Column that the ranks add if the objective reads it."""


class KeptSteps:
    """The kept weights and batches in a run's directory."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._weights = run / AUDIT / "weights"
        self._batches = run / AUDIT / "batches"

    def weights_path(self, version: Version) -> Path:
        """Returns the folder with the weights of a version, which the ranks save."""
        return self._weights / str(version)

    def versions(self) -> list[Version]:
        """Returns the versions whose weights are kept, in order."""
        found = [name for name in names(self._weights, inside=self._run) if (self._weights / name / COMPLETE).exists()]
        return sorted(map(Version.parse, found))

    async def keep_batch(self, lease: Lease, reading: Awaitable[BatchedDataDict]) -> None:
        """Writes the lease of a step, and its rows, which `reading` gets.

        Rows that cannot be read are logged and not raised. The audit then finds that the batch is missing.
        """
        try:
            rows = await reading
        except Exception as error:
            logger.error(
                "the batch of step %d is not kept for the audit, because its rows cannot be read: %s: %s",
                lease.step,
                type(error).__name__,
                error,
            )
        else:
            await asyncio.to_thread(self.write_batch, lease, rows)

    def write_batch(self, lease: Lease, rows: BatchedDataDict) -> None:
        """Writes the lease and the rows of a step."""
        self._batches.mkdir(parents=True, exist_ok=True)
        lease_path, rows_path = self._paths(Version(lease.incarnation, lease.step))
        write_atomically(rows_path, save({name: column.contiguous() for name, column in rows.items()}))
        write_atomically(lease_path, msgspec.msgpack.encode(lease))

    def batch(self, version: Version) -> tuple[Lease, BatchedDataDict] | None:
        """Returns the lease and the rows of the step that trained `version`; None if they were not kept.

        Raises OSError, MsgspecError or SafetensorError if they cannot be read, and FileRefused, which is an OSError.
        """
        lease_path, rows_path = self._paths(version)
        if not (lease_path.exists() and rows_path.exists()):
            return None
        lease = msgspec.msgpack.decode(read(lease_path, inside=self._run, most=FILE_BYTES), type=Lease)
        return lease, BatchedDataDict(load(read(rows_path, inside=self._run, most=FILE_BYTES)))

    def _paths(self, version: Version) -> tuple[Path, Path]:
        return self._batches / f"{version}.msgpack", self._batches / f"{version}.safetensors"


def kept_columns(*, with_logprobs: bool, extra: Sequence[str]) -> Sequence[str]:
    """Returns the columns of a kept batch. `extra` are those that only some runs have (`Config.extra_columns`)."""
    return [*GENERATED_FIELDS, *extra, *ADDED_COLUMNS, *([PREV_LOGPROBS] if with_logprobs else [])]
