"""Tool calls in the answers of a model, read by vLLM's parsers."""

import pytest

from asyncrl.demo.chat_tokenizer import END, build_chat_tokenizer
from asyncrl.errors import ConfigError
from asyncrl.generation.vllm_tools import ToolParser

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
    message = parser.message(tokens(f"let me see {GOOD}{end}"), tools=[TOOL])
    [call] = message["tool_calls"]
    assert message["content"] == "let me see "
    assert (call["type"], call["function"]) == (
        "function",
        {"name": "calculator", "arguments": '{"expression": "6 × 7"}'},
    )


@pytest.mark.parametrize(
    "call",
    [
        "<tool_call>{</tool_call>",
        '<tool_call>{"name": "calculator"}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": "6 * 7"}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": [6, 7]}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": null}</tool_call>',
        f'{GOOD}<tool_call>{{"name": "calculator", "arguments": 42}}</tool_call>',
    ],
)
def test_an_answer_with_a_malformed_call_stays_a_text(parser: ToolParser, call: str) -> None:
    assert parser.message(tokens(f"see {call}{END}"), tools=[TOOL]) == {"role": "assistant", "content": f"see {call}"}


def test_an_answer_without_calls_is_a_text(parser: ToolParser) -> None:
    assert parser.message(tokens(f"42{END}"), tools=[TOOL]) == {"role": "assistant", "content": "42"}


def test_an_unknown_parser_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"vLLM has no such parser; set one of .*hermes"):
        ToolParser("mine", TOKENIZER)
