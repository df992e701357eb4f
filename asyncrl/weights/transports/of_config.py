"""Chooses the transport of a run."""

from asyncrl.config.schema import Config
from asyncrl.weights.transports.filesystem import FilesystemTransport
from asyncrl.weights.transports.interfaces import Transport
from asyncrl.weights.transports.object_store import ObjectStoreTransport
from asyncrl.weights.transports.shared_snapshot import SharedSnapshotTransport


def transport_of(config: Config) -> Transport:
    """Returns the transport `weights.transport`."""
    match config.weights.transport:
        case "object_store":
            return ObjectStoreTransport()
        case "filesystem":
            return FilesystemTransport(config.weights.folder or config.run.dir / config.run.name / "weights")
        case "ipc":
            return SharedSnapshotTransport()
