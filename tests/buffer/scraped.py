"""Reads the metrics of a process at its endpoint, as Prometheus does."""

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from asyncrl.common.names import COORDINATOR
from asyncrl.coordinator.coordinator import Coordinator

DEADLINE_S = 60.0


class Scraped:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        samples = [sample for family in families for sample in family.samples]
        self._values = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}

    def get_sample_value(self, name: str, labels: dict[str, str] | None = None) -> float | None:
        return self._values.get((name, frozenset((labels or {}).items())))


async def scraped(coordinator: Coordinator) -> Scraped:
    """Scrapes the endpoint of a coordinator that was started."""
    url = f"http://{coordinator.registry.endpoints[COORDINATOR].address}/metrics"

    def read() -> str:
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as response:
            return str(response.read().decode())

    return Scraped(await asyncio.to_thread(read))
