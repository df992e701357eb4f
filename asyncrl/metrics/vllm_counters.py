"""Counters of vLLM in this process, which it registers in the default registry of Prometheus."""

from typing import NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry

ALL, CACHED = "vllm:prefix_cache_queries", "vllm:prefix_cache_hits"


class PromptTokens(NamedTuple):
    """Prompt tokens of an engine's requests since its start: `all` of them, and those whose keys and values came from
    the prefix cache (`cached`), so that they were not computed again."""

    all: int
    cached: int


def prompt_tokens(registry: CollectorRegistry = REGISTRY) -> PromptTokens:
    """Returns the prompt tokens of this process's engine, whose counters are in `registry`; zeros if it has none.

    vLLM counts each sample of a group, when it is scheduled for the first time. It counts neither a sequence that is
    computed again after a weight update nor a request for the log-probs of a prompt, with which such an update is
    checked, because neither reads the cache.
    """
    names = [f"{ALL}_total", f"{CACHED}_total"]
    # only these two counters are collected, because this runs in each heartbeat and vLLM has a hundred others
    collected = registry.restricted_registry(names).collect()
    found = {sample.name: int(sample.value) for metric in collected for sample in metric.samples}
    return PromptTokens(*(found.get(name, 0) for name in names))
