"""Rows and partial generations in the data plane that no group needs. Their owner asks by key and clears them."""

from collections.abc import Iterable

from asyncrl.buffer.attempts import parsed_key
from asyncrl.buffer.state import BufferState


class Unneeded:
    """Tells which keys may be cleared."""

    def __init__(self, state: BufferState) -> None:
        self._state = state

    def never_committed(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Returns those of `keys` whose attempts have ended without a commit. No commit of them can be accepted, so
        their rows may be cleared. Keys of groups that were never issued are left out, and names of another form."""
        attempts = self._state.groups.attempts
        return tuple(key for key in keys if (ticket := parsed_key(key)) and attempts.is_never_committed(*ticket))

    def without_slot(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Returns those of `keys` that are keys of groups, but of none that is reserved, ready, leased or retained."""
        groups = self._state.groups
        held = {slot.ticket.key for slot in (*groups.table.open.values(), *groups.retained.slots())}
        return tuple(key for key in keys if parsed_key(key) and key not in held)

    def prefixes(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Returns those of `keys` whose prefixes no attempt writes, reads or may read later. Names of another form are
        left out."""
        stored = self._state.groups.prefixes
        return tuple(key for key in keys if (ticket := parsed_key(key)) and not stored.is_needed(*ticket))

    def take_prefixes(self) -> tuple[str, ...]:
        """Returns the keys of the attempts whose prefixes became unneeded since the last call. They may be cleared."""
        return self._state.groups.prefixes.take_unneeded()
