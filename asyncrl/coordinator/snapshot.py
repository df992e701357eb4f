"""The coordinator's part of a checkpoint, and what a learner that restores one tells the coordinator."""

import msgspec

from asyncrl.buffer.snapshot import BufferSnapshot
from asyncrl.common.lineage import Lineage
from asyncrl.common.version import Version
from asyncrl.data.prompts import PromptCursor


class RunSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The buffer and the position in the order of the prompts, at one moment."""

    buffer: BufferSnapshot
    prompts: PromptCursor

    @property
    def version(self) -> Version:
        """The version of the learner at the snapshot."""
        return self.buffer.version


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """What a learner restored: the snapshot of its checkpoint, and the lineage whose live incarnation it is.

    The lineage has all incarnations of the run, also those that the checkpoint does not know.
    """

    snapshot: RunSnapshot
    lineage: Lineage
