"""JSON datasets of the Hugging Face Hub: rows have the values of the files, also when the Hub does not answer later."""

import gzip
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    "by-name": {"train.jsonl": lines(TRAIN), "test.json": json.dumps(TEST).encode(), "README.md": b"text"},
    "without-a-card": {"data/train.json": json.dumps(TRAIN, indent=1).encode(), "data/test.jsonl": lines(TEST)},
    "packed": {"train.jsonl.gz": gzip.compress(lines(TRAIN)), "test.jsonl.gz": gzip.compress(lines(TEST))},
    "subsets": {
        "README.md": CARD.encode(),
        "other.json": b"[]",
        "rows/a.jsonl": lines(TRAIN),
        "rows/b.json": json.dumps(TEST).encode(),
    },
}


class Handler(BaseHTTPRequestHandler):
    """A Hub with a dataset `own/NAME` for each of these repositories."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.answer(json.dumps([each for each in self.entries() if json.dumps(each["path"]) in asked]).encode())

    def do_GET(self) -> None:
        path, files = self.path.partition("?")[0], self.files()
        if "/tree/" in path:
            folder = path.partition(SHA)[2].strip("/")
            inside = [each for each in self.entries() if each["path"].startswith(f"{folder}/" if folder else "")]
            self.answer(json.dumps(inside).encode())
        elif path.startswith("/api/datasets/own/"):
            siblings = [{"rfilename": name} for name in files]
            self.answer(json.dumps({"id": f"own/{self.name()}", "sha": SHA, "siblings": siblings}).encode())
        elif "/resolve/" in path and (name := path.split("/", 6)[6]) in files:
            self.answer(files[name], ETag=f'"{name}"', **{"X-Repo-Commit": SHA})
        else:
            self.answer(b"", status=404, **{"X-Error-Code": "EntryNotFound", "X-Repo-Commit": SHA})

    def name(self) -> str:
        return self.path.partition("/own/")[2].partition("/")[0].partition("?")[0]

    def files(self) -> dict[str, bytes]:
        return REPOSITORIES.get(self.name(), {})

    def entries(self) -> list[dict[str, Any]]:
        files = self.files()
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


SPLITS = {"train": TRAIN, "test": TEST, "train[1:3]": TRAIN[1:3], "test[:1]+train[3:]": [TEST[0], TRAIN[3]]}
READS = """
import json, sys
from asyncrl.data.hugging_face import hugging_face_rows
names, splits = json.loads(sys.argv[1])
for name in names:
    subset = "main" if name == "subsets" else None
    for split in splits:
        print(json.dumps([name, split, list(hugging_face_rows(f"own/{name}", subset=subset, split=split, options={}))]))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a process that knows only this Hub, and has downloaded nothing yet."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield {
            "HF_HOME": str(tmp_path_factory.mktemp("home")),
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
            "HF_HUB_DISABLE_XET": "1",
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": ":".join(sys.path),
        }
        hub.shutdown()


@pytest.mark.parametrize("more", [{}, {"HF_HUB_OFFLINE": "1"}], ids=["online", "then offline"])
def test_values_keep_their_types_and_rows_their_keys(environment: dict[str, str], more: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READS, json.dumps([[*REPOSITORIES], [*SPLITS]])],
        env=environment | more, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {(name, split): rows for name, split, rows in map(json.loads, done.stdout.splitlines())}
    for name in REPOSITORIES:
        for split, rows in SPLITS.items():
            assert repr(found[name, split]) == repr(rows), (name, split)
