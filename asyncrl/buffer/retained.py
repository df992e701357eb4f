"""Retained groups: groups that have ended, but that a learner which goes back to a checkpoint can train again.

Their rows stay in the data plane. A learner can go back to the newest complete checkpoint, and to the newest snapshot,
whose checkpoint may still be written and may read the rows.
"""

from asyncrl.buffer.records import GroupMeta
from asyncrl.buffer.slots import Slot


class Retained:
    """The retained groups, by key, each with the step that ended it."""

    def __init__(self) -> None:
        self._complete: int | None = None  # the step of the newest complete checkpoint
        self._snapshot: int | None = None  # the step of the newest snapshot
        self._slots: dict[str, tuple[Slot, int]] = {}

    def slots(self) -> list[Slot]:
        """Returns the slots that the retained groups had."""
        return [slot for slot, _ in self._slots.values()]

    def end(self, slot: Slot, *, step: int) -> bool:
        """Retains a group that `step` has ended, if a checkpoint needs it. Returns False if none needs it."""
        if self._is_needed(slot, step):
            self._slots[slot.ticket.key] = slot, step
            return True
        return False

    def splits(self, meta: GroupMeta) -> bool:
        """Returns whether a learner that goes back to a checkpoint loses some tokens of a group, and not all."""
        return any(at is not None and meta.oldest <= at < meta.newest for at in (self._complete, self._snapshot))

    def snapshot_taken(self, *, step: int) -> None:
        """From now on, groups are retained that a learner would need that goes back to `step`."""
        self._snapshot = step

    def restored(self, *, step: int) -> None:
        """Records that the buffer continues from the checkpoint of `step`, which is complete."""
        self._complete = self._snapshot = step

    def release(self, *, complete: int | None) -> tuple[str, ...]:
        """Forgets retained groups that are not needed, now that the newest complete checkpoint is that of step
        `complete`; with None, all. Returns their keys; their rows may be cleared."""
        self._complete = complete
        if complete is None:
            self._snapshot = None
        over = tuple(key for key, (slot, step) in self._slots.items() if not self._is_needed(slot, step))
        for key in over:
            del self._slots[key]
        return over

    def _is_needed(self, slot: Slot, step: int) -> bool:
        """Returns whether a learner that goes back to a checkpoint can train a group again that `step` ended: it was
        not trained at the checkpoint, and no token is newer."""
        assert slot.meta is not None, f"group {slot.ticket.key} was leased before its commit"
        newest = slot.meta.newest
        return any(at is not None and newest <= at <= step for at in (self._complete, self._snapshot))
