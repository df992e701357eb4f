"""Reads the metrics endpoints of a run without Prometheus, and computes how counters grew between two scrapes.

- An endpoint loses only its own series when it does not answer in time, does not answer with metrics, or belongs to
  another run.
- A value that cannot be summed (NaN, infinite or absurdly large) is left out; the other values stay.
- A counter that fell, because its process was replaced, counts from zero, as in PromQL.

Endpoints are read directly, without the HTTP proxy of the environment. Such a proxy is for the internet and could not
reach them.
"""

import math
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from threading import Event, Timer

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from asyncrl.errors import RunError
from asyncrl.metrics.discovery import RAY, Target

Labels = frozenset[tuple[str, str]]
"""The labels of one series, including those of service discovery (`role`, `replica`)."""
MAX_BYTES = 32 * 2**20
"""Largest answer of an endpoint. The page of a generator, with vLLM's metrics, has about 100 KB."""
MAX_VALUE = 1e30
"""Largest absolute value that is used. No number of a run comes near it, and a sum of larger values could be Inf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """The values of all endpoints at the time `at_s` on the monotonic clock, by metric name and labels.

    `silent` are the endpoints that gave no usable answer. `foreign` are the endpoints of other processes, whose values
    are ignored: it maps them to the name of the run that they belong to now, or to "" when they belong to no run.
    """

    at_s: float
    values: Mapping[str, Mapping[Labels, float]]
    silent: tuple[Target, ...] = ()
    foreign: Mapping[Target, str] = field(default_factory=dict)

    def sums(self, name: str, *, by: str, **where: str) -> dict[str, float]:
        """Returns the sums of the series with the labels `where`, by the value of the label `by`.

        Series without the label `by` are left out.
        """
        found: dict[str, float] = {}
        for series, value in self.values.get(name, {}).items():
            labels = dict(series)
            if by in labels and where.items() <= labels.items():
                found[labels[by]] = found.get(labels[by], 0.0) + value
        return found

    def shares(self, name: str, *, by: str) -> dict[str, float] | None:
        """Returns `sums` divided by their total. Returns None when the total is not above 0 or a sum is below 0."""
        sums = self.sums(name, by=by)
        total = sum(sums.values())
        if total <= 0 or min(sums.values()) < 0:
            return None
        return {label: value / total for label, value in sums.items()}

    def strangers(self) -> list[str]:
        """Returns a line of text for each endpoint of `foreign`."""
        return [
            f"{target.address} belongs to {f'run {run}' if run else 'no run'} now"
            for target, run in self.foreign.items()
        ]

    def last(self, name: str, **where: str) -> float | None:
        """Returns the value of the first series with these labels; None when there is no such series."""
        for series, value in self.values.get(name, {}).items():
            if where.items() <= dict(series).items():
                return value
        return None

    def since(self, earlier: "Scrape") -> "Scrape":
        """Returns how much each counter grew since `earlier`.

        A series that is new, such as that of a replica that has joined, counts from zero. The series of a process that
        gave no usable answer in `earlier` are left out, because it is unknown how much of their totals is new.
        """
        unknown = {(target.role, target.replica) for target in (*earlier.silent, *earlier.foreign)}
        values = {
            name: {
                labels: _growth(earlier.values.get(name, {}).get(labels, 0.0), value)
                for labels, value in of.items()
                if _process(labels) not in unknown
            }
            for name, of in self.values.items()
        }
        return Scrape(at_s=self.at_s - earlier.at_s, values=values, silent=self.silent, foreign=self.foreign)


def _growth(before: float, now: float) -> float:
    return now - before if now >= before else now


def _process(labels: Labels) -> tuple[str | None, str | None]:
    found = dict(labels)
    return found.get("role"), found.get("replica")


def scrape(targets: Sequence[Target], *, run: str, timeout_s: float) -> Scrape:
    """Reads all endpoints of `run` at the same time. Each endpoint has `timeout_s` seconds to answer."""
    with ThreadPoolExecutor(max_workers=max(1, len(targets))) as pool:
        answers = list(pool.map(lambda target: _answer(target, timeout_s), targets))
    values: dict[str, dict[Labels, float]] = {}
    silent: list[Target] = []
    foreign: dict[Target, str] = {}
    for target, samples in zip(targets, answers, strict=True):
        if samples is None:
            silent.append(target)
        elif (owner := _run_of(samples)) != run:
            foreign[target] = owner
        else:
            for sample in filter(_adds_up, samples):
                labels = frozenset({**sample.labels, "role": target.role, "replica": target.replica}.items())
                values.setdefault(sample.name, {})[labels] = sample.value
    return Scrape(at_s=time.monotonic(), values=values, silent=tuple(silent), foreign=foreign)


def _run_of(samples: Iterable[Sample]) -> str:
    """Returns the name of the run that an endpoint belongs to; empty when it is not an endpoint of asyncrl."""
    return next((sample.labels.get("run_name", "") for sample in samples if sample.name == "asyncrl_run_info"), "")


def _adds_up(sample: Sample) -> bool:
    """Returns whether a sample can be used in sums.

    A gauge that was not measured is NaN. Infinite values, and buckets whose bound `le` is not a number, do not come
    from asyncrl or vLLM.
    """
    try:
        bound = float(sample.labels.get("le", 0))
    except ValueError:
        return False
    return abs(sample.value) <= MAX_VALUE and bound > -math.inf


def _answer(target: Target, timeout_s: float) -> list[Sample] | None:
    """Returns the samples of an endpoint; None when there is no answer, or when the answer cannot be parsed."""
    try:
        text = _read(target.address, timeout_s)
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except Exception:  # network errors, and any error of the parser for a text that is not metrics
        return None


def _read(address: str, timeout_s: float) -> str:
    """Returns the text of an endpoint. Raises an error when it is not complete within `timeout_s`."""
    late, started_s = Event(), time.monotonic()
    with closing(HTTPConnection(address, timeout=timeout_s)) as connection:
        connection.connect()
        # The timeout of the connection limits each read, not the whole answer: a server that sends one byte a second
        # would never reach it. The timer limits the whole answer.
        ends = Timer(started_s + timeout_s - time.monotonic(), _hang_up, args=(connection.sock, late))
        ends.daemon = True
        ends.start()
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            body = answer.read(MAX_BYTES + 1)  # one byte more than allowed shows that the answer is too long
        finally:
            ends.cancel()
    if answer.status != HTTPStatus.OK or late.is_set():
        raise ValueError(f"{address} answered with status {answer.status}{', too slowly' if late.is_set() else ''}")
    if len(body) > MAX_BYTES or not body.endswith(b"\n"):
        raise ValueError(
            f"{address} answered with {len(body)} bytes: more than {MAX_BYTES}, or an incomplete last line"
        )
    return body.decode()


def _hang_up(connection: socket.socket, late: Event) -> None:
    """Ends a connection whose answer takes too long, so that the blocked read returns."""
    late.set()
    with suppress(OSError):  # the connection has ended meanwhile
        connection.shutdown(socket.SHUT_RDWR)


def read_targets(path: Path) -> list[Target]:
    """Returns the targets in the file that `write_targets` wrote, without Ray's endpoints.

    Raises RunError when the file cannot be read or is not a list of targets.
    """
    try:
        groups = msgspec.json.decode(path.read_bytes(), type=list[_Group])
    except OSError as error:
        raise RunError(
            f"cannot read {path}: {error.strerror or error}. The learner writes this file when the run starts: check "
            "the run's directory, and that the run has started"
        ) from error
    except msgspec.MsgspecError as error:
        raise RunError(
            f"{path} is not a list of Prometheus targets: {error}. Give the targets.json that a learner has written"
        ) from error
    return [target for target in _targets(groups) if target.role != RAY]


class _Group(msgspec.Struct):
    targets: list[str]
    labels: dict[str, str]


def _targets(groups: Iterable[_Group]) -> Iterable[Target]:
    for group in groups:
        for address in group.targets:
            yield Target(
                role=group.labels.get("role", ""), replica=group.labels.get("replica", address), address=address
            )
