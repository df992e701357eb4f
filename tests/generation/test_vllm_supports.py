"""The support of a sampled token is what vLLM sampled it from, and a support that is not whole is refused. The most
likely tokens come with their log-probs."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_vllm_ends import EndedLLM

from asyncrl.common.version import Version
from asyncrl.config.load import load_config
from asyncrl.data.specs import SUPPORT, TOP_IDS, TOP_LOGPROBS
from asyncrl.errors import ConfigError, DataError
from asyncrl.generation.interfaces import NOTHING, PartialCompletion
from asyncrl.generation.vllm_engine import VLLMEngine
from asyncrl.generation.vllm_sampled import Child, SampledByVLLM, sampling_parameters, until_stop, wide_columns

pytestmark = pytest.mark.slow  # imports torch

NEVER = -math.inf


def flat(*tokens: list[tuple[int, float]]) -> SimpleNamespace:
    """Returns log-probs as vLLM's FlatLogprobs: for each token (id, probability), the sampled one first."""
    entries = [entry for token in tokens for entry in token]
    logprobs = [math.log(p) if p else NEVER for _, p in entries]
    return SimpleNamespace(token_ids=[each for each, _ in entries], logprobs=logprobs)


TWO_TOKENS = flat(
    [(7, 0.25), (4, 0.5), (7, 0.25), (9, 0.25)],
    [(3, 1.0), (3, 1.0), (0, 0.0), (1, 0.0)],
)
"""Two tokens, sampled with `top_k` 3: the second one with `min_p`, so that only one token was left."""


def output(logprobs: SimpleNamespace, token_ids: list[int]) -> SimpleNamespace:
    return SimpleNamespace(
        finish_reason="stop",
        token_ids=token_ids,
        logprobs=logprobs,
        weight_versions=[SimpleNamespace(version="1.3", start=0)],
        text="ab",
    )


def test_the_support_is_the_tokens_that_could_be_sampled_padded_to_top_k() -> None:
    assert wide_columns([7, 3], TWO_TOKENS, widths={SUPPORT: 3})[SUPPORT].tolist() == [[4, 7, 9], [3, -1, -1]]


def test_a_vocabulary_smaller_than_top_k_leaves_padding() -> None:
    assert wide_columns([7, 3], TWO_TOKENS, widths={SUPPORT: 5})[SUPPORT].tolist() == [
        [4, 7, 9, -1, -1],
        [3, -1, -1, -1, -1],
    ]
    assert wide_columns([], flat(), widths={SUPPORT: 5})[SUPPORT].shape == (0, 5)


@pytest.mark.parametrize(
    "token",
    [
        [(7, 0.25), (4, 0.25), (5, 0.25), (7, 0.25)],  # four tokens of the same logit, of which three are listed
        [(8, 0.3), (4, 0.4), (5, 0.3), (7, 0.3)],  # the sampled one is not listed
    ],
)
def test_a_support_of_more_than_top_k_tokens_is_refused(token: list[tuple[int, float]]) -> None:
    with pytest.raises(DataError, match=r"among more than generator\.top_k = 3 tokens") as caught:
        wide_columns([token[0][0]], flat(token), widths={SUPPORT: 3})
    assert caught.value.reason == "support"


@pytest.mark.parametrize("top_k", [None, 3])
def test_the_most_likely_tokens_have_their_log_probs_and_tokens_that_cannot_be_sampled_are_padding(
    top_k: int | None,
) -> None:
    widths = {TOP_IDS: 2, TOP_LOGPROBS: 2} | ({SUPPORT: top_k} if top_k else {})
    columns = wide_columns([7, 3], TWO_TOKENS, widths=widths)
    assert {name: column.shape for name, column in columns.items()} == {
        name: (2, width) for name, width in widths.items()
    }
    assert columns[TOP_IDS].tolist() == [[4, 7], [3, -1]]
    np.testing.assert_array_equal(columns[TOP_LOGPROBS], np.log(np.array([[0.5, 0.25], [1, 1]], dtype=np.float32)))
    wider = wide_columns([7, 3], TWO_TOKENS, widths={TOP_IDS: 4, TOP_LOGPROBS: 4})
    assert wider[TOP_IDS].tolist() == [[4, 7, 9, -1], [3, -1, -1, -1]]
    assert wider[TOP_LOGPROBS][:, 3].tolist() == [0, 0]
    assert (columns[TOP_IDS].dtype, columns[TOP_LOGPROBS].dtype) == (np.int32, np.float32)


def test_a_support_is_found_among_more_log_probs_than_it_has_tokens() -> None:
    entries = [(7, 0.25), (4, 0.5), (7, 0.25), (9, 0.25), (1, 0.0), (2, 0.0)]
    columns = wide_columns([7], flat(entries), widths={SUPPORT: 3, TOP_IDS: 5, TOP_LOGPROBS: 5})
    assert columns[SUPPORT].tolist() == [[4, 7, 9]]
    assert columns[TOP_IDS].tolist() == [[4, 7, 9, -1, -1]]
    four = [(7, 0.25), (4, 0.25), (5, 0.25), (7, 0.25), (8, 0.25)]
    with pytest.raises(DataError, match="among more than"):
        wide_columns([7], flat(four), widths={SUPPORT: 3, TOP_IDS: 4})


def test_a_completion_has_the_sampled_tokens_log_probs_and_all_supports() -> None:
    sample = Child(NOTHING, widths={SUPPORT: 3}).ended(output(TWO_TOKENS, [7, 3]))
    assert (sample.token_ids, sample.logprobs) == ([7, 3], [math.log(0.25), 0.0])
    assert sample.wide[SUPPORT].tolist() == [[4, 7, 9], [3, -1, -1]]
    with pytest.raises(DataError, match="other tokens than the sampled ones"):
        Child(NOTHING, widths={SUPPORT: 3}).ended(output(TWO_TOKENS, [4, 3]))


def test_a_continued_completion_keeps_the_supports_of_its_prefix() -> None:
    prefix = PartialCompletion(
        token_ids=[5], logprobs=[-0.1], versions=[Version(1, 2)], wide={SUPPORT: np.array([[5, 6, -1]], dtype=np.int32)}
    )
    sample = Child(prefix, widths={SUPPORT: 3}).ended(output(TWO_TOKENS, [7, 3]))
    assert sample.wide[SUPPORT].tolist() == [[5, 6, -1], [4, 7, 9], [3, -1, -1]]
    cut = until_stop(sample, ["57"], lambda tokens: "".join(map(str, tokens)))
    assert cut.wide[SUPPORT].tolist() == [[5, 6, -1], [4, 7, 9]]
    [partial] = (
        SampledByVLLM(EndedLLM(), [Child(prefix, output=output(TWO_TOKENS, [7, 3]), widths={SUPPORT: 3})]).partial()
        or []
    )
    assert len(partial.wide[SUPPORT]) == 3


def test_a_request_that_has_sampled_nothing_yet_has_an_empty_support() -> None:
    state = SimpleNamespace(
        request_index=0,
        weight_version_starts=[],
        detokenizer=SimpleNamespace(output_token_ids=[]),
        logprobs_processor=SimpleNamespace(logprobs=flat()),
    )
    llm = SimpleNamespace(
        output_processor=SimpleNamespace(external_req_ids={"r": ["r-0"]}, request_states={"r-0": state})
    )
    [sample] = SampledByVLLM(llm, [Child(NOTHING, request_id="r", widths={SUPPORT: 3})]).partial() or []
    assert sample.wide[SUPPORT].shape == (0, 3)


def test_vllm_is_asked_for_as_many_log_probs_as_a_support_may_have_tokens() -> None:
    generator = load_config([], ["generator.top_k=8", "generator.top_p=0.9", "generator.min_p=0.1"]).generator
    assert sampling_parameters(generator, vocabulary=100) == {
        "top_k": 8, "top_p": 0.9, "min_p": 0.1, "logprobs": 8,
    }  # fmt: skip
    assert sampling_parameters(generator, vocabulary=5)["logprobs"] == 5
    assert sampling_parameters(load_config([], []).generator, vocabulary=100) == {}
    listed = load_config([], ["generator.logprobs=16"]).generator
    assert sampling_parameters(listed, vocabulary=100) == {"logprobs": 16}
    both = load_config([], ["generator.logprobs=16", "generator.top_k=8"]).generator
    assert sampling_parameters(both, vocabulary=100) == {"top_k": 8, "top_p": 1.0, "min_p": 0.0, "logprobs": 16}
    assert sampling_parameters(both, vocabulary=9)["logprobs"] == 9


@pytest.mark.parametrize("override", ["top_p=0.9", "top_p=0.999", "min_p=0.1", "min_p=1e-6"])
def test_a_filter_without_top_k_is_refused_where_vllm_would_not_get_it(override: str) -> None:
    generator = load_config([], [f"generator.{override}"]).generator
    with pytest.raises(ConfigError, match=rf"generator\.{override.split('=')[0]} = .*needs generator\.top_k"):
        sampling_parameters(generator, vocabulary=100)


class NotedEngine(VLLMEngine):
    """Notes the parameters of each request, and answers with two tokens."""

    asked: dict[str, Any]

    async def _request(self, tokens: Any, children: Any, **sampling: Any) -> Any:
        self.asked = sampling
        greedy = sampling["temperature"] == 0.0
        found = flat([(7, 1.0)], [(3, 1.0)]) if greedy else TWO_TOKENS
        for child in children:
            child.output = output(found, [7, 3])


@pytest.mark.asyncio
async def test_a_greedy_answer_has_no_support() -> None:
    llm = EndedLLM()
    llm.model_config = SimpleNamespace(get_vocab_size=lambda: 100)  # type: ignore[attr-defined]
    engine = NotedEngine(llm, config=load_config([], ["generator.top_k=3"]), processes=[])
    [sampled] = await engine.generate([1], n=1, seed=None, temperature=0.5, max_tokens=2)
    assert {"top_k": 3, "logprobs": 3}.items() <= engine.asked.items()
    assert sampled.wide[SUPPORT].shape == (2, 3)
    [greedy] = await engine.generate([1], n=1, seed=None, temperature=0.0, max_tokens=2)
    assert engine.asked["logprobs"] == 0, "an answer that is not counted costs no further log-prob"
    assert "top_k" not in engine.asked
    assert not greedy.wide
