"""An S3 server in this process: moto's, before which a test can refuse calls, delay them, or act at one of them."""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from urllib.parse import parse_qs
from urllib.request import Request, urlopen

BUCKET = "bucket"
KEYS = {"AWS_ACCESS_KEY_ID": "right", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


def why_not() -> str | None:
    """Returns why no S3 server can be started here; None if one can."""
    missing = [name for name in ("moto", "flask", "flask_cors", "s3fs") if find_spec(name) is None]
    return f"{', '.join(missing)} not installed: make campaign installs the extra `campaign`" if missing else None


@dataclass(frozen=True)
class Call:
    """A call of the server: its method, the path `/bucket/key`, the parameters of the query, and the access key."""

    method: str
    path: str
    query: dict[str, list[str]]
    key_id: str

    @property
    def writes(self) -> bool:
        """Whether the call sends an object, or a part of one."""
        return self.method == "PUT" and self.path.count("/") > 1


@dataclass(frozen=True)
class Refusal:
    """An answer with an error of S3, e.g. 503 and `SlowDown`."""

    status: int
    code: str


class S3Server:
    """A running server. `before` gets each call before moto does, and returns a refusal or None. `after` gets each call
    that moto has answered, before the client has the answer. Both run in threads of the server."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each call
        self.before: Callable[[Call], Refusal | None] = lambda call: None
        self.after: Callable[[Call], None] = lambda call: None
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self, True, request_handler=MotoRequestHandler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        _, _, credential = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")
        query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
        call = Call(environ["REQUEST_METHOD"], environ["PATH_INFO"], query, credential.partition("/")[0])
        if (refusal := self.before(call)) is not None:
            # Otherwise the client would see a closed connection and not the answer.
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(f"{refusal.status} {refusal.code}", [("Content-Type", "application/xml")])
            return [f"<Error><Code>{refusal.code}</Code><Message>{refusal.code}</Message></Error>".encode()]
        answer = list(self._moto(environ, start_response))
        self.after(call)
        return answer

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Yields a server with an empty bucket `BUCKET`. The variables of the environment name it meanwhile."""
    from s3fs import S3FileSystem

    server = S3Server()
    urlopen(Request(f"{server.url}/moto-api/reset", method="POST")).close()  # moto has one state in a process
    before = dict(os.environ)
    os.environ.update(KEYS | {"AWS_ENDPOINT_URL": server.url})
    S3FileSystem.clear_instance_cache()  # a cached one has the address of an earlier server
    try:
        S3FileSystem().mkdir(BUCKET)
        yield server
    finally:
        S3FileSystem.clear_instance_cache()
        os.environ.clear()
        os.environ.update(before)
        server.close()
