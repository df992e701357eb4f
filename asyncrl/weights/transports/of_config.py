"""Chooses the transport of a run."""

from functools import partial
from pathlib import Path

import ray

from asyncrl.common.names import WEIGHTS
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.weights.transports.broadcast import CollectiveTransport
from asyncrl.weights.transports.filesystem import FilesystemTransport
from asyncrl.weights.transports.interfaces import Transport
from asyncrl.weights.transports.ipc import SharedSnapshotTransport
from asyncrl.weights.transports.object_store import ObjectStoreTransport


def transport_of(config: Config, *, nonce: str = "", staged_at: Path | None = None) -> Transport:
    """Returns the transport that `weights.transport` names. A learner gives the `nonce` of its run, so that runs which
    share a folder do not share files. A replica gives `staged_at`, the pointer to its node's memory for staged weights.

    Raises ConfigError if the learner cannot use `weights.folder`."""
    match config.weights.transport:
        case "object_store":
            return ObjectStoreTransport()
        case "filesystem":
            if config.weights.folder is None:
                return FilesystemTransport(config.run.dir / config.run.name / "weights")
            folder = config.weights.folder / f"{config.run.name}-{nonce}"
            if nonce:
                _make(folder)
            return FilesystemTransport(folder)
        case "ipc":
            return SharedSnapshotTransport()
        case "collective":
            return CollectiveTransport(
                partial(ray.get_actor, WEIGHTS, namespace=config.run.name),
                timeout_s=config.weights.load_timeout_s,
                call_timeout_s=config.buffer.call_timeout_s,
                staged_at=staged_at,
            )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"weights.folder = {folder.parent}: the learner cannot make a folder in it ({error}); name one that "
            "learner and generators share and may write to"
        ) from error
