"""A run's directory with records and checkpoints, and a storage in memory that fails or refuses as a test says."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from made_up_run import make_step

from asyncrl.checkpoints.directory import RunManifest, folder_of, write
from asyncrl.common.version import Version
from asyncrl.config.load import shared_config
from asyncrl.config.schema import CheckpointSection, Config
from asyncrl.deployment.mirror import Mirror, Store
from asyncrl.deployment.run_dir import RunDir

URL = "memory://bucket/quick"


def config_in(folder: Path, **sections: Any) -> Config:
    return Config.model_validate({"run": {"name": "quick", "dir": str(folder)}, **sections})


def new_run(folder: Path, *, steps: int = 0) -> RunDir:
    run = RunDir.create(config_in(folder))
    train(run, range(steps))
    return run


def train(run: RunDir, steps: range) -> None:
    for step in steps:
        run.append_step(make_step(step))
        (run.path / "samples" / f"step-{step}.jsonl").write_text(f"sample of step {step}\n")
    (run.path / "audit").mkdir(exist_ok=True)
    with (run.path / "audit" / "steps-1.msgpack").open("ab") as file:
        file.write(bytes(steps))


def save(run: RunDir, step: int, *, content: bytes = b"w" * 100, incarnation: int = 1) -> None:
    """Writes a checkpoint with two files of weights."""

    def fill(folder: Path) -> None:
        (folder / "policy").mkdir()
        (folder / "policy" / "weights").write_bytes(content)
        (folder / "buffer.msgpack").write_bytes(content[:10])

    settings = dict(shared_config(config_in(run.path.parent)))
    version = Version(incarnation, step)
    manifest = RunManifest(nonce=run.nonce, version=version, lineage=run.lineage, settings=settings, packages={})
    write(folder_of(run.checkpoints, step), manifest, fill=fill)


def mirror_of(run: RunDir, *, url: str = URL, **keep: Any) -> Mirror:
    return Mirror(Store(url), run.path, nonce=run.nonce, lineage=run.lineage, keep=CheckpointSection(**keep))


def content(url: str = URL) -> dict[str, bytes]:
    """Returns the files of a mirror in memory by their names."""
    prefix = url.removeprefix("memory:/") + "/"
    found = MemoryFileSystem.store.items()
    return {path.removeprefix(prefix): file.getvalue() for path, file in found if path.startswith(prefix)}


class Storage:
    """Records what is written, and calls `before` with each operation and name first, which may raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.written: list[str] = []
        self.threads: set[str] = set()
        self.before: Callable[[str, str], None] = lambda operation, name: None
        for operation in ("send", "write", "remove"):
            monkeypatch.setattr(Store, operation, self._noted(operation, getattr(Store, operation)))

    def _noted(self, operation: str, original: Callable[..., None]) -> Callable[..., None]:
        def noted(store: Store, *arguments: Any) -> None:
            name = str(arguments[-1] if operation == "send" else arguments[0])
            self.threads.add(threading.current_thread().name)
            self.before(operation, name)
            original(store, *arguments)
            self.written += [name] if operation != "remove" else []

        return noted
