"""Tokens that are not the most probable ones are counted. Two tokens with the same log-prob are equally probable."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm_ends import EndedLLM, output_of
from test_vllm_supports import TWO_TOKENS, flat

from asyncrl.config.load import load_config
from asyncrl.generation.interfaces import Completion
from asyncrl.generation.vllm_engine import VLLMEngine
from asyncrl.generation.vllm_sampled import non_greedy_tokens

pytestmark = pytest.mark.slow  # imports torch


def counted(*tokens: list[tuple[int, float]]) -> int:
    """Returns the count of an output with these probabilities: of each token, and of the most probable one."""
    return non_greedy_tokens(SimpleNamespace(token_ids=[token[0][0] for token in tokens], logprobs=flat(*tokens)))


def test_a_greedy_answer_has_none() -> None:
    assert counted([(7, 0.5), (7, 0.5)], [(3, 0.25), (3, 0.25)]) == 0


def test_a_tie_is_none() -> None:
    """The sampled token and the one that vLLM lists as the most probable one may differ, if both have its log-prob."""
    assert counted([(7, 0.5), (4, 0.5)], [(3, 0.25), (9, 0.25)]) == 0


def test_each_less_probable_token_counts() -> None:
    assert counted([(7, 0.25), (4, 0.5)], [(3, 0.5), (3, 0.5)], [(3, 0.4), (4, 0.41)]) == 2
    assert counted([(7, 0.0), (4, 0.5)]) == 1


def test_an_answer_without_a_token_or_with_numbers_that_are_not_finite_has_none() -> None:
    assert counted() == non_greedy_tokens(None) == 0
    broken = SimpleNamespace(token_ids=[7, 7], logprobs=[math.nan, math.nan])
    assert non_greedy_tokens(SimpleNamespace(token_ids=[7], logprobs=broken)) == 0


def test_an_output_without_the_most_probable_token_is_refused() -> None:
    with pytest.raises(IndexError):
        counted([(7, 0.5)], [(3, 0.5)])


async def generated(
    logprobs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, *overrides: str, **sampling: Any
) -> tuple[Completion, dict[str, Any]]:
    """Returns the completion of two tokens with these log-probs, and the parameters of its request."""
    names = SimpleNamespace(
        SamplingParams=dict, tokens_input=lambda tokens, **_: tokens, RequestOutputKind=SimpleNamespace(FINAL_ONLY=2)
    )
    for module in ("vllm", "vllm.inputs", "vllm.sampling_params"):
        monkeypatch.setitem(sys.modules, module, names)
    llm = EndedLLM("stop")
    llm.model_config = SimpleNamespace(get_vocab_size=lambda: 100)  # type: ignore[attr-defined]
    llm._outputs[0] = output_of("stop")
    llm._outputs[0].token_ids, llm._outputs[0].logprobs = [7, 3], logprobs
    engine = VLLMEngine(llm, config=load_config([], list(overrides)), processes=[])
    [completion] = await engine.generate([1], n=1, seed=None, max_tokens=2, **sampling)
    return completion, llm.parameters


@pytest.mark.asyncio
async def test_the_most_probable_token_is_asked_for_only_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    both = flat([(7, 0.25), (4, 0.5)], [(3, 0.5), (3, 0.5)])
    found, asked = await generated(both, monkeypatch, temperature=0.0, count_non_greedy=True)
    assert (found.non_greedy_tokens, asked["logprobs"]) == (1, 1)
    assert (found.token_ids, found.logprobs) == ([7, 3], [math.log(0.25), math.log(0.5)])
    found, asked = await generated(flat([(7, 0.25)], [(3, 0.5)]), monkeypatch, temperature=0.0)
    assert (found.non_greedy_tokens, asked["logprobs"]) == (None, 0)


@pytest.mark.asyncio
async def test_a_temperature_that_should_be_0_is_found_with_top_k_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = await generated(TWO_TOKENS, monkeypatch, "generator.top_k=3", temperature=1.0, count_non_greedy=True)
    assert (found.non_greedy_tokens, asked["logprobs"]) == (1, 3)
