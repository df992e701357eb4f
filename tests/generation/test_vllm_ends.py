"""Only `stop` and `length` are ends of a completion. All other finish reasons of vLLM fail its group."""

import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.errors import DataError, InfraError, RolloutError
from asyncrl.generation.interfaces import NOTHING
from asyncrl.generation.vllm_engine import VLLMEngine
from asyncrl.generation.vllm_sampled import Child, SampledByVLLM

pytestmark = pytest.mark.slow  # imports torch


def output_of(finish_reason: str | None) -> SimpleNamespace:
    """Returns the output of one completion of two tokens, as vLLM returns it."""
    tokens = [40, 41]
    return SimpleNamespace(
        finish_reason=finish_reason,
        token_ids=tokens,
        logprobs=SimpleNamespace(token_ids=tokens, logprobs=[-0.5, -0.25]),
        weight_versions=[SimpleNamespace(version="1.3", start=0)],
        text="ab",
    )


class EndedLLM:
    """Stands for `AsyncLLM`: ends each request at once, its completions with these reasons."""

    def __init__(self, *finish_reasons: str | None) -> None:
        self._outputs = [output_of(reason) for reason in finish_reasons]
        self.tokenizer = SimpleNamespace(decode=lambda token_ids, **_: "ab")

    async def generate(self, _: Any, parameters: Any, *_more: Any, **_options: Any) -> AsyncIterator[SimpleNamespace]:
        self.parameters = parameters
        yield SimpleNamespace(finished=True, outputs=self._outputs, prompt_logprobs=[None])


@pytest.fixture
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine imports vLLM for its first request, which takes many seconds."""
    names = SimpleNamespace(
        SamplingParams=dict, tokens_input=lambda tokens, **_: tokens, RequestOutputKind=SimpleNamespace(FINAL_ONLY=2)
    )
    for module in ("vllm", "vllm.inputs", "vllm.sampling_params"):
        monkeypatch.setitem(sys.modules, module, names)


async def sampled(*finish_reasons: str | None) -> list[bool]:
    """Returns which completions were cut off at their length limit."""
    engine = VLLMEngine(EndedLLM(*finish_reasons), config=Config(), processes=[])
    completions = await engine.generate([7], n=len(finish_reasons), seed=None, temperature=1.0, max_tokens=2)
    return [completion.truncated for completion in completions]


@pytest.mark.asyncio
@pytest.mark.usefixtures("_without_vllm")
async def test_a_completion_ends_with_its_text_or_at_its_length_limit() -> None:
    assert await sampled("stop", "length") == [False, True]


@pytest.mark.asyncio
@pytest.mark.usefixtures("_without_vllm")
@pytest.mark.parametrize(
    ("finish_reason", "failure", "label"),
    [
        ("error", InfraError, "engine"),
        ("abort", InfraError, "aborted"),
        ("repetition", DataError, "finish_reason"),
        ("a reason of a later version", DataError, "finish_reason"),
        (None, DataError, "finish_reason"),
    ],
)
async def test_another_end_fails_the_group_and_is_tried_again_only_if_that_may_help(
    finish_reason: str | None, failure: type[RolloutError], label: str
) -> None:
    with pytest.raises(failure) as caught:
        await sampled("stop", finish_reason)
    assert caught.value.reason == label


@pytest.mark.asyncio
@pytest.mark.usefixtures("_without_vllm")
async def test_a_score_that_the_engine_did_not_finish_is_an_infra_failure() -> None:
    engine = VLLMEngine(EndedLLM("error"), config=Config(), processes=[])
    with pytest.raises(InfraError, match="internal error"):
        await engine.score([7])


@pytest.mark.parametrize(
    ("finish_reason", "finished", "truncated"),
    [("stop", True, False), ("length", True, True), ("error", False, False), ("abort", False, False)],
)
def test_the_next_attempt_continues_a_stored_completion_that_did_not_end_in_order(
    finish_reason: str, finished: bool, truncated: bool
) -> None:
    child = Child(NOTHING, output=output_of(finish_reason))
    samples = SampledByVLLM(EndedLLM(), [child]).partial()
    assert samples is not None
    [sample] = samples
    assert sample.token_ids == [40, 41]
    assert (sample.finished, sample.truncated) == (finished, truncated)


@pytest.mark.asyncio
@pytest.mark.usefixtures("_without_vllm")
@pytest.mark.parametrize(("end", "given"), [(None, []), (7, [7])])
async def test_a_request_ends_at_the_end_of_the_chat_template_too(end: int | None, given: list[int]) -> None:
    llm = EndedLLM("stop")
    engine = VLLMEngine(llm, config=Config(), processes=[], further_end=end)
    await engine.generate([7], n=1, seed=None, temperature=1.0, max_tokens=2)
    assert llm.parameters["stop_token_ids"] == given


@pytest.mark.asyncio
@pytest.mark.usefixtures("_without_vllm")
@pytest.mark.parametrize(
    ("stop", "decoded", "expected"),
    [
        ((), "ab", "ab"),
        (("x",), "ab", "ab"),
        (("</answer>", "\n\n"), "<answer>7</answer>", "<answer>7"),
        (("Question:", "。"), "\u4e8c\u3002Question:", "\u4e8c"),
    ],
    ids=["none", "absent", "a tag", "the first of several"],
)
async def test_the_text_does_not_depend_on_stop_strings(stop: tuple[str, ...], decoded: str, expected: str) -> None:
    """vLLM decodes a request with stop strings token by token, with a space before the first word."""
    llm = EndedLLM("stop")
    llm.tokenizer = SimpleNamespace(decode=lambda token_ids, **_: decoded)
    llm._outputs[0].text = f" {expected}"
    [found] = await VLLMEngine(llm, config=Config(), processes=[]).generate(
        [7], n=1, seed=None, temperature=1.0, max_tokens=2, stop=stop
    )
    assert found.text == expected


@pytest.mark.asyncio
@pytest.mark.usefixtures("_without_vllm")
@pytest.mark.parametrize(("end", "decoded"), [(None, [40, 41]), (41, [40]), (40, [40, 41])])
async def test_the_text_does_not_have_the_end_of_the_chat_template(end: int | None, decoded: list[int]) -> None:
    """This token need not be a special one, which decoding would leave out."""
    llm = EndedLLM("stop")
    seen: list[list[int]] = []
    llm.tokenizer = SimpleNamespace(decode=lambda token_ids, **_: seen.append(list(token_ids)) or "ab")
    engine = VLLMEngine(llm, config=Config(), processes=[], further_end=end)
    await engine.generate([7], n=1, seed=None, temperature=1.0, max_tokens=2)
    assert seen == [decoded]
