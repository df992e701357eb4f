"""Chooses the transport of a run."""

from asyncrl.config.schema import Config
from asyncrl.weights.transports.filesystem import FilesystemTransport
from asyncrl.weights.transports.interfaces import Transport
from asyncrl.weights.transports.object_store import ObjectStoreTransport
from asyncrl.weights.transports.shared_snapshot import SharedSnapshotTransport


def transport_of(config: Config, *, nonce: str = "") -> Transport:
    """Returns the transport `weights.transport`. A learner gives the `nonce` of its run, so that runs which share a
    folder do not share files."""
    match config.weights.transport:
        case "object_store":
            return ObjectStoreTransport()
        case "filesystem":
            if config.weights.folder is None:
                return FilesystemTransport(config.run.dir / config.run.name / "weights")
            return FilesystemTransport(config.weights.folder / f"{config.run.name}-{nonce}")
        case "ipc":
            return SharedSnapshotTransport()
