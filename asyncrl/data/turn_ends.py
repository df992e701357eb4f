"""Tokens that end a model's turns: those at which an engine stops, and the one that the chat template writes."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from asyncrl.data.light_tokenizer import cached_files

REFUSALS = (TemplateError, AttributeError, KeyError, TypeError, ValueError)
"""Errors of chat templates that cannot write a conversation."""
CONTENTS = ("b", "d")
"""Two example texts of a turn. A template renders the turn with each of them. The common end of both renderings is what
the template writes behind the text."""


def engine_ends(tokenizer: Any) -> frozenset[int]:
    """Returns the tokens at which an engine ends an answer by itself: the tokenizer's `eos_token`, and `eos_token_id`
    of the generation_config.json beside it."""
    named = [tokenizer.eos_token_id]
    folder = Path(tokenizer.name_or_path)
    files = folder if folder.is_dir() else cached_files(str(tokenizer.name_or_path)) if tokenizer.name_or_path else None
    file = None if files is None else files / "generation_config.json"
    if file is not None and file.is_file():
        found = json.loads(file.read_bytes()).get("eos_token_id")
        named += found if isinstance(found, list) else [found]
    return frozenset(each for each in named if isinstance(each, int))


def template_end(tokenizer: Any) -> int | None:
    """Returns the control token with which the chat template ends an answer that another message follows: the first of
    `engine_ends` behind the answer's text, otherwise the first control token behind it. Returns None if there is no
    control token before the text of the next message, if the tokenizer has no template, and if the template refuses or
    leaves out such messages."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        one, other = (
            behind_turn(lambda messages: _rendered(tokenizer, messages, prompted=True), [_user(text)])
            for text in CONTENTS
        )
    except REFUSALS:
        return None
    between = [each for each in common_prefix(one, other) if each in control_ids(tokenizer)]
    ends = engine_ends(tokenizer)
    return next((each for each in between if each in ends), next(iter(between), None))


def further_end(tokenizer: Any) -> int | None:
    """Returns the token at which an engine must stop besides `engine_ends`, so that an answer ends where the chat
    template ends it. This is `template_end`. Returns None if there is no such token, if it is one of `engine_ends`, or
    if the template ends the last answer of a conversation with one of `engine_ends`.

    Base models often have a template whose end, such as `<|im_end|>`, is not their `eos_token`.
    """
    end, ends = template_end(tokenizer), engine_ends(tokenizer)
    if end is None or end in ends:
        return None
    last = behind_turn(lambda messages: _rendered(tokenizer, messages, prompted=False), [])
    return None if ends.intersection(last) else end


def generation_prompt(tokenizer: Any) -> str:
    """Returns the text with which the chat template begins an answer, with special tokens; empty without a template, or
    if the template also changes the messages before this text when an answer follows."""
    if not getattr(tokenizer, "chat_template", None):
        return ""
    try:
        begun, ended = (_rendered(tokenizer, [_user("a")], prompted=prompted) for prompted in (True, False))
    except REFUSALS:
        return ""
    shared = len(common_prefix(begun, ended))
    # some templates write `eos_token` behind the last message if no answer is to follow
    if not control_ids(tokenizer).issuperset(ended[shared:]):
        return ""
    return str(tokenizer.decode(begun[shared:], skip_special_tokens=False))


def note_on_ends(tokenizer: Any) -> str | None:
    """Returns a line for the start of a run if the chat template ends an answer with another token than the model's own
    end (`further_end`); otherwise None."""
    end = further_end(tokenizer)
    if end is None:
        return None
    theirs = ", ".join(repr(tokenizer.decode([each])) for each in sorted(engine_ends(tokenizer)))
    return (
        f"the chat template ends an answer with {tokenizer.decode([end])!r}, and the model's own end is {theirs}, as "
        "in base models: engines stop at all of them"
    )


def control_ids(tokenizer: Any) -> frozenset[int]:
    """Returns the ids of the tokens that were added to the vocabulary by hand and not learned from text, such as those
    that begin and end messages."""
    return frozenset(tokenizer.added_tokens_decoder) | frozenset(tokenizer.all_special_ids)


def behind_turn(render: Callable[[Sequence[Mapping[str, Any]]], list[int]], after: Sequence[Any]) -> list[int]:
    """Returns all tokens that a template writes behind the text of a model's answer, if the messages `after` follow it.
    `render` returns the tokens of a conversation. Raises ValueError if the template leaves texts out, as some templates
    for images do."""
    one, other = (render([_user("a"), {"role": "assistant", "content": text}, *after]) for text in CONTENTS)
    if one == other:
        raise ValueError("the chat template leaves out the text of an answer")
    return common_suffix(one, other)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Returns the tokens with which both sequences begin."""
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return list(one[:length])


def common_suffix(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Returns the tokens with which both sequences end."""
    return common_prefix(one[::-1], other[::-1])[::-1]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, prompted: bool) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=prompted, tokenize=True, return_dict=False
    )
    return ids
