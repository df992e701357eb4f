"""The text of a model's answer, as the reward gets it and as the files in `samples/` show it."""

import re
from collections.abc import Sequence
from typing import Any, Literal

from asyncrl.data.turn_ends import engine_ends, further_end, generation_prompt, template_end

SpecialTokens = Literal["drop", "keep"]
_TAG = re.compile("think|thought|reason|answer|solution|tool|call", re.IGNORECASE)
_BEGUN = re.compile(r"[<\[◁][|｜]?/?\w*(?:think|thought|reason)\w*[|｜]?[>\]▷]", re.IGNORECASE)
_MOST_SHOWN = 6


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the first stop string, as vLLM does.

    >>> before_stop("a b</s>", ["</s>", "b<"])
    'a '
    """
    return text[: min([place for stop in stops if (place := text.find(stop)) >= 0], default=len(text))]


def hidden_tags(tokenizer: Any, *, special_tokens: SpecialTokens) -> tuple[str, ...]:
    """Returns tags for which rewards often look, such as `<think>`, and which the text of an answer lacks. These are
    special tokens, if `special_tokens` is `drop`, and tags that the chat template itself writes before the answer."""
    dropped = _special_tags(tokenizer) if special_tokens == "drop" else []
    return tuple(dict.fromkeys([*dropped, *_BEGUN.findall(generation_prompt(tokenizer))]))


def note_on_begin(tokenizer: Any) -> str | None:
    """Returns a line about tags such as `<think>` that the chat template writes before an answer; None if there are
    none."""
    begin = generation_prompt(tokenizer)
    if not (tags := _BEGUN.findall(begin)):
        return None
    return (
        f"the chat template writes {' '.join(tags)} before an answer, so completions do not have this text: "
        f"task.generation_prompt is {begin!r}"
    )


def note_on_tags(tokenizer: Any) -> str | None:
    """Returns a line about special tokens for which rewards often look, such as `<think>`; None if there are none."""
    if not (tags := _special_tags(tokenizer)):
        return None
    more = f" and {len(tags) - _MOST_SHOWN} more" if len(tags) > _MOST_SHOWN else ""
    return (
        f"rewards get completions without the special tokens {', '.join(tags[:_MOST_SHOWN])}{more}; "
        "environment.special_tokens: keep leaves them in"
    )


def _special_tags(tokenizer: Any) -> list[str]:
    special = (each.content for each in tokenizer.added_tokens_decoder.values() if each.special)
    return [text for text in special if _TAG.search(text)]


class AnswerText:
    """Turns the tokens of answers into text. `stops` are the stop strings, `generator.stop`."""

    def __init__(self, tokenizer: Any, *, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._ends: dict[SpecialTokens, frozenset[int | None]] = {
            "drop": frozenset({further_end(tokenizer)}),  # if it is not a special token, `decode` keeps it
            "keep": frozenset({template_end(tokenizer), *engine_ends(tokenizer)}),
        }

    def __call__(self, token_ids: Sequence[int], *, special_tokens: SpecialTokens) -> str:
        """Returns the text up to the first stop string. `special_tokens` is `environment.special_tokens`: `drop` leaves
        out all special tokens, and `keep` only the token that ended the answer."""
        ids = list(token_ids)
        if ids and ids[-1] in self._ends[special_tokens]:
            ids = ids[:-1]
        text = self._tokenizer.decode(ids, skip_special_tokens=special_tokens == "drop")
        return before_stop(str(text), self._stops)
