"""The endpoints of a run for Prometheus: the list over HTTP (`groups`), and the file metrics/targets.json."""

import asyncio
import logging
from pathlib import Path

from asyncrl.coordinator.client import CoordinatorClient
from asyncrl.coordinator.endpoints import Endpoints
from asyncrl.deployment.cluster import ray_nodes
from asyncrl.errors import RunError
from asyncrl.metrics.discovery import Target, ray_targets, target_groups, targets_of, write_targets
from asyncrl.views.run_facts import usable_cores

logger = logging.getLogger(__name__)

TARGETS_EVERY_S = 2.0


class Targets:
    """The endpoints of the run's processes and of Ray's nodes, and the number of cores of the run's machines."""

    def __init__(self, *, run: str, path: Path) -> None:
        self._run = run
        self._path = path
        self._written: list[Target] | None = None
        self.current: list[Target] = []
        self.cores = usable_cores()

    def groups(self) -> bytes:
        """Returns the list for Prometheus' HTTP discovery."""
        return target_groups(run=self._run, targets=self.current)

    def publish(self, targets: list[Target]) -> None:
        """Publishes `targets` over HTTP and in the file.

        If the file cannot be written, the next call tries again, because the disk may have space then.
        """
        self.current = targets
        if targets == self._written:
            return
        try:
            write_targets(self._path, run=self._run, targets=targets)
            self._written = targets
        except OSError as error:
            logger.warning("%s is not up to date: %s", self._path, error)

    async def follow(self, coordinator: CoordinatorClient, *, timeout_s: float) -> None:
        """Updates the list every `TARGETS_EVERY_S` until it is cancelled, because replicas and Ray's nodes come and
        go."""
        own_cores = self.cores
        serial, addresses = 0, dict[str, str]()
        while True:
            try:
                changes = await coordinator.call(Endpoints.since, serial)
                serial, addresses = changes.serial, changes.applied_to(addresses)
                nodes = await ray_nodes(timeout_s=timeout_s)
            except (RunError, TimeoutError) as error:
                logger.warning("Prometheus' targets are not up to date: %s", error)
            else:
                self.publish([*targets_of(addresses), *ray_targets(nodes)])
                # Ray on one machine reports only the logical CPUs that the run asked for, so the machine's cores count.
                # A cluster reports the CPUs of all its machines.
                cores = sum(int(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"])
                self.cores = max(own_cores, cores)
            await asyncio.sleep(TARGETS_EVERY_S)
