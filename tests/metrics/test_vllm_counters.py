"""The prompt tokens of an engine are read from the counters that vLLM registers in its process."""

import pytest
from prometheus_client import CollectorRegistry, Counter

from asyncrl.metrics.vllm_counters import ALL, CACHED, PromptTokens, prompt_tokens


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry of its own: the default one has the counters of any engine that this process of tests has started."""
    return CollectorRegistry()


@pytest.fixture
def counters(registry: CollectorRegistry) -> dict[str, Counter]:
    """Registers counters of vLLM, with its labels, and one that is not asked for."""
    names = (ALL, CACHED, "vllm:prompt_tokens_cached")
    return {name: Counter(name, "a counter", ("model_name", "engine"), registry=registry) for name in names}


def test_cached_and_all_prompt_tokens_are_those_of_vllms_counters(
    counters: dict[str, Counter], registry: CollectorRegistry
) -> None:
    for name, tokens in zip(counters, (712, 602, 5), strict=True):
        counters[name].labels("m", "0").inc(tokens)
    assert prompt_tokens(registry) == PromptTokens(all=712, cached=602)


@pytest.mark.usefixtures("counters")
def test_an_engine_without_a_request_has_no_prompt_tokens(registry: CollectorRegistry) -> None:
    assert prompt_tokens(registry) == PromptTokens(all=0, cached=0)


def test_a_process_without_an_engine_has_no_prompt_tokens(registry: CollectorRegistry) -> None:
    assert prompt_tokens(registry) == PromptTokens(all=0, cached=0)
