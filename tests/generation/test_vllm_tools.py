"""vLLM's tool parsers read the calls of a model, and its client reads the answers of the gateway."""

import json
from typing import Any

import pytest

from asyncrl.common.version import Version
from asyncrl.demo.chat_tokenizer import END, build_chat_tokenizer
from asyncrl.environments.games import CALCULATOR
from asyncrl.errors import ConfigError
from asyncrl.generation.conversations import Conversation, TemplateRenderer
from asyncrl.generation.gateway_calls import token_answer
from asyncrl.generation.interfaces import Completion
from asyncrl.generation.vllm_tools import ToolParser

pytestmark = pytest.mark.integration  # vLLM's modules take seconds to import

TOKENIZER = build_chat_tokenizer(max_length=512)
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 2"}}</tool_call>'


def read(text: str) -> dict[str, Any]:
    return ToolParser("hermes", TOKENIZER).message(TOKENIZER(text)["input_ids"], tools=[CALCULATOR])


def test_a_call_becomes_a_call_of_the_message() -> None:
    message = read(f"I add. {CALL}{END}")
    assert message["content"] == "I add. "
    [call] = message["tool_calls"]
    assert call["function"]["name"] == "calculator"
    assert json.loads(call["function"]["arguments"]) == {"expression": "1 + 2"}
    assert call["id"]
    assert len(read(f"{CALL}{CALL}")["tool_calls"]) == 2


@pytest.mark.parametrize("text", ["3", "<tool_call>{bad", "<tool_call></tool_call>"])
def test_what_is_no_call_stays_in_the_text(text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert read(f"{text}{END}") == {"role": "assistant", "content": text}
    assert not caplog.records, "errors of the model are no errors of the program"


def test_an_unknown_parser_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"generator.tool_parser = hermes2: vLLM has no such parser; .*hermes"):
        ToolParser("hermes2", TOKENIZER)


def test_vllms_client_reads_the_answer_of_the_gateway() -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensResponse

    conversation = Conversation(TemplateRenderer(TOKENIZER))
    turn = conversation.call_with_tokens([5, 6])
    versions = [Version(1, 3), Version(1, 4), Version(1, 4)]
    sampled = Completion(token_ids=[7, 8, 9], logprobs=[-0.1, -0.2, -0.3], versions=versions, text="", truncated=True)
    conversation.answered(turn, sampled, {"role": "assistant", "content": ""})
    answer = GenerateTokensResponse.model_validate_json(json.dumps(token_answer(turn, number=1)))
    [choice] = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [(each.token_id, each.logprob) for each in choice.logprobs.content] == [(7, -0.1), (8, -0.2), (9, -0.3)]
    assert [(span.version, span.start, span.end) for span in choice.weight_versions or []] == [
        ("1.3", 0, 1),
        ("1.4", 1, 3),
    ]
    assert (choice.finish_reason, choice.token_ids, answer.prompt_token_ids) == ("length", [7, 8, 9], [5, 6])
