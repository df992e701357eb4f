"""Reading a run's endpoints without a Prometheus: who is asked, what they answered, and how counters grew.

What must hold: an endpoint that does not answer in time costs its own series and nothing else; a counter that went
back (its process was replaced) counts from zero, as in PromQL.
"""

import math
import time
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from asyncrl.errors import RunError
from asyncrl.metrics.discovery import Target

Labels = frozenset[tuple[str, str]]
"""Of one series, those of service discovery (`role`, `replica`) among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """What all endpoints said at `at_s` on the monotonic clock: values by name and labels. `silent` did not answer."""

    at_s: float
    values: Mapping[str, Mapping[Labels, float]]
    silent: tuple[Target, ...] = ()

    def sums(self, name: str, *, by: str, **where: str) -> dict[str, float]:
        """Values of the series with these labels, added up by the label `by`; series without it are left out."""
        found: dict[str, float] = {}
        for series, value in self.values.get(name, {}).items():
            labels = dict(series)
            if by in labels and where.items() <= labels.items():
                found[labels[by]] = found.get(labels[by], 0.0) + value
        return found

    def shares(self, name: str, *, by: str) -> dict[str, float] | None:
        """`sums` as parts of their total; None when that is 0."""
        sums = self.sums(name, by=by)
        total = sum(sums.values())
        return {label: value / total for label, value in sums.items()} if total > 0 else None

    def last(self, name: str, **where: str) -> float | None:
        """The value of the one series with these labels, of the first when there are several; None without any."""
        for series, value in self.values.get(name, {}).items():
            if where.items() <= dict(series).items():
                return value
        return None

    def since(self, earlier: "Scrape") -> "Scrape":
        """How much each counter grew; what was not there before counts from zero."""
        values = {
            name: {
                labels: _growth(earlier.values.get(name, {}).get(labels, 0.0), value) for labels, value in of.items()
            }
            for name, of in self.values.items()
        }
        return Scrape(at_s=self.at_s - earlier.at_s, values=values, silent=self.silent)


def _growth(before: float, now: float) -> float:
    return now - before if now >= before else now


def scrape(targets: Sequence[Target], *, timeout_s: float) -> Scrape:
    """Asks all endpoints at once."""
    with ThreadPoolExecutor(max_workers=max(1, len(targets))) as pool:
        answers = list(pool.map(lambda target: _read(target, timeout_s), targets))
    values: dict[str, dict[Labels, float]] = {}
    for target, text in zip(targets, answers, strict=True):
        if text is None:
            continue
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if math.isnan(sample.value):
                    continue  # a gauge's way to say that nothing was measured
                labels = frozenset({**sample.labels, "role": target.role, "replica": target.replica}.items())
                values.setdefault(sample.name, {})[labels] = sample.value
    silent = tuple(target for target, text in zip(targets, answers, strict=True) if text is None)
    return Scrape(at_s=time.monotonic(), values=values, silent=silent)


def _read(target: Target, timeout_s: float) -> str | None:
    try:
        with urllib.request.urlopen(f"http://{target.address}/metrics", timeout=timeout_s) as answer:
            return str(answer.read().decode())
    except (OSError, HTTPException, ValueError):
        return None


def read_targets(path: Path) -> list[Target]:
    """The endpoints that `write_targets` wrote. RunError when there is no such file, or it is something else."""
    try:
        groups = msgspec.json.decode(path.read_bytes(), type=list[_Group])
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}: the learner writes it when the run starts") from error
    except msgspec.MsgspecError as error:
        raise RunError(f"{path}: not a list of Prometheus targets: {error}") from error
    return list(_targets(groups))


class _Group(msgspec.Struct):
    targets: list[str]
    labels: dict[str, str]


def _targets(groups: Iterable[_Group]) -> Iterable[Target]:
    for group in groups:
        for address in group.targets:
            yield Target(
                role=group.labels.get("role", ""), replica=group.labels.get("replica", address), address=address
            )
