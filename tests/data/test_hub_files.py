"""A process asks the Hugging Face Hub for a model once, when it starts. Later it reads the folder in the cache."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from asyncrl.data.light_tokenizer import model_folder

pytestmark = pytest.mark.slow

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama", "vocab_size": 8}',
    "generation_config.json": b'{"eos_token_id": [1, 2]}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the same weights again",
    "onnx/model.safetensors": b"the same weights again",
    "README.md": b"text",
}
SMALL = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}


class Hub(ThreadingHTTPServer):
    """A Hub with the model `own/model`. `refuse` is the status with which it answers every request, if it is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[str] = []
        self.refuse: int | None = None


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        path = self.path.partition("?")[0]
        if self.server.refuse is not None:
            self.answer(b"", status=self.server.refuse)
        elif "/tree/" in path:
            entries = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in FILES.items()]
            self.answer(json.dumps(entries).encode())
        elif path.startswith("/api/models/own/model"):
            files = [{"rfilename": name} for name in FILES]
            self.answer(json.dumps({"id": "own/model", "sha": SHA, "siblings": files}).encode())
        elif "/resolve/" in path:
            self.answer(FILES[path.partition(f"/resolve/{SHA}/")[2]], ETag='"0"', **{"X-Repo-Commit": SHA})
        else:
            self.answer(b"", status=404)

    def answer(self, data: bytes, *, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def run(hub: Hub, home: Path, code: str, **more: str) -> str:
    """Returns the output of Python code in a new process that knows only this Hub."""
    environment = {
        "HF_HOME": str(home),
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_DISABLE_XET": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", f"from asyncrl.data.light_tokenizer import model_folder\n{code}"],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)} | environment | more,
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def files_in(folder: str) -> set[str]:
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize("weights", [False, True])
def test_the_folder_has_the_files_that_a_run_reads_and_no_copies_for_other_programs(
    weights: bool, hub: Hub, tmp_path: Path
) -> None:
    folder = run(hub, tmp_path, f"print(model_folder('own/model', weights={weights}))")
    assert files_in(folder) == SMALL | ({"model.safetensors"} if weights else set())


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_refuses_later_is_not_missed(status: int, hub: Hub, tmp_path: Path) -> None:
    first = run(hub, tmp_path, "print(model_folder('own/model', weights=True))")
    hub.refuse = status
    again = run(hub, tmp_path, "print(model_folder('own/model', weights=True))")
    assert again == first, "a process that starts later reads the same folder"
    hub.requests.clear()
    assert run(hub, tmp_path, f"print(model_folder({first!r}, weights=True))") == first
    assert hub.requests == [], "a folder is read without a request"


def test_without_a_hub_the_cache_is_enough(hub: Hub, tmp_path: Path) -> None:
    first = run(hub, tmp_path, "print(model_folder('own/model', weights=True))")
    hub.requests.clear()
    assert run(hub, tmp_path, "print(model_folder('own/model', weights=True))", HF_HUB_OFFLINE="1") == first
    nowhere = run(hub, tmp_path, "print(model_folder('own/model', weights=True))", HF_ENDPOINT="http://127.0.0.1:9")
    assert nowhere == first
    assert hub.requests == []


def test_a_cache_with_the_configuration_only_serves_an_engine_offline(hub: Hub, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--own--model" / "snapshots" / SHA
    run(hub, tmp_path, "print(model_folder('own/model', weights=False))")
    assert snapshot.is_dir()
    offline = run(hub, tmp_path, "print(model_folder('own/model', weights=True))", HF_HUB_OFFLINE="1")
    assert offline == str(snapshot), "what is there is read, and the load names the file that is not"


def test_a_model_that_is_nowhere_keeps_its_name_for_the_error(hub: Hub, tmp_path: Path) -> None:
    hub.refuse = 404
    assert run(hub, tmp_path, "print(model_folder('own/other', weights=True))") == "own/other"


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert model_folder(str(tmp_path), weights=True) == str(tmp_path)


SAVES = """
import sys
from pathlib import Path
from types import SimpleNamespace
import torch
from transformers import AutoConfig, GenerationConfig
from asyncrl.config.schema import LoraSection
from asyncrl.policy import adapter_export, export
folder, out = model_folder("own/tiny", weights=False), Path(sys.argv[1])
(out / "model").mkdir()
model = SimpleNamespace(config=AutoConfig.from_pretrained(folder), generation_config=GenerationConfig())
export._write_rest(model, tokenizer_path=folder, path=out / "model", dtype=torch.float32)
class Saved(dict):
    def read(self, name, dtype):
        return torch.ones(2, 2, dtype=dtype)
adapter_export.SavedTensors = lambda path: Saved({"model.layers.0.mlp.up_proj.lora_A.default.weight": None})
adapter_export.convert_adapter(
    LoraSection(rank=2), weights_path=out, base="own/tiny", tokenizer_path=folder, path=out / "adapter",
    dtype=torch.float32,
)
"""


def test_exports_of_a_model_in_the_cache_send_no_request(hub: Hub, tmp_path: Path) -> None:
    """The cache is one that transformers wrote. The Hub refuses from the first request on."""
    from transformers import Qwen3Config

    from asyncrl.demo.chat_tokenizer import build_chat_tokenizer

    hub.refuse = 429
    snapshot = tmp_path / "home" / "hub" / "models--own--tiny" / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    Qwen3Config().save_pretrained(snapshot)
    build_chat_tokenizer(max_length=64).save_pretrained(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(SHA)
    out = tmp_path / "out"
    out.mkdir()
    run(hub, tmp_path / "home", SAVES.replace("sys.argv[1]", repr(str(out))))
    asked = [path for path in hub.requests if path != "/api/agent-harnesses"]  # the library's own, once a process
    assert asked == ["/api/models/own/tiny/revision/main"], "the one of the start"
    assert json.loads((out / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"] == "own/tiny"
    for folder in ("adapter", "model"):
        assert (out / folder / "tokenizer.json").is_file()
