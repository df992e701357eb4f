"""Rows of datasets that are not in the prompts of a run. Each of them is counted by its reason."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class LeftOutRow(NamedTuple):
    """A row that is left out: its number in its dataset, from 1, a reason (a key of `REASONS`), and details."""

    row: int
    reason: str
    details: str = ""


LeftOut = Mapping[str, Sequence[LeftOutRow]]
"""The rows that are left out of each dataset of a run. The key is the name of its part (`asyncrl.config.parts`): the
name in `data.mixture`, empty without a mixture, or `eval/NAME` for a held-out set. A part of which nothing is left out
has no entry."""

REASONS: Mapping[str, str] = {
    "blank": "the row or its prompt is blank",
    "too_large": "the row is larger than 1 MiB",
    "bad_json": "the row is not JSON, or not UTF-8",
    "not_an_object": "the row is not an object",
    "missing_key": "the row has no prompt or no answer, or lacks a field of data.prompt_template",
    "wrong_type": "a value has a type that cannot be used",
    "messages": "its messages are not a conversation",
    "duplicate": "its prompt, answer and metadata are those of an earlier row",
    "held_out": "its prompt is held out for evaluation",
    "trained": "the run trains its prompt, so it is not evaluated",
    "prompt_length": "its prompt has no token or too many",
    "control_token": "its text contains a control token of the tokenizer",
}
"""Why a row is left out, in words."""


def counts(left_out: LeftOut) -> dict[str, dict[str, int]]:
    """Returns how many rows are left out, by part and reason.

    >>> counts({"": [LeftOutRow(3, "blank"), LeftOutRow(4, "duplicate"), LeftOutRow(7, "blank")]})
    {'': {'blank': 2, 'duplicate': 1}}
    """
    return {part: dict(sorted(Counter(each.reason for each in rows).items())) for part, rows in left_out.items()}


def in_words(by_reason: Mapping[str, int]) -> str:
    """Returns numbers of rows by reason as a text.

    >>> in_words({"blank": 2, "duplicate": 1})
    '2 blank, 1 duplicate'
    """
    return ", ".join(f"{count} {reason}" for reason, count in sorted(by_reason.items()))


def joined(*found: tuple[str, Iterable[LeftOutRow]]) -> dict[str, list[LeftOutRow]]:
    """Joins pairs (part, rows that are left out of it) to one dict by part. A part may be in several pairs. A part
    without rows gets no entry."""
    rows: dict[str, list[LeftOutRow]] = {}
    for part, of_part in found:
        if more := list(of_part):
            rows.setdefault(part, []).extend(more)
    return rows
