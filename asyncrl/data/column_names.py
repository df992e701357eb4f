"""Finds the columns of prompt and answer in a dataset whose columns have names of its own."""

from collections.abc import Mapping, Sequence

from asyncrl.errors import ConfigError

LIKELY: Mapping[str, Sequence[str]] = {
    "prompt": ("question", "problem", "instruction", "query", "input"),
    "answer": ("solution", "output", "response", "target", "label", "ground_truth", "expected_answer", "final_answer"),
}
"""Names that datasets often have instead of `prompt` and `answer`, the likeliest first."""
NO_ANSWER = "none"
"""Value of the option --answer for a dataset without answers."""


def columns_for(names: Sequence[str], *, prompt: str | None, answer: str | None, source: str) -> dict[str, str | None]:
    """Returns `data.columns` for a dataset with the columns `names`. `prompt` and `answer` are the user's choices.

    A column that has the name that asyncrl reads needs no entry, and a conversation (`messages`) may end with its
    answer. Raises ConfigError if a choice is not one of the columns, or if no column is likely.

    >>> columns_for(["id", "question", "solution"], prompt=None, answer=None, source="mine.csv")
    {'prompt': 'question', 'answer': 'solution'}
    >>> columns_for(["messages"], prompt=None, answer=None, source="chat.parquet")
    {}
    """
    columns: dict[str, str | None] = {}
    if prompt is None and "prompt" not in names and "messages" not in names:
        prompt = _likely("prompt", names, source=source)
    if answer is None and "answer" not in names and "messages" not in (*names, prompt):
        answer = _likely("answer", names, source=source)
    for name, column in (("prompt", prompt), ("answer", answer)):
        if name == "answer" and column == NO_ANSWER and NO_ANSWER not in names:
            columns[name] = None
        elif column is not None:
            if column not in names and column.partition(".")[0] not in names:
                raise ConfigError(f"--{name} {column}: {source} has no such column; it has {', '.join(names)}")
            if column != name:
                columns[name] = column
    return columns


def _likely(name: str, names: Sequence[str], *, source: str) -> str:
    by_lower_case = {each.lower(): each for each in reversed(names)}
    for candidate in LIKELY[name]:
        if candidate in by_lower_case:
            return by_lower_case[candidate]
    without = f", or --answer {NO_ANSWER} if there are no answers" if name == "answer" else ""
    raise ConfigError(
        f"DATA {source}: has no column `{name}`, but {', '.join(names)}; name its column with --{name} COLUMN{without}"
    )
