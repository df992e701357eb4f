"""Tool calls in the answers of a model, read by vLLM's parsers; and answers of the gateway, read by vLLM's client."""

import json
from typing import Any

import pytest
from session_settings import session_settings

from asyncrl.common.version import Version
from asyncrl.demo.chat_tokenizer import END, build_chat_tokenizer
from asyncrl.errors import ConfigError, DataError
from asyncrl.gateway.calls import TokenCall
from asyncrl.gateway.conversations import Conversation
from asyncrl.gateway.rendering import Renderer
from asyncrl.gateway.vllm_tools import ToolParser, settled_id
from asyncrl.generation.interfaces import Completion

TOKENIZER = build_chat_tokenizer(max_length=1024)
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
GOOD = '<tool_call>{"name": "calculator", "arguments": {"expression": "6 × 7"}}</tool_call>'

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def parser() -> ToolParser:
    return ToolParser("hermes", TOKENIZER)


def tokens(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


@pytest.mark.parametrize("end", ["", END], ids=["cut off", "ended"])
def test_a_call_becomes_a_tool_call_and_the_rest_stays_text(parser: ToolParser, end: str) -> None:
    message = parser.message(tokens(f"let me see {GOOD}{end}"), tools=[TOOL], prompt=[1])
    [call] = message["tool_calls"]
    assert message["content"] == "let me see "
    assert (call["type"], call["function"]) == (
        "function",
        {"name": "calculator", "arguments": '{"expression": "6 × 7"}'},
    )


@pytest.mark.parametrize("tool", [{"a": 1}, {"type": "function"}, {"function": {"name": 5}}, {"function": {}}])
def test_tools_that_vllm_refuses_are_an_error_of_the_call(parser: ToolParser, tool: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="refuses the tools"):
        parser.message(tokens("hello"), tools=[tool], prompt=[1])


@pytest.mark.parametrize("error", [AttributeError, KeyError, RecursionError])
def test_an_answer_for_which_the_parser_fails_stays_text(
    parser: ToolParser, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise error("of the parameters")

    monkeypatch.setattr(parser._parser, "extract_tool_calls", fails)
    assert parser.message(tokens(GOOD), tools=[TOOL], prompt=[1]) == {"role": "assistant", "content": GOOD}


def test_the_same_answer_to_the_same_prompt_has_the_same_ids(parser: ToolParser) -> None:
    def ids(answer: str, prompt: list[int]) -> list[str]:
        return [call["id"] for call in parser.message(tokens(answer), tools=[TOOL], prompt=prompt)["tool_calls"]]

    once = ids(GOOD + GOOD, [1, 2])
    assert ids(GOOD + GOOD, [1, 2]) == once
    others = [*ids(GOOD + GOOD, [1, 3]), *ids(f"{GOOD} {GOOD}", [1, 2])]
    assert len({*once, *others}) == 6
    assert all(id.startswith("chatcmpl-tool-") for id in [*once, *others])


@pytest.mark.parametrize(
    ("id", "settled"),
    [
        ("functions.calculator:0", False),
        ("aB3dE6gH9", True),
        ("call_0123456789abcdef", True),
        ("call_0_8014bc83d2515c95", True),
    ],
)
def test_only_random_ids_are_settled_and_they_keep_their_form(id: str, settled: bool) -> None:
    found = settled_id(id, 0, [1], [2])
    assert (found != id) is settled
    assert len(found) == len(id)
    assert found.rpartition("_")[0] == id.rpartition("_")[0]


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>{</tool_call>",
        '<tool_call>{"name": "calculator"}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": "6 * 7"}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"expression": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"\\udfff": [1]}}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"a": {"b": ["x", "\\ud83d!"]}}}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"a": [-Infinity]}}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": [6, 7]}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": null}</tool_call>',
        f'{GOOD}<tool_call>{{"name": "calculator", "arguments": 42}}</tool_call>',
    ],
)
def test_an_answer_with_a_malformed_call_stays_a_text(parser: ToolParser, call: str) -> None:
    assert parser.message(tokens(f"see {call}{END}"), tools=[TOOL], prompt=[1]) == {
        "role": "assistant",
        "content": f"see {call}",
    }


def test_an_answer_without_calls_is_a_text(parser: ToolParser) -> None:
    assert parser.message(tokens(f"42{END}"), tools=[TOOL], prompt=[1]) == {"role": "assistant", "content": "42"}


def test_an_unknown_parser_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"vLLM has no such parser; set one of .*hermes"):
        ToolParser("mine", TOKENIZER)


def test_vllms_client_reads_the_answer_of_the_gateway() -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensResponse

    conversation = Conversation(Renderer(TOKENIZER), session_settings(max_branches=1))
    turn = conversation.call_with_tokens([5, 6])
    versions = [Version(1, 3), Version(1, 4), Version(1, 4)]
    sampled = Completion(token_ids=[7, 8, 9], logprobs=[-0.1, -0.2, -0.3], versions=versions, text="", truncated=True)
    conversation.answered(turn, sampled, {"role": "assistant", "content": ""})
    body = TokenCall(token_ids=[5, 6]).answer(turn, model="run", number=1)
    answer = GenerateTokensResponse.model_validate_json(json.dumps(body))
    [choice] = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [(each.token_id, each.logprob) for each in choice.logprobs.content] == [(7, -0.1), (8, -0.2), (9, -0.3)]
    assert [(span.version, span.start, span.end) for span in choice.weight_versions or []] == [
        ("1.3", 0, 1),
        ("1.4", 1, 3),
    ]
    assert (choice.finish_reason, choice.token_ids, answer.prompt_token_ids) == ("length", [7, 8, 9], [5, 6])
