"""The text of an answer, as its reward gets it and as samples show it."""

import re
from collections.abc import Sequence
from typing import Any, Literal

from asyncrl.data.turn_ends import engine_ends, template_end

SpecialTokens = Literal["drop", "keep"]
_TAG = re.compile("think|thought|reason|answer|solution|tool|call", re.IGNORECASE)
_MOST_SHOWN = 6


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the first stop string, as vLLM does.

    >>> before_stop("a b</s>", ["</s>", "b<"])
    'a '
    """
    return text[: min([place for stop in stops if (place := text.find(stop)) >= 0], default=len(text))]


def note_on_tags(tokenizer: Any) -> str | None:
    """Returns a line about special tokens for which rewards often look, such as `<think>`; None if there are none."""
    special = (each.content for each in tokenizer.added_tokens_decoder.values() if each.special)
    tags = [text for text in special if _TAG.search(text)]
    if not tags:
        return None
    more = f" and {len(tags) - _MOST_SHOWN} more" if len(tags) > _MOST_SHOWN else ""
    return (
        f"rewards get completions without the special tokens {', '.join(tags[:_MOST_SHOWN])}{more}; "
        "environment.special_tokens: keep leaves them in"
    )


class AnswerText:
    """Turns the tokens of answers into text. `stops` are the stop strings, `generator.stop`."""

    def __init__(self, tokenizer: Any, *, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._ends = engine_ends(tokenizer) | {template_end(tokenizer)}

    def __call__(self, token_ids: Sequence[int], *, special_tokens: SpecialTokens) -> str:
        """Returns the text up to the first stop string. `special_tokens` is `environment.special_tokens`: with `keep`,
        only the token that ended the answer is left out."""
        ids = list(token_ids)
        if special_tokens == "keep" and ids and ids[-1] in self._ends:
            ids = ids[:-1]
        text = self._tokenizer.decode(ids, skip_special_tokens=special_tokens == "drop")
        return before_stop(str(text), self._stops)
