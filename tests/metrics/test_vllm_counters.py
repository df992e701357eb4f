"""The prompt tokens of an engine are read from the counters that vLLM registers in its process."""

from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY, Counter

from asyncrl.metrics.vllm_counters import ALL, CACHED, PromptTokens, prompt_tokens


@pytest.fixture
def counters() -> Iterator[dict[str, Counter]]:
    """Registers counters of vLLM, with its labels, and one that is not asked for."""
    names = (ALL, CACHED, "vllm:prompt_tokens_cached")
    found = {name: Counter(name, "a counter", labelnames=("model_name", "engine")) for name in names}
    yield found
    for counter in found.values():
        REGISTRY.unregister(counter)


def test_cached_and_all_prompt_tokens_are_those_of_vllms_counters(counters: dict[str, Counter]) -> None:
    for name, tokens in zip(counters, (712, 602, 5), strict=True):
        counters[name].labels("m", "0").inc(tokens)
    assert prompt_tokens() == PromptTokens(all=712, cached=602)


def test_an_engine_without_a_request_has_no_prompt_tokens(counters: dict[str, Counter]) -> None:
    assert prompt_tokens() == PromptTokens(all=0, cached=0)


def test_a_process_without_an_engine_has_no_prompt_tokens() -> None:
    assert prompt_tokens() == PromptTokens(all=0, cached=0)
