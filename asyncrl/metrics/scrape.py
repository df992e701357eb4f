"""Reading a run's endpoints without a Prometheus: who is asked, what they answered, and how counters grew.

What must hold: an endpoint that does not answer in time, answers something else than metrics, or does not say that it
is this run's, costs its own series and nothing else, and a value that no sum can be made of costs itself; a counter
that went back (its process was replaced) counts from zero, as in PromQL. Endpoints are asked directly: a proxy of the
environment is for the internet, and could not reach them.
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
"""Of one series, those of service discovery (`role`, `replica`) among them."""
MAX_BYTES = 32 * 2**20
"""Of one answer. A generator's, with vLLM's metrics in it, has some 100 KB."""
MAX_VALUE = 1e30
"""Nothing that a run counts comes near it; of values beyond it sums would end as Inf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """What all endpoints said at `at_s` on the monotonic clock: values by name and labels.

    `silent` did not answer. Of `foreign` nothing is taken: each has the name of the run that it belongs to now, none
    when it is somebody else's altogether.
    """

    at_s: float
    values: Mapping[str, Mapping[Labels, float]]
    silent: tuple[Target, ...] = ()
    foreign: Mapping[Target, str] = field(default_factory=dict)

    def sums(self, name: str, *, by: str, **where: str) -> dict[str, float]:
        """Values of the series with these labels, added up by the label `by`; series without it are left out."""
        found: dict[str, float] = {}
        for series, value in self.values.get(name, {}).items():
            labels = dict(series)
            if by in labels and where.items() <= labels.items():
                found[labels[by]] = found.get(labels[by], 0.0) + value
        return found

    def shares(self, name: str, *, by: str) -> dict[str, float] | None:
        """`sums` as parts of their total; None when that is 0, or one of them is less, which no part can be."""
        sums = self.sums(name, by=by)
        total = sum(sums.values())
        if total <= 0 or min(sums.values()) < 0:
            return None
        return {label: value / total for label, value in sums.items()}

    def strangers(self) -> list[str]:
        """What there is to say of `foreign`, a line each."""
        return [
            f"{target.address} belongs to {f'run {run}' if run else 'no run'} now"
            for target, run in self.foreign.items()
        ]

    def last(self, name: str, **where: str) -> float | None:
        """The value of the one series with these labels, of the first when there are several; None without any."""
        for series, value in self.values.get(name, {}).items():
            if where.items() <= dict(series).items():
                return value
        return None

    def since(self, earlier: "Scrape") -> "Scrape":
        """How much each counter grew. What was not there before counts from zero, such as a replica that has joined;
        but of one that did not speak for itself then, nobody knows how much of its life is new: its series are left
        out."""
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
    """Asks all endpoints of `run` at once, and waits for none of them longer than `timeout_s`."""
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
    """The run that the endpoint's process is of; empty when it is of none."""
    return next((sample.labels.get("run_name", "") for sample in samples if sample.name == "asyncrl_run_info"), "")


def _adds_up(sample: Sample) -> bool:
    """Whether sums can be made of it. NaN is a gauge's way to say that nothing was measured; Inf, and a bucket without
    a bound that can be read, are nobody's."""
    try:
        bound = float(sample.labels.get("le", 0))
    except ValueError:
        return False
    return abs(sample.value) <= MAX_VALUE and bound > -math.inf


def _answer(target: Target, timeout_s: float) -> list[Sample] | None:
    """What the endpoint says; None when that is nothing, or nothing that can be read."""
    try:
        text = _read(target.address, timeout_s)
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except Exception:  # of the network, or whatever a text that is no metrics leads the parser to
        return None


def _read(address: str, timeout_s: float) -> str:
    """The endpoint's text. Raises when it cannot be had whole within `timeout_s`."""
    late, started_s = Event(), time.monotonic()
    with closing(HTTPConnection(address, timeout=timeout_s)) as connection:
        connection.connect()
        # the connection's own time is that of one read: who sends a byte a second would be listened to for ever
        ends = Timer(started_s + timeout_s - time.monotonic(), _hang_up, args=(connection.sock, late))
        ends.daemon = True
        ends.start()
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            body = answer.read(MAX_BYTES + 1)
        finally:
            ends.cancel()
    if answer.status != HTTPStatus.OK or late.is_set():
        raise ValueError(f"{address} answers {answer.status}{', too slowly' if late.is_set() else ''}")
    if len(body) > MAX_BYTES or not body.endswith(b"\n"):
        raise ValueError(f"{address} answers {len(body)} bytes of at most {MAX_BYTES}, or a torn line")
    return body.decode()


def _hang_up(connection: socket.socket, late: Event) -> None:
    late.set()
    with suppress(OSError):  # it has ended meanwhile
        connection.shutdown(socket.SHUT_RDWR)


def read_targets(path: Path) -> list[Target]:
    """The run's own endpoints of those that `write_targets` wrote. RunError when there is no such file, or it is
    something else."""
    try:
        groups = msgspec.json.decode(path.read_bytes(), type=list[_Group])
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}: the learner writes it when the run starts") from error
    except msgspec.MsgspecError as error:
        raise RunError(f"{path}: not a list of Prometheus targets: {error}") from error
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
