"""Reading endpoints: a broken endpoint loses only its own series, each has a time limit, and growth of counters."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from asyncrl.config.schema import Config
from asyncrl.metrics import scrape as module
from asyncrl.metrics.discovery import Target
from asyncrl.metrics.recorders import LearnerMetrics
from asyncrl.metrics.scrape import Scrape, scrape
from asyncrl.metrics.server import MetricsServer

pytestmark = pytest.mark.slow

DRIPS_S = 30.0

VERSION = "asyncrl_learner_policy_version"
RUN = Config.model_validate({"run": {"name": "r"}})
HEAD = b"HTTP/1.0 200 OK\r\n\r\n"
METRICS = f"{VERSION} 3.0\n".encode()
OURS = b'asyncrl_run_info{run_name="r"} 1\n'


@contextmanager
def endpoint(answer: Callable[[socket.socket], None]) -> Iterator[Target]:
    """Runs an endpoint that answers one request with `answer` and closes the connection."""

    def serve() -> None:
        with listener.accept()[0] as connection:
            connection.recv(65536)
            try:
                answer(connection)
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1)
            except OSError:
                pass  # the reader has closed the connection

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Target(role="generator", replica="odd", address=f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join(60)


@pytest.fixture
def learner() -> Iterator[Target]:
    metrics = LearnerMetrics()
    metrics.run_info(RUN)
    metrics.versions(learner=7, published=6)
    with MetricsServer(metrics.registry, host="127.0.0.1", port=0) as server:
        yield Target(role="learner", replica="learner", address=server.address)


def sends(content: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(content)


def drips(head: bytes, byte: bytes) -> Callable[[socket.socket], None]:
    """Returns an answer that sends `head`, then one byte every 50 ms for `DRIPS_S` seconds."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(head)
        for _ in range(int(DRIPS_S / 0.05)):
            connection.sendall(byte)
            time.sleep(0.05)  # this is the simulated slow process, so the test must sleep

    return answer


ODD = {
    "HTML": sends(HEAD + b"<html><body>Sign in</body></html>\n"),
    "a value that is none": sends(HEAD + f"{VERSION} three\n".encode()),
    "a label without its end": sends(HEAD + f'{VERSION}{{replica="a\n'.encode()),
    "a torn line": sends(HEAD + METRICS + f"{VERSION} 12".encode()),
    "bytes that are no text": sends(HEAD + b"\xff\xfe\n"),
    "not HTTP": sends(b"\x15\x03\x01\n"),
    "nothing": sends(b""),
    "an error": sends(b"HTTP/1.0 500 Oh\r\n\r\n" + METRICS),
    "a proxy's other place": sends(b"HTTP/1.0 302 Found\r\nLocation: http://127.0.0.1:9/\r\n\r\n"),
}


@pytest.mark.parametrize("answer", ODD.values(), ids=ODD)
def test_an_endpoint_that_answers_something_else_costs_its_own_series_alone(
    learner: Target, answer: Callable[[socket.socket], None]
) -> None:
    with endpoint(answer) as odd:
        found = scrape([odd, learner], run="r", timeout_s=30.0)
    assert found.silent == (odd,)
    assert found.last(VERSION) == 7.0


NO_NUMBERS = {
    "not known": f"{VERSION} NaN\n",
    "infinite": f"{VERSION} +Inf\n",
    "infinite below": f"{VERSION} -Inf\n",
    "a sum of it would be infinite": f"{VERSION} 1.7e308\n",
    "a bound that is a word": f'{VERSION}{{le="abc"}} 1\n',
    "a bound that is none": f'{VERSION}{{le="NaN"}} 1\n',
    "a bound below all": f'{VERSION}{{le="-Inf"}} 1\n',
}


@pytest.mark.parametrize("text", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_what_no_sum_can_be_made_of_costs_itself_and_nothing_else(learner: Target, text: str) -> None:
    with endpoint(sends(HEAD + OURS + text.encode() + b"asyncrl_published_policy_version -3.5\n")) as odd:
        found = scrape([odd, learner], run="r", timeout_s=30.0)
    assert found.sums(VERSION, by="role") == {"learner": 7.0}
    assert found.last("asyncrl_published_policy_version", role="generator") == -3.5
    assert found.silent == ()


def test_nothing_is_taken_from_an_endpoint_that_is_another_runs_by_now(learner: Target) -> None:
    """When a process dies, another process may get its port."""
    others = LearnerMetrics()
    others.run_info(Config.model_validate({"run": {"name": "b"}}))
    others.versions(learner=777, published=777)
    with MetricsServer(others.registry, host="127.0.0.1", port=0) as server:
        taken = Target(role="generator", replica="generator-0", address=server.address)
        found = scrape([taken, learner], run="r", timeout_s=30.0)
        assert found.sums(VERSION, by="role") == {"learner": 7.0}
        assert (found.silent, found.foreign) == ((), {taken: "b"})
        assert found.strangers() == [f"{server.address} belongs to run b now"]
        own = scrape([taken], run="b", timeout_s=30.0)
        assert own.last(VERSION) == 777.0
        grown = own.since(found)
    assert grown.last(VERSION) is None, "it is unknown how much of the total is new"


def test_an_endpoint_that_names_no_run_is_not_ours(learner: Target) -> None:
    with endpoint(sends(HEAD + METRICS)) as odd:
        found = scrape([odd, learner], run="r", timeout_s=30.0)
    assert found.sums(VERSION, by="role") == {"learner": 7.0}
    assert found.strangers() == [f"{odd.address} belongs to no run now"]


SECONDS = "asyncrl_learner_state_seconds_total"


@pytest.mark.parametrize(
    ("seconds", "shares"),
    [
        ({"a": 3.0, "b": 1.0}, {"a": 0.75, "b": 0.25}),
        ({"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 1.0}),
        ({"a": 5.0, "b": -4.0}, None),  # 500 %
        ({"a": -1.0}, None),
        ({"a": 0.0}, None),
        ({}, None),
    ],
)
def test_shares_are_parts_of_a_whole_or_none(seconds: dict[str, float], shares: dict[str, float] | None) -> None:
    of = {frozenset({"state": state}.items()): value for state, value in seconds.items()}
    assert Scrape(at_s=0.0, values={SECONDS: of}).shares(SECONDS, by="state") == shares


def test_what_is_well_said_is_read(learner: Target) -> None:
    with endpoint(sends(HEAD + OURS + METRICS)) as plain:
        found = scrape([plain, learner], run="r", timeout_s=30.0)
    assert found.sums(VERSION, by="role") == {"generator": 3.0, "learner": 7.0}
    assert found.silent == ()


SLOW = {
    "header": drips(b"HTTP/1.0 200 OK\r\nX-Slow: ", b"#"),
    "body": drips(HEAD + METRICS, b"\n"),  # it ends with a newline wherever it is cut, like a complete answer
}


@pytest.mark.parametrize("answer", SLOW.values(), ids=SLOW)
def test_an_endpoint_that_answers_byte_by_byte_has_its_time_and_no_more(
    learner: Target, answer: Callable[[socket.socket], None]
) -> None:
    with endpoint(answer) as slow:
        started_s = time.monotonic()
        found = scrape(
            [slow, learner], run="r", timeout_s=2.0
        )  # long enough for the learner's answer on a busy machine
        assert time.monotonic() - started_s < DRIPS_S
    assert found.silent == (slow,)
    assert found.last(VERSION) == 7.0


def test_an_answer_without_an_end_is_not_read_to_it(learner: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    # Cut at this length, the answer ends with a newline, like a complete one. The limit is large enough for the
    # learner's answer, which also has the metrics that other tests put into the default registry.
    monkeypatch.setattr(module, "MAX_BYTES", 100_000 * len(METRICS) - 1)

    def goes_on(connection: socket.socket) -> None:
        connection.sendall(HEAD)
        while True:
            connection.sendall(METRICS * 1000)

    started_s = time.monotonic()
    with endpoint(goes_on) as endless:
        found = scrape([endless, learner], run="r", timeout_s=120.0)
    assert time.monotonic() - started_s < 60.0
    assert found.silent == (endless,)
    assert found.last(VERSION) == 7.0


def test_a_proxy_of_the_environment_is_not_asked(learner: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert scrape([learner], run="r", timeout_s=30.0).last(VERSION) == 7.0


def look(at_s: float, *, silent: tuple[str, ...] = (), **tokens: float) -> Scrape:
    """Returns a scrape with a counter of tokens by generator."""
    of = {frozenset({"role": "generator", "replica": name}.items()): value for name, value in tokens.items()}
    gone = tuple(Target(role="generator", replica=name, address="127.0.0.1:9") for name in silent)
    return Scrape(at_s=at_s, values={"tokens": of}, silent=gone)


def test_growth_is_what_is_known_to_be_new() -> None:
    earlier = look(0.0, silent=("slow",), steady=100.0, replaced=100.0)
    now = look(10.0, steady=130.0, replaced=5.0, joined=7.0, slow=1_000_000.0)
    grown = now.since(earlier).sums("tokens", by="replica")
    assert grown == {"steady": 30.0, "replaced": 5.0, "joined": 7.0}
