"""Reads the tool calls in the answers of a model, with the tool parsers of vLLM."""

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from asyncrl.data.turn_ends import engine_ends, template_end
from asyncrl.errors import ConfigError, DataError
from asyncrl.user_code import describe_error

_log = logging.getLogger(__name__)

_RANDOM_ID = re.compile(r"(?:chatcmpl-tool-|call_(?:\d+_)?)?([0-9A-Za-z]{9,})")
"""Matches ids of tool calls that vLLM's parsers draw at random: hexadecimal digits, and for Mistral's models nine
letters and digits. Its group is the random part."""


class ToolParser:
    """Reads the answers of models that write tool calls in the format `name` (`generator.tool_parser`).

    Raises ConfigError if vLLM has no such parser, or if the parser does not work with the model's tokenizer.
    """

    def __init__(self, name: str, tokenizer: Any) -> None:
        from asyncrl.vllm_internals import ToolParserManager

        # A parser logs each malformed call with a traceback. During training, the model may write many of them.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        key = "generator.tool_parser"
        try:
            parser = ToolParserManager.get_tool_parser(name)
        except KeyError:
            known = ", ".join(sorted(ToolParserManager.list_registered()))
            raise ConfigError(f"{key} = {name}: vLLM has no such parser; set one of {known}") from None
        try:
            parser(tokenizer)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"{key} = {name}: does not fit the model's tokenizer: {error}") from error
        self._parser = parser
        self._tokenizer = tokenizer
        self._ends = engine_ends(tokenizer) | {template_end(tokenizer)}
        self._failed = False

    def message(
        self, token_ids: Sequence[int], *, tools: Sequence[Mapping[str, Any]], prompt: Sequence[int]
    ) -> dict[str, Any]:
        """Returns the answer `token_ids` as a message of the chat interface: its text, and the calls of `tools` in it.
        The same answer to the same `prompt` (tokens) has the same ids of calls: a template may write them into the
        prompt of the next turn, which is compared with the prompts of an earlier attempt.

        All calls stay in the text if one of them is malformed, if its arguments are not a JSON object (LangChain raises
        an error for other arguments), or if the parser raises an error, for example because of a tool's parameters.

        Raises DataError if vLLM refuses `tools`.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        try:
            request = ChatCompletionRequest.model_validate(
                {"messages": [], "model": "", "tools": [dict(tool) for tool in tools]}
            )
        except ValueError as error:
            raise DataError(f"vLLM refuses the tools of the call: {error}", reason="tools_refused") from error
        ended = bool(token_ids) and token_ids[-1] in self._ends
        # The tags of calls are special tokens in some models.
        text = self._tokenizer.decode(token_ids[: len(token_ids) - ended], skip_special_tokens=False)
        try:
            found = self._parser(self._tokenizer, [*(request.tools or [])]).extract_tool_calls(text, request)
        except Exception as error:  # some parsers read the JSON schema of the parameters, which may be any object
            level, self._failed = (
                logging.DEBUG if self._failed else logging.WARNING,
                True,
            )  # it may fail for each answer
            _log.log(level, "the tool parser fails for an answer, which stays text: %s", describe_error(error))
            return {"role": "assistant", "content": text}
        if not all(_is_object(call.function.arguments) for call in found.tool_calls):
            return {"role": "assistant", "content": text}
        message: dict[str, Any] = {"role": "assistant", "content": found.content}
        if found.tool_calls:
            message["tool_calls"] = [
                {
                    "id": settled_id(call.id, index, prompt, token_ids),
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for index, call in enumerate(found.tool_calls)
            ]
        return message


def settled_id(id: str, index: int, *tokens: Sequence[int]) -> str:
    """Returns the id of call number `index` of an answer: `id` with other characters in place of the random ones.
    `index` and `tokens` determine these characters. Ids that a parser makes from the name of the function stay."""
    found = _RANDOM_ID.fullmatch(id)
    if found is None:
        return id
    digest = hashlib.blake2b(msgspec.json.encode([index, *map(list, tokens)])).hexdigest()
    return id[: found.start(1)] + digest[: len(found[1])]


def _is_object(arguments: str) -> bool:
    """Returns whether the arguments are a JSON object that can be sent to the agent: without lone surrogates
    (`\\ud800`), NaN and infinite numbers, which are not JSON."""
    try:
        found = json.loads(arguments)
        msgspec.json.encode(found)
        msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict)
