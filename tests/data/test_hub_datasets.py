"""JSON datasets of the Hugging Face Hub: rows have the values of the files, also when the Hub does not answer later."""

import gzip
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")

pytestmark = pytest.mark.slow

SHA = "0123456789abcdef0123456789abcdef01234567"
TRAIN: list[dict[str, Any]] = [
    {"prompt": "a", "answer": "007", "when": "2024-01-02 03:04:05", "tests": {"in": 1}},
    {"prompt": "b", "answer": 2**63, "tests": {"out": None}},
    {"prompt": "c", "answer": 3, "when": None, "score": -0.0},
    {"prompt": "d", "answer": True, "tests": [1, "2", 3.0]},
]
TEST = [{"prompt": "e", "answer": 1.0}, {"prompt": "f", "answer": "1e5", "more": []}]
CARD = """---
configs:
- config_name: other
  data_files: [{split: train, path: other.json}]
- config_name: main
  data_files: [{split: train, path: rows/a.jsonl}, {split: test, path: rows/b.json}]
---
"""


def lines(rows: list[Any]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


REPOSITORIES = {
    "by name": {"train.jsonl": lines(TRAIN), "test.json": json.dumps(TEST).encode(), "README.md": b"text"},
    "without a card": {"data/train.json": json.dumps(TRAIN, indent=1).encode(), "data/test.jsonl": lines(TEST)},
    "packed": {"train.jsonl.gz": gzip.compress(lines(TRAIN)), "test.jsonl.gz": gzip.compress(lines(TEST))},
    "subsets": {
        "README.md": CARD.encode(),
        "other.json": b"[]",
        "rows/a.jsonl": lines(TRAIN),
        "rows/b.json": json.dumps(TEST).encode(),
    },
}


class Hub(ThreadingHTTPServer):
    """A Hub with the dataset `own/rows`, which has these files."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.answer(json.dumps([each for each in self.entries() if json.dumps(each["path"]) in asked]).encode())

    def do_GET(self) -> None:
        path, files = self.path.partition("?")[0], self.server.files
        if "/tree/" in path:
            folder = path.partition(SHA)[2].strip("/")
            inside = [each for each in self.entries() if each["path"].startswith(f"{folder}/" if folder else "")]
            self.answer(json.dumps(inside).encode())
        elif path.startswith("/api/datasets/own/rows"):
            siblings = [{"rfilename": name} for name in files]
            self.answer(json.dumps({"id": "own/rows", "sha": SHA, "siblings": siblings}).encode())
        elif path.startswith("/datasets/own/rows/resolve/") and (name := path.split("/", 6)[6]) in files:
            self.answer(files[name], ETag=f'"{name}"', **{"X-Repo-Commit": SHA})
        else:
            self.answer(b"", status=404, **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": SHA})

    def entries(self) -> list[dict[str, Any]]:
        files = self.server.files
        folders = {name.rpartition("/")[0] for name in files if "/" in name}
        return [
            *({"type": "directory", "path": name, "oid": "0"} for name in folders),
            *({"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in files.items()),
        ]

    def answer(self, data: bytes, *, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


READS = """
import json, sys
from asyncrl.data.hugging_face import hugging_face_rows
subset, *splits = json.loads(sys.argv[1])
for split in splits:
    print(json.dumps(list(hugging_face_rows("own/rows", subset=subset, split=split, options={}))))
"""


def read(hub: Hub, home: Path, *splits: str, subset: str | None = None, code: str = READS, **more: str) -> list[Any]:
    """Returns the rows of each split, read in a new process that knows only this Hub."""
    environment = {
        "HF_HOME": str(home),
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_DISABLE_XET": "1",
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": ":".join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([subset, *splits])],
        env=environment | more, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def hub(request: pytest.FixtureRequest) -> Iterator[Hub]:
    with Hub(REPOSITORIES[request.param]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("hub", REPOSITORIES, indirect=True)
def test_values_keep_their_types_and_rows_their_keys_online_and_offline(hub: Hub, tmp_path: Path) -> None:
    subset = "main" if "other.json" in hub.files else None
    parts = {"train": TRAIN, "test": TEST, "train[1:3]": TRAIN[1:3], "test[:1]+train[3:]": [TEST[0], TRAIN[3]]}
    expected = repr([*parts.values()])
    assert repr(read(hub, tmp_path, *parts, subset=subset)) == expected
    assert repr(read(hub, tmp_path, *parts, subset=subset, HF_HUB_OFFLINE="1")) == expected
