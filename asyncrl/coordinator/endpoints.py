"""The metrics endpoints of a run's processes, and their changes since an earlier call.

A process that polls the endpoints passes the serial number of its last answer, and gets only what has changed since.
"""

from collections import deque
from collections.abc import Mapping

import msgspec

KEPT_CHANGES = 1000
"""Number of changes that are remembered. A caller that missed more gets all endpoints."""


class EndpointChanges(msgspec.Struct, frozen=True, kw_only=True):
    """The endpoints that changed, by process name; "" for a process that is gone. If `whole`, all endpoints.

    `serial` is the number for the next call.
    """

    serial: int
    whole: bool
    addresses: dict[str, str]

    def applied_to(self, known: Mapping[str, str]) -> dict[str, str]:
        """Returns all endpoints, given those that were known before."""
        merged = self.addresses if self.whole else {**known, **self.addresses}
        return {name: address for name, address in merged.items() if address}


class Endpoints:
    """The endpoints of the processes that have one. `addresses` maps their names to them."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self._serial = 0
        self._changed: deque[str] = deque(maxlen=KEPT_CHANGES)  # names, the newest change last

    def set(self, name: str, address: str) -> None:
        """Sets the endpoint of a process; "" if it has none."""
        if address == self.addresses.get(name, ""):
            return
        if address:
            self.addresses[name] = address
        else:
            del self.addresses[name]
        self._serial += 1
        self._changed.append(name)

    def since(self, serial: int) -> EndpointChanges:
        """Returns what has changed since the answer with this serial number; all endpoints for 0."""
        missed = self._serial - serial
        whole = not serial or not 0 <= missed <= len(self._changed)
        changed = self.addresses if whole else dict.fromkeys([*self._changed][len(self._changed) - missed :], "")
        return EndpointChanges(
            serial=self._serial,
            whole=whole,
            addresses={name: self.addresses.get(name, "") for name in changed},
        )
